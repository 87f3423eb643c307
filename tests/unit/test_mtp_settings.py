"""Layers for multi-token prediction: which a run has, and what is refused in one line."""

from __future__ import annotations

import math

import pytest

from engine.cli import prepare
from engine.errors import UserError
from engine.family import load_dotted, load_family


def run_of(*words: str, family: str = "qwen3"):
    return prepare(family, ["hardware=cpu", "launcher=print", *words])


@pytest.mark.parametrize(
    ("words", "layers", "weight"),
    [
        ([], 0, 0.0),
        (["model.mtp_layers=2"], 2, 0.1),
        (["model.mtp_layers=2", "mtp.loss_weight=0.3"], 2, 0.3),
        (["model.mtp_layers=1", "mtp.loss_weight=0"], 1, 0.0),
        (["model.mtp_layers=1", "backend=native"], 1, 0.0),
    ],
)
def test_layers_and_weight(words: list[str], layers: int, weight: float) -> None:
    run = run_of(*words)
    assert (run.model.mtp_layers, run.mtp.loss_weight) == (layers, weight)


def test_a_published_number_is_trained_from_scratch_where_it_is_asked_for() -> None:
    run = run_of("mtp.loss_weight=0.3", family="deepseek_v3")
    assert (run.model.mtp_layers, run.mtp.loss_weight) == (1, 0.3)
    assert run_of(family="deepseek_v3").model.mtp_layers == 0
    assert run_of("mtp.loss_weight=0", family="deepseek_v3").model.mtp_layers == 0
    with pytest.raises(UserError, match="kimi_k2 tiny has no layers"):
        run_of("mtp.loss_weight=0.3", family="kimi_k2")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["mtp.loss_weight=0.2"], "qwen3 tiny has no layers for multi-token prediction"),
        (["model.mtp_layers=1", "mtp.loss_weight=0.2", "backend=native"], "backend=native cannot train layers"),
        (["model.mtp_layers=-1"], "model.mtp_layers=-1: must be 0 or more"),
        (["mtp.loss_weight=-1"], "mtp.loss_weight=-1"),
        (["mtp.loss_weigth=1"], "mtp.loss_weight"),
    ],
)
def test_refusals(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        run_of(*words)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_deepseeks_published_layer() -> None:
    """DeepSeek-V3, README_WEIGHTS: 11.5 B parameters of its own, embeddings and head shared with the model."""
    family = load_family("deepseek_v3")
    config = run_of("model=671b", "mtp.loss_weight=0.1", family="deepseek_v3").model
    weights = load_dotted(family.weights)(config)
    count = sum(math.prod(weights.published[name]) for name in weights.predictors)
    assert count == pytest.approx(11.5e9, rel=0.01)
    assert weights.published["model.layers.61.eh_proj.weight"] == (7168, 14336)
    assert "model.layers.61.mlp.gate.e_score_correction_bias" in weights.buffers & weights.predictors
    assert weights.aliases == {
        "model.layers.61.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight": "lm_head.weight",
    }
