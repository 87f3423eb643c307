"""MiMo: a dense 7B with Qwen2's architecture, and V2-Flash, a mixture of experts with sliding windows and sinks."""

from engine.family import Family, Variant

FAMILY = Family(
    name="mimo",
    shelf="llm",
    model_type="mimo",
    config="zoo.mimo.config:MiMoConfig",
    reference="transformers:Qwen2ForCausalLM",
    reference_config="transformers:Qwen2Config",
    architecture="MiMoForCausalLM",
    variants=(
        Variant(
            model_type="mimo_v2_flash",
            config="zoo.mimo.config:MiMoV2FlashConfig",
            reference="transformers:MiMoV2FlashForCausalLM",
            reference_config="transformers:MiMoV2FlashConfig",
        ),
    ),
    weights="zoo.mimo.weights:weight_map",
    megatron="zoo.mimo.model:build",
    check="zoo.mimo.check:check",
    tasks=("pretrain", "midtrain", "sft", "lora"),
)
