"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): latent attention to the keys of an indexer.

The indexer is whole on every tensor-parallel rank. Under context parallelism its keys, like attention's keys and
values, are gathered over the group, and each chunk of queries chooses among those that it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.backends.megatron.attention import Documents
from engine.backends.megatron.context_parallel import Gathered, all_tokens
from engine.backends.megatron.mla import Latent, LatentAttention, ReplicatedLinear, rotate
from engine.backends.megatron.spec import SpecProvider
from hardware.kernels.sparse_attention import Bounds, SparseAttention

EPS = 1e-6  # of the keys' norm, as published


@dataclass(frozen=True)
class Indexing:
    """What an indexer is made of."""

    heads: int
    width: int
    topk: int
    pairs: bool = False  # rotary pairs are neighbours (GLM-5), else the halves (DeepSeek-V3.2)
    layer: int | None = None  # the layer whose choice this one takes, having no indexer of its own (GLM-5.2)


class KeyNorm(nn.LayerNorm):
    """torch's LayerNorm, with the tag of what sees a share of the tokens under sequence parallelism."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(width, eps=EPS, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Indexer(MegatronModule):
    """Queries from the query latent, one key for all heads, and the weights of the heads."""

    def __init__(self, config: TransformerConfig, indexing: Indexing, latent: Latent) -> None:
        super().__init__(config=config)
        self._indexing, self._latent = indexing, latent
        self._group = parallel_state.get_tensor_model_parallel_group()
        self.wq_b = ReplicatedLinear(latent.query_rank, indexing.heads * indexing.width, config)
        self.wk = ReplicatedLinear(config.hidden_size, indexing.width, config)
        self.k_norm = KeyNorm(config, indexing.width)
        self.weights_proj = ReplicatedLinear(config.hidden_size, indexing.heads, config)

    def forward(self, hidden: Tensor, queries: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, I, W], [T, W] and [T, I] of all this rank's tokens, whose gradients do not leave the indexer."""
        hidden, queries = hidden.detach(), queries.detach()
        own = (self.wq_b(queries)[0], self.k_norm(self.wk(hidden)[0]), self.weights_proj(hidden)[0])
        if self._group.size() > 1 and self.config.sequence_parallel:
            # Every rank uses all of it in the same way, so each keeps the gradient of its own share.
            own = tuple(
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self._group)
                for x in own
            )
        q, k, w = own
        q = self._rotated(q.unflatten(-1, (self._indexing.heads, -1)), angles)
        return q[:, 0], self._rotated(k.unsqueeze(2), angles)[:, 0, 0], w[:, 0]

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        """The first channels of a head have positions."""
        rotary, plain = x.split((self._latent.rotary, self._indexing.width - self._latent.rotary), -1)
        return torch.cat([rotate(rotary, angles, self._latent.magnitude, self._indexing.pairs), plain], -1)


class SparseLatentAttention(LatentAttention):
    """Latent attention to the keys that the indexer chooses, of this layer or of the last layer before that has one."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: Latent,
        provider: SpecProvider,
        indexing: Indexing,
        kernels: SparseAttention,
        **_: Any,
    ) -> None:
        super().__init__(config, layer_number, latent, provider)
        self._indexing, self._kernels = indexing, kernels
        if indexing.layer is None:
            self.indexer = Indexer(config, indexing, latent)
            self.indexer.requires_grad_(False)  # choosing has no gradient

    def _core(
        self, hidden: Tensor, queries: Tensor, angles: Tensor, documents: Optional[Documents]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        own = self._indexing.layer
        if own is None:
            own = self.layer_number - 1
            with torch.no_grad():
                documents.chosen[own] = self._choose(*self.indexer(hidden, queries, angles), documents)
        chosen = documents.chosen[own]
        return lambda q, k, v: self._attend(q, k, v, documents, chosen)

    def _choose(self, q: Tensor, k: Tensor, w: Tensor, documents: Documents) -> list[Tensor]:
        """The chosen keys of each part of this rank's queries."""
        if documents.chunks:
            k = all_tokens(k, parallel_state.get_context_parallel_group())
        return [
            self._kernels.choose(q[queries], k[keys], w[queries], bounds, self._indexing.topk)
            for queries, keys, bounds in parts(documents)
        ]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, chosen: Sequence[Tensor]) -> Tensor:
        q, k, v, total = q[:, 0], k[:, 0], v[:, 0], q.shape[0]
        if documents.chunks:
            both = Gathered(torch.cat([k.flatten(1), v.flatten(1)], 1), parallel_state.get_context_parallel_group())
            whole = both.gather()
            width = k[0].numel()
            k, v = whole[:, :width].unflatten(1, k.shape[1:]), whole[:, width:].unflatten(1, v.shape[1:])
            with both.saved_as_places(whole):
                out = both.needed_by(self._parts(q, k, v, documents, chosen))
        else:
            out = self._parts(q, k, v, documents, chosen)
        return pad(out.flatten(1), (0, 0, 0, total - out.shape[0])).unsqueeze(1)

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, chosen: Sequence[Tensor]) -> Tensor:
        scale = self.latent.scale
        return torch.cat(
            [
                self._kernels.attend(q[queries], k[keys], v[keys], own, bounds, scale)
                for (queries, keys, bounds), own in zip(parts(documents), chosen, strict=True)
            ]
        )


def parts(documents: Documents) -> list[tuple[slice, slice, Bounds]]:
    """Queries of this rank's tokens and the keys, of all tokens, that they may see."""
    if documents.chunks:
        return [(c.queries, c.keys, Bounds(c.cu_seqlens_q, c.cu_seqlens_k)) for c in documents.chunks]
    real = slice(0, documents.tokens)
    return [(real, real, Bounds(documents.cu_seqlens, documents.cu_seqlens))]


def sparse_spec(provider: SpecProvider, latent: Latent, indexing: Indexing, kernels: SparseAttention) -> ModuleSpec:
    """Sparse latent self-attention for a layer's specification."""
    own = {"latent": latent, "provider": provider, "indexing": indexing, "kernels": kernels}
    return ModuleSpec(module=SparseLatentAttention, params=own)
