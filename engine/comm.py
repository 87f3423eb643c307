"""What the jobs need of the other ranks: an index, a barrier and small JSON messages. No pickle crosses it."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class Comm:
    """The world of this run over `torch.distributed`, or a world of one where no process group is up."""

    def __init__(self, device: torch.device | None = None) -> None:
        up = dist.is_initialized()
        self.rank = dist.get_rank() if up else 0
        self.world = dist.get_world_size() if up else 1
        self._device = device or torch.device("cpu")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            # An all-reduce that is read back also waits where the backend only enqueues.
            self.any(False)

    def any(self, flag: bool) -> bool:
        """True on every rank if it is on one."""
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers, on every rank."""
        if self.world == 1:
            return number
        value = torch.tensor([number], device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    def all_gather(self, message: Any) -> list[Any]:
        """Every rank's JSON-able message, by rank."""
        if self.world == 1:
            return [message]
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([data.numel()], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        buffers = [torch.zeros(longest, dtype=torch.uint8, device=self._device) for _ in range(self.world)]
        dist.all_gather(buffers, padded.to(self._device))
        return [json.loads(bytes(b[: int(n)].tolist())) for b, n in zip(buffers, sizes, strict=True)]

    def broadcast(self, message: Any) -> Any:
        """Rank 0's JSON-able message, on every rank."""
        return self.all_gather(message if self.rank == 0 else None)[0]
