"""What anything must have that acts behind the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.policy.conventions import Conventions


@dataclass(frozen=True)
class Request:
    """One observation: images uint8 [H, W, 3], state float [D], prompt text, under the protocol's keys."""

    observation: dict[str, Any]
    seed: int = 0  # of whatever is drawn for this answer, and nothing else
    session: str = ""  # the episode, for policies that remember
    step: int = 0  # of the episode; at 0 a policy forgets what it remembers of the session


class Policy(Protocol):
    """A policy. `infer` runs in one thread; answers must not depend on what else is in the batch."""

    name: str
    conventions: Conventions
    needs: tuple[str, ...]  # observations beyond cameras, state and prompt: `privileged`

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        """Actions [T, D] for each request. UserError for an observation that it cannot use."""

    def forget(self, session: str) -> None:
        """The session is over."""
