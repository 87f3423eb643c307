"""Numbers and values in sentences. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def counted(number: int, what: str) -> str:
    """1 rank, 2 ranks, 2 processes."""
    plural = f"{what}es" if what.endswith(("s", "x", "ch")) else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def some(names: Sequence[str], most: int = 8) -> str:
    """a, b, c; of many the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words where JSON has it: a string, an object, a datetime."""
    name = type(value).__name__
    return KINDS.get(type(value)) or f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
