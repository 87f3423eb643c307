"""DeepSeek-V3, R1 and V3.1: mixtures of experts with latent attention and routers balanced by a correction bias."""

from engine.family import Family

FAMILY = Family(
    name="deepseek_v3",
    shelf="llm",
    model_type="deepseek_v3",
    config="zoo.deepseek_v3.config:DeepseekV3Config",
    reference="transformers:DeepseekV3ForCausalLM",
    reference_config="transformers:DeepseekV3Config",
    weights="zoo.deepseek_v3.weights:weight_map",
    megatron="zoo.deepseek_v3.model:build",
    check="zoo.deepseek_v3.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
