"""What no GR00T N1.6 can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.policy.groot.check import check_head
from zoo.groot_n16.config import GrootN16Config


def check(model: GrootN16Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from check_head(model)
    if model.vlsa_layers:
        yield f"model.vlsa_layers={model.vlsa_layers}: N1.6 has no such layers; 0 would be right, or family groot_n17"
    if model.image_size % (2 * model.patch_size):
        yield f"model.image_size={model.image_size} must be a multiple of 2 x model.patch_size={model.patch_size}"
    if not 0 < model.crop_fraction <= 1:
        yield f"model.crop_fraction={model.crop_fraction} must lie in (0, 1]"
    for whole, part in (("text_heads", "text_kv_heads"), ("vision_width", "vision_heads")):
        if getattr(model, whole) % getattr(model, part):
            yield f"model.{whole}={getattr(model, whole)} must be a multiple of model.{part}={getattr(model, part)}"
