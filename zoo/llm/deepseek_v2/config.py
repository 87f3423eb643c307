"""DeepSeek-V2's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.latent import LatentConfig
from engine.moe.mixture import Mixture


@dataclass
class DeepseekV2Config(LatentConfig):
    """Keys of a published `config.json` under their published names."""

    model_type: Optional[str] = "deepseek_v2"
    topk_method: Optional[str] = "greedy"
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scoring_func = self.scoring_func or "softmax"

    def mixture(self) -> Optional[Mixture]:
        """Softmax over all experts; with groups, the best experts of the groups that have the best single one."""
        limited = self.topk_method == "group_limited_greedy"
        return self.routed(
            normalised=False,
            groups=self.n_group if limited else None,
            group_topk=self.topk_group if limited else None,
            group_best=1,
        )
