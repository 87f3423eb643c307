"""Llama 3, 3.1 and 3.2: Llama's architecture with grouped queries in every size, and stretched rotary positions."""

from engine.family import Family

FAMILY = Family(
    name="llama3",
    shelf="llm",
    model_type="llama",
    config="engine.llm.llama:LlamaConfig",
    reference="transformers:LlamaForCausalLM",
    reference_config="transformers:LlamaConfig",
    weights="engine.llm.grouped:weight_map",
    megatron="engine.backends.megatron.decoder:grouped_query",
    check="engine.llm.llama:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
