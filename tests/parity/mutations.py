"""Faults put into a rank on purpose, and the job run with them: the harness must notice every one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.weight_map import Block, WeightMap


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(original)` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def swapped_blocks(original: Callable[..., list[Block]]) -> Callable[..., list[Block]]:
    """One transform dropped: the first two blocks of equal extent of a merged parameter trade places."""

    def blocks(self: WeightMap, *args: Any) -> list[Block]:
        found = original(self, *args)
        for i, a in enumerate(found):
            for j, b in enumerate(found[i + 1 :], i + 1):
                if a.extent == b.extent and a.name != b.name:
                    found[i] = dataclasses.replace(b, local_offset=a.local_offset)
                    found[j] = dataclasses.replace(a, local_offset=b.local_offset)
                    return found
        return found

    return blocks


def one_gradient_dropped(original: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the first norm comes out as zero."""

    def state(self: Any, kinds: Any) -> Iterator[Any]:
        for part in original(self, kinds):
            lost = part.kind == "grad" and part.name.endswith("layers.0.input_layernorm.weight")
            yield dataclasses.replace(part, tensor=part.tensor * 0) if lost else part

    return state


def no_document_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Packed rows are taken for single documents: tokens see the documents before their own."""

    def rows_to_batch(tokens_BS: Any, labels_BS: Any, starts_BS: Any, sample_ids: Any) -> Any:
        return original(tokens_BS, labels_BS, starts_BS & False, sample_ids)

    return rows_to_batch


def experts_swapped(original: Callable[..., str]) -> Callable[..., str]:
    """The first two experts of every layer trade places."""
    trade = {"0": "1", "1": "0"}

    def global_name(model: Any, local: str) -> str:
        name = original(model, local)
        return re.sub(r"(?<=local_experts\.)[01](?=\.)", lambda match: trade[match[0]], name)

    return global_name


def weights_not_learnt(original: Callable[..., Any]) -> Callable[..., Any]:
    """The weights of a token's experts are constants, from which the router learns nothing."""

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = original(self, *args, **kwargs)
        return probs.detach(), chosen

    return routing


def run_mutated(config: str, mutation: str) -> int:
    """The job of a frozen config on this rank, with one fault in it."""
    import engine.backends.megatron.backend as megatron
    import engine.backends.megatron.router as router
    import engine.backends.megatron.state as state
    import engine.jobs.forward as forward
    from engine.worker import run_job

    place = {
        "transform": (WeightMap, "blocks", swapped_blocks),
        "gradient": (megatron.MegatronBackend, "state", one_gradient_dropped),
        "experts": (state, "global_name", experts_swapped),
        "weights": (router.Router, "routing", weights_not_learnt),
        "mask": (forward, "rows_to_batch", no_document_mask),
    }[mutation]
    with replaced(*place):
        return run_job(Path(config))
