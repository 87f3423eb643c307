"""What each training task needs. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.data.mixture import has_chats
from engine.schema import Run


def task_problems(run: Run) -> Iterator[str]:
    """A line for everything that a run's task lacks."""
    task, data = run.task, run.data
    if run.job.name not in ("train", "prepare"):
        return
    chats = has_chats(data)
    if task.name == "sft" and not chats:
        what = "a mixture without kind=chat" if data.name == "mixture" else f"data={data.name}"
        yield f"task=sft learns from conversations, and this is {what}; leave data out, or set data=chat"
    if chats and task.name in ("pretrain", "midtrain"):
        what = "data.mixture has a source of kind=chat" if data.name == "mixture" else f"this is data={data.name}"
        yield (
            f"task={task.name} learns all tokens of plain text, and {what}; task=sft learns from conversations, also "
            "mixed with text"
        )
    if chats and (run.job.name == "prepare" or data.packing == "offline"):
        rest = "conversations are rendered while training; leave job=prepare and data.packing=offline out"
        yield f"data={data.name}: {rest}"
    begun = run.model.weights is not None or run.checkpoint.resume is not None
    if task.name == "midtrain" and not begun:
        yield "task=midtrain goes on from trained weights, and model.weights is missing; name a directory"
    if task.name == "lora" and not begun and task.lora.adapter is None:
        yield "task=lora adapts trained weights, and model.weights is missing; name a directory"
