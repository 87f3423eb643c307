"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): which layers for it a run has. Free of torch.

Such a layer predicts one token further ahead than the one before it. Weights have them or have not, and what a run
does with them follows from its job and its backend: the Megatron backend trains them, the native one, whose reference
models have none, keeps them as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.schema import Run

USUAL_WEIGHT = 0.1  # of the loss; DeepSeek-V3, section 4.2: 0.3 for 10 T tokens, then 0.1
MOST_LAYERS = 8


def predictors(family: Family, model: Any, count: int) -> frozenset[str]:
    """The published tensors of so many layers. UserError if the family has no names for them."""
    return load_dotted(family.weights)(dataclasses.replace(model, mtp_layers=count)).predictors


def held_layers(names: Collection[str], family: Family, model: Any) -> int:
    """How many layers for multi-token prediction there are among the tensors of some weights."""
    before: frozenset[str] = frozenset()
    for count in range(1, MOST_LAYERS + 1):
        try:
            own = predictors(family, model, count)
        except UserError:
            return count - 1
        if (own - before).isdisjoint(names):
            return count - 1
        before = own
    return MOST_LAYERS


def decide(run: Run) -> Run:
    """The run with the number of its layers and the weight of their loss decided."""
    trainable = run.job.name == "train" and run.task.name != "lora" and not warms_up(run)
    layers, weight = run.model.mtp_layers, run.mtp.loss_weight
    if layers is None:
        fresh = run.model.weights is None and run.checkpoint.resume is None
        # Weights that hold such layers say so themselves; from scratch they come with a weight that is asked for.
        layers = run.model.published_mtp_layers() if trainable and fresh and run.backend == "megatron" and weight else 0
    adapts = run.job.name == "train" and run.task.name == "lora"
    if adapts or (run.job.name in ("forward", "sample") and not weight):
        layers = 0  # nothing there uses or saves them
    if weight is None:
        weight = USUAL_WEIGHT if layers and trainable and run.backend == "megatron" else 0.0
    model = dataclasses.replace(run.model, mtp_layers=layers)
    return dataclasses.replace(run, model=model, mtp=dataclasses.replace(run.mtp, loss_weight=weight))


def warms_up(run: Run) -> bool:
    """Whether a run trains the indexers of sparse attention and nothing else."""
    return run.indexer.loss > 0 and run.indexer.stage == "dense"


def check(run: Run, family: Family) -> None:
    """UserError, in one line, for layers and a weight that a decided run cannot have."""
    weight, size, layers = run.mtp.loss_weight, f"{run.family} {run.model.name}", run.model.mtp_layers
    if layers and not predictors(family, run.model, layers):
        raise UserError(
            f"model.mtp_layers={layers}: {run.family} has no layers for multi-token prediction; leave it out"
        )
    if not weight:
        return
    if run.backend == "native" and run.job.name == "train":
        raise UserError(
            f"mtp.loss_weight={weight}: backend=native cannot train layers for multi-token prediction, it keeps those "
            "of its weights as they are; leave it out, or add backend=megatron"
        )
    if run.task.name == "lora" and run.job.name == "train":
        raise UserError(f"mtp.loss_weight={weight}: task=lora adapts the model's own layers only; leave it out")
    if run.backend == "native" or run.job.name not in ("train", "forward"):
        raise UserError(
            f"mtp.loss_weight={weight}: only job=train and job=forward with backend=megatron have this loss; "
            "leave it out"
        )
    if not layers:
        raise UserError(
            f"mtp.loss_weight={weight}: {size} has no layers for multi-token prediction here; leave it out, or "
            "name their number with model.mtp_layers when training from scratch"
        )
