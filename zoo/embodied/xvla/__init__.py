"""X-VLA: Florence-2's encoder and a transformer with soft prompts for each robot turn noise into a chunk of actions."""

from engine.family import Family

FAMILY = Family(
    name="xvla",
    shelf="embodied",
    model_type="xvla",
    config="zoo.xvla.config:XvlaConfig",
    reference="lerobot.policies.xvla.modeling_xvla:XVLAPolicy",
    reference_config="lerobot.policies.xvla.configuration_xvla:XVLAConfig",
    weights="zoo.xvla.weights:weight_map",
    megatron=None,
    native="zoo.xvla.objective:OBJECTIVE",
    policy="zoo.xvla.data:serve",
    inputs="zoo.xvla.inputs:read",
    data="zoo.xvla.data:build",
    check="zoo.xvla.check:check",
    tasks=("pretrain",),
)
