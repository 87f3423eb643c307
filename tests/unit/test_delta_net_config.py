"""Gated DeltaNet's keys: how layers are spelled, how values begin, which layouts divide its heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from zoo.qwen3_next.config import Qwen3NextConfig

from engine.architecture import read_architecture
from engine.checkpoint.sources import InitSource, normal
from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_family

LINEAR, FULL = "linear_attention", "full_attention"


def directory(tmp_path: Path, **keys: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"} | keys))
    return tmp_path


@pytest.mark.parametrize(
    ("kinds", "linear"),
    [
        ([LINEAR] * 3 + [FULL], (True, True, True, False)),
        ([LINEAR, FULL, LINEAR], (True, False, True)),
        ([FULL, FULL], (False, False)),
        ([LINEAR] * 5, (True,) * 5),
    ],
)
def test_a_list_of_layers_is_an_interval(tmp_path: Path, kinds: list[str], linear: tuple[bool, ...]) -> None:
    folder = directory(tmp_path, layer_types=kinds, num_hidden_layers=len(kinds))
    assert read_architecture(folder, load_family("qwen3_next")).linear() == linear


def test_the_published_spelling_is_the_same_model(tmp_path: Path) -> None:
    """As published, and as transformers 5 writes it again."""
    old = {"full_attention_interval": 2, "partial_rotary_factor": 0.5, "rope_theta": 5e3, "num_experts": 6}
    new = {"layer_types": [LINEAR, FULL] * 2, "num_local_experts": 6}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}
    first, second = (
        read_architecture(directory(tmp_path, num_hidden_layers=4, **keys), load_family("qwen3_next"))
        for keys in (old, new)
    )
    assert first == second and first.partial_rotary_factor == 0.5 and first.rope_theta == 5e3


@pytest.mark.parametrize("kinds", [[FULL, LINEAR], [LINEAR], [LINEAR, "sliding_attention"], "linear_attention"])
def test_layers_that_no_interval_makes_are_refused(tmp_path: Path, kinds: Any) -> None:
    folder = directory(tmp_path, layer_types=kinds, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"config\.json: layer_types must hold one for each of num_hidden_layers"):
        read_architecture(folder, load_family("qwen3_next"))


def test_fresh_values_are_the_references() -> None:
    """transformers' Qwen3NextPreTrainedModel: most norms are added to 1; A is drawn from (0, 16)."""
    source = InitSource(5, 0.02, normal(0.02, Qwen3NextConfig().fresh_value))

    def fresh(name: str) -> list[float]:
        return source.read("param", f"model.layers.0.{name}", (400,), (0,), (400,)).tolist()

    assert {*fresh("input_layernorm.weight"), *fresh("self_attn.q_norm.weight")} == {0.0}
    assert {*fresh("linear_attn.norm.weight"), *fresh("linear_attn.dt_bias")} == {1.0}
    decays = source.read("param", "model.layers.0.linear_attn.A_log", (400,), (0,), (400,)).exp()
    assert 0.01 <= decays.min() < 1 and 15 < decays.max() <= 16 and abs(decays.mean() - 8) < 5 * 4.62 / 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("parallelism=tp2_sp", "parallelism.cp=4"), "tp=2 x parallelism.cp=4 does not divide"),
        (("model.linear_num_key_heads=3",), "model.linear_num_value_heads=8 must be a multiple of"),
        (("model.partial_rotary_factor=1.5",), "partial_rotary_factor=1.5: it must be above 0"),
        (("model.full_attention_interval=0",), "full_attention_interval=0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as error:
        prepare("qwen3_next", ["hardware=cpu", "launcher=print", *words])
    assert said in str(error.value)
