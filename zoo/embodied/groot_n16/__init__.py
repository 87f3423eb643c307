"""GR00T N1.6: N1.7's action head without self-attention over what was seen, on an Eagle backbone."""

from engine.family import Family

FAMILY = Family(
    name="groot_n16",
    shelf="embodied",
    model_type="Gr00tN1d6",
    config="zoo.groot_n16.config:GrootN16Config",
    # No package has N1.6: its head is compared with that of N1.7, its backbone with transformers' parts.
    reference="lerobot.policies.groot.groot_n1_7:GR00TN17ActionHead",
    reference_config="lerobot.policies.groot.groot_n1_7:GR00TN17Config",
    architecture="Gr00tN1d6",
    weights="zoo.groot_n16.weights:weight_map",
    megatron=None,
    native="zoo.groot_n16.objective:OBJECTIVE",
    policy="zoo.groot_n16.data:serve",
    inputs="engine.policy.groot.inputs:read",
    data="zoo.groot_n16.data:build",
    check="zoo.groot_n16.check:check",
    tasks=("pretrain",),
)
