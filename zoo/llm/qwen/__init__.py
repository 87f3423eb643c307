"""The first Qwen: Qwen2's mathematics with a key for each query head, under its own names and keys."""

from engine.family import Family

FAMILY = Family(
    name="qwen",
    shelf="llm",
    model_type="qwen",
    config="zoo.qwen.config:QwenConfig",
    reference="transformers:Qwen2ForCausalLM",
    reference_config="transformers:Qwen2Config",
    architecture="QWenLMHeadModel",
    weights="zoo.qwen.weights:weight_map",
    megatron="zoo.qwen.model:build",
    check="zoo.qwen.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
