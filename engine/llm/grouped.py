"""Decoders with grouped-query attention, whatever their switches: one weight map for all. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.weight_map import WeightMap
from engine.llm.config import DecoderConfig
from engine.llm.parts import Part, decoder_map, experts, gated_mlp, grouped_attention, layer_norms, shared_expert
from engine.llm.predictors import PredictorNames, with_predictors
from engine.moe.mixture import Mixture


@dataclass(frozen=True)
class Switches:
    """What tells one architecture from another; the names are those of `grouped_query_decoder`."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False  # of dense layers
    qk_norm: bool = False


@dataclass
class GroupedConfig(DecoderConfig):
    """The keys of `DecoderConfig`, and what the architecture makes of them."""

    def switches(self) -> Switches:
        """The switches of this configuration."""
        return Switches()

    def predictor_names(self) -> PredictorNames | None:
        """What layers for multi-token prediction are called; None for a family that has none."""
        return None


class QwenWindows:
    """`windows()` of the published keys `use_sliding_window`, `sliding_window` and, where there is one,
    `max_window_layers`.
    """

    def has_window(self, layer: int) -> bool:
        """Whether a layer has a window where the model uses them."""
        return layer >= getattr(self, "max_window_layers", 0)

    def windows(self: Any) -> tuple[int | None, ...]:
        """See `DecoderConfig.windows`."""
        size = self.sliding_window if self.use_sliding_window else None
        return tuple(size if self.has_window(layer) else None for layer in range(self.num_hidden_layers))


def stepped_layers(config: Any) -> tuple[bool, ...]:
    """Which layers have experts by Qwen's keys: every `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    return tuple(
        (layer + 1) % config.decoder_sparse_step == 0 and layer not in config.mlp_only_layers
        for layer in range(config.num_hidden_layers)
    )


def weight_map(config: GroupedConfig) -> WeightMap:
    """The weight map of one configuration, under the names of Llama; experts and a shared one have Qwen2-MoE's."""
    hidden, mixture, has = config.hidden_size, config.mixture(), config.switches()
    heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_channels
    biases = {"bias": has.qkv_bias, "output_bias": has.output_bias}
    common = [*layer_norms(hidden), *grouped_attention(hidden, heads, groups, head, **biases, qk_norm=has.qk_norm)]
    dense = [*common, *gated_mlp(hidden, config.intermediate_size, bias=has.mlp_bias)]
    layers: Sequence[list[Part]] = [dense] * config.num_hidden_layers
    if mixture:
        routed = [*common, *mixture_parts(hidden, mixture)]
        layers = [routed if here else dense for here in mixture.layers]
    own = decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
    names = config.predictor_names()
    return with_predictors(own, config, names, layers) if names else own


def mixture_parts(hidden: int, mixture: Mixture) -> list[Part]:
    """The experts of a layer, and the one that every token goes to."""
    parts = experts(hidden, mixture.ffn_hidden_size, mixture.experts)
    if mixture.shared_ffn_hidden_size:
        gate = "mlp.shared_expert_gate.weight" if mixture.shared_gate else None
        parts += shared_expert(hidden, mixture.shared_ffn_hidden_size, gate=gate)
    return parts
