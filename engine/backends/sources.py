"""The training loss of each source of a mixture: both backends report losses by row, and here they are added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.data.batch import IGNORE, Batch
from engine.data.mixture import sources
from engine.schema import Run


def source_names(run: Run) -> tuple[str, ...]:
    """The sources by their numbers in `Batch.sources`; none where there is no mixture, and nothing to tell apart."""
    return tuple(source.name for source in sources(run.data)) if run.data.name == "mixture" else ()


def row_tokens(labels_BS: Tensor) -> Tensor:
    """Supervised tokens of each row, [B]."""
    return (labels_BS != IGNORE).sum(1)


def tokens_of(batch: Batch) -> Tensor:
    """Supervised tokens of each row of a batch, [B]."""
    return row_tokens(batch.labels_BS)


def add_up(
    count: int,
    rows: Sequence[tuple[Any, Tensor]],
    device: torch.device,
    items: Callable[[Any], Tensor] = tokens_of,
    with_tokens: bool = True,
) -> Tensor:
    """Loss sum and number of items (supervised tokens) of each of `count` sources, fp64 [count, 2], on this rank.

    `rows` are micro-batches and the loss sums of their rows, [B]. Micro-batches without sources (fillers) do not count.
    Of ranks that share rows only one counts the tokens.
    """
    totals = torch.zeros(count, 2, dtype=torch.float64, device=device)
    for batch, losses_B in rows:
        if not batch.sources:
            continue
        tokens_B = items(batch).to(device).double() * with_tokens
        pairs = torch.stack([losses_B.double(), tokens_B], 1)
        totals.index_add_(0, torch.tensor(batch.sources, device=device), pairs)
    return totals


def source_metrics(names: Sequence[str], totals: Tensor) -> dict[str, float]:
    """`loss.<source>` in nats per token, of the sources that had any in this step; `totals` over all ranks."""
    return {
        f"loss.{name}": loss / tokens for name, (loss, tokens) in zip(names, totals.tolist(), strict=True) if tokens
    }
