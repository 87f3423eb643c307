"""Qwen3-Next: gated DeltaNet and gated attention in turns, experts with a gated shared one."""

from engine.family import Family

FAMILY = Family(
    name="qwen3_next",
    shelf="llm",
    model_type="qwen3_next",
    config="zoo.qwen3_next.config:Qwen3NextConfig",
    reference="transformers:Qwen3NextForCausalLM",
    reference_config="transformers:Qwen3NextConfig",
    weights="engine.llm.delta_net:weight_map",
    megatron="engine.backends.megatron.delta_net:delta_net_decoder",
    check="zoo.qwen3_next.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
