"""Flow matching as GR00T is trained: actions - noise at (1 - t) noise + t actions."""

from __future__ import annotations

from typing import Any

from engine.policy.flow import FlowMatching, towards_actions
from zoo.groot_n16.model import GrootN16

OBJECTIVE: Any = FlowMatching(GrootN16, towards_actions)
