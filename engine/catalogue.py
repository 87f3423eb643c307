"""`zoo list`: what the zoo holds. Never imports torch or transformers."""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.errors import UserError
from engine.family import Family, proven
from engine.help import families, sizes
from engine.verbs import read_words

COLUMNS = ("family", "shelf", "tasks", "backends", "reference", "sizes", "layouts", "error")
GAP = "  "
HELP = """Lists the model families: their tasks, backends and sizes with their parameters, the reference that each is
compared with, the layouts in which it was, and the largest error of its logits (absolute, fp32) there.

Usage: zoo list [--json]

  --json      the same as JSON"""


def catalogue(words: list[str]) -> int:
    """Print all families; the exit status. UserError for words that it does not know."""
    given = read_words("zoo list", HELP, words)
    if given is None:
        return 0
    if given[0]:
        raise UserError(f"zoo list: {given[0][0]!r} is not known; zoo list takes no words, and --json")
    entries = [entry(family) for family in families()]
    if given[1]:
        print(json.dumps(entries, indent=1))
    elif sys.stdout.isatty():
        _table(entries)
    else:
        print(plain(entries), flush=True)
    return 0


def entry(family: Family) -> dict[str, Any]:
    """One family, by the names of the columns."""
    known = proven().get(family.name, {})
    layouts: dict[str, dict[str, float]] = known.get("layouts", {})
    backends = [name for name, part in (("megatron", family.megatron), ("native", family.reference)) if part]
    references = [family.reference, *(variant.reference for variant in family.variants)]
    return {
        "family": family.name,
        "shelf": family.shelf,
        "tasks": list(family.tasks),
        "backends": backends,
        "reference": _by_package([r for r in dict.fromkeys(references) if r]),
        "sizes": sizes(family),
        "parameters": known.get("parameters", {}),
        "layouts": list(layouts),
        "error": max((errors["logits"] for errors in layouts.values()), default=None),
    }


def counted_sizes(one: dict[str, Any]) -> list[str]:
    """`8b (8.19 B)` for each size of an entry; the name alone of one that was never published."""
    counts = one["parameters"]
    return [f"{name} ({_short(counts[name])})" if name in counts else name for name in one["sizes"]]


def _short(count: int) -> str:
    """7.62 B, 494 M."""
    value, unit = next((count / 10**n, unit) for n, unit in ((12, "T"), (9, "B"), (6, "M")) if count >= 10**n)
    return f"{value:.3g} {unit}"


def _by_package(references: list[str]) -> list[str]:
    """`transformers: A`, `B`: the package before the first of its classes."""
    packages = [reference.partition(":")[0] for reference in references]
    names = [reference.partition(":")[2] for reference in references]
    return [f"{p}: {n}" if p not in packages[:i] else n for i, (p, n) in enumerate(zip(packages, names, strict=True))]


def plain(entries: list[dict[str, Any]]) -> str:
    """A line for each family, in columns."""
    rows = [COLUMNS, *(_cells(one) for one in entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(GAP.join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    shown = one | {"sizes": counted_sizes(one)}
    return tuple(_cell(shown[column]) for column in COLUMNS)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}"
    return value if isinstance(value, str) else ", ".join(value)


def _table(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        whole = column in ("family", "shelf", "backends")
        table.add_column(column, overflow="fold", no_wrap=whole, style="cyan" if column == "family" else None)
    for one in entries:
        table.add_row(*_cells(one))
    Console(highlight=False, markup=False).print(table)
