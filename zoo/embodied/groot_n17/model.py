"""GR00T N1.7: Qwen3-VL reads images and a prompt, a diffusion transformer turns noise into actions.

Names are those of NVIDIA's checkpoints. Source: arXiv 2503.14734 (GR00T N1) and lerobot 0.6.1's `groot_n1_7.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.head import ActionHead
from zoo.groot_n17.backbone import Qwen3VLBackbone
from zoo.groot_n17.config import GrootN17Config


class GrootN17(nn.Module):
    """The model; `forward` is what a strategy wraps, so that everything is computed within it."""

    _no_split_modules = ("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer", "VLBlock", "DiTBlock")

    def __init__(self, config: GrootN17Config) -> None:
        super().__init__()
        self.backbone = Qwen3VLBackbone(config)
        self.action_head = ActionHead(config)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor:
        """fp32 [B, T, max_action_dim]: the velocity at `batch.time`, or with `sample` the actions."""
        return self.action_head(self.backbone(batch), batch, sample)

    def _init_weights(self, module: nn.Module) -> None:
        """Rotary frequencies, which no checkpoint holds."""
        self.backbone.model.model._init_weights(module)
