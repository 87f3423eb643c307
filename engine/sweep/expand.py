"""Which values an override lists, in Hydra's words: `1,2`, `choice()`, `range()`, `glob()`."""

from __future__ import annotations

import itertools
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString, Transformer, ValueType

from engine.compose import parse
from engine.errors import UserError

FREE_TEXT = ("prompt", "job.sample_prompt")  # commas belong to the text


def expand(overrides: list[str], groups: dict[str, list[str]]) -> list[list[str]]:
    """The product of all sweeps among the overrides, the last one varying fastest."""
    choices: list[list[str]] = []
    for word in overrides:
        override = swept(word)
        listed = [] if override is None else values(word, override, groups)
        choices.append([f"{override_key(word)}={value}" for value in listed] or [word])
    return [list(combination) for combination in itertools.product(*choices)]


def override_key(word: str) -> str:
    """The key of `key=value`."""
    return word.partition("=")[0].strip().lstrip("+")


def swept(word: str) -> Override | None:
    """An override that lists values, as Hydra reads it; None if it names a single one."""
    if override_key(word) in FREE_TEXT:
        return None
    try:
        override = parse(word)
    except UserError:
        return None  # plain text such as a path; whether it is right is checked with the run
    return override if override.is_sweep_override() else None


def values(word: str, override: Override, groups: dict[str, list[str]]) -> list[str]:
    """The values, as they would be typed. `groups` are the options that glob() chooses from."""
    key = override_key(word)
    if override.is_interval_sweep():
        raise UserError(
            f"{word}: an interval has no end of values; list some, write range(start,stop,step), or search with "
            "sweep=optuna"
        )
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        found = override._value.filter(groups.get(key, []))  # type: ignore[union-attr]
    else:
        found = list(override.sweep_iterator(_typed))
    if not found:
        raise UserError(f"{word}: there is no value in it; write a list like {key}=1,2 or range(start,stop,step)")
    return found


def _typed(value: Any) -> str:
    """A value as text that means the same again; what was not quoted stays without quotes."""
    return value if isinstance(value, str) and not isinstance(value, QuotedString) else Transformer.str(value)
