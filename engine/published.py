"""Whether a published config.json holds the types that its keys take. JSON says them, so nothing is converted."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from engine.words import kind_of

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
UNIONS = (Union, getattr(types, "UnionType", Union))


def wrong_types(cls: type, values: Mapping[str, Any]) -> Iterator[str]:
    """`key=value is a string; a whole number should be there`, for each key of the dataclass that has another type.

    A string of digits is no number, true is none either, and a whole number stands for a float but not the reverse.
    """
    hints = get_type_hints(cls)
    for key, value in values.items():
        if key in hints and not _fits(value, hints[key]):
            shown = repr(value) if isinstance(value, str) else str(value)
            yield f"{key}={shown[:60]} is {_kind(value)}; {_wanted(hints[key])} should be there"


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in UNIONS:
        return any(_fits(value, one) for one in inner)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is (origin or hint)


def _kind(value: Any) -> str:
    """What it is, a number told from a whole one."""
    if isinstance(value, float):
        return "not finite" if not math.isfinite(value) else "not a whole number"
    return "a truth value" if isinstance(value, bool) else kind_of(value)


def _wanted(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        return " or ".join("null" if one is type(None) else _wanted(one) for one in inner)
    if origin in (list, tuple):
        return f"a list, each item {_wanted(inner[0])}"
    return WORDS.get(origin or hint, str(hint))
