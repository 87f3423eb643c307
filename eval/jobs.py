"""`job=eval` and `job=serve` of a family of policies: the worker's side of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Optional

from engine.context import Context
from engine.judging import Episodes
from eval.command import Progress, serve_until_signal
from eval.policies.trained import Trained
from eval.report import percent
from eval.runner import evaluate
from eval.server import Server
from eval.settings import EvalSettings


def evaluation(context: Context) -> None:
    """Play the episodes; their folder is the run's, or the one that `eval.output` names."""
    run = context.run
    given = {field.name: getattr(run.eval, field.name) for field in dataclasses.fields(Episodes)}
    settings = EvalSettings(**given, benchmark=run.eval.name, policy=run.model.weights, precision=run.precision.name)
    folder = Path(settings.output) if settings.output else context.run_dir
    policy = _policy(context, settings.batch)
    summary = evaluate(settings, folder, context.log, Progress(), policy)
    kept = ("suite", "successes", "episodes", "rate", "low", "high", "mean_of_tasks", "complete", "latency_ms")
    context.result |= {"benchmark": run.eval.name, "results": str(folder)} | {key: summary[key] for key in kept}
    context.log(f"{summary['suite']}: {percent(summary)}, {folder / 'report.html'}")


def serving(context: Context) -> None:
    """Serve until a signal ends it."""
    job = context.run.job
    serve_until_signal(Server(_policy(context, job.max_batch if job.fill else None), job, context.log))


def _policy(context: Context, batch: Optional[int]) -> Trained:
    context.hardware.set_device(context.local_rank)
    device = context.hardware.device(context.local_rank)
    return Trained(Path(str(context.run.model.weights)), device, context.run.precision.name, batch)
