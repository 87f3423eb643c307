"""Weights and losses that are not finite: what is said, and what is left alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.sources import HFSource
from engine.comm import Comm
from engine.errors import UserError
from engine.faults.finite import FiniteSource, listed, not_finite
from engine.jobs.start import load_finite


def weights(folder: Path) -> HFSource:
    folder.mkdir(parents=True)
    first = {"a": torch.ones(3, 2), "b": torch.tensor([1.0, math.nan])}
    second = {"c": torch.tensor([[math.inf]]), "d": torch.full((2,), -math.inf, dtype=torch.bfloat16)}
    save_file(first, folder / "model-1.safetensors")
    save_file(second, folder / "model-2.safetensors")
    where = {**dict.fromkeys(first, "model-1.safetensors"), **dict.fromkeys(second, "model-2.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return HFSource(folder)


def test_bad_weights_are_named_with_their_files(tmp_path):
    source = weights(tmp_path / "hf")

    def load_state(source, kinds):
        for name, shape in (("a", (3, 2)), ("b", (2,)), ("c", (1, 1)), ("d", (2,))):
            for kind in kinds:
                source.read(kind, name, shape, (0,) * len(shape), shape)

    with pytest.raises(UserError) as error:
        load_finite(Comm(), SimpleNamespace(load_state=load_state), source, ("param",))
    said = str(error.value)
    assert f"b (in {tmp_path}/hf/model-1.safetensors)" in said and f"d (in {tmp_path}/hf/model-2.safetensors)" in said
    assert "c (in" in said and "a (in" not in said and len(said.splitlines()) == 1


def test_a_part_that_is_not_read_is_not_looked_at(tmp_path):
    source = FiniteSource(weights(tmp_path / "hf"))
    assert source.read("param", "b", (2,), (0,), (1,)).tolist() == [1.0]
    source.settle(Comm())
    source.read("param", "b", (2,), (1,), (1,))
    with pytest.raises(UserError, match="b "):
        source.settle(Comm())


def test_names():
    good, bad = torch.zeros(0), torch.tensor([0.0, math.nan])
    assert not_finite([("x", good), ("y", bad), ("z", torch.ones(2)), ("y", bad)]) == ["y"]
    assert listed(f"t{i}" for i in range(8)) == ", ".join(f"t{i}" for i in range(8))
    assert listed(f"t{i}" for i in range(10)).endswith("t7 and 2 more")
