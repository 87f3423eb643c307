"""Qwen1.5: Qwen2's architecture before Qwen2, with biases on queries, keys and values."""

from engine.family import Family

FAMILY = Family(
    name="qwen1_5",
    shelf="llm",
    model_type="qwen2",
    config="engine.llm.qwen2:Qwen2Config",
    reference="transformers:Qwen2ForCausalLM",
    reference_config="transformers:Qwen2Config",
    weights="engine.llm.grouped:weight_map",
    megatron="engine.backends.megatron.decoder:grouped_query",
    check="engine.llm.qwen2:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
