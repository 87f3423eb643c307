"""The causal language model: megatron-core's GPTModel with a forward pass for flattened, packed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad

from engine.backends.megatron import groups
from engine.backends.megatron.attention import Documents
from engine.backends.megatron.context_parallel import all_tokens, chunks, share
from engine.backends.megatron.mtp import Ahead, PredictorSpec, attach, look_ahead, predict
from engine.backends.megatron.rope import Rope, Ropes
from engine.backends.megatron.spec import mark_shares
from engine.data.batch import IGNORE, Batch, sample_rows
from hardware.kernels.linear_cross_entropy import LinearCrossEntropy


@dataclass(frozen=True)
class FlatBatch:
    """A micro-batch as one row of T tokens, padding included; under context parallelism this rank's share of it."""

    tokens_1T: Tensor
    labels_T1: Tensor  # IGNORE on padding
    positions_T: Tensor
    documents: Documents
    num_tokens: int  # supervised, of these
    want_logits: bool = False
    ahead: tuple[Ahead, ...] = ()  # for each layer for multi-token prediction, where they are to learn


def padded_tokens(batch: Batch, multiple: int) -> int:
    """Tokens of the flattened batch over all context-parallel ranks, padding included."""
    return -(-batch.tokens_BS.numel() // multiple) * multiple


def flatten(
    batch: Batch, total: int, device: torch.device, want_logits: bool = False, predictors: int = 0
) -> FlatBatch:
    """The batch, or this rank's share of it, on a device as one row; all ranks' rows together hold `total` tokens."""
    num_tokens, (rows, length) = batch.num_tokens, batch.tokens_BS.shape
    cp, parts = parallel_state.get_context_parallel_world_size(), ()
    if cp == 1:
        batch = batch.to(device)
    padding = (0, total - rows * length)
    tokens = pad(batch.tokens_BS.reshape(-1), padding)
    of_row = pad(sample_rows(batch).repeat_interleave(length).to(tokens.device), padding, value=-1)
    experts = {layer: pad(x.flatten(0, 1), (0, 0, *padding), value=-1) for layer, x in batch.experts.items()}
    labels = pad(batch.labels_BS.reshape(-1), padding, value=IGNORE)
    positions = pad(batch.positions_BS.reshape(-1), padding)
    whole = (batch.tokens_BS.reshape(-1), batch.labels_BS.reshape(-1), batch.cu_seqlens)
    further = [
        [pad(x, padding, value=value) for x, value in zip(look_ahead(*whole, k + 1), (0, IGNORE, False), strict=True)]
        for k in range(predictors)
    ]
    if cp > 1:  # before the copy to the device: it is of this rank's share
        rank = parallel_state.get_context_parallel_rank()
        tokens, labels, positions, of_row = (share(x, cp, rank) for x in (tokens, labels, positions, of_row))
        experts = {layer: share(x, cp, rank).to(device) for layer, x in experts.items()}
        parts = chunks(pad(batch.cu_seqlens, (0, 1), value=total), cp, rank, device)
        num_tokens = int((labels != IGNORE).sum())
        tokens, labels, positions, of_row = (
            x.to(device, non_blocking=True) for x in (tokens, labels, positions, of_row)
        )
        further = [[share(x, cp, rank).to(device, non_blocking=True) for x in one] for one in further]
    return FlatBatch(
        tokens_1T=tokens.unsqueeze(0),
        labels_T1=labels.unsqueeze(1),
        positions_T=positions,
        documents=Documents(rows, length, batch.cu_seqlens, batch.max_seqlen, batch.dense, parts, of_row, experts),
        num_tokens=num_tokens,
        want_logits=want_logits,
        ahead=tuple(Ahead(ids.unsqueeze(0), targets.unsqueeze(1), real) for ids, targets, real in further),
    )


@dataclass(frozen=True)
class ModelOutput:
    """What the last pipeline stage computes."""

    loss_P: Tensor  # fp32, in nats, of each token (0 where there is no label), or summed over each of `rows_P`
    logits_BSV: Tensor | None  # fp32, gathered over tensor- and context-parallel ranks, padding cut off
    ahead_DP: Tensor | None = None  # as `loss_P`, of each layer for multi-token prediction
    ahead_weight: float = 0.0  # of the mean over those layers
    rows_P: Tensor | None = None  # int64, the row that each loss is of; negative for padding; None: of all rows


class CausalLM(GPTModel):
    """A stage of the model, a virtual one where the pipeline is interleaved.

    `forward` gives hidden states [T, 1, H], and on the last stage a ModelOutput.
    """

    def __init__(
        self,
        config: TransformerConfig,
        block: TransformerBlockSubmodules,
        vocab_size: int,
        tied: bool,
        rope: Rope | Ropes,
        padding_token: int | None = None,
        predictors: PredictorSpec | None = None,
    ) -> None:
        """`vocab_size` is the published one. It is padded to a multiple of the tensor-parallel size; nobody sees it.

        The embedding of `padding_token` gets no gradient, as in a reference that has one.
        """
        tp, stage = config.tensor_model_parallel_size, groups.virtual_stage()
        super().__init__(
            config,
            block,
            vocab_size=-(-vocab_size // tp) * tp,
            max_sequence_length=0,  # of learned position embeddings only
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="none",  # `rope` knows the positions of packed documents
            vp_stage=stage,
        )
        if predictors:
            attach(self, predictors)
        mark_shares(self)
        self.rope = rope
        self.published_vocab_size = vocab_size
        self._padding_token = padding_token
        self.predictor_spec = predictors
        self.linear_loss: LinearCrossEntropy | None = None  # in the place of logits and their loss
        self.loss_by_row = False  # whether it tells rows apart

    def forward(self, batch: FlatBatch) -> Tensor | ModelOutput:
        rope = self.rope(batch.positions_T)
        hidden = self.decoder(
            hidden_states=self.embedded(batch.tokens_1T) if self.pre_process else None,
            attention_mask=None,  # the documents say all
            rotary_pos_emb=rope,
            packed_seq_params=batch.documents,
        )
        if not self.post_process:
            return hidden
        gathered = None
        if batch.want_logits:
            logits, rows = self.logits(hidden), batch.documents.rows_t
            gathered = self._gather(logits.detach(), batch.documents)  # before the loss, which works in place
            loss = self.loss_of(logits, batch.labels_T1)
        else:
            loss, rows = self.losses(hidden, batch.labels_T1, batch.documents)
        if not batch.ahead:
            return ModelOutput(loss, gathered, rows_P=rows)
        ahead = predict(self, hidden, batch.ahead, rope, batch.documents)
        return ModelOutput(loss, gathered, ahead, self.predictor_spec.weight, rows)

    def logits(self, hidden_T1H: Tensor) -> Tensor:
        """[T, 1, V], this rank's share of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_T1H, weight=weight)
        self._mask_padding(logits)
        return logits

    def embedded(self, tokens_1T: Tensor) -> Tensor:
        """[t, 1, H]: under sequence parallelism this rank's share of the tokens."""
        hidden = self.embedding(tokens_1T, None)
        if self._padding_token is None:
            return hidden
        ranks = tokens_1T.shape[1] // hidden.shape[0]
        own_t = tokens_1T[0].chunk(ranks)[self.pg_collection.tp.rank() if ranks > 1 else 0]
        return hidden.where((own_t != self._padding_token)[:, None, None], hidden.detach())

    def _mask_padding(self, logits_T1V: Tensor) -> None:
        """Rows of the vocabulary that are padding get no probability, and so no gradient."""
        first = self.pg_collection.tp.rank() * logits_T1V.shape[-1]
        real = max(0, self.published_vocab_size - first)
        if real < logits_T1V.shape[-1]:
            logits_T1V[..., real:] = float("-inf")

    def loss_of(self, logits_T1V: Tensor, labels_T1: Tensor) -> Tensor:
        """[T]; works in place."""
        supervised = labels_T1 != IGNORE
        loss = vocab_parallel_cross_entropy(logits_T1V, labels_T1.where(supervised, 0))
        return loss.where(supervised, 0.0).squeeze(1)

    def losses(self, hidden_T1H: Tensor, labels_T1: Tensor, documents: Documents) -> tuple[Tensor, Tensor | None]:
        """`ModelOutput.loss_P` and `rows_P`."""
        if self.linear_loss is None:
            return self.loss_of(self.logits(hidden_T1H), labels_T1), documents.rows_t
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        hidden, labels = hidden_T1H.squeeze(1), labels_T1.squeeze(1)
        if not self.loss_by_row:
            return self.linear_loss(hidden, weight, labels).reshape(1), None
        hidden, labels = hidden[: documents.tokens], labels[: documents.tokens]  # what follows is padding
        rows = zip(hidden.split(documents.length), labels.split(documents.length), strict=True)
        losses = [self.linear_loss(hidden, weight, labels) for hidden, labels in rows]
        return torch.stack(losses), torch.arange(len(losses), device=hidden.device)

    def _gather(self, logits_T1V: Tensor, documents: Documents) -> Tensor:
        whole = gather_from_tensor_model_parallel_region(logits_T1V, group=self.pg_collection.tp)
        if documents.chunks:
            whole = all_tokens(whole, self.pg_collection.cp)
        cut = whole[: documents.tokens, 0, : self.published_vocab_size]
        return cut.reshape(documents.rows, documents.length, -1).float().clone()
