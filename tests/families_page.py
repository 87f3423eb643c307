"""docs/families.md from the families, their sizes' parameters and what the parity tests measured.

ZOO_MEASURED=tests/parity/measured.json pytest -m "slow or not slow" tests/parity/test_forward.py
python -m tests.families_page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from engine.catalogue import entry
from engine.family import Family, family_names, load_family
from tests import harness
from tests.measured import Measured, load

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
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


def page(measured: Measured) -> str:
    """The whole page."""
    lines = [HEAD]
    families = [load_family(name) for name in family_names()]
    for shelf in dict.fromkeys(family.shelf for family in families):
        lines += [f"## {SHELVES[shelf]}", ""]
        lines += [block(family, measured.get(family.name, {})) for family in families if family.shelf == shelf]
    return "\n".join(lines).rstrip() + "\n"


def block(family: Family, measured: dict[str, dict[str, float]]) -> str:
    """One family."""
    known = entry(family)
    rows = [
        f"### [{family.name}](../zoo/{family.shelf}/{family.name}/README.md)",
        "",
        f"Reference: {', '.join(known['reference'])}. Backends: {', '.join(known['backends'])}. "
        f"Tasks: {', '.join(known['tasks'])}.",
        "",
        f"Sizes: {', '.join(sizes(family, known['sizes']))}.",
        "",
        "| layout | logits | loss | gradients |",
        "|---|---|---|---|",
        *(row(layout, measured.get(layout, {})) for layout in layouts(family.name)),
        "",
    ]
    refused = harness.refused(family.name)
    return "\n".join([*rows, *(f"Refused: {layout} ({why}).\n" for layout, why in refused.items())])


def sizes(family: Family, names: list[str]) -> list[str]:
    """Each size with its parameters, where a published number is known."""
    counts: dict[str, Any] = (yaml.safe_load(COUNTS.read_text()) or {}).get(family.name, {})
    return [f"`{name}` ({short(counts[name]['parameters'])})" if name in counts else f"`{name}`" for name in names]


def short(count: int) -> str:
    """7.62 B, 494 M."""
    value, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{value:.3g} {unit}"


def layouts(family: str) -> list[str]:
    """Those in which some case of the family is tried."""
    cases = [case for case, _ in harness.discover() if case.family == family]
    return [layout for layout in harness.LAYOUTS if any(harness.possible(case, layout) for case in cases)]


def row(layout: str, errors: dict[str, float]) -> str:
    """A layout's errors; dashes where none were measured yet."""
    cells = (f"{errors[what]:.1e}" if what in errors else "-" for what in ("logits", "loss", "gradients"))
    return f"| {layout} | {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(load()))
    print(f"wrote {PAGE}")
