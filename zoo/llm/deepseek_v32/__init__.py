"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys a lightning indexer chooses."""

from engine.family import Family

FAMILY = Family(
    name="deepseek_v32",
    shelf="llm",
    model_type="deepseek_v32",
    config="zoo.deepseek_v32.config:DeepseekV32Config",
    reference="transformers:DeepseekV32ForCausalLM",
    reference_config="transformers:DeepseekV32Config",
    weights="zoo.deepseek_v32.weights:weight_map",
    megatron="zoo.deepseek_v32.model:build",
    check="zoo.deepseek_v32.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
