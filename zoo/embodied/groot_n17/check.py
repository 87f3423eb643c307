"""What no GR00T can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.groot_n17.config import GrootN17Config, HeadConfig


def check(model: GrootN17Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from check_head(model)
    for name, whole, part in (
        ("text_heads", model.text_heads, "text_kv_heads"),
        ("vision_width", model.vision_width, "vision_heads"),
    ):
        if whole % getattr(model, part):
            yield f"model.{name}={whole} must be a multiple of model.{part}={getattr(model, part)}"
    unit = model.patch_size * model.spatial_merge_size
    if len(model.image_target_size) != 2 or any(side <= 0 or side % unit for side in model.image_target_size):
        yield (
            f"model.image_target_size={model.image_target_size} must be a height and a width, multiples of "
            f"patch_size x spatial_merge_size = {unit}"
        )
    if round(model.num_position_embeddings**0.5) ** 2 != model.num_position_embeddings:
        yield f"model.num_position_embeddings={model.num_position_embeddings} must be a square: 2304 is 48 x 48"
    deep = model.deepstack_visual_indexes
    if (
        sorted(set(deep)) != deep
        or len(deep) > model.select_layer
        or any(not 0 <= i < model.vision_depth for i in deep)
    ):
        yield (
            f"model.deepstack_visual_indexes={deep} must be rising layers below model.vision_depth={model.vision_depth}"
            f", at most model.select_layer={model.select_layer} of them"
        )
    if len(model.mrope_section) != 3 or sum(model.mrope_section) != model.text_head_dim // 2:
        yield (
            f"model.mrope_section={model.mrope_section} must be three numbers that add up to half of "
            f"model.text_head_dim={model.text_head_dim}"
        )


def check_head(model: HeadConfig) -> Iterator[str]:
    """What N1.6 and N1.7 ask for alike."""
    width = model.dit_heads * model.dit_head_dim
    if width != model.input_embedding_dim or width % 2:
        yield (
            f"model.input_embedding_dim={model.input_embedding_dim} must be even, and dit_heads x dit_head_dim, "
            f"which is {width}"
        )
    seen = model.vlsa_heads * model.vlsa_head_dim
    if model.vlsa_layers and seen != model.backbone_embedding_dim:
        yield (
            f"model.backbone_embedding_dim={model.backbone_embedding_dim} must be vlsa_heads x vlsa_head_dim = {seen}"
        )
    most = model.max_num_embodiments
    if not model.embodiments or any(not 0 <= number < most for number in model.embodiments):
        yield f"model.embodiments={model.embodiments} must be numbers in [0, {most}) (max_num_embodiments)"
    if not 0 <= model.tune_top_llm_layers <= model.select_layer:
        yield (
            f"model.tune_top_llm_layers={model.tune_top_llm_layers} must lie in [0, model.select_layer="
            f"{model.select_layer}]"
        )
    if not 1 <= model.action_horizon <= model.max_seq_len:
        yield f"model.action_horizon={model.action_horizon} must lie in [1, {model.max_seq_len}] (max_seq_len)"
    if not 0 <= model.state_dropout_prob < 1:
        yield f"model.state_dropout_prob={model.state_dropout_prob} must lie in [0, 1)"
    if model.num_inference_timesteps < 1:
        yield f"model.num_inference_timesteps={model.num_inference_timesteps} must be at least 1"
