"""What a search varies: one parameter for each override that lists values or names an interval. Free of Optuna."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep

from engine.errors import UserError
from engine.sweep.expand import override_key, swept, values

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Parameter:
    """A list of values as they would be typed, or an interval with both ends; integers if its ends are."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    ordered: bool = False  # the values are a range: neighbours are alike

    def distribution(self) -> BaseDistribution:
        """The same in Optuna's terms. A range is searched by its positions."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.ordered:
            return IntDistribution(0, len(self.values) - 1)
        if self.values:
            return CategoricalDistribution(self.values)
        kind = IntDistribution if isinstance(self.low, int) else FloatDistribution
        return kind(self.low, self.high, log=self.log)  # type: ignore[arg-type]

    def word(self, drawn: Any) -> str:
        """The override for what Optuna has drawn; six digits of a number on an interval are enough to be read."""
        if self.ordered:
            drawn = self.values[drawn]
        elif isinstance(drawn, float):
            drawn = min(max(float(f"{drawn:.6g}"), self.low), self.high)
        return f"{self.key}={drawn}"

    def examples(self) -> list[str]:
        """Overrides that stand for all: every listed value, or both ends."""
        ends = [self.low, self.high] if self.low != self.high else [self.low]
        return [f"{self.key}={value}" for value in self.values or ends]


def search_space(words: list[str], groups: dict[str, list[str]]) -> tuple[list[Parameter], list[str]]:
    """What varies, and the overrides that do not. UserError for an interval that Optuna could not draw from."""
    found: dict[str, Parameter] = {}
    fixed: list[str] = []
    for word in words:
        override, key = swept(word), override_key(word)
        if override is None:
            fixed.append(word)
            continue
        if key in found:
            raise UserError(f"{word}: {key} is varied twice; leave one out")
        value: Any = override._value
        if isinstance(value, IntervalSweep):
            found[key] = _interval(word, key, value)
        elif _log(word, value):
            raise UserError(f"{word}: only an interval has a log scale, tag(log,interval(1e-4,1e-2))")
        else:
            if getattr(value, "shuffle", False):
                value.shuffle = False  # order means nothing to a search, and a resumed one must find the same
            listed = tuple(dict.fromkeys(values(word, override, groups)))
            found[key] = Parameter(key, listed, ordered=override.is_range_sweep())
    return list(found.values()), fixed


def _interval(word: str, key: str, value: IntervalSweep) -> Parameter:
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UserError(f"{word}: an interval begins with its lower end, interval(1e-4,1e-2)")
    log = _log(word, value)
    if log and low <= 0:
        raise UserError(f"{word}: a log scale begins above 0")
    return Parameter(key, low=low, high=high, log=log)


def _log(word: str, value: Any) -> bool:
    tags = set(getattr(value, "tags", ()) or ())
    if unknown := tags - {"log"}:
        raise UserError(f"{word}: tag {', '.join(sorted(unknown))} means nothing here; the only one is log")
    return "log" in tags
