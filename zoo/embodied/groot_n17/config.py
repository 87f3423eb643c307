"""GR00T N1.7's config keys: NVIDIA's published ones, those of nested configs under names of their own. Free of torch.

Defaults are the published checkpoint's: lerobot 0.6.1's `GR00T_N1_7_DEFAULTS` and Cosmos-Reason2-2B's config as it
stands in `groot_n1_7.py`. (Isaac-GR00T's dataclass has other defaults, which no checkpoint has.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from engine.policy.groot.config import ATTENTION, FIXED, TOWER, HeadConfig
from engine.policy.groot.nested import Nested


@dataclass
class GrootN17Config(HeadConfig):
    """N1.7: with Qwen3-VL."""

    BACKBONE: ClassVar[str] = "nvidia/Cosmos-Reason2-2B"
    PARTS: ClassVar[dict[str, Nested]] = {
        "text_config": Nested(ATTENTION | {"mrope_section": "mrope_section"}),
        "vision_config": Nested(
            TOWER
            | {"num_heads": "vision_heads", "patch_size": "patch_size", "spatial_merge_size": "spatial_merge_size"}
            | {"temporal_patch_size": "temporal_patch_size", "num_position_embeddings": "num_position_embeddings"}
            | {"deepstack_visual_indexes": "deepstack_visual_indexes"}
        ),
        "": Nested({"image_token_id": "image_token_id"}),
    }
    SAME: ClassVar[dict[str, Any]] = FIXED | {"backbone_model_type": "qwen", "apply_sincos_state_encoding": False}
    ZERO_STATE: ClassVar[bool] = True

    model_type: Optional[str] = "Gr00tN1d7"
    text_mlp_dim: int = 6144  # Qwen3-VL's language model
    text_heads: int = 16
    text_kv_heads: int = 8
    text_head_dim: int = 128
    rope_theta: float = 5e6
    mrope_section: list[int] = field(default_factory=lambda: [24, 20, 20])  # frequencies of time, height, width
    vision_width: int = 1024  # its vision tower
    vision_mlp_dim: int = 4096
    vision_depth: int = 24
    vision_heads: int = 16
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2  # that squared patches become one token
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: list[int] = field(default_factory=lambda: [5, 11, 17])  # speak to the first text layers
    image_token_id: int = 151655
    image_target_size: list[int] = field(default_factory=lambda: [256, 256])  # height, width of what the tower sees
    image_crop_size: Optional[list[int]] = field(default_factory=lambda: [230, 230])  # of the target, the middle

    @property
    def view(self) -> tuple[list[int], int, float]:
        """See `engine.policy.groot.pixels.pixels`."""
        height = self.image_target_size[0]
        return self.image_target_size, height, self.image_crop_size[0] / height if self.image_crop_size else 1.0

    @property
    def image_tokens(self) -> int:
        """Tokens of an image in the prompt."""
        unit = self.patch_size * self.spatial_merge_size
        return (self.image_target_size[0] // unit) * (self.image_target_size[1] // unit)
