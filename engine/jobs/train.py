"""`job=train`: build the parts, bring them to the starting point, run the loop, leave a model behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.backends.base import TRAINED, Backend, TensorSource
from engine.checkpoint.manager import CheckpointManager
from engine.checkpoint.sharded import ShardedSource
from engine.checkpoint.sources import InitSource, open_weights
from engine.context import Context
from engine.data.loader import build_data
from engine.loop import Loop, Start
from engine.metrics.writer import MetricsWriter
from engine.report import write_report


def run(context: Context) -> None:
    """Train from scratch, from weights, or on from a checkpoint."""
    settings = context.run
    backend = context.build_backend("train")
    manager = CheckpointManager(context.run_dir, settings.checkpoint, context.comm)
    resumed = manager.resume_from(settings.checkpoint.resume)
    if resumed:
        start = _resume(backend, resumed)
    else:
        load_start_weights(context, backend)
        start = Start()
    data = build_data(settings, backend.dp_rank, backend.dp_size, state=start.data_state, log=context.log)
    metrics = MetricsWriter(context.run_dir, settings, start.step) if context.rank == 0 else None
    context.log(_summary(context, backend, start))
    loop = Loop(context, backend, data, manager, metrics, start)
    try:
        loop.run()
    finally:
        if metrics is not None:
            metrics.close()
            context.result |= loop.summary()
    if context.rank == 0:
        write_report(context.run_dir)


def load_start_weights(context: Context, backend: Backend) -> None:
    """Fill a model that does not resume: the tensors of `model.weights`, or initial values by name and seed."""
    model = context.run.model
    source: TensorSource
    if model.weights:
        source = open_weights(Path(model.weights), context.family, model)
    else:
        source = InitSource(context.run.seed, model.initializer_range)
    backend.load_state(source, ("param",))


def _resume(backend: Backend, folder: Path) -> Start:
    """Everything a checkpoint holds: weights, optimizer, position in the data and in the schedule."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    backend.load_state(ShardedSource(folder), TRAINED)
    backend.set_optimizer_step(state["optimizer_step"])
    return Start(
        step=state["step"],
        tokens=state["tokens"],
        best_val_loss=state["best_val_loss"],
        data_state=state["data"],
        folder=folder,
    )


def _summary(context: Context, backend: Backend, start: Start) -> str:
    """One line before the first step: what runs, how, on what."""
    run, layout = context.run, context.run.parallelism
    begin = f"from step {start.step} of {start.folder}" if start.folder else f"from {run.model.weights or 'scratch'}"
    return (
        f"{run.family} {run.model.name}: {backend.parameters_total / 1e6:,.1f} M parameters {begin} · "
        f"{run.backend} {layout.name} (tp {layout.tp}, pp {layout.pp}, dp {backend.dp_size}) · {run.precision.name} · "
        f"{context.hardware.spec().name} · {run.schedule.steps} steps of "
        f"{run.data.global_batch_size} x {run.data.seq_len} tokens"
    )
