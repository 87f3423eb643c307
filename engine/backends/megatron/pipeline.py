"""Micro-batches through the model: megatron-core's schedules, 1F1B over pipeline stages or one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine.backends.megatron.context_parallel import token_multiple
from engine.backends.megatron.model import CausalLM, FlatBatch, ModelOutput, flatten, padded_tokens
from engine.data.batch import IGNORE, Batch


@dataclass(frozen=True)
class MicroResult:
    """Of one micro-batch, on the last pipeline stage. Under context parallelism, of this rank's share."""

    loss_sum: Tensor  # fp64 scalar on the device
    num_tokens: int  # supervised
    logits_BSV: Tensor | None  # on the CPU, where `holds_logits()`
    rows_B: Tensor | None  # loss sum of each row, fp64, where rows are told apart
    ahead_D2: Tensor | None = None  # of each layer for multi-token prediction: loss sum and supervised tokens, fp64


def run_microbatches(
    chunks: Sequence[CausalLM | DistributedDataParallel],
    config: TransformerConfig,
    batches: Sequence[Batch],
    device: torch.device,
    backward: bool,
    want_logits: bool = False,
    predictors: int = 0,
) -> list[MicroResult]:
    """Forward, and with `backward` also backward and the reduction of gradients, of this rank's micro-batches.

    `chunks` are the model's parts on this rank: one, or with an interleaved pipeline one for each virtual stage.
    Gradients are those of the mean loss over all supervised tokens of all ranks, and of the weighted loss of so many
    `predictors` (layers for multi-token prediction), divided by as many tokens. Results come on the last stage; the
    other stages get an empty list. Collective: with `backward` over all ranks, else over those with the same data.
    """
    if not batches:
        if not backward:
            return []
        batches = [filler()]  # a rank without data still takes part in the reduction, adding zero
    count = len(batches)
    lengths = [padded_tokens(batch, token_multiple(config)) for batch in batches]
    if len(chunks) > 1:  # the interleaved schedule wants one length, and a micro-batch for every stage to begin with
        pp = config.pipeline_model_parallel_size
        batches = [*batches, *(filler() for _ in range(pp - count))]
        lengths = [max(lengths)] * len(batches)
        config.microbatch_group_size_per_vp_stage = group_size(len(batches), pp)
    # Stages tell each other the shape only where it changes, since that costs a round trip.
    config.variable_seq_lengths = len(set(lengths)) > 1
    flat = (flatten(*each, device, want_logits, predictors) for each in zip(batches, lengths, strict=True))
    with torch.set_grad_enabled(backward):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=flat if len(chunks) == 1 else list(tee(flat, len(chunks))),
            model=chunks[0] if len(chunks) == 1 else list(chunks),
            num_microbatches=len(batches),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=not backward,
        )
    return results[:count]


def group_size(count: int, pp: int) -> int:
    """How many micro-batches a virtual stage takes in a row: as few as megatron-core's schedule can, at least pp.

    What is left over after whole groups must be none or at least pp, or the pipeline would wait for itself. More in a
    row hold more activations. `count` is at least pp.
    """
    return next(size for size in range(pp, count + 1) if count % size == 0 or count % size >= pp)


def filler() -> Batch:
    """One token without a label."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(token, torch.full_like(token, IGNORE), token, torch.tensor([0, 1], dtype=torch.int32), 1)


def forward_step(batches: Iterator[FlatBatch], model: Any) -> tuple[Any, Any]:
    """One micro-batch: this stage's output and what makes the loss of it, as megatron-core's schedules ask for."""
    batch = next(batches)
    return model(batch), partial(loss_of, batch)


def loss_of(batch: FlatBatch, output: ModelOutput) -> tuple[Tensor, Tensor, MicroResult]:
    """The loss to differentiate, the tokens to divide it by in the end, and what to report."""
    tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=output.loss_P.device)
    logits = output.logits_BSV.cpu() if output.logits_BSV is not None and holds_logits() else None
    losses, count, rows = output.loss_P.detach().double(), batch.documents.rows, None
    if output.rows_P is not None:
        of_row = output.rows_P.where(output.rows_P >= 0, count)  # padding: of one row more
        rows = losses.new_zeros(count + 1).index_add_(0, of_row, losses)[:count]
    result = MicroResult(losses.sum(), batch.num_tokens, logits, rows, ahead_of(batch, output))
    learned = output.loss_P.sum()
    if output.ahead_DP is not None:
        learned = learned + output.ahead_weight * output.ahead_DP.sum() / len(output.ahead_DP)
    return learned, tokens, result


def ahead_of(batch: FlatBatch, output: ModelOutput) -> Tensor | None:
    """See `MicroResult.ahead_D2`."""
    if output.ahead_DP is None:
        return None
    counts = torch.stack([(one.labels_T1 != IGNORE).sum() for one in batch.ahead])
    return torch.stack([output.ahead_DP.detach().double().sum(1), counts.double()], dim=1)


def reports() -> bool:
    """Is this the rank, among those with the same tokens, whose results count?"""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def holds_logits() -> bool:
    """Is this the rank, among those with the same rows, that keeps the logits of all their tokens?"""
    return reports() and parallel_state.get_context_parallel_rank() == 0
