"""`zoo parity A B`: errors against arithmetic on tensors and curves that are known, and what cannot be compared."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file

import engine.parity.outputs as outputs_module
from engine.checkpoint.headers import read_header
from engine.cli import guarded
from engine.parity.checks import LIMITS
from engine.parity.command import parity
from engine.parity.curves import compare_curves, read_steps
from engine.parity.outputs import compare_outputs, distance, other_experts

FP32, BF16 = LIMITS["fp32"], LIMITS["bf16"]


def outputs(scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "logits": torch.randn(3, 7, 11, generator=generator),
        "loss": torch.tensor(2.5),
        "grad.model.layers.0.up.weight": scale * torch.randn(5, 3, generator=generator),
        "grad.model.layers.1.up.weight": scale * torch.randn(5, 3, generator=generator),
        "experts.1": torch.tensor([[[0, 3], [2, 1], [4, 5]]]),
    }


def stored(tmp_path, name: str, tensors: dict[str, torch.Tensor], **config):
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "outputs.safetensors")
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def checks_of(tmp_path, a, b, limits=FP32):
    files = [stored(tmp_path, name, tensors) / "outputs.safetensors" for name, tensors in (("a", a), ("b", b))]
    return {check.name: check for check in compare_outputs(*map(read_header, files), limits)}


@pytest.mark.parametrize("piece", [1, 7, 2**22])
def test_errors_are_those_of_torch(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(outputs_module, "PIECE", piece)
    a, b = outputs(), outputs()
    b["logits"] = a["logits"] + 1e-3 * torch.randn(3, 7, 11)
    b["loss"] = torch.tensor(2.625)
    name = "grad.model.layers.1.up.weight"
    b[name] = 1.25 * a[name]
    found = checks_of(tmp_path, a, b) if piece > 1 else checks_of(tmp_path, *(_without_experts(x) for x in (a, b)))
    assert found["logits"].error == pytest.approx((a["logits"] - b["logits"]).abs().max().item(), rel=1e-6)
    assert found["loss"].error == 0.125
    gradients = found["gradients"]
    assert gradients.error == pytest.approx(0.25, rel=1e-6) and gradients.count == 2
    assert gradients.where == "model.layers.1.up.weight"
    assert not any(found[name].within for name in ("logits", "loss", "gradients"))
    relative = ((a["logits"] - b["logits"]).double().norm() / a["logits"].double().norm()).item()
    in_bf16 = checks_of(tmp_path, _without_experts(a), _without_experts(b), BF16)["logits"]
    assert in_bf16.error == pytest.approx(relative, rel=1e-6) and in_bf16.within


def _without_experts(tensors):
    return {name: x for name, x in tensors.items() if not name.startswith("experts.")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_every_dtype_is_read_exactly(tmp_path, dtype):
    a = torch.tensor([1.0, -2.0, 384.0, 0.0]).to(dtype)
    file = stored(tmp_path, "a", {"x": a, "y": (a + 1).to(dtype)}) / "outputs.safetensors"
    header = read_header(file)
    found = distance(header["x"], header["y"])
    assert found.largest == (a.double() - (a + 1).to(dtype).double()).abs().max().item()
    assert found.norm_a == pytest.approx(a.double().norm().item())


def test_numbers_that_are_not_finite_are_beyond_every_limit(tmp_path):
    for bad, other in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, 1.0), (math.inf, -math.inf)):
        a, b = outputs(), outputs()
        a["grad.model.layers.0.up.weight"][4, 2], b["grad.model.layers.0.up.weight"][4, 2] = bad, other
        a["logits"][2, 6, 10], b["logits"][2, 6, 10] = bad, other
        for limits in (FP32, BF16):
            found = checks_of(tmp_path, a, b, limits)
            assert not found["logits"].within and not found["gradients"].within, (bad, other)
            assert found["gradients"].where == "model.layers.0.up.weight"
    a = outputs()
    a["logits"][0, 0, 0] = -math.inf  # a masked token of the vocabulary, in both
    assert checks_of(tmp_path, a, a)["logits"].error == 0


def test_no_element_and_a_gradient_of_zero(tmp_path):
    a = {"logits": torch.zeros(0, 4), "grad.w": torch.zeros(3)}
    assert all(check.within for check in checks_of(tmp_path, a, a).values())
    assert not checks_of(tmp_path, a, {**a, "grad.w": torch.full((3,), 1e-6)})["gradients"].within


def test_missing_tensors_are_named(tmp_path):
    a, b = outputs(), outputs()
    del b["grad.model.layers.0.up.weight"], b["grad.model.layers.1.up.weight"], a["loss"]
    found = checks_of(tmp_path, a, b)
    only = found["tensors only in A"]
    assert (only.error, only.where, only.within) == (2, "grad.model.layers.{0-1}.up.weight", False)
    assert found["tensors only in B"].where == "loss" and "gradients" not in found


def test_experts_are_sets_of_each_token(tmp_path):
    a, b = outputs(), outputs()
    b["experts.1"] = torch.tensor([[[3, 0], [2, 1], [4, 0]]])
    found = checks_of(tmp_path, a, b)["experts"]
    assert found.error == pytest.approx(1 / 3) and not found.within
    assert checks_of(tmp_path, a, b, BF16)["experts"].within
    file = stored(tmp_path, "c", {"e": torch.zeros(1, 0, 2, dtype=torch.int64)}) / "outputs.safetensors"
    assert other_experts(read_header(file)["e"], read_header(file)["e"]) == 0


def write_curve(folder, losses, norms=None, first=1, tokens=64):
    folder.mkdir(exist_ok=True)
    rows = [
        {"step": first + i, "loss": loss, "grad_norm": norm, "step_tokens": tokens}
        for i, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True))
    ]
    lines = [json.dumps(row) for row in rows] + [json.dumps({"step": 2, "val_loss": 9.0}), '{"step": 3, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def curve_checks(a, b, **options):
    steps = [read_steps(folder / "metrics.jsonl") for folder in (a, b)]
    return {check.name: check for check in compare_curves(*steps, FP32, **options)}


def test_curves_step_by_step(tmp_path):
    a = write_curve(tmp_path / "a", [4.0, 2.0, 1.0], [1.0, 2.0, 4.0])
    b = write_curve(tmp_path / "b", [4.0, 2.5, 1.0, 0.5], [1.0, 2.0, 3.0, 1.0])
    found = curve_checks(a, b)
    assert (found["training losses"].error, found["training losses"].where) == (0.25, "step 2")
    assert (found["gradient norms"].error, found["gradient norms"].where) == (0.25, "step 3")
    assert "3 in A and 4 in B" in found["steps with other tokens"].kind
    assert all(check.within for check in curve_checks(a, b, first=1).values())
    c = write_curve(tmp_path / "c", [4.0, None, 1.0], tokens=63)
    found = curve_checks(a, c)
    assert not found["training losses"].within and found["training losses"].where == "step 2"
    assert found["steps with other tokens"].error == 3


def test_a_command_says_how_it_stands(tmp_path, capsys):
    config = {
        "family": "qwen3",
        "model": {"hidden_size": 8, "weights": "here"},
        "seed": 1,
        "job": {"name": "train"},
        "precision": {"name": "fp32"},
    }
    a = stored(tmp_path, "a", outputs(), **config)
    config["model"]["weights"], config["seed"], config["moe"] = "there", 2, {"dispatcher": "alltoall"}
    changed = outputs()
    changed["loss"] += 0.001
    b = stored(tmp_path, "b", changed, **config)
    for folder in (a, b):
        write_curve(folder, [3.0, 2.0])
    assert parity([str(a), str(a)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith("A and B agree within the limits of fp32: logits 0,") and not said.err
    assert parity([str(a), str(b)]) == 1
    said = capsys.readouterr()
    assert "loss 1.0e-03, at most 1.0e-05" in said.out.splitlines()[-1]
    assert said.err == "note: seed is 1 in A and 2 in B\n"
    assert parity([str(a), str(b), "limits=bf16", "steps=2"]) == 0
    capsys.readouterr()
    config["precision"]["name"] = "bf16"
    stored(tmp_path, "b", changed, **config)
    changed["loss"] *= math.nan
    assert parity([str(a), str(b), "--json"]) == 0  # either in bf16: its limits
    report = json.loads(capsys.readouterr().out)
    assert report["within"] and report["limits"] == "bf16" and report["checks"][0]["name"] == "logits"
    config["precision"]["name"], config["model"]["eos_token_id"] = "fp32", None
    resumed = {**config, "model": {**config["model"], "eos_token_id": 0}}  # as a checkpoint says it
    assert parity([str(stored(tmp_path, n, outputs(), **c)) for n, c in (("e", config), ("f", resumed))]) == 0
    alone = shutil.copy(a / "outputs.safetensors", tmp_path / "from_the_card.safetensors")
    assert parity([str(a), str(alone)]) == 0


def test_what_cannot_be_compared_is_an_error_of_one_line(tmp_path, capsys):
    config = {"family": "qwen3", "model": {"hidden_size": 8}}
    a = stored(tmp_path, "a", outputs(), **config)
    other_model = stored(tmp_path, "b", outputs(), family="qwen3", model={"hidden_size": 16})
    other_shape = stored(tmp_path, "c", {**outputs(), "logits": torch.zeros(3, 7, 12)})
    curve, later = write_curve(tmp_path / "d", [1.0]), write_curve(tmp_path / "e", [1.0], first=5)
    cut = stored(tmp_path, "f", outputs())
    (cut / "outputs.safetensors").write_bytes((cut / "outputs.safetensors").read_bytes()[:-1])
    for words, said in (
        ([a], "this names 1; zoo parity A B"),
        ([a, tmp_path / "none"], "no such run folder"),
        ([a, other_model], "model.hidden_size is 8 in A and 16 in B"),
        ([a, other_shape], "logits is [3, 7, 11] in A and [3, 7, 12] in B"),
        ([a, curve], "nothing to compare"),
        (
            [tmp_path, tmp_path],
            f"error: {tmp_path} holds neither outputs.safetensors nor metrics.jsonl: nothing to compare",
        ),
        ([curve, later], "share no training step"),
        ([a, cut], "truncated"),
        ([a, a, "steps=3"], "steps=3 has no effect"),
        ([a, a, "steps=0"], "at least 1"),
        ([a, a, "limits=fp8"], "limits=fp32 or limits=bf16"),
        ([a, a, "--tight"], "--help shows"),
    ):
        assert guarded(lambda words=words: parity([str(word) for word in words])) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
