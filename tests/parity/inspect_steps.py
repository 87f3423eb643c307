"""What ranks do for test_inspect: one step that is not wanted, and the same step wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.backends.base import TRAINED
from engine.context import Context
from engine.data.loader import build_data
from engine.freeze import load_run
from engine.jobs.start import load_start_weights
from hardware import registry


def unwanted(config: str) -> dict[str, Any]:
    """A refused step and then an accepted one on the same batches; what changed."""
    run = load_run(Path(config))
    hardware = registry.get(run.hardware.name)
    context = Context(run, Path(config).parent, hardware)
    backend = context.build_backend("train")
    load_start_weights(context, backend)
    data = build_data(run, backend.dp_rank, backend.dp_size, log=lambda _: None)
    batches = data.train.next_step()
    data.close()

    def state() -> dict[tuple, torch.Tensor]:
        return {(s.kind, s.name, s.offset): s.tensor.clone() for s in backend.state(TRAINED)}

    asked: list[float] = []

    def refuse(loss: float) -> bool:
        asked.append(loss)
        return False

    before = state()
    first = backend.train_step(batches, 1e-2, refuse)
    after = state()
    updates = backend.optimizer_step()
    second = backend.train_step(batches, 1e-2)
    changed = state()
    result = {
        "asked": asked,
        "same": before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before),
        "moved": any(not torch.equal(before[k], changed[k]) for k in before),
        "updated": (first.updated, second.updated),
        "updates": (updates, backend.optimizer_step()),
        "loss": (first.loss_sum / first.num_tokens, second.loss_sum / second.num_tokens),
        "norm": (first.grad_norm, second.grad_norm),
    }
    context.close()
    return result


def first_step(config: str) -> dict[str, Any]:
    """The metrics of a run's first step, beside its loss."""
    run = load_run(Path(config))
    hardware = registry.get(run.hardware.name)
    context = Context(run, Path(config).parent, hardware)
    backend = context.build_backend("train")
    load_start_weights(context, backend)
    data = build_data(run, backend.dp_rank, backend.dp_size, log=lambda _: None)
    result = backend.train_step(data.train.next_step(), 1e-3)
    data.close()
    context.close()
    return {"loss": result.loss_sum / result.num_tokens, **result.metrics}
