"""Saving while training goes on: the step loop waits for a copy in host memory, a thread does the rest.

The ranks agree through files, not through the training's process group: a collective of the thread would race those of
the steps, and a second process group costs memory on every device. Each rank's thread writes its share and then
`rank_00003.share.json`, which lists it; rank 0's thread waits for all of these, writes the index, renames the folder.
So a checkpoint is complete as soon as the slowest rank has written, whatever the steps do, and a kill at any moment
leaves an unfinished folder that no one takes for a checkpoint. Errors are raised by `wait`, on every rank the same.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint.agree import Ranks, agree, attempt
from engine.checkpoint.card import Card, write_synced
from engine.checkpoint.sharded import failure, finish
from engine.checkpoint.share import MAX_FILE_BYTES, Share, write_share
from engine.checkpoint.swap import unfinished
from engine.errors import UserError

SHARE = ".share.json"
POLL_S = (0.005, 0.2)  # how often rank 0 looks for the other ranks' shares: at first, and at most


class HostCopies:
    """Copies of slices in host memory that every save uses again: fresh memory costs more time than the copy."""

    def __init__(self, pin_memory: bool = False) -> None:
        """`pin_memory`: the device copies several times as fast into pages that stay where they are."""
        self._pin = pin_memory
        self._memory: dict[tuple[Any, ...], Tensor] = {}

    def take(self, slices: Iterable[Slice]) -> list[Slice]:
        """The slices with copies of their tensors, valid until the next call. As collective as making the slices is."""
        held, self._memory = self._memory, {}
        copies = []
        for part in slices:
            key = (part.kind, part.name, part.offset, part.tensor.shape, part.tensor.dtype)
            memory = held.pop(key, None)
            if memory is None:
                pinned = self._pin and part.tensor.device.type != "cpu"
                memory = torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=pinned)
            self._memory[key] = memory.copy_(part.tensor.detach())
            copies.append(replace(part, tensor=memory))
        return copies


class BackgroundSave:
    """One checkpoint that a thread of every rank is writing. `then` runs on rank 0 when it is complete."""

    def __init__(
        self,
        folder: Path,
        slices: list[Slice],
        state: dict[str, Any],
        ranks: Ranks,
        card: Card,
        then: Callable[[], None],
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.folder, self._temporary = folder, unfinished(folder)
        self._slices, self._state, self._ranks, self._card, self._then = slices, state, ranks, card, then
        self._max_file_bytes = max_file_bytes
        self._share = Share()
        self._error: Exception | None = None
        self._shared, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether this rank already knows that the save will not succeed."""
        return self._share.error is not None or self._error is not None

    def wait(self) -> None:
        """Return when the checkpoint is complete on every rank, or raise on every rank. Collective."""
        self._shared.wait()
        error = failure(self._ranks, self._temporary, self._share)
        if error is not None:
            self._abandoned.set()
        self._thread.join()
        if self._ranks.rank == 0 and (error or self._error):
            shutil.rmtree(self._temporary, ignore_errors=True)
        agree(self._ranks, self._error or error)

    def join(self, timeout: float) -> bool:
        """Wait for this rank's part without the others; whether it succeeded in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self.failed

    def _run(self) -> None:
        try:
            self._share = self._write()
        except OSError as error:
            self._share = Share(error=error)
        except Exception as error:  # a mistake of ours: said by this rank, and waited for in vain by none
            self._error, self._share = error, Share(error=UserError(repr(error)))
        self._shared.set()
        if self._ranks.rank == 0 and not self.failed:
            self._error = attempt(self._finish)

    def _write(self) -> Share:
        """Write this rank's share, and then say so, in one move."""
        share = write_share(self._temporary, self._ranks.rank, self._slices, self._max_file_bytes, finite=True)
        if share.error is None:
            place = self._temporary / f"rank_{self._ranks.rank:05d}{SHARE}"
            unfinished = place.with_suffix(".part")
            write_synced(unfinished, json.dumps([share.parts, share.files]))
            unfinished.replace(place)
        return share

    def _finish(self) -> None:
        """Wait for all shares, complete the checkpoint."""
        pause, most = POLL_S
        while len(shares := sorted(self._temporary.glob(f"rank_*{SHARE}"))) < self._ranks.world:
            if self._abandoned.wait(pause):
                return
            pause = min(2 * pause, most)
        listings = [json.loads(path.read_bytes()) for path in shares]
        for path in shares:
            path.unlink()
        finish(self.folder, self._temporary, listings, self._state, self._card)
        self._then()
