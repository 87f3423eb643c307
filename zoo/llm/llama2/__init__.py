"""Llama 2: decoder-only language models, each query head with its own key or grouped ones."""

from engine.family import Family

FAMILY = Family(
    name="llama2",
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
