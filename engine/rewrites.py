"""What a hardware plugin must change in a resolved run: shown, frozen with the run, refused under hardware.strict."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

from engine.errors import UserError
from engine.schema import Run
from hardware.base import Hardware, Rewrite


def rewritten(run: Run, hardware: Hardware) -> tuple[Run, list[str]]:
    """The run as this hardware can do it, and a note for each setting that had to change.

    The changes are in `run.hardware.rewrites`: key, from, to, reason. Raises UserError, one setting a line, under
    `hardware.strict`.
    """
    if run.hardware.rewrites is not None:
        raise UserError("hardware.rewrites: a run writes it; leave it out")
    changes = [change for change in hardware.rewrites(run) if attrgetter(change.key)(run) != change.value]
    if changes and run.hardware.strict:
        raise UserError("\n".join(_refusal(run, hardware.name, change) for change in changes))
    notes, records = [], []
    for change in changes:
        before, after = attrgetter(change.key)(run), _word(change.value)
        notes.append(f"hardware={hardware.name}: {change.key}={_word(before)} is {after} here; {change.reason}")
        records.append({"key": change.key, "from": before, "to": change.value, "reason": change.reason})
        run = _with(run, change.key.split("."), change.value)
    return dataclasses.replace(run, hardware=dataclasses.replace(run.hardware, rewrites=records)), notes


def _refusal(run: Run, name: str, change: Rewrite) -> str:
    before = _word(attrgetter(change.key)(run))
    return (
        f"hardware.strict=true: hardware={name} cannot do {change.key}={before}; {change.reason}; "
        f"{change.key.removesuffix('.name')}={_word(change.value)} would be right here"
    )


def _with(node: Any, path: list[str], value: Any) -> Any:
    """A copy of a tree of dataclasses with one value exchanged."""
    name, *rest = path
    return dataclasses.replace(node, **{name: _with(getattr(node, name), rest, value) if rest else value})


def _word(value: Any) -> str:
    """A value as a user writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
