"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): latent attention to the keys of an indexer.

The indexer is whole on every tensor-parallel rank. Under context parallelism its keys, like attention's keys and
values, are gathered over the group, and each chunk of queries chooses among those that it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.backends.megatron.attention import Documents
from engine.backends.megatron.context_parallel import Gathered, all_tokens
from engine.backends.megatron.mla import Latent, LatentAttention, ReplicatedLinear, rotate
from engine.backends.megatron.spec import SpecProvider
from engine.checkpoint.weight_map import WeightMap
from engine.data.batch import Batch, token_counts
from hardware.kernels.registry import Choice
from hardware.kernels.sparse_attention import Bounds, SparseAttention

EPS = 1e-6  # of the keys' norm, as published


@dataclass
class IndexerObjective:
    """What the indexers of a model add to the loss of the step that runs. One for all of them; the backend sets it."""

    weight: float = 0.0  # of each indexer's loss; 0: they are not trained
    dense: bool = False  # attention looks at all keys, and so does the loss: the warm-up
    scale: float = 0.0  # supervised tokens of the global batch for each real one


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
        kernel: Choice,
        objective: IndexerObjective,
        **_: Any,
    ) -> None:
        super().__init__(config, layer_number, latent, provider)
        self._indexing, self.objective = indexing, objective
        self._kernels: SparseAttention = kernel.kernel.load()
        self.kernels = {"sparse_attention": str(kernel)}  # what a run says that it computes with
        self._index: Optional[tuple[Tensor, Tensor, Tensor]] = None  # of the tokens that it learns from
        self.reset()
        if indexing.layer is None:
            self.indexer = Indexer(config, indexing, latent)
            self.indexer.requires_grad_(objective.weight > 0)  # choosing has no gradient

    def reset(self) -> None:
        """Forget what was counted."""
        self.loss_sum: Tensor | float = 0.0

    def _core(
        self, hidden: Tensor, queries: Tensor, angles: Tensor, documents: Optional[Documents]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        own = self._indexing.layer
        if own is None:
            own = self.layer_number - 1
            learns = self.training and torch.is_grad_enabled() and self.objective.weight > 0
            with torch.set_grad_enabled(learns):
                index = self.indexer(hidden, queries, angles)
            documents.chosen[own] = self._choose(*index, documents)
            self._index = index if learns else None
        if self.objective.dense:
            return super()._core(hidden, queries, angles, documents)
        chosen = documents.chosen[own]
        return lambda q, k, v: self._attend(q, k, v, documents, chosen)

    def _learnt(self, out: Tensor, q: Tensor, k: Tensor, documents: Optional[Documents]) -> Tensor:
        """`out`, in whose backward pass the indexer's loss has its gradient."""
        index, self._index = self._index, None
        if index is None:
            return out
        q, k, (iq, ik, iw) = q[:, 0].detach(), k[:, 0].detach(), index
        if documents.chunks:
            group = parallel_state.get_context_parallel_group()
            k, ik = all_tokens(k, group), Gathered(ik, group).gather()
        chosen = documents.chosen[self.layer_number - 1]
        losses = [
            self._kernels.indexer_loss(
                (iq[queries], ik[keys], iw[queries]),
                *(q[queries], k[keys], None if self.objective.dense else own),
                *(bounds, self.latent.scale, self._over_heads),
            )
            for (queries, keys, bounds), own in zip(parts(documents), chosen, strict=True)
        ]
        loss_T = torch.cat(losses)
        total = (loss_T * (documents.rows_t[: loss_T.shape[0]] >= 0)).sum()
        self.loss_sum = self.loss_sum + total.detach().double()
        return MoEAuxLossAutoScaler.apply(out, total * self.objective.weight * self.objective.scale)

    def _over_heads(self, p: Tensor) -> Tensor:
        if self._group.size() > 1:
            dist.all_reduce(p, group=self._group)
        return p

    @torch.no_grad()
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


def sparse_spec(
    provider: SpecProvider, latent: Latent, indexing: Indexing, kernel: Choice, objective: IndexerObjective
) -> ModuleSpec:
    """Sparse latent self-attention for a layer's specification."""
    own = {"latent": latent, "provider": provider, "indexing": indexing, "kernel": kernel, "objective": objective}
    return ModuleSpec(module=SparseLatentAttention, params=own)


def warm_up(chunks: Sequence[nn.Module], weight_map: WeightMap) -> WeightMap:
    """Freeze everything but the indexers. The weight map whose other tensors a run keeps without learning them."""
    for name, parameter in ((name, p) for chunk in chunks for name, p in chunk.named_parameters()):
        parameter.requires_grad_(".indexer." in name)
    return replace(weight_map, unlearned=frozenset(weight_map.published))


class IndexerAccounts:
    """The indexers of this rank's stages over a step. Methods that say so are collective over all ranks of the run."""

    def __init__(self, chunks: Sequence[Any], layers: int, device: torch.device) -> None:
        """`layers` are those of the whole model that have an indexer."""
        modules = [module for chunk in chunks for module in chunk.modules()]
        found = [m for m in modules if isinstance(m, SparseLatentAttention)]
        self._learners = [m for m in found if m.objective.weight > 0 and m._indexing.layer is None]
        self._layers, self._device, self._tokens = layers, device, 1.0

    def begin(self, batches: Sequence[Batch]) -> None:
        """Before a step. Collective."""
        totals = torch.tensor(token_counts(batches), dtype=torch.float64, device=self._device)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        supervised, self._tokens = (max(total, 1.0) for total in totals.tolist())
        for learner in self._learners:
            learner.reset()
            learner.objective.scale = supervised / self._tokens

    def end(self) -> dict[str, float]:
        """After a step: the mean of the loss over tokens and indexers. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for learner in self._learners:
            total += learner.loss_sum
        dist.all_reduce(total)
        copies = parallel_state.get_tensor_model_parallel_world_size()  # each computes the whole loss
        return {"indexer_loss": float(total) / copies / self._tokens / self._layers}
