"""Where a model's numbers come from when a job begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.base import TRAINED, Backend, TensorSource
from engine.checkpoint.index import STATE, read_json
from engine.checkpoint.sharded import ShardedSource
from engine.checkpoint.sources import InitSource, open_weights
from engine.context import Context


@dataclass
class Start:
    """Where a run begins: at nothing, or where a checkpoint left off."""

    step: int = 0
    tokens: int = 0
    best_val_loss: float | None = None
    data_state: dict[str, Any] | None = None
    folder: Path | None = None  # the checkpoint


def load_start_weights(context: Context, backend: Backend) -> None:
    """Fill a model that does not resume: the tensors of `model.weights`, or initial values by name and seed."""
    model = context.run.model
    source: TensorSource
    if model.weights:
        source = open_weights(Path(model.weights), context.family, model)
    else:
        source = InitSource(context.run.seed, model.initializer_range)
    backend.load_state(source, ("param",))


def resume(backend: Backend, folder: Path) -> Start:
    """Everything a checkpoint holds: weights, optimizer, position in the data and in the schedule."""
    state = read_json(folder / STATE)
    backend.load_state(ShardedSource(folder), TRAINED)
    backend.set_optimizer_step(state["optimizer_step"])
    return Start(state["step"], state["tokens"], state["best_val_loss"], state["data"], folder)
