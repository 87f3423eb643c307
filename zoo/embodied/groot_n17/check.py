"""What no GR00T N1.7 can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.policy.groot.check import check_head
from zoo.groot_n17.config import GrootN17Config


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
