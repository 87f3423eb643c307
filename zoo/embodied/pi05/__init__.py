"""Pi0.5: a vision-language-action model whose expert turns noise into a chunk of actions by flow matching."""

from engine.family import Family

FAMILY = Family(
    name="pi05",
    shelf="embodied",
    model_type="pi05",
    config="zoo.pi05.config:Pi05Config",
    reference="lerobot.policies.pi05.modeling_pi05:PI05Policy",
    reference_config="lerobot.policies.pi05.configuration_pi05:PI05Config",
    weights="zoo.pi05.weights:weight_map",
    megatron=None,
    native="zoo.pi05.objective:OBJECTIVE",
    policy="zoo.pi05.data:serve",
    inputs="zoo.pi05.inputs:read",
    data="zoo.pi05.data:build",
    check="zoo.pi05.check:check",
    tasks=("pretrain", "lora"),
)
