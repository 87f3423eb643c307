"""Decoders whose layers are gated DeltaNet or gated attention (Qwen3-Next): keys and weight map. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from engine.checkpoint.weight_map import Rows, Rule, WeightMap
from engine.llm.config import DecoderConfig
from engine.llm.grouped import mixture_parts
from engine.llm.parts import Part, decoder_map, gated_mlp, grouped_attention, layer_norms, matrix
from engine.llm.predictors import QWEN, with_predictors

INTERVAL = 4


@dataclass
class DeltaNetConfig(DecoderConfig):
    """Published keys of such a decoder, with Qwen3-Next's defaults."""

    head_dim: Optional[int] = 256
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    full_attention_interval: Optional[int] = None  # every so many layers one has attention; None: 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_attention_interval is None:
            self.full_attention_interval = INTERVAL

    def linear(self) -> tuple[bool, ...]:
        """Which layers are DeltaNet; the others have attention."""
        return tuple(bool((layer + 1) % self.full_attention_interval) for layer in range(self.num_hidden_layers))

    def fresh_value(self, name: str) -> Optional[str]:
        """How a published tensor begins, where not as usual: most norms are centred at zero."""
        if name.endswith(".A_log"):
            return "decay"
        if name.endswith((".dt_bias", ".linear_attn.norm.weight")):
            return "ones"
        return "zeros" if name.endswith("norm.weight") or ".pre_fc_norm_" in name else None

    def predictor_layer(self) -> int:
        """The last layer with attention."""
        return max((layer for layer, linear in enumerate(self.linear()) if not linear), default=-1)

    @classmethod
    def respell(cls, published: Mapping[str, Any]) -> dict[str, Any]:
        """Keys in the published spelling: transformers 5 writes a list of layers in the interval's place.

        Raises ValueError, with what is wrong, for layers that no interval makes.
        """
        keys = dict(published)
        kinds = keys.pop("layer_types", None)
        if kinds is None:
            return keys
        count, named = len(kinds) if isinstance(kinds, list) else 0, keys.get("full_attention_interval")
        # The named one or the default first: where there are few layers, several intervals make the same.
        for interval in (named if type(named) is int and named > 0 else INTERVAL, *range(1, count + 2)):
            made = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(count)]
            if kinds == made and keys.get("num_hidden_layers", count) == count:
                return keys | {"full_attention_interval": interval}
        raise ValueError(
            "layer_types must hold one for each of num_hidden_layers, linear_attention with full_attention in every "
            "n-th place"
        )


def delta_net(
    hidden: int, key_heads: int, value_heads: int, key: int, value: int, window: int, *, prefix: str = "linear_attn."
) -> list[Part]:
    """A gated DeltaNet. The projections hold each key head's rows together, the convolution all heads' q, then k, v."""
    own = "self_attention."
    per, queries, values = value_heads // key_heads, key_heads * key, value_heads * value
    convolution = f"{prefix}conv1d.weight"

    def rows(tp: int) -> list[Rows]:
        parts = ((0, queries), (queries, queries), (2 * queries, values))
        return [(convolution, first + rank * (n // tp), n // tp) for rank in range(tp) for first, n in parts]

    each = {
        "in_proj_qkvz.weight": (key_heads * (2 * key + 2 * per * value), hidden),
        "in_proj_ba.weight": (2 * value_heads, hidden),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
    }
    return [
        *(matrix(prefix + name, own + name, shape, "rows") for name, shape in each.items()),
        Part({convolution: (2 * queries + values, 1, window)}, [Rule(f"{own}conv1d.weight", rows, "rows")]),
        matrix(f"{prefix}norm.weight", f"{own}norm.weight", (value,)),
        matrix(f"{prefix}out_proj.weight", f"{own}out_proj.weight", (hidden, values), "columns"),
    ]


def weight_map(config: DeltaNetConfig) -> WeightMap:
    """The weight map of one configuration."""
    hidden, mixture, bias = config.hidden_size, config.mixture(), config.attention_bias
    heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_channels
    mixers = {
        False: grouped_attention(hidden, heads, groups, head, bias=bias, output_bias=bias, qk_norm=True, gate=True),
        True: delta_net(
            hidden,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        ),
    }
    dense = gated_mlp(hidden, config.intermediate_size)
    routed = mixture_parts(hidden, mixture) if mixture else dense
    has = mixture.layers if mixture else (False,) * config.num_hidden_layers
    layers = [
        [*layer_norms(hidden), *mixers[linear], *(routed if experts else dense)]
        for linear, experts in zip(config.linear(), has, strict=True)
    ]
    own = decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
    return with_predictors(own, config, QWEN, layers)
