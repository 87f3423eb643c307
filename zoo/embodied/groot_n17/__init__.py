"""GR00T N1.7: a vision-language-action model whose diffusion transformer serves robots of many kinds."""

from engine.family import Family, Variant

OWN = {
    "config": "zoo.groot_n17.config:GrootN17Config",
    "reference": "lerobot.policies.groot.groot_n1_7:GR00TN17",
    "reference_config": "lerobot.policies.groot.groot_n1_7:GR00TN17Config",
    "architecture": "Gr00tN1d7",
}
FAMILY = Family(
    name="groot_n17",
    shelf="embodied",
    model_type="Gr00tN1d7",
    **OWN,
    weights="zoo.groot_n17.weights:weight_map",
    megatron=None,
    native="zoo.groot_n17.objective:OBJECTIVE",
    policy="zoo.groot_n17.data:serve",
    inputs="engine.policy.groot.inputs:read",
    data="zoo.groot_n17.data:build",
    check="zoo.groot_n17.check:check",
    tasks=("pretrain",),
    variants=(Variant("groot", **OWN),),  # as lerobot calls a policy that it trained
)
