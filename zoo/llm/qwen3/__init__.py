"""Qwen3: dense decoder-only language models with grouped-query attention and query-key norms."""

from engine.family import Family

FAMILY = Family(
    name="qwen3",
    shelf="llm",
    model_type="qwen3",
    config="zoo.qwen3.config:Qwen3Config",
    reference="transformers:Qwen3ForCausalLM",
    reference_config="transformers:Qwen3Config",
    weights="zoo.qwen3.weights:weight_map",
    megatron="zoo.qwen3.model:build",
    check="zoo.qwen3.check:check",
    tasks=("pretrain",),
)
