"""Decoders with multi-head latent attention and a mixture of experts: published keys, checks and the weight map.

DeepSeek-V2 (arXiv 2405.04434, section 2) and what grew from it. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from engine.checkpoint.weight_map import WeightMap
from engine.llm import check as shared
from engine.llm.config import DecoderConfig
from engine.llm.parts import (
    Part,
    correction_bias,
    decoder_map,
    experts,
    gated_mlp,
    latent_attention,
    layer_norms,
    shared_expert,
)
from engine.llm.predictors import numbered, with_predictors
from engine.moe.mixture import Mixture


@dataclass
class LatentConfig(DecoderConfig):
    """Keys of a published `config.json` that all of these models have, with DeepSeek-V2's defaults."""

    vocab_size: int = 102400
    bos_token_id: Optional[int] = 1
    eos_token_id: Optional[int] = 2
    attention_bias: bool = False
    q_lora_rank: Optional[int] = 1536  # None: queries come from the hidden states directly
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 0  # so many layers have no experts
    moe_layer_freq: Optional[int] = None  # the reference has no such key; None: 1
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: Optional[int] = None
    moe_intermediate_size: int = 1407
    n_group: Optional[int] = None
    topk_group: Optional[int] = None
    topk_method: Optional[str] = None
    scoring_func: Optional[str] = None  # nor this one; None: what the family has
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.moe_layer_freq = 1 if self.moe_layer_freq is None else self.moe_layer_freq

    @property
    def head_channels(self) -> int:
        """Channels of a query's or a key's head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def sparse_layers(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        return tuple(layer >= self.first_k_dense_replace for layer in range(self.num_hidden_layers))

    def routed(self, **router: Any) -> Optional[Mixture]:
        """The experts, with what the family says of its router; None if all layers are dense."""
        layers = self.sparse_layers()
        if not any(layers):
            return None
        return Mixture(
            experts=self.n_routed_experts,
            topk=self.num_experts_per_tok or 0,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=layers,
            scaling_factor=self.routed_scaling_factor,
            shared_ffn_hidden_size=self.moe_intermediate_size * self.n_shared_experts,
            **router,
        )


@dataclass
class NoauxConfig(LatentConfig):
    """With DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2) and defaults.

    Sigmoid scores, and a correction bias on the choice instead of a balancing loss: `noaux_tc` as it is published.
    """

    SPELLINGS: ClassVar[dict[str, str]] = {"num_mtp_layers": "num_nextn_predict_layers"}  # transformers 5 writes it so

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: Optional[int] = 128
    max_position_embeddings: int = 4096
    bos_token_id: Optional[int] = 0
    eos_token_id: Optional[int] = 1
    first_k_dense_replace: int = 3
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: Optional[int] = 8
    moe_intermediate_size: int = 2048
    n_group: Optional[int] = 8
    topk_group: Optional[int] = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True  # rotary pairs are neighbouring channels, else the halves
    num_nextn_predict_layers: Optional[int] = 1  # layers for multi-token prediction

    def __post_init__(self) -> None:
        super().__post_init__()
        self.topk_method = self.topk_method or "noaux_tc"
        self.scoring_func = self.scoring_func or "sigmoid"

    def mixture(self) -> Optional[Mixture]:
        """The experts; a group is as good as its two best together."""
        return self.routed(
            score_function="sigmoid",
            bias=True,
            normalised=self.norm_topk_prob,
            groups=self.n_group,
            group_topk=self.topk_group,
        )


def check(model: LatentConfig, backend: str, *, methods: Sequence[str], scoring: str) -> Iterator[str]:
    """What is wrong with the keys; `methods` and `scoring` are the family's `topk_method`s and `scoring_func`."""
    yield from shared.decoder(model, backend)
    for key, allowed in (("topk_method", methods), ("scoring_func", (scoring,)), ("moe_layer_freq", (1,))):
        if getattr(model, key) not in allowed:
            yield f"model.{key}={getattr(model, key)}: it must be {' or '.join(map(str, allowed))}"
    if model.num_key_value_heads != model.num_attention_heads:
        yield (
            f"model.num_key_value_heads={model.num_key_value_heads}: every head has its own keys in latent attention; "
            f"it must be model.num_attention_heads={model.num_attention_heads}"
        )
    if model.qk_rope_head_dim % 2:
        yield f"model.qk_rope_head_dim={model.qk_rope_head_dim} must be even, since rotary embeddings turn pairs"
    if model.mixture() is None:
        return
    if model.num_experts_per_tok is None:
        yield "model.num_experts_per_tok is missing: how many experts a token goes to"
        return
    if model.n_shared_experts < 1:
        yield f"model.n_shared_experts={model.n_shared_experts}: it must be at least 1"
    yield from shared.topk(model, experts="n_routed_experts")
    yield from _groups(model)


def _groups(model: LatentConfig) -> Iterator[str]:
    groups, chosen, experts_ = model.n_group or 1, model.topk_group or 1, model.n_routed_experts
    if experts_ % groups:
        yield f"model.n_group={groups} does not divide model.n_routed_experts={experts_}"
    elif not 1 <= chosen <= groups:
        yield f"model.topk_group={chosen}: it must be from 1 to model.n_group={groups}"
    elif model.num_experts_per_tok > chosen * (experts_ // groups):
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok}: the {chosen} best of {groups} groups hold "
            f"{chosen * (experts_ // groups)} experts"
        )


def score_scale(config: LatentConfig) -> float:
    """What scores are multiplied by: 1 / sqrt(channels), times YaRN's square (DeepSeek-V2's published code)."""
    scaling = config.rope_scaling or {}
    every = scaling.get("mscale_all_dim")
    factor = 0.1 * every * math.log(scaling["factor"]) + 1.0 if every and scaling["factor"] > 1 else 1.0
    return factor**2 / math.sqrt(config.head_channels)


def layer_parts(config: LatentConfig, routed: bool) -> list[Part]:
    """A layer of the weight map, with experts or with one dense MLP."""
    hidden, mixture = config.hidden_size, config.mixture()
    attention = latent_attention(
        hidden,
        config.num_attention_heads,
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotary=config.qk_rope_head_dim,
        value=config.v_head_dim,
        bias=config.attention_bias,
    )
    common = [*layer_norms(hidden), *attention]
    if not routed:
        return [*common, *gated_mlp(hidden, config.intermediate_size)]
    bias = [correction_bias("mlp.gate.e_score_correction_bias", (mixture.experts,))] if mixture.bias else []
    return [
        *common,
        *experts(hidden, mixture.ffn_hidden_size, mixture.experts),
        *bias,
        *shared_expert(hidden, mixture.shared_ffn_hidden_size, prefix="mlp.shared_experts."),
    ]


def latent_map(config: LatentConfig) -> WeightMap:
    """The weight map of one configuration."""
    mixture = config.mixture()
    dense, routed = layer_parts(config, False), layer_parts(config, True) if mixture else []
    layers = [routed if has else dense for has in mixture.layers] if mixture else [dense] * config.num_hidden_layers
    hidden = config.hidden_size
    own = decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
    return with_predictors(own, config, numbered(config.num_hidden_layers), layers)
