"""`--multirun`: what it expands to, that it checks before it starts, and what it leaves."""

from __future__ import annotations

import subprocess

import pytest

from engine.cli import command, guarded
from engine.errors import UserError
from engine.sweep.expand import expand
from tests.unit.sweeps import home, summary

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


def test_one_failure_stops_no_other(stub, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command("qwen3", [*stub, "seed=1,2,7"]) == 1
    runs = summary(tmp_path)
    assert [run["status"] for run in runs] == ["done", "failed (2)", "done"]
    assert [run["val_loss"] for run in runs] == [1.0, None, 1.0]
    assert [run["exit_status"] for run in runs] == [0, 2, 0]
    said = capfd.readouterr().out
    table = said[said.index("┏") : said.index("summary: ")]
    assert all(word in table for word in ("seed=1", "seed=2", "seed=7", "failed (2)", "1.0223", "1.0000"))
    assert said.startswith("all runs: hardware=cpu output_dir=") and "\nrun 2 of 3: seed=2\n" in said
    assert "hardware=cpu" not in table  # what all runs share is above the table


def test_the_best_run_is_named(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, "optim.lr=1e-4,1e-3,1e-2", "schedule.steps=5"]) == 0
    assert [run["val_loss"] for run in summary(tmp_path)] == [2.0, 1.0, 2.0]
    said = capfd.readouterr().out.splitlines()
    assert "best: run 2 (optim.lr=0.001), val_loss 1.0000" in said
    repeat = said[-1].split()
    assert said[-1].startswith("repeat it with: ") and repeat[4:6] == ["-m", "zoo.qwen3"]
    assert repeat[6:] == ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "optim.lr=0.001", "schedule.steps=5"]
    assert f"report: {home(tmp_path) / 'report.html'}" in said


def test_the_highest_can_be_the_best(stub, capfd):
    assert command("qwen3", [*stub, "optim.lr=1e-3,1e-1", "sweep.metric=loss", "sweep.direction=maximize"]) == 0
    assert "best: run 2 (optim.lr=0.1), loss 5.0223" in capfd.readouterr().out


def test_runs_without_validation_are_compared_by_loss(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, "optim.lr=1e-2,1e-3", "job.eval_interval=7"]) == 0
    assert "best: run 2 (optim.lr=0.001), loss 1.0223" in capfd.readouterr().out


def test_a_metric_that_no_run_reports_stops_after_the_first(stub, tmp_path, capfd):
    assert guarded(lambda: command("qwen3", [*stub, "seed=1,4", "sweep.metric=val_los"])) == 2
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "error: sweep.metric=val_los: the runs report no such number; did you mean val_loss or loss?; "
        "they report loss, step, val_loss"
    ]
    assert [run["status"] for run in summary(tmp_path)] == ["done", "not started"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sead=1,2"], ["did you mean seed"]),
        (["model=tiny,8B"], ["model=8B", "did you mean 8b"]),
        (["optim.lr=1,x"], ["optim.lr=x: must be a number"]),
        (["parallelism=tp2,pp2", "model.num_hidden_layers=1"], ["pp=2: more stages than"]),
        (["run_id=a", "seed=1,2"], ["run_id"]),
        (["optim.lr=interval(1,2)"], ["optim.lr=interval(1,2)", "sweep=optuna"]),
        (["seed=1,2", "sweep.trials=3"], ["sweep.trials has no effect: only sweep=optuna"]),
        (["seed=1,2", "sweep.resume=gone"], ["sweep.resume=gone", "no such folder"]),
        (["seed=1,2", "sweep.slots=0"], ["sweep.slots=0: must be a whole number of at least 1"]),
        (["seed=1,2", "sweep.slots=1,2"], ["sweep.slots=1,2: one value is needed"]),
        (["seed=1,2", "sweep=grid,optuna"], ["sweep=grid,optuna: one value is needed"]),
        (["seed=1,2", "sweep.slot=2"], ["did you mean sweep.slots"]),
        (["seed=1,2", "sweep.direction=down"], ["sweep.direction=down", "minimize, maximize"]),
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


@pytest.mark.parametrize("word", ["sweep.trials=3", "sweep=optuna", "sweep.slots=1"])
def test_settings_of_sweeps_need_a_sweep(word, capsys, tmp_path):
    assert guarded(lambda: command("qwen3", ["hardware=cpu", f"output_dir={tmp_path}", word])) == 2
    key = word.partition("=")[0]
    assert capsys.readouterr().err.splitlines() == [
        f"error: {key} has no effect: it is for sweeps, which --multirun begins; leave it out"
    ]
    assert list(tmp_path.iterdir()) == []
