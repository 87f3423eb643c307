"""Names of modules, sums of statistics, parts of parameters, runs of steps: against torch and arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine.inspect.layers import merged, natural, statistics, sums_of
from engine.inspect.modules import by_published_name, watched
from engine.inspect.parameters import by_part, table
from engine.inspect.profiler import operations, spans

PUBLISHED = {
    "model.embed_tokens.weight": (13, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
    "model.layers.0.self_attn.q_proj.lora_A.weight": (2, 6),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.input_layernorm.weight": (6,),
    "model.layers.0.mlp.experts.11.up_proj.weight": (3, 6),
    "model.layers.10.mlp.gate.weight": (12, 6),
    "model.layers.10.mlp.up_proj.weight": (10, 6),
    "model.norm.weight": (6,),
    "lm_head.weight": (13, 6),
}


def test_which_modules_are_watched():
    layers = {
        "model.layers.0",
        "model.layers.0.self_attn",
        "model.layers.0.mlp",
        "model.layers.10",
        "model.layers.10.mlp",
    }
    assert watched(PUBLISHED) == layers | {"model.embed_tokens", "model.norm"}


def test_modules_are_found_by_the_tensors_in_them():
    """A merged matrix has its parts' common name, but the module around it is the one that is meant."""
    layer = nn.ModuleDict(
        {"attention": nn.ModuleDict({"qkv": nn.Linear(2, 2), "out": nn.Linear(2, 2)}), "n": nn.Linear(1, 1)}
    )
    root = nn.ModuleDict({"decoder": nn.ModuleList([layer]), "final": nn.Linear(1, 1), "unnamed": nn.Linear(1, 1)})
    at = "model.layers.4"
    names = {
        id(layer["attention"]["qkv"].weight): [f"{at}.self_attn.{x}_proj.weight" for x in "qkv"],
        id(layer["attention"]["out"].weight): [f"{at}.self_attn.o_proj.weight"],
        id(layer["n"].weight): [f"{at}.input_layernorm.weight"],
        id(root["final"].weight): ["model.norm.weight"],
    }
    wanted = {at, f"{at}.self_attn", "model.norm"}
    found = by_published_name([root], names, wanted)
    assert found.keys() == wanted
    assert found[f"{at}.self_attn"] is layer["attention"] and found["model.norm"] is root["final"]
    assert found[at] in (layer, root["decoder"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_parts_are_those_of_the_whole(dtype):
    x = (torch.randn(7, 1, 5) * 3 + 1).to(dtype)
    parts = [sums_of(x[:1]), sums_of(x[1:4]), sums_of(x[4:4]), sums_of(x[4:])]
    sums = parts[0]
    for part in parts[1:]:
        sums = merged(sums, part)
    found, exact = statistics(sums), x.double()
    assert found["mean"] == pytest.approx(exact.mean().item(), rel=1e-12)
    assert found["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-9)
    assert found["absmax"] == exact.abs().max().item() and found["nonfinite"] == 0


def test_statistics_leave_out_what_is_not_finite_and_count_it():
    found = statistics(sums_of(torch.tensor([1.0, math.nan, -3.0, math.inf])))
    assert found == {"mean": -1.0, "std": 2.0, "absmax": 3.0, "nonfinite": 0.5}
    assert statistics(sums_of(torch.tensor([math.nan]))) == {"mean": 0.0, "std": 0.0, "absmax": 0.0, "nonfinite": 1.0}
    assert statistics(sums_of(torch.zeros(0)))["nonfinite"] == 0.0


def test_layers_are_sorted_as_they_count():
    names = ["model.layers.10", "model.norm", "model.layers.2.mlp", "model.layers.2", "model.embed_tokens"]
    assert sorted(names, key=natural)[1:4] == ["model.layers.2", "model.layers.2.mlp", "model.layers.10"]


def test_parameters_by_part():
    found = by_part(PUBLISHED, lambda name: "lora" in name)
    assert found == {
        "model.embed_tokens": (0, 78),
        "model.layers.self_attn": (12, 48 + 4),
        "model.layers.input_layernorm": (0, 6),
        "model.layers.mlp.experts": (0, 18),
        "model.layers.mlp": (0, 72 + 60),
        "model.norm": (0, 6),
        "lm_head": (0, 78),
    }
    lines = table(found).splitlines()
    assert lines[0].split() == ["parameters", "trained", "frozen"] and lines[-1].split() == ["all", "12", "370"]
    assert [line.split()[1:] for line in lines if line.startswith("lm_head")] == [["-", "78"]]


@pytest.mark.parametrize(
    ("steps", "found"), [([3, 4, 5], {3: 5}), ([9], {9: 9}), ([7, 2, 3, 8, 8], {2: 3, 7: 8}), ([], {})]
)
def test_runs_of_steps(steps, found):
    assert spans(steps) == found


def test_the_dearest_operations():
    averages = [
        SimpleNamespace(self_cpu_time_total=t, count=c, key=k) for t, c, k in ((100, 4, "small"), (300, 2, "mm"))
    ]
    lines = operations(averages, "cpu", steps=2).splitlines()
    assert lines[1].split() == ["0.150", "75.0%", "1.0", "mm"] and lines[2].split() == [
        "0.050",
        "25.0%",
        "2.0",
        "small",
    ]
