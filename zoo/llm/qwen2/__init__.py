"""Qwen2 and Qwen2.5: grouped-query attention with biases, dense or with experts and a gated shared one."""

from engine.family import Family, Variant

FAMILY = Family(
    name="qwen2",
    shelf="llm",
    model_type="qwen2",
    config="engine.llm.qwen2:Qwen2Config",
    reference="transformers:Qwen2ForCausalLM",
    reference_config="transformers:Qwen2Config",
    variants=(
        Variant(
            model_type="qwen2_moe",
            config="engine.llm.qwen2:Qwen2MoeConfig",
            reference="transformers:Qwen2MoeForCausalLM",
            reference_config="transformers:Qwen2MoeConfig",
        ),
    ),
    weights="engine.llm.grouped:weight_map",
    megatron="engine.backends.megatron.decoder:grouped_query",
    check="engine.llm.qwen2:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
