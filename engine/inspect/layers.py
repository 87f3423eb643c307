"""`debug.dump=layers`: what passes through each layer of chosen steps, as lines of JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.comm import Comm
from engine.metrics.writer import keep_until

FILE = "layers.jsonl"


class LayerDump:
    """Statistics of the outputs of modules, over all ranks and micro-batches of a step.

    A line is {"step", "name", "mean", "std", "absmax", "nonfinite"}: of the finite elements, and the share of those
    that are not finite (0 to 1). Ranks that hold the same output count alike, and padding counts like any token, so a
    layout changes nothing as long as it adds no padding.
    """

    def __init__(self, modules: Mapping[str, nn.Module], steps: Optional[list[int]], comm: Comm, run_dir: Path) -> None:
        """`steps` None: every step."""
        self._modules, self._steps, self._comm, self._path = modules, steps, comm, run_dir / FILE
        self._sums: dict[str, Tensor] = {}

    def resume(self, step: int) -> None:
        """Forget the lines after this step. On one rank."""
        keep_until(self._path, step)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Within this, outputs are looked at; then rank 0 writes the step's lines. Collective."""
        if self._steps is not None and step not in self._steps:
            yield
            return
        self._sums = {}
        hooks = [module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._write(step)

    def _hook(self, name: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._add(name, sums_of(tensor.detach()))

        return look

    def _add(self, name: str, sums: Tensor) -> None:
        before = self._sums.get(name)
        self._sums[name] = sums if before is None else merged(before, sums)

    def _write(self, step: int) -> None:
        mine = {name: sums.tolist() for name, sums in self._sums.items()}
        everyone: dict[str, Tensor] = {}
        for rank in self._comm.all_gather(mine):
            for name, values in rank.items():
                sums = torch.tensor(values, dtype=torch.float64)
                everyone[name] = merged(everyone[name], sums) if name in everyone else sums
        if self._comm.rank == 0:
            with self._path.open("a") as file:
                for name in sorted(everyone, key=natural):
                    file.write(json.dumps({"step": step, "name": name, **statistics(everyone[name])}) + "\n")


@torch.no_grad()
def sums_of(x: Tensor) -> Tensor:
    """fp64 [5]: elements, those that are not finite, and of the rest the sum, the sum of squares and the largest."""
    finite = torch.isfinite(x)
    known = torch.where(finite, x, 0).double()
    largest = known.abs().max() if x.numel() else known.sum()
    counts = torch.stack([torch.full_like(largest, x.numel()), (~finite).sum().double()])
    return torch.cat([counts, torch.stack([known.sum(), known.square().sum(), largest])])


def merged(a: Tensor, b: Tensor) -> Tensor:
    """The sums of two parts as one."""
    return torch.cat([a[:4] + b[:4], torch.maximum(a[4:], b[4:])])


def statistics(sums: Tensor) -> dict[str, float]:
    """The figures that the sums stand for; 0 where no element is finite."""
    elements, bad, total, squares, largest = sums.tolist()
    finite = max(1.0, elements - bad)
    mean = total / finite
    std = math.sqrt(max(0.0, squares / finite - mean * mean))
    return {"mean": mean, "std": std, "absmax": largest, "nonfinite": bad / max(1.0, elements)}


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", name)]
