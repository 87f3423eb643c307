"""Kimi K2: DeepSeek-V3's architecture with more experts, fewer heads and one group."""

from engine.family import Family, Variant

FAMILY = Family(
    name="kimi_k2",
    shelf="llm",
    model_type="kimi_k2",
    config="zoo.kimi_k2.config:KimiK2Config",
    reference="transformers:DeepseekV3ForCausalLM",
    reference_config="transformers:DeepseekV3Config",
    variants=(
        # What transformers writes when it saves such a model.
        Variant(
            model_type="deepseek_v3",
            config="zoo.kimi_k2.config:KimiK2Config",
            reference="transformers:DeepseekV3ForCausalLM",
            reference_config="transformers:DeepseekV3Config",
        ),
    ),
    weights="zoo.kimi_k2.weights:weight_map",
    megatron="zoo.kimi_k2.model:build",
    check="zoo.kimi_k2.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
