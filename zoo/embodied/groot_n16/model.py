"""GR00T N1.6: Eagle reads images and a prompt, a diffusion transformer turns noise into actions."""

from __future__ import annotations

from torch import Tensor, nn

from engine.data.policy_batch import PolicyBatch
from engine.policy.groot.head import ActionHead
from zoo.groot_n16.backbone import EagleBackbone
from zoo.groot_n16.config import GrootN16Config


class GrootN16(nn.Module):
    """The model; `forward` is what a strategy wraps, so that everything is computed within it."""

    _no_split_modules = ("Siglip2EncoderLayer", "Qwen3DecoderLayer", "DiTBlock")

    def __init__(self, config: GrootN16Config) -> None:
        super().__init__()
        self.backbone = EagleBackbone(config)
        self.action_head = ActionHead(config, mask_token=True)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor:
        """fp32 [B, T, max_action_dim]: the velocity at `batch.time`, or with `sample` the actions."""
        return self.action_head(self.backbone(batch), batch, sample)

    def _init_weights(self, module: nn.Module) -> None:
        """Rotary frequencies, which no checkpoint holds."""
        self.backbone.model.language_model.model._init_weights(module)
