"""MiniMax-M2: mixtures of experts with query-key norms over all heads and partly rotated heads."""

from engine.family import Family

FAMILY = Family(
    name="minimax_m2",
    shelf="llm",
    model_type="minimax_m2",
    config="zoo.minimax_m2.config:MiniMaxM2Config",
    reference="transformers:MiniMaxM2ForCausalLM",
    reference_config="transformers:MiniMaxM2Config",
    weights="zoo.minimax_m2.weights:weight_map",
    megatron="zoo.minimax_m2.model:build",
    check="zoo.minimax_m2.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
