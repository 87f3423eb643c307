"""Flow matching as GR00T is trained: actions - noise at (1 - t) noise + t actions."""

from __future__ import annotations

from typing import Any

from engine.policy.flow import FlowMatching, towards_actions
from zoo.groot_n17.model import GrootN17

OBJECTIVE: Any = FlowMatching(GrootN17, towards_actions)
