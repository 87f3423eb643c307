"""What no Pi0.5 can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.pi05.config import Pi05Config


def check(model: Pi05Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    if model.num_heads % model.num_kv_heads:
        yield f"model.num_heads={model.num_heads} must be a multiple of model.num_kv_heads={model.num_kv_heads}"
    if model.image_size % model.patch_size:
        yield f"model.image_size={model.image_size} must be a multiple of model.patch_size={model.patch_size}"
    if model.vision_width % model.vision_heads:
        yield f"model.vision_width={model.vision_width} must be a multiple of model.vision_heads={model.vision_heads}"
    if model.expert_width % 2:
        yield f"model.expert_width={model.expert_width} must be even: a time is told in sines and cosines"
