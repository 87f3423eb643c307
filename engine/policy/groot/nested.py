"""Published configs that hold configs: their keys as ours, and back. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Nested:
    """What a published key holds: `keys` names ours by theirs, `fixed` is what no model here has otherwise."""

    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def read(self, published: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Our keys. ValueError for a fixed one that says something else."""
        check_fixed(published, self.fixed, f"{where}.")
        return {ours: published[theirs] for theirs, ours in self.keys.items() if theirs in published}

    def write(self, model: Any) -> dict[str, Any]:
        """As published."""
        return {theirs: getattr(model, ours) for theirs, ours in self.keys.items()} | dict(self.fixed)


def check_fixed(published: Mapping[str, Any], fixed: Mapping[str, Any], where: str = "") -> None:
    """ValueError for a key that says something else than the models here are."""
    for key, value in fixed.items():
        if published.get(key, value) != value:
            raise ValueError(f"{where}{key}={published[key]!r}; {value!r} is what there is here")
