"""GR00T N1.6's config keys: NVIDIA's published ones. Free of torch.

Defaults are those of nvidia/GR00T-N1.6-3B where public copies state them; what none states is marked with (?).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from engine.policy.groot.config import ATTENTION, FIXED, TOWER, HeadConfig
from engine.policy.groot.nested import Nested


@dataclass
class GrootN16Config(HeadConfig):
    """N1.6: with Eagle, made of SigLIP2 and Qwen3-1.7B."""

    BACKBONE: ClassVar[str] = "nvidia/Eagle-Block2A-2B-v2"
    PARTS: ClassVar[dict[str, Nested]] = {
        "text_config": Nested(ATTENTION),
        "vision_config": Nested(TOWER | {"num_attention_heads": "vision_heads", "patch_size": "patch_size"}),
        "": Nested({"image_token_id": "image_token_id", "image_size": "image_size"}),
    }
    SAME: ClassVar[dict[str, Any]] = FIXED | {"backbone_model_type": "eagle"}

    model_type: Optional[str] = "Gr00tN1d6"
    max_state_dim: int = 128
    max_action_dim: int = 128
    action_horizon: int = 50
    vlsa_layers: int = 0
    tune_top_llm_layers: int = 4
    use_percentiles: bool = False
    state_dropout_prob: float = 0.2  # (?) N1.7's
    text_mlp_dim: int = 6144  # Qwen3-1.7B
    text_heads: int = 16
    text_kv_heads: int = 8
    text_head_dim: int = 128
    rope_theta: float = 1e6
    vision_width: int = 1152  # SigLIP2 So400m (?)
    vision_mlp_dim: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    patch_size: int = 14
    image_token_id: int = 151667
    image_size: int = 224  # a square
    shortest_image_edge: int = 256  # that it is cut from
    crop_fraction: float = 0.95

    @property
    def view(self) -> tuple[list[int], int, float]:
        """See `engine.policy.groot.pixels.pixels`."""
        return self.image_target_size, self.shortest_image_edge, self.crop_fraction

    @property
    def image_target_size(self) -> list[int]:
        """Height and width of what the tower sees."""
        return [self.image_size, self.image_size]

    @property
    def image_tokens(self) -> int:
        """Tokens of an image in the prompt: one for four patches."""
        return (self.image_size // self.patch_size // 2) ** 2
