"""DeepSeek-V2: mixtures of experts with multi-head latent attention."""

from engine.family import Family

FAMILY = Family(
    name="deepseek_v2",
    shelf="llm",
    model_type="deepseek_v2",
    config="zoo.deepseek_v2.config:DeepseekV2Config",
    reference="transformers:DeepseekV2ForCausalLM",
    reference_config="transformers:DeepseekV2Config",
    weights="zoo.deepseek_v2.weights:weight_map",
    megatron="zoo.deepseek_v2.model:build",
    check="zoo.deepseek_v2.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
