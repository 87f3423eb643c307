"""Published keys that no MiniMax-M2 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import check as shared
from zoo.minimax_m2.config import MiniMaxM2Config


def check(model: MiniMaxM2Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    yield from shared.topk(model, "num_experts_per_tok", "num_local_experts")
    rotary, head = model.rotary_dim, model.head_channels
    if not 0 < rotary <= head or rotary % 2:
        yield f"model.rotary_dim={rotary}: it must be even and from 2 to model.head_dim={head}"
    elif int(head * model.partial_rotary_factor) != rotary:
        yield (
            f"model.rotary_dim={rotary} and model.partial_rotary_factor={model.partial_rotary_factor} of "
            f"model.head_dim={head} say different things; name one of them"
        )
