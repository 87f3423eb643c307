"""Naming the samples behind a loss that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from engine.data.batch import Batch


def gather_bad_samples(
    losses: Sequence[Tensor], batches: Sequence[Batch], rank: int, ranks: int
) -> tuple[tuple[int, ...], Optional[int]]:
    """(sample ids of the micro-batches of all ranks whose loss is not finite, the first rank that has one). Collective.

    ((), None) if every loss is finite: then a gradient was not.
    """
    finite = torch.stack(list(losses)).isfinite().tolist()
    bad = [i for good, batch in zip(finite, batches, strict=True) if not good for i in batch.sample_ids]
    flags = torch.tensor([len(bad), not all(finite)], dtype=torch.int64, device=losses[0].device)
    if ranks == 1:
        return tuple(bad), None if all(finite) else rank
    counts = [torch.empty_like(flags) for _ in range(ranks)]
    dist.all_gather(counts, flags)
    table = torch.stack(counts).tolist()
    width = max(1, *(count for count, _ in table))
    mine = torch.tensor(bad + [0] * (width - len(bad)), dtype=torch.int64, device=flags.device)
    lists = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(lists, mine)
    everyone = [i for ids, (count, _) in zip(lists, table, strict=True) for i in ids.tolist()[:count]]
    first = next((r for r, (_, failed) in enumerate(table) if failed), None)
    return tuple(everyone), first
