"""What arithmetic shows to be beyond any machine. Notes, not errors: a layout may be looked at that nobody can run yet.

Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from engine.family import Family, load_dotted
from engine.metrics.text import count
from engine.resolve import model_ranks
from engine.schema import Run

CARD_BYTES = 288e9  # the most memory of a card that can be bought: AMD MI355X, NVIDIA B300 (their data sheets, 2025)
NODE_RANKS = 256  # more than devices, or processes of any use, in one machine
RANKS = 200_000  # the largest clusters that were made public
TENSORS = 300_000  # more than any published model has; so many are not counted one by one
BYTES = {"fp32": 4, "bf16": 2}


def doubts(run: Run, family: Family) -> Iterator[str]:
    """One line for each size of a resolved run that cannot be right. Weights and rows are held against one card."""
    yield from _ranks(run)
    if hasattr(run.model, "num_hidden_layers") and hasattr(run.model, "hidden_size"):
        yield from _weights(run, family)
        yield from _row(run)


def _ranks(run: Run) -> Iterator[str]:
    ranks, nodes = run.launcher.nproc_per_node or 1, run.launcher.nodes
    if ranks > NODE_RANKS:
        yield f"{ranks} ranks on one node: no machine has so many devices; launcher.nodes=... spreads them"
    if ranks * nodes > RANKS:
        yield f"{ranks * nodes} ranks: the largest clusters have about {RANKS} devices; check parallelism.dp"


def _weights(run: Run, family: Family) -> Iterator[str]:
    mixture = run.model.mixture()
    layers, experts = run.model.num_hidden_layers, mixture.experts if mixture else 0
    if layers * (1 + experts) > TENSORS:
        what = f"{layers} layers" + (f" of {experts} experts" if experts else "")
        yield f"model.num_hidden_layers: {what} are more than any model has; its parameters are not even counted"
        return
    parameters = parameters_of_a_rank(run, load_dotted(family.weights)(run.model).published)
    needed = parameters * BYTES.get(run.precision.name, 4)
    if needed > CARD_BYTES:
        larger = "parallelism.strategy=fsdp" if run.backend == "native" else "a larger parallelism.tp, pp or ep"
        yield (
            f"each rank holds {count(parameters)} parameters, {_size(needed)} in {run.precision.name} for the weights "
            f"alone, and no card has more than {_size(CARD_BYTES)}; {larger} divides them over more ranks"
        )


def parameters_of_a_rank(run: Run, published: dict[str, Any]) -> float:
    """An even share of the parameters, experts by their own layout."""
    layout = run.parallelism
    sizes = {name: math.prod(shape) for name, shape in published.items()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    rest = sum(sizes.values()) - routed
    if run.backend == "native":
        shards = {"fsdp": layout.dp or 1, "hsdp": layout.shard_size or 1}.get(layout.strategy, 1)
        return (rest + routed) / shards
    return rest / (layout.tp * layout.pp) + routed / (layout.ep * layout.etp * layout.pp)


def _row(run: Run) -> Iterator[str]:
    """The states between two layers, which any way of recomputing keeps for the rows at hand."""
    layout, data = run.parallelism, run.data
    if run.job.name != "train":
        return
    tokens = data.seq_len * (data.micro_batch_size or 1) / (layout.cp * (layout.tp if layout.sp else 1))
    needed = tokens * run.model.hidden_size * BYTES.get(run.precision.name, 4)
    if needed > CARD_BYTES:
        yield (
            f"data.seq_len={data.seq_len}: one layer's states of a micro-batch are {_size(needed)} on each rank, and "
            f"no card has more than {_size(CARD_BYTES)}; shorten it, or raise parallelism.cp (now {layout.cp}, of "
            f"{model_ranks(layout)} ranks that share a model)"
        )


def _size(value: float) -> str:
    return f"{value / 1e9:.0f} GB" if value < 1e12 else f"{value / 1e12:.3g} TB"
