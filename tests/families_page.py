"""docs/families.md and what `zoo list` knows: the families, their sizes' parameters and what the parity tests measured.

ZOO_MEASURED=measured.json pytest -m "slow or not slow" tests/parity/test_forward.py
python -m tests.families_page measured.json     # without a file: what was measured before stays
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

import zoo
from engine.catalogue import counted_sizes, entry
from engine.family import Family, family_names, load_family, proven
from tests import harness
from tests.measured import Measured, load

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
PROVEN = Path(zoo.__file__).parent / "families.json"
COUNTS = Path(__file__).parent / "parity" / "published_counts.yaml"
SHELVES = {"llm": "Language models", "vlm": "Vision-language models", "diffusion": "Diffusion", "embodied": "Embodied"}
HEAD = """<!-- Written by `python -m tests.families_page`; change the families, or the script. -->
# Families

`zoo list` prints the same families. Each is compared with its reference implementation by
[the parity harness](add-a-family.md): random small configurations in fp32, dense and packed rows, in every layout
named here. The errors are the largest that were seen: of logits (absolute), of the loss (absolute), of any parameter's
gradient (norm of the difference over the norm). Parameters are published numbers, which a test compares with the weight
map; layers for multi-token prediction are not counted.
"""
APART = "Compared with its reference by tests of its own, of which its page tells."


def collect(measured: Measured) -> dict[str, dict[str, Any]]:
    """What `engine.family.proven` gives, with what was `measured` since in place of what was known."""
    before, counts = proven(), yaml.safe_load(COUNTS.read_text()) or {}
    return {name: _of(name, counts.get(name, {}), before.get(name, {}), measured) for name in family_names()}


def _of(name: str, counts: dict[str, Any], before: dict[str, Any], measured: Measured) -> dict[str, Any]:
    known = before.get("layouts", {}) | measured.get(name, {})
    return {
        "parameters": {size: count["parameters"] for size, count in counts.items()},
        "layouts": {layout: known[layout] for layout in layouts(name) if layout in known},
    }


def page(facts: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    lines = [HEAD]
    families = [load_family(name) for name in family_names()]
    for shelf in dict.fromkeys(family.shelf for family in families):
        lines += [f"## {SHELVES[shelf]}", ""]
        lines += [block(family, facts[family.name]["layouts"]) for family in families if family.shelf == shelf]
    return "\n".join(lines).rstrip() + "\n"


def block(family: Family, errors: dict[str, dict[str, float]]) -> str:
    """One family."""
    known, tried = entry(family), layouts(family.name)
    rows = [
        f"### [{family.name}](../zoo/{family.shelf}/{family.name}/README.md)",
        "",
        f"Reference: {', '.join(known['reference'])}. Backends: {', '.join(known['backends'])}. "
        f"Tasks: {', '.join(known['tasks'])}.",
        "",
        f"Sizes: {', '.join(counted_sizes(known))}.",
        "",
        *(["| layout | logits | loss | gradients |", "|---|---|---|---|"] if tried else [APART]),
        *(row(layout, errors.get(layout, {})) for layout in tried),
        "",
    ]
    refused = harness.refused(family.name)
    return "\n".join([*rows, *(f"Refused: {layout} ({why}).\n" for layout, why in refused.items())])


def layouts(family: str) -> list[str]:
    """Those in which some case of the family is tried."""
    cases = [case for case, _ in harness.discover() if case.family == family]
    return [layout for layout in harness.LAYOUTS if any(harness.possible(case, layout) for case in cases)]


def row(layout: str, errors: dict[str, float]) -> str:
    """A layout's errors; dashes where none were measured yet."""
    cells = (f"{errors[what]:.1e}" if what in errors else "-" for what in ("logits", "loss", "gradients"))
    return f"| {layout} | {' | '.join(cells)} |"


if __name__ == "__main__":
    facts = collect(load(Path(sys.argv[1])) if sys.argv[1:] else {})
    PROVEN.write_text(json.dumps(facts, indent=1) + "\n")
    PAGE.write_text(page(facts))
    print(f"wrote {PROVEN} and {PAGE}")
