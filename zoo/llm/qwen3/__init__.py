"""Qwen3: decoder-only language models with grouped-query attention and query-key norms, dense or with experts."""

from engine.family import Family, Variant

FAMILY = Family(
    name="qwen3",
    shelf="llm",
    model_type="qwen3",
    config="zoo.qwen3.config:Qwen3Config",
    reference="transformers:Qwen3ForCausalLM",
    reference_config="transformers:Qwen3Config",
    variants=(
        Variant(
            model_type="qwen3_moe",
            config="zoo.qwen3.config:Qwen3MoeConfig",
            reference="transformers:Qwen3MoeForCausalLM",
            reference_config="transformers:Qwen3MoeConfig",
        ),
    ),
    weights="engine.llm.grouped:weight_map",
    megatron="engine.backends.megatron.decoder:grouped_query",
    check="zoo.qwen3.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
