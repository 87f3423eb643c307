"""What each training task needs. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.schema import Run


def task_problems(run: Run) -> Iterator[str]:
    """A line for everything that a run's task lacks."""
    task, data = run.task, run.data
    if run.job.name not in ("train", "prepare"):
        return
    if task.name == "sft" and data.name != "chat":
        yield f"task=sft learns from conversations, and this is data={data.name}; leave data out, or set data=chat"
    if data.name == "chat" and (run.job.name == "prepare" or data.packing == "offline"):
        yield "data=chat: conversations are rendered while training; leave job=prepare and data.packing=offline out"
    begun = run.model.weights is not None or run.checkpoint.resume is not None
    if task.name == "midtrain" and not begun:
        yield "task=midtrain goes on from trained weights, and model.weights is missing; name a directory"
    if task.name == "lora" and not begun and task.lora.adapter is None:
        yield "task=lora adapts trained weights, and model.weights is missing; name a directory"
