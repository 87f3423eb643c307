"""`job=train`: build the parts, bring them to the starting point, run the loop, leave a model behind."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.backends.base import Backend, unit_of
from engine.checkpoint.card import TOKENIZER
from engine.checkpoint.manager import CheckpointManager
from engine.checkpoint.origin import make_card
from engine.context import Context
from engine.data.chat.preview import Preview
from engine.data.loader import build_data
from engine.family import load_dotted
from engine.inspect.parameters import by_part, table
from engine.jobs.start import Start, load_start_weights, resume
from engine.loop import Loop
from engine.lora.names import is_adapter_name, trained_adapters
from engine.metrics.writer import MetricsWriter


def run(context: Context) -> None:
    """Train from scratch, from weights, or on from a checkpoint."""
    settings = context.run
    context.after_result.append(lambda folder: load_dotted("engine.report:write_report")(folder))
    backend = context.build_backend("train")
    pin_memory = context.hardware.supports("pin_memory")
    manager = CheckpointManager(context.run_dir, settings.checkpoint, context.comm, pin_memory=pin_memory)
    folder = manager.resume_from(settings.checkpoint.resume)
    if folder:
        start = resume(context, backend, folder)
    else:
        load_start_weights(context, backend)
        start = Start()
    build = load_dotted(context.family.data) if context.family.data else build_data
    data = build(
        settings,
        backend.dp_rank,
        backend.dp_size,
        state=start.data_state,
        log=context.log,
        tokenizer_dir=folder / TOKENIZER if folder else None,
        pin_memory=pin_memory,
    )
    manager.card = make_card(settings, context.family, data.tokenizer.folder, data.tokenizer.eos_id, folder, data.texts)
    metrics = MetricsWriter(context.run_dir, settings, start.step) if context.rank == 0 else None
    context.log(_summary(context, backend, start))
    if backend.kernels:
        context.log("kernels: " + ", ".join(f"{operation} by {name}" for operation, name in backend.kernels.items()))
        context.result["kernels"] = dict(backend.kernels)
    frozen = trained_adapters(settings, "train") is not None  # all that is no adapter
    still = getattr(backend, "still", frozenset())

    def learns(name: str) -> bool:
        return is_adapter_name(name) if frozen else name not in still

    context.log(table(by_part(backend.published, learns)))
    show_previews(context, data.previews)
    loop = Loop(context, backend, data, manager, metrics, start)
    try:
        loop.run()
    finally:
        data.close()
        manager.close()
        context.result |= loop.summary()
        if metrics is not None:
            metrics.close()


def show_previews(context: Context, shown: Sequence[Preview]) -> None:
    """The first conversations into the log and the report, so that a person can check what is learned."""
    for preview in shown:
        context.log(preview.text(colour=sys.stdout.isatty()) + "\n")
    if shown:
        context.result["conversations"] = [vars(preview) for preview in shown]


def _summary(context: Context, backend: Backend, start: Start) -> str:
    """One line before the first step: what runs, how, on what."""
    run, layout, unit = context.run, context.run.parallelism, unit_of(backend)
    begin = f"from step {start.step} of {start.folder}" if start.folder else f"from {run.model.weights or 'scratch'}"
    return (
        f"{run.family} {run.model.name}: {backend.parameters_total / 1e6:,.1f} M parameters {begin} · "
        f"{run.backend} {layout.name} (tp {layout.tp}, pp {layout.pp}, dp {backend.dp_size}) · {run.precision.name} · "
        f"{context.hardware.spec().name} · {run.schedule.steps} steps of "
        f"{run.data.global_batch_size} " + (f"x {run.data.seq_len} tokens" if unit == "tokens" else unit)
    )
