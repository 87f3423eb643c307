"""`--multirun`: what it expands to, that it checks before it starts, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import engine.sweep
from engine.cli import command, guarded
from engine.errors import UserError
from engine.sweep import expand

GROUPS = {"model": ["4b", "8b", "tiny"], "schedule": ["cosine", "wsd"]}


def test_expansion_is_a_product_in_order():
    assert expand(["optim.lr=1e-3,5e-3", "seed=1", "schedule=cosine,wsd"], GROUPS) == [
        ["optim.lr=0.001", "seed=1", "schedule=cosine"],
        ["optim.lr=0.001", "seed=1", "schedule=wsd"],
        ["optim.lr=0.005", "seed=1", "schedule=cosine"],
        ["optim.lr=0.005", "seed=1", "schedule=wsd"],
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("schedule.steps=range(2,8,3)", ["2", "5"]),
        ("schedule.steps=range(3)", ["0", "1", "2"]),
        ("optim.lr=choice(1,2)", ["1", "2"]),
        ("model=glob(*b)", ["4b", "8b"]),
        ("data.path=a b,c", ["a b", "c"]),
        ("optim.betas=[0.9,0.9],[0.8,0.9]", ["[0.9,0.9]", "[0.8,0.9]"]),
        ("precision.compile=true,false", ["True", "False"]),
        ("parallelism.dp=1,null", ["1", "null"]),
    ],
)
def test_ways_to_list_values(word, values):
    key = word.partition("=")[0]
    assert expand([word], GROUPS) == [[f"{key}={value}"] for value in values]


@pytest.mark.parametrize("word", ["optim.betas=[0.9,0.9]", "prompt=a, b", "data.path=a (1).txt", "seed=3"])
def test_a_single_value_stays_one(word):
    assert expand([word], GROUPS) == [[word]]


@pytest.mark.parametrize("word", ["optim.lr=interval(0,1)", "schedule.steps=range(0)", "model=glob(x*)"])
def test_what_lists_nothing_is_refused(word):
    with pytest.raises(UserError, match=word.split("=")[0]):
        expand([word], GROUPS)


STUB = """
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(words["output_dir"]) / "qwen3" / words["run_id"]
if words["seed"] == "2":
    sys.exit(2)
folder.mkdir(parents=True)
(folder / "result.json").write_text(json.dumps({"status": "done", "loss": float(words["seed"]), "val_loss": 0.5}))
"""


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Runs that only leave a result; the one with seed 2 fails."""
    monkeypatch.setattr(
        engine.sweep,
        "_command",
        lambda family, row, run_id: [sys.executable, "-c", STUB, *row.overrides, f"run_id={run_id}"],
    )
    return ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "-m"]


def summary(tmp_path):
    return json.loads(next((tmp_path / "out" / "qwen3" / "sweeps").glob("*/summary.json")).read_text())["runs"]


def test_one_failure_stops_no_other(stub, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command("qwen3", [*stub, "seed=1,2,3"]) == 1
    runs = summary(tmp_path)
    assert [run["status"] for run in runs] == ["done", "failed (2)", "done"]
    assert [run["loss"] for run in runs] == [1.0, None, 3.0]
    assert [run["exit_status"] for run in runs] == [0, 2, 0]
    said = capfd.readouterr().out
    table = said[said.index("┏") :]
    assert all(word in table for word in ("seed=1", "seed=2", "seed=3", "failed (2)", "3.0000", "0.5000"))
    assert said.startswith("all runs: hardware=cpu output_dir=") and "\nrun 2 of 3: seed=2\n" in said
    assert "hardware=cpu" not in table  # what all runs share is above the table


def test_success(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, "seed=4,5"]) == 0
    assert [run["val_loss"] for run in summary(tmp_path)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sead=1,2"], ["did you mean seed"]),
        (["model=tiny,8B"], ["model=8B", "did you mean 8b"]),
        (["optim.lr=1,x"], ["optim.lr=x: must be a number"]),
        (["parallelism=tp2,pp2", "model.num_hidden_layers=3"], ["pp=2 does not divide"]),
        (["run_id=a", "seed=1,2"], ["run_id"]),
    ],
)
def test_a_mistake_anywhere_starts_nothing(stub, words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert guarded(lambda: command("qwen3", [*stub, *words])) == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1 and [word for word in said if word not in text] == []
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_every_run(stub, capsys, tmp_path):
    assert command("qwen3", [*stub, "seed=7,8", "--cfg", "job"]) == 0
    said = capsys.readouterr().out
    assert said.count("schema_version: 1") == 2 and "seed: 7" in said and "seed: 8" in said
    assert list(tmp_path.iterdir()) == []
