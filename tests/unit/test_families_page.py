"""docs/families.md is made of what is there and of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.family import family_names, load_family, proven
from tests import families_page, measured


def test_the_page_names_every_family_size_and_layout() -> None:
    facts = families_page.collect({"qwen3": {"megatron-pp2": {"logits": 1.23e-6, "loss": 0.0, "gradients": 4.5e-6}}})
    page = families_page.page(facts)
    for name in family_names():
        family = load_family(name)
        assert f"zoo/{family.shelf}/{name}/README.md" in page and family.reference.partition(":")[2] in page
    assert "8b (8.19 B)" in page and "tiny, tiny_moe, 0_6b" in page
    assert "| megatron-pp2 | 1.2e-06 | 0.0e+00 | 4.5e-06 |" in page


def test_the_largest_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.record("a", "single", {"loss": 1.0})  # no file is named
    file = tmp_path / "measured.json"
    monkeypatch.setenv(measured.VARIABLE, str(file))
    for loss in (2e-7, 1.23456e-6, 3e-7):
        measured.record("a", "single", {"loss": loss})
    measured.record("a", "pp2", {"loss": 0.0})
    assert json.loads(file.read_text()) == {"a": {"pp2": {"loss": 0.0}, "single": {"loss": 1.23e-06}}}
    assert measured.load(file)["a"]["single"] == {"loss": 1.23e-06}


def test_nothing_is_stale() -> None:
    """docs/families.md and what `zoo list` shows are what the script makes of the families that are there."""
    facts = families_page.collect({})
    assert facts == proven(), "run python -m tests.families_page"
    assert families_page.PAGE.read_text() == families_page.page(facts), "run python -m tests.families_page"


def test_what_is_not_measured_shows_dashes() -> None:
    assert families_page.row("megatron-pp2", {}) == "| megatron-pp2 | - | - | - |"
