"""What a job is given: the frozen run, its family and hardware, this rank's place, and where to put things."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.backends.base import Backend
from engine.comm import Comm
from engine.errors import UserError
from engine.family import Family, load_family
from engine.faults.board import Page
from engine.faults.stacks import rank_log, show_stacks_in
from engine.schema import Run
from hardware.base import Hardware


class Context:
    """One rank of one run."""

    def __init__(self, run: Run, run_dir: Path, hardware: Hardware, page: Page | None = None) -> None:
        self.run = run
        self.run_dir = run_dir
        self.hardware = hardware
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.page = page or Page.private(self.rank)  # where the launcher sees how far this rank is
        self.began = False  # whether anything of the run folder may have changed
        self.result: dict[str, Any] = {}
        self.after_result: list[Callable[[Path], object]] = []  # called by rank 0 once result.json is written
        self.comm = Comm()
        self._backend: Backend | None = None

    @property
    def family(self) -> Family:
        return load_family(self.run.family).of(self.run.model.model_type)

    def log(self, text: str) -> None:
        """A line for the user, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def begin(self) -> None:
        """From here on the run folder changes, and the launcher expects progress."""
        self.began = True
        if self.page.watched:
            show_stacks_in(rank_log(self.run_dir, self.rank))

    def start_distributed(self) -> None:
        """Bring the process group up; a world of one has one too, since backends ask it."""
        self.hardware.set_device(self.local_rank)
        if not dist.is_initialized():
            try:
                self._init_process_group()
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                port = os.environ.get("MASTER_PORT")
                raise UserError(f"launcher.master_port={port} is in use on this machine; name another one") from None
        self.comm = Comm(self.hardware.device(self.local_rank))

    def _init_process_group(self) -> None:
        dist.init_process_group(
            self.hardware.dist_backend,
            rank=self.rank,
            world_size=self.world,
            store=None if self.world > 1 else dist.HashStore(),
            # The watchdog speaks first, since it can say who was waited for.
            timeout=datetime.timedelta(seconds=2 * self.run.faults.timeout_s + 60),
        )

    def build_backend(self, mode: str) -> Backend:
        """The run's backend, without weights yet. See `engine.backends.base.Builder` for the modes."""
        self.start_distributed()
        torch.manual_seed(self.run.seed)
        module = import_module(f"engine.backends.{self.run.backend}")
        self._backend = module.build(self.run, self.family, self.hardware, mode)
        return self._backend

    def close(self) -> None:
        """Take the process group down in order, so that no rank waits for one that has left."""
        if self._backend is not None and hasattr(self._backend, "close"):
            self._backend.close()
        if dist.is_initialized():
            dist.destroy_process_group()
