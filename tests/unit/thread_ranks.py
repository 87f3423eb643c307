"""Ranks as threads of this process, for what needs agreement and no process group."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any


class ThreadRanks:
    """Ranks as threads of this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=20)
        self._values: list[Any] = [None] * world

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = json.dumps(value)
        self._barrier.wait()
        values = [json.loads(v) for v in self._values]
        self._barrier.wait()
        return values


class Member:
    def __init__(self, group: ThreadRanks, rank: int) -> None:
        self._group, self.rank, self.world = group, rank, group.world

    def barrier(self) -> None:
        self._group.gather(self.rank, None)

    def all_gather(self, message: Any) -> list[Any]:
        return self._group.gather(self.rank, message)


def on_ranks(world: int, function: Callable[[Any], Any]) -> list[Any]:
    """The function's value or exception on every rank."""
    group, results = ThreadRanks(world), [None] * world

    def work(rank: int) -> None:
        try:
            results[rank] = function(group.member(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
