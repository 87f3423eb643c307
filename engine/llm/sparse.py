"""Decoders with DeepSeek sparse attention: latent attention to keys that an indexer chooses. Free of torch.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1), and GLM-5.2, where several layers share what one indexer chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Optional

from engine.checkpoint.weight_map import WeightMap
from engine.llm import latent
from engine.llm.parts import decoder_map, indexer
from engine.llm.predictors import numbered, with_predictors

# What lists of layers are derived from.
NUMBERS = ("num_hidden_layers", "first_k_dense_replace", "index_topk_freq", "index_skip_topk_offset")
NOTHING = object()
FULL, SHARED = "full", "shared"
DENSE, ROUTED = "dense", "sparse"  # of `mlp_layer_types`: of MLPs, as published


@dataclass
class SparseConfig(latent.NoauxConfig):
    """Keys of a published `config.json` that these models have, with DeepSeek-V3.2's defaults."""

    LAYER_TYPES: ClassVar[tuple[str, ...]] = ("deepseek_sparse_attention",)

    max_position_embeddings: int = 163840
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64
    indexer_rope_interleave: Optional[bool] = None  # the reference has no such key; None: as the family has it
    rope_interleave: Optional[bool] = None  # nor this one: attention turns neighbouring channels
    mlp_layer_types: Optional[list[str]] = None  # None: from `first_k_dense_replace`
    mlp_bias: bool = False
    num_nextn_predict_layers: Optional[int] = None  # the reference has no such key

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rope_interleave = True if self.rope_interleave is None else self.rope_interleave

    @classmethod
    def respell(cls, published: Mapping[str, Any]) -> dict[str, Any]:
        """Keys without lists that say what other keys say: transformers writes them into every file."""
        made = cls(**{f.name: published[f.name] for f in fields(cls) if f.name in NUMBERS and f.name in published})
        return {key: value for key, value in published.items() if made.derived().get(key, NOTHING) != value}

    def derived(self) -> dict[str, Any]:
        """Published keys that are made of others where they are left out."""
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        return {"mlp_layer_types": [DENSE] * dense + [ROUTED] * (self.num_hidden_layers - dense)}

    def reference_keys(self) -> dict[str, Any]:
        """What the reference's config class takes."""
        keys = super().reference_keys()
        del keys["num_nextn_predict_layers"]
        return {key: value for key, value in keys.items() if value is not None} | {
            key: made if keys[key] is None else keys[key] for key, made in self.derived().items()
        }

    def sparse_layers(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        return tuple(kind == ROUTED for kind in self.mlp_layer_types or self.derived()["mlp_layer_types"])

    @property
    def index_pairs(self) -> bool:
        """Whether the indexer's rotary pairs are neighbouring channels, else the halves."""
        raise NotImplementedError

    def leaders(self) -> list[int]:
        """For each layer, the layer whose indexer chooses its keys."""
        return list(range(self.num_hidden_layers))

    def predictor_layer(self) -> int:
        """The last layer with an indexer of its own."""
        return max(layer for layer, follows in enumerate(self.follows()) if not follows)

    def follows(self) -> list[bool]:
        """Which layers need the choice of one before them."""
        return [leader != layer for layer, leader in enumerate(self.leaders())]


def check(model: SparseConfig, backend: str) -> Iterator[str]:
    """What is wrong with the keys for a backend, one a line."""
    yield from latent.check(model, backend, methods=("noaux_tc",), scoring="sigmoid")
    if model.q_lora_rank is None:
        yield "model.q_lora_rank=null: the indexer's queries are made of the queries' latent; it must be a number"
    if model.index_head_dim < model.qk_rope_head_dim:
        yield (
            f"model.index_head_dim={model.index_head_dim}: the first model.qk_rope_head_dim={model.qk_rope_head_dim} "
            "channels of the indexer's heads have positions; it must not be less"
        )
    if not model.rope_interleave:
        yield "model.rope_interleave=false: the reference turns neighbouring channels; it must be true"
    if model.mlp_bias:
        yield "model.mlp_bias=true: MLPs and experts have no biases here; it must be false"
    yield from kinds(model, "mlp_layer_types", (DENSE, ROUTED))


def kinds(model: SparseConfig, key: str, known: tuple[str, str]) -> Iterator[str]:
    """A list that does not say of each layer which of two kinds it is."""
    listed = getattr(model, key)
    if listed is not None and (len(listed) != model.num_hidden_layers or set(listed) - set(known)):
        yield f"model.{key} must name one of {' and '.join(known)} for each of the {model.num_hidden_layers} layers"


def sparse_map(config: SparseConfig) -> WeightMap:
    """The weight map of one configuration: that of latent attention, with an indexer in each layer that has one."""
    mixture = config.mixture()
    sparse = mixture.layers if mixture else (False,) * config.num_hidden_layers
    common = {has: latent.layer_parts(config, has) for has in set(sparse)}
    parts = indexer(config.hidden_size, config.q_lora_rank, config.index_n_heads, config.index_head_dim)
    layers = [common[has] + ([] if follows else parts) for has, follows in zip(sparse, config.follows(), strict=True)]
    hidden = config.hidden_size
    own = decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
    return with_predictors(own, config, numbered(config.num_hidden_layers), layers)
