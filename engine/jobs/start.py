"""Where a model's numbers come from when a job begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backends.base import EMA, Backend, trained_kinds
from engine.checkpoint.sharded import ShardedSource
from engine.checkpoint.sources import InitSource, normal, open_weights
from engine.checkpoint.state import load_train_state
from engine.comm import Comm
from engine.context import Context
from engine.faults.finite import FileSource, FiniteSource
from engine.lora.adapter import base_of, is_adapter
from engine.lora.names import trained_adapters
from engine.lora.sources import Beside
from engine.lora.start import start_adapters


@dataclass
class Start:
    """Where a run begins: at nothing, or where a checkpoint left off."""

    step: int = 0
    tokens: int = 0
    best_val_loss: float | None = None
    data_state: dict[str, Any] | None = None
    folder: Path | None = None  # the checkpoint
    state: dict[str, Any] = field(default_factory=dict)  # all that its state.json holds


def load_start_weights(context: Context, backend: Backend) -> None:
    """Fill a model that does not resume: the tensors of `model.weights`, or initial values by name and seed."""
    model = context.run.model
    if model.weights:
        source = open_weights(Path(model.weights), context.family, model)
        if trained_adapters(context.run, context.run.job.name):
            source = Beside(source, start_adapters(context.run, context.family))
        load_finite(context.comm, backend, source, ("param",))
    else:
        fill = normal(model.initializer_range, getattr(model, "fresh_value", None))
        backend.load_state(InitSource(context.run.seed, model.initializer_range, fill), ("param",))


def load_finite(comm: Comm, backend: Backend, source: FileSource, kinds: tuple[str, ...]) -> None:
    """Fill the model from files; UserError on every rank that names tensors with values that are not finite."""
    finite = FiniteSource(source)
    backend.load_state(finite, kinds)
    finite.settle(comm)


def resume(context: Context, backend: Backend, folder: Path) -> Start:
    """Everything a checkpoint holds: weights, optimizer, position in the data and in the schedule."""
    state = load_train_state(folder)
    checkpoint = ShardedSource(folder)
    source: FileSource = checkpoint
    if is_adapter(folder):
        source = Beside(open_weights(base_of(folder), context.family, context.run.model), source)
    # A checkpoint from before there was an average begins one with its weights.
    kinds = [kind for kind in trained_kinds(backend) if kind != EMA or EMA in checkpoint.index.tensors]
    load_finite(context.comm, backend, source, tuple(kinds))
    backend.set_optimizer_step(state.optimizer_step)
    return Start(state.step, state.tokens, state.best_val_loss, state.data, folder, state.everything)
