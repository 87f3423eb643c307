"""Flow matching as Pi0.5 is trained: noise - actions at t noise + (1 - t) actions."""

from __future__ import annotations

from typing import Any

from engine.policy.flow import FlowMatching, towards_noise
from zoo.pi05.model import Pi05Policy

OBJECTIVE: Any = FlowMatching(Pi05Policy, towards_noise)
