"""Policies by name: a floor (zero actions), a ceiling (scripted experts that know all poses), and trained ones."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Optional

from engine.errors import UserError
from engine.policy.conventions import Conventions
from eval.policy import Policy

POLICIES = {
    "zero": "eval.policies.zero:Zero",
    "libero_expert": "eval.policies.libero_expert:Expert",
    "toy_expert": "eval.policies.toy_expert:Expert",
}


def make(name: str, benchmark: Conventions, **options: Any) -> Policy:
    """A policy without weights by name, for a benchmark's conventions. UserError for one that is not there."""
    if name not in POLICIES:
        from engine.suggest import did_you_mean  # not in a simulator's environment, which lacks its packages

        raise UserError(
            f"policy={name}: neither a policy directory nor one of {', '.join(POLICIES)}{did_you_mean(name, POLICIES)}"
        )
    module, _, cls = POLICIES[name].partition(":")
    return getattr(import_module(module), cls)(benchmark, **options)


def chosen(
    name: str, benchmark: Conventions, cameras: bool = False, precision: str = "fp32", batch: Optional[int] = 1
) -> Policy:
    """A policy without weights, or the one in a policy directory, which knows its own conventions."""
    if name not in POLICIES and Path(name).expanduser().is_dir():
        from engine.architecture import find_weights
        from eval.policies.trained import Trained

        return Trained(find_weights(name, "policy"), precision=precision, batch=batch)
    return make(name, benchmark, cameras=cameras)
