"""The training rows of one data-parallel rank, step after step, prepared ahead in threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.data.ahead import Ahead
from engine.data.batch import Batch, rows_to_batch
from engine.data.identity import differing, refusal
from engine.data.packing import Cursor, Rows
from engine.data.row_reader import MixedReader, Stream
from engine.data.schedule import Turns
from engine.errors import UserError
from engine.schema import Data

STATE_VERSION = 2


def to_batch(rows: Rows, sample_ids: list[int], pin_memory: bool = False, sources: list[int] | None = None) -> Batch:
    """Rows as a micro-batch."""
    tokens, labels = (torch.from_numpy(part.astype(np.int64)) for part in (rows.tokens, rows.labels))
    batch = rows_to_batch(tokens, labels, torch.from_numpy(rows.starts), sample_ids)
    batch.sources = sources or [0] * len(sample_ids)
    if not pin_memory:
        return batch
    pinned = (t.pin_memory() for t in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.cu_seqlens))
    return Batch(*pinned, batch.max_seqlen, batch.sample_ids, batch.sources)


class TrainData:
    """Step s uses rows [s * global_batch_size, (s + 1) * global_batch_size), each rank a contiguous share of them."""

    def __init__(
        self,
        streams: Sequence[Stream],
        data: Data,
        identity: dict[str, Any],
        dp_rank: int,
        dp_size: int,
        state: dict[str, Any] | None = None,
        pin_memory: bool = False,
    ):
        assert data.global_batch_size % (dp_size * data.micro_batch_size) == 0, "engine.resolve refuses this"
        self.streams, self._data, self._pin = streams, data, pin_memory
        self._turns = Turns([stream.weight for stream in streams])
        self._share, self._rank = data.global_batch_size // dp_size, dp_rank
        self._identity = identity
        step, places = 0, [(0, Cursor())] * len(streams)
        if state is not None:
            step, places = self._checked(state)
        self._reader = MixedReader(streams, self._turns, places)
        self._ahead = Ahead(self._batches, step, data.prefetch, "batches")

    def ready(self, seconds: float) -> bool:
        """Whether `next_step` would answer at once, now or within that time."""
        return self._ahead.ready(seconds)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step. What goes wrong in the threads is raised here."""
        return self._ahead.next()

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to go on with `step`: the same on every rank, whatever their number. Plain JSON."""
        row = step * self._data.global_batch_size
        places = {
            stream.name: {"window": window, "epoch": at.epoch, "position": at.position, "offset": at.offset}
            for stream, (window, at) in zip(self.streams, self._reader.places(row), strict=True)
        }
        return {"version": STATE_VERSION, "row": row, "sources": places, "identity": self._identity}

    def rows_by_source(self, step: int) -> dict[str, int]:
        """Rows of each source in the first `step` steps, over all ranks."""
        before = self._turns.before(step * self._data.global_batch_size).tolist()
        return {stream.name: rows for stream, rows in zip(self.streams, before, strict=True)}

    def stop(self) -> None:
        """No more steps will be asked for."""
        self._reader.stop()

    def close(self) -> None:
        """Stop the threads."""
        self._reader.close()
        self._ahead.close()

    def _batches(self, step: int) -> list[Batch]:
        row, size, batches = step * self._data.global_batch_size, self._data.micro_batch_size, []
        self._reader.forget_before(row)
        first = row + self._rank * self._share
        for at in range(first, first + self._share, size):
            rows, sources = self._reader.read(at, size)
            batches.append(to_batch(rows, list(range(at, at + size)), self._pin, sources))
        return batches

    def _checked(self, state: dict[str, Any]) -> tuple[int, list[tuple[int, Cursor]]]:
        """Raises UserError if the state belongs to other data or settings: the samples would not be the same."""
        if state["version"] > STATE_VERSION:
            raise UserError(
                f"checkpoint.resume: data state of version {state['version']}, and this Zooforge reads {STATE_VERSION}"
            )
        if differences := differing(state["identity"], self._identity):
            raise UserError(refusal(differences))
        # Version 1 knew one source, whose place lay at the top.
        places = state["sources"] if state["version"] > 1 else {"": state}
        if missing := [stream.name for stream in self.streams if stream.name not in places]:
            raise UserError(refusal([f"other sources than {', '.join(missing)}"]))
        return state["row"] // self._data.global_batch_size, [_place(places[stream.name]) for stream in self.streams]


def _place(state: dict[str, Any]) -> tuple[int, Cursor]:
    """A window, and where it begins."""
    return state["window"], Cursor(state["epoch"], state["position"], state["offset"])
