"""GLM-5 and GLM-5.2: DeepSeek's sparse attention; in 5.2 several layers share what one indexer chose."""

from engine.family import Family

FAMILY = Family(
    name="glm5",
    shelf="llm",
    model_type="glm_moe_dsa",
    config="zoo.glm5.config:Glm5Config",
    reference="transformers:GlmMoeDsaForCausalLM",
    reference_config="transformers:GlmMoeDsaConfig",
    weights="zoo.glm5.weights:weight_map",
    megatron="zoo.glm5.model:build",
    check="zoo.glm5.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
