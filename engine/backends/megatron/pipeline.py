"""Micro-batches through the model: megatron-core's schedules, 1F1B over pipeline stages or one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine.backends.megatron.model import CausalLM, FlatBatch, ModelOutput, flatten, padded_tokens
from engine.data.batch import IGNORE, Batch


@dataclass(frozen=True)
class MicroResult:
    """Of one micro-batch, on the last pipeline stage."""

    loss_sum: Tensor  # fp64 scalar on the device
    logits_BSV: Tensor | None  # on the CPU, where `reports()`


def run_microbatches(
    model: CausalLM | DistributedDataParallel,
    config: TransformerConfig,
    batches: Sequence[Batch],
    device: torch.device,
    backward: bool,
    want_logits: bool = False,
) -> list[MicroResult]:
    """Forward, and with `backward` also backward and the reduction of gradients, of this rank's micro-batches.

    Gradients are those of the mean loss over all supervised tokens of all ranks. Results come on the last stage; the
    other stages get an empty list. Collective: with `backward` over all ranks, else over a pipeline.
    """
    if not batches:
        if not backward:
            return []
        batches = [filler()]  # a rank without data still takes part in the reduction, adding zero
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    lengths = {padded_tokens(batch, multiple) for batch in batches}
    # Stages tell each other the shape only where it changes, since that costs a round trip.
    config.variable_seq_lengths = len(lengths) > 1
    flat = (flatten(batch, multiple, device, want_logits) for batch in batches)
    with torch.set_grad_enabled(backward):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=flat,
            model=model,
            num_microbatches=len(batches),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=not backward,
        )


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
    tokens = torch.tensor(batch.num_tokens, dtype=torch.int, device=output.loss_T.device)
    logits = output.logits_BSV.cpu() if output.logits_BSV is not None and reports() else None
    return output.loss_T.sum(), tokens, MicroResult(output.loss_T.detach().double().sum(), logits)


def reports() -> bool:
    """Is this the rank, among those with the same data, whose results count?"""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
