"""Qwen3-235B-A22B over eight ranks: without a byte of its weights, and scaled down with as many tensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.backends.base import Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.headers import INDEX
from engine.checkpoint.sharded import save_sharded
from engine.freeze import load_run
from engine.llm.grouped import weight_map
from tests.freezing import freeze
from tests.parallel import fake_ranks
from tests.ranks import Ranks

HIDDEN, LAYERS, VOCABULARY = 4096, 94, 151936
HEADS, GROUPS, HEAD = 64, 4, 128
EXPERTS, WIDTH = 128, 1536


@pytest.mark.slow
def test_parameters_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    """tp 2 x pp 2 x dp 2 with the experts of a stage over its four ranks: counts as on paper, nothing twice."""
    config = freeze(
        tmp_path / "run",
        "qwen3",
        "model=235b_a22b",
        "launcher=print",
        *(f"parallelism.{key}" for key in ("tp=2", "sp=true", "pp=2", "ep=4", "dp=2", "strategy=zero1")),
        "precision=bf16",
    )
    (results,) = ranks.call(fake_ranks.instantiate, 1, config=str(config), size=8)
    attention = (2 * HEADS + 2 * GROUPS) * HEAD * HIDDEN // 2  # divided over tp
    whole = 2 * HEAD + 2 * HIDDEN + EXPERTS * HIDDEN  # norms and router, on every rank
    experts = EXPERTS // 4 * 3 * WIDTH * HIDDEN
    layers = LAYERS // 2 * (attention + whole + experts)
    first, last = layers + VOCABULARY // 2 * HIDDEN, layers + VOCABULARY // 2 * HIDDEN + HIDDEN
    assert [result["parameters"] for result in results] == [first] * 4 + [last] * 4
    held: Counter[str] = Counter()
    for result in results:
        for name, _, extent in result["blocks"]:
            held[name] += math.prod(extent)
    total = sum(held.values())
    assert total == 235_093_634_560  # transformers' count of the published configuration
    assert len(set(held)) == 2 + 1 + LAYERS * (2 + 2 + 4 + 1 + 3 * EXPERTS)


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_experts": 16,
    "moe_intermediate_size": 40,
    "vocab_size": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["published", "sharded"])
def test_a_rank_reads_its_share_and_holds_one_tensor_of_it(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """The memory of a load is the rank's share of the model, and a tensor on its way there."""
    layout = ("tp=2", "sp=true", "pp=2", "ep=4", "dp=2", "strategy=zero1")
    keys = (*(f"model.{key}={value}" for key, value in SMALL.items()), *(f"parallelism.{key}" for key in layout))
    config = freeze(tmp_path / "run", "qwen3", "model=235b_a22b", "launcher=print", "precision=fp32", *keys)
    published = weight_map(load_run(config).model).published
    tensors = {name: torch.full(shape, 0.5) for name, shape in published.items()}
    folder = (write_published if form == "published" else write_shards)(tmp_path / "step_00000001", tensors)
    (found,) = ranks.call(fake_ranks.load, 1, config=str(config), size=8, members=[0, 5], folder=str(folder))
    hidden, layers, heads, experts = 64, 30 // 2, 24 * (2 * 4 + 2 * 2) // 2, 16 // 4 * 3 * 40
    whole = 2 * 24 + 2 * hidden + 16 * hidden  # norms and router, on every rank
    ends = 1024 // 2 * hidden
    stage = layers * (heads * hidden + whole + experts * hidden) + ends
    assert [result["share"] for result in found] == [4 * stage, 4 * (stage + hidden)]
    largest = 4 * 1024 // 2 * hidden  # the embedding's share
    for result in found:
        assert result["read"] == result["share"]
        assert result["most"] <= largest
        assert result["read"] < 4 * sum(math.prod(shape) for shape in published.values()) / 5


def write_published(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face directory of several files."""
    folder.mkdir()
    names = list(tensors)
    places = {name: f"model-{number % 5}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of another layout: every tensor in two pieces that no rank's share is."""
    parts = []
    for name, tensor in tensors.items():
        cut, rest = len(tensor) // 3, (0,) * (tensor.dim() - 1)
        for first, piece in ((0, tensor[:cut]), (cut, tensor[cut:])):
            parts.append(Slice("param", name, tuple(tensor.shape), (first, *rest), piece.contiguous()))
    return save_sharded(folder, parts, {"from": "a test"}, Alone())
