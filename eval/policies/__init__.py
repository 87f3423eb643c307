"""Policies without weights: a floor (zero actions) and a ceiling (a scripted expert that knows all poses)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from engine.errors import UserError
from engine.policy.conventions import Conventions
from engine.suggest import did_you_mean
from eval.policy import Policy

POLICIES = {
    "zero": "eval.policies.zero:Zero",
    "libero_expert": "eval.policies.libero_expert:Expert",
}


def make(name: str, benchmark: Conventions, **options: Any) -> Policy:
    """A policy by name, for a benchmark's conventions. UserError for one that is not there."""
    if name not in POLICIES:
        raise UserError(f"policy={name}: the policies are {', '.join(POLICIES)}{did_you_mean(name, POLICIES)}")
    module, _, cls = POLICIES[name].partition(":")
    return getattr(import_module(module), cls)(benchmark, **options)
