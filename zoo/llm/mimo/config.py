"""MiMo's published config keys with the reference classes' defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from engine.llm.config import DecoderConfig
from engine.llm.predictors import MIMO, PredictorNames
from engine.llm.qwen2 import Qwen2Config
from engine.moe.mixture import Mixture

FULL, WINDOW = "full_attention", "sliding_attention"
ROTATED = 0.334  # share of a head


@dataclass
class MiMoConfig(Qwen2Config):
    """The dense model: Qwen2's keys, and how many layers predict further tokens."""

    MTP_HIDDEN_FIRST: ClassVar[bool] = True

    model_type: Optional[str] = "mimo"
    num_nextn_predict_layers: int = 0  # layers that predict further tokens

    def predictor_names(self) -> PredictorNames:
        return MIMO

    def reference_keys(self) -> dict[str, Any]:
        keys = super().reference_keys()
        del keys["num_nextn_predict_layers"]  # the reference does not build them
        return keys


@dataclass
class MiMoV2FlashConfig(DecoderConfig):
    """MiMo-V2-Flash, under the names that the reference class has; `respell` reads those of the published file.

    A layer sees a window or everything before it. With a window it has sinks, twice the key/value heads and a rotary
    base of its own.
    """

    LAYER_TYPES: ClassVar[tuple[str, ...]] = (WINDOW,)
    NOT_PUBLISHED: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling")  # rope_parameters say it of each kind

    model_type: Optional[str] = "mimo_v2_flash"
    vocab_size: int = 152576
    hidden_size: int = 4096
    intermediate_size: int = 16384  # of the dense layers
    num_hidden_layers: int = 48
    num_attention_heads: int = 64
    num_key_value_heads: Optional[int] = 4  # of layers without a window
    head_dim: int = 192  # of queries and keys
    v_head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5000000.0  # of layers without a window, where rope_parameters are not given
    rope_parameters: Optional[dict[str, Any]] = None  # of both kinds of layers: rope_theta, partial_rotary_factor
    attention_bias: bool = False  # biases on query, key and value projections
    attention_value_scale: Optional[float] = 0.707  # factor on values
    sliding_window: int = 128  # tokens that a layer with a window sees
    layer_types: Optional[list[str]] = None  # None: all but the first and every sixth layer have a window
    mlp_layer_types: Optional[list[str]] = None  # None: all but the first are sparse
    bos_token_id: Optional[int] = 1
    moe_intermediate_size: int = 2048
    num_experts_per_tok: int = 8
    n_routed_experts: int = 256
    routed_scaling_factor: Optional[float] = 1.0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = range(self.num_hidden_layers)
        if self.layer_types is None:
            self.layer_types = [FULL if i == 0 or (i + 1) % 6 == 0 else WINDOW for i in layers]
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse" if i else "dense" for i in layers]
        if self.rope_parameters is None:
            self.rope_parameters = rope_parameters(self.rope_theta)
        if self.routed_scaling_factor is None:  # as the published file has it
            self.routed_scaling_factor = 1.0

    @classmethod
    def respell(cls, published: dict[str, Any]) -> dict[str, Any]:
        """The reference's keys for those of the published file. ValueError for what neither of the two can be."""
        if "hybrid_layer_pattern" not in published:
            return published
        keys = {key: value for key, value in published.items() if key not in ("rope_theta", "partial_rotary_factor")}
        full, window = published.get("rope_theta", 5e6), published.get("swa_rope_theta", 1e4)
        for key, wanted in _fixed(published).items():
            if published.get(key, wanted) != wanted:
                raise ValueError(f"{key}={published[key]}; the reference has {wanted} and so has this")
        return keys | {
            "layer_types": [WINDOW if has else FULL for has in published["hybrid_layer_pattern"]],
            "mlp_layer_types": ["sparse" if has else "dense" for has in published["moe_layer_freq"]],
            "rms_norm_eps": published.get("layernorm_epsilon", 1e-5),
            "rope_parameters": rope_parameters(full, window, published.get("partial_rotary_factor", ROTATED)),
        }

    def reference_keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().reference_keys().items() if key not in self.NOT_PUBLISHED}

    def rotary_channels(self, kind: str) -> int:
        """Channels of a head that positions rotate in a kind of layers."""
        return int(self.head_dim * self.rope_parameters[kind].get("partial_rotary_factor", ROTATED))

    def groups(self, layer: int) -> int:
        """Key/value heads of a layer."""
        return self.num_key_value_heads * (2 if self.layer_types[layer] == WINDOW else 1)

    def windows(self) -> tuple[Optional[int], ...]:
        return tuple(self.sliding_window if kind == WINDOW else None for kind in self.layer_types)

    def mixture(self) -> Mixture:
        """The experts of the sparse layers."""
        return Mixture(
            experts=self.n_routed_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=tuple(kind == "sparse" for kind in self.mlp_layer_types),
            score_function="sigmoid",
            normalised=self.norm_topk_prob,
            scaling_factor=self.routed_scaling_factor,
            groups=self.n_group if self.n_group > 1 else None,
            group_topk=self.topk_group if self.n_group > 1 else None,
            bias=True,
        )


def rope_parameters(full: float, window: float = 1e4, rotated: float = ROTATED) -> dict[str, Any]:
    """The rotary settings of both kinds of layers, from their bases and the share of a head that is rotated."""
    return {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated}
        for kind, theta in ((FULL, full), (WINDOW, window))
    }


def _fixed(published: dict[str, Any]) -> dict[str, Any]:
    """Published keys that the reference class does not read, and what it has in their place."""
    heads, width, value = (published.get(key) for key in ("num_attention_heads", "head_dim", "v_head_dim"))
    return {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * published.get("num_key_value_heads", 0),
        "swa_head_dim": width,
        "swa_v_head_dim": value,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
    }
