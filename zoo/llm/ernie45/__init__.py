"""ERNIE 4.5: decoder-only language models with rotary pairs of neighbouring channels, dense or with experts."""

from engine.family import Family, Variant

FAMILY = Family(
    name="ernie45",
    shelf="llm",
    model_type="ernie4_5",
    config="zoo.ernie45.config:Ernie45Config",
    reference="transformers:Ernie4_5ForCausalLM",
    reference_config="transformers:Ernie4_5Config",
    variants=(
        Variant(
            model_type="ernie4_5_moe",
            config="zoo.ernie45.config:Ernie45MoeConfig",
            reference="transformers:Ernie4_5_MoeForCausalLM",
            reference_config="transformers:Ernie4_5_MoeConfig",
        ),
    ),
    weights="zoo.ernie45.weights:weight_map",
    megatron="zoo.ernie45.model:build",
    check="zoo.ernie45.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
