"""Layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) on the last pipeline stage.

megatron-core has such layers too, but its targets are rolled over the padding and the rows that are flattened here, its
loss is divided by the tokens of each micro-batch, and its metrics live in a global: this is the part, without those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import (
    checkpoint,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from engine.backends.megatron import groups
from engine.backends.megatron.attention import Documents
from engine.backends.megatron.experts import MoETransformerLayer
from engine.data.batch import IGNORE
from engine.schema import Run

if TYPE_CHECKING:
    from engine.backends.megatron.model import CausalLM


@dataclass(frozen=True)
class PredictorSpec:
    """What a family's layers for multi-token prediction are made of."""

    layers: Sequence[ModuleSpec]  # the layer of the decoder within each
    norm: Any
    weight: float  # of their loss; 0: they are held and do not learn
    hidden_first: bool = False  # which half of the projection's input is the hidden state

    def expert_layers(self, num_layers: int) -> list[int]:
        """The numbers (from 0, after the model's own) of those that have experts."""
        return [num_layers + k for k, layer in enumerate(self.layers) if is_sparse(layer)]


def is_sparse(layer: ModuleSpec) -> bool:
    """Whether a layer's specification is one with experts."""
    return isinstance(layer.module, type) and issubclass(layer.module, MoETransformerLayer)


@dataclass(frozen=True)
class Ahead:
    """What one of the layers reads and learns, for each of a rank's T tokens; nothing crosses a document's end."""

    tokens_1T: Tensor  # the token so many places ahead, 0 where its document has none
    labels_T1: Tensor  # the one after it, or IGNORE
    real_T: Tensor  # bool: whether there is such a token


def look_ahead(tokens_T: Tensor, labels_T: Tensor, cu_seqlens: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and reality [T] of what lies `places` ahead in the same document."""
    lengths = cu_seqlens.diff().long()
    document_T = torch.arange(len(lengths), device=tokens_T.device).repeat_interleave(lengths.to(tokens_T.device))
    real = torch.zeros_like(tokens_T, dtype=torch.bool)
    tokens, labels = torch.zeros_like(tokens_T), torch.full_like(labels_T, IGNORE)
    kept = max(0, len(tokens_T) - places)
    real[:kept] = document_T[:kept] == document_T[places:]
    tokens[:kept] = tokens_T[places:].where(real[:kept], 0)
    labels[:kept] = labels_T[places:].where(real[:kept], IGNORE)
    return tokens, labels, real


class Predictor(MegatronModule):
    """One layer: projection of the hidden state and the embedding of the token ahead, transformer layer, norm."""

    def __init__(self, model: CausalLM, layer: ModuleSpec, spec: PredictorSpec, depth: int) -> None:
        """`depth` counts from 0."""
        config = model.config
        super().__init__(config=config)
        self._hidden_first, self._tp = spec.hidden_first, model.pg_collection.tp
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = spec.norm(config=config, hidden_size=hidden, eps=eps)
        self.hnorm = spec.norm(config=config, hidden_size=hidden, eps=eps)
        self.eh_proj = ColumnParallelLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self._tp,
        )
        # A layer adds what lies before its stage to the number that it is given.
        stage = groups.virtual_stage()
        number = config.num_layers + depth + 1 - get_transformer_layer_offset(config, stage)
        self.layer = build_module(
            layer, config=config, layer_number=number, pg_collection=model.pg_collection, vp_stage=stage
        )
        self.final_layernorm = spec.norm(config=config, hidden_size=hidden, eps=eps)

    def forward(self, hidden_T1H: Tensor, embedded_T1H: Tensor, rope: Any, documents: Documents) -> Tensor:
        """The hidden state that predicts one token further; under sequence parallelism T is a share."""
        if self.config.recompute_granularity == "full" and self.training:
            return checkpoint(lambda h, e: self._compute(h, e, rope, documents), False, hidden_T1H, embedded_T1H)
        return self._compute(hidden_T1H, embedded_T1H, rope, documents)

    def _compute(self, hidden_T1H: Tensor, embedded_T1H: Tensor, rope: Any, documents: Documents) -> Tensor:
        halves = [self.enorm(embedded_T1H), self.hnorm(hidden_T1H)]
        joined, _ = self.eh_proj(torch.cat(halves[::-1] if self._hidden_first else halves, dim=-1))
        joined = gather_from_tensor_model_parallel_region(joined, group=self._tp)
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined, group=self._tp)
        output, _ = self.layer(
            hidden_states=joined, attention_mask=None, rotary_pos_emb=rope, packed_seq_params=documents
        )
        return self.final_layernorm(output)


def attach(model: CausalLM, spec: PredictorSpec) -> None:
    """Give a stage of a model what it needs of the layers: the last one holds them, and the embeddings they read."""
    split = model.config.pipeline_model_parallel_size > 1
    if split and not model.share_embeddings_and_output_weights:
        # megatron-core then adds up the gradients of the first and the last stage's embeddings.
        model.config.mtp_num_layers = len(spec.layers)
        model.mtp_process = model.post_process
        if model.pre_process:
            model.embedding.word_embeddings.weight.shared_embedding = True
    if not model.post_process:
        return
    model.predictors = torch.nn.ModuleList(
        Predictor(model, layer, spec, depth) for depth, layer in enumerate(spec.layers)
    )
    if model.pre_process:
        return
    model.embedding = LanguageModelEmbedding(
        config=model.config,
        vocab_size=model.vocab_size,
        max_sequence_length=0,
        position_embedding_type="none",
        tp_group=model.pg_collection.tp,
    )
    if model.share_embeddings_and_output_weights:
        model.embedding.word_embeddings.weight = model.output_layer.weight
    else:
        weight = model.embedding.word_embeddings.weight
        weight.shared = weight.shared_embedding = True  # the first stage answers for it


def freeze(model: CausalLM) -> None:
    """Keep a stage's layers for multi-token prediction out of what is trained."""
    for module in getattr(model, "predictors", ()):
        module.requires_grad_(False)


def predict(model: CausalLM, hidden_T1H: Tensor, ahead: Sequence[Ahead], rope: Any, documents: Documents) -> Tensor:
    """The loss at every depth, fp32 [D, P], in nats: of every token (0 without a label), or of all of them.

    Each depth goes on from the one before, the first from what the model's head reads.
    """
    losses = []
    for predictor, one in zip(model.predictors, ahead, strict=True):
        embedded = model.embedded(one.tokens_1T)
        rows_t = documents.rows_t
        rows = replace(documents, rows_t=None if rows_t is None else rows_t.where(one.real_T, -1))
        hidden_T1H = predictor(hidden_T1H, embedded, rope, rows)
        losses.append(model.losses(hidden_T1H, one.labels_T1, documents)[0])
    return torch.stack(losses)


def spec_of(config: Any, run: Run, layer: ModuleSpec, norm: Any) -> PredictorSpec | None:
    """The specification of a run's layers, all of them with the same `layer`; None where a run has none."""
    count, weight = config.mtp_layers or 0, run.mtp.loss_weight or 0.0
    return PredictorSpec([layer] * count, norm, weight, config.MTP_HIDDEN_FIRST) if count else None
