"""`sweep=optuna`: what is drawn, what the study keeps, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time

import pytest

from engine.cli import command, guarded
from engine.errors import UserError
from engine.sweep.space import Parameter, search_space
from tests.unit.sweeps import home, summary

SEARCH = ["sweep=optuna", "optim.lr=tag(log,interval(1e-5,1e-1))"]


@pytest.mark.parametrize(
    ("word", "parameter"),
    [
        ("optim.lr=interval(1e-4,1)", Parameter("optim.lr", low=1e-4, high=1.0)),
        ("optim.lr=tag(log,interval(1e-4,1))", Parameter("optim.lr", low=1e-4, high=1.0, log=True)),
        ("schedule.steps=int(interval(2,8))", Parameter("schedule.steps", low=2, high=8)),
        ("schedule.steps=range(2,9,3)", Parameter("schedule.steps", ("2", "5", "8"), ordered=True)),
        ("schedule.steps=shuffle(range(2,9,3))", Parameter("schedule.steps", ("2", "5", "8"), ordered=True)),
        ("schedule=cosine,wsd", Parameter("schedule", ("cosine", "wsd"))),
        ("schedule=choice(wsd,wsd)", Parameter("schedule", ("wsd",))),
        ("model=glob(*b)", Parameter("model", ("4b", "8b"))),
    ],
)
def test_what_varies(word, parameter):
    found, fixed = search_space([word, "seed=3"], {"model": ["4b", "8b", "tiny"]})
    assert (found, fixed) == ([parameter], ["seed=3"])


def test_distributions():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    words = ["a=tag(log,interval(1,8))", "b=int(interval(1,8))", "c=x,y", "d=range(0,3,0.5)"]
    found, _ = search_space(words, {})
    assert [p.distribution() for p in found] == [
        FloatDistribution(1, 8, log=True),
        IntDistribution(1, 8),
        CategoricalDistribution(("x", "y")),
        IntDistribution(0, 5),
    ]
    drawn = [8 - 1e-12, 3, "y", 5]
    assert [p.word(d) for p, d in zip(found, drawn, strict=True)] == ["a=8.0", "b=3", "c=y", "d=2.5"]
    assert Parameter("a", low=0.1234564, high=1.0).word(0.1234564) == "a=0.1234564"  # never below the interval


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "sweep=optuna has nothing to vary"),
        (["optim.lr=interval(2,1)"], "optim.lr=interval(2,1): an interval begins with its lower end"),
        (["optim.lr=tag(log,interval(0,1))"], "a log scale begins above 0"),
        (["optim.lr=tag(lin,interval(0,1))"], "tag lin means nothing here"),
        (["seed=tag(log,range(1,9))"], "only an interval has a log scale"),
        (["seed=1,2", "seed=3,4"], "seed is varied twice"),
        (
            ["schedule.steps=interval(20,90)"],
            "schedule.steps=interval(20,90): must be a whole number; int(interval(20,90)) draws such",
        ),
        (["optim.lr=interval(-1,1)"], "optim.lr=-1.0: must be greater than 0"),
        (["model=tiny,8B"], "did you mean 8b"),
        (["seed=1,2", "sweep.trials=0"], "sweep.trials=0: must be a whole number of at least 1"),
        (["seed=1,2", "launcher=print"], "launcher=print starts no run"),
    ],
)
def test_mistakes_start_nothing(stub, words, said, tmp_path, capsys):
    assert guarded(lambda: command("qwen3", [*stub, "sweep=optuna", *words])) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_without_optuna_one_line_says_how_to_get_it(stub, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert guarded(lambda: command("qwen3", [*stub, *SEARCH])) == 2
    assert "uv sync --extra optuna" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_values_that_only_go_with_some_others_are_no_mistake(stub, tmp_path):
    words = ["schedule.steps=int(interval(2,30))", "schedule.warmup_steps=int(interval(2,20))", "sweep.trials=1"]
    assert command("qwen3", [*stub, "sweep=optuna", *words]) == 0


def drawn(tmp_path):
    return [run["overrides"][-1] for run in summary(tmp_path)]


def test_a_search_finds_the_minimum(stub, tmp_path, capfd):
    """One trial at a time: what a search of several slots has seen when it draws depends on which run ends first."""
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=25"]) == 0
    values = [run["value"] for run in summary(tmp_path)]
    assert len(values) == 25 and min(values) < 1.05  # (log10(lr) + 3)^2 + 1, whose minimum is 1 at 1e-3
    assert statistics.median(values[15:]) < statistics.median(values[:10])  # learns from what it has seen
    assert "best: run " in capfd.readouterr().out


def test_several_trials_at_a_time(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=12", "sweep.slots=5"]) == 0
    runs = summary(tmp_path)
    assert [run["status"] for run in runs] == ["done"] * 12
    assert len({run["overrides"][-1] for run in runs}) == 12  # none is drawn twice
    assert f"{min(run['value'] for run in runs):.4f}" in capfd.readouterr().out


def test_a_study_goes_on_as_if_it_had_not_stopped(stub, tmp_path, capfd):
    """The same trials whether in one command, or in three with a killed one between."""
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=14"]) == 0
    whole = drawn(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=6"]) == 0
    study = home(tmp_path)
    journal = study / "study.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code":4,"worker')  # a kill in the middle of a line
    (study / "study.journal.lock").symlink_to("study.journal")
    assert command("qwen3", ["-m", f"sweep.resume={study}", "sweep.trials=9"]) == 0
    assert (
        command("qwen3", ["-m", f"output_dir={tmp_path / 'out'}", f"sweep.resume={study.name}", "sweep.trials=14"]) == 0
    )
    assert drawn(tmp_path) == whole
    capfd.readouterr()
    assert command("qwen3", ["-m", f"sweep.resume={study}"]) == 0  # nothing is left
    said = capfd.readouterr().out
    assert "14 trials so far, 0 of them failed; 0 to go\nsweep.trials=28 would go on\n" in said
    assert len(drawn(tmp_path)) == 14


def test_what_ran_when_it_died_has_failed(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=4"]) == 0
    study = home(tmp_path)
    lines = (study / "study.journal").read_text().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if '"op_code":6' in line]
    (study / "study.journal").write_text("".join(lines[: ends[-1]]))  # the last trial never ended
    rows = summary(tmp_path)
    rows[3] |= {"status": "running", "exit_status": None, "value": None}
    (study / "summary.json").write_text(json.dumps({"runs": rows}))
    result = tmp_path / "out" / "qwen3" / rows[3]["folder"].rpartition("/")[2] / "result.json"
    result.unlink()
    assert command("qwen3", ["-m", f"sweep.resume={study}", "sweep.trials=5"]) == 1
    assert "4 trials so far, 1 of them failed; 1 to go" in capfd.readouterr().out
    assert [run["status"] for run in summary(tmp_path)] == ["done", "done", "done", "failed (killed)", "done"]


def test_a_signal_leaves_a_study_that_can_go_on(stub, tmp_path, capfd):
    def send():
        while not (tmp_path / "out" / "waiting").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    assert guarded(lambda: command("qwen3", [*stub, *SEARCH, "seed=9", "sweep.trials=3"])) == 75
    thread.join()
    study = home(tmp_path)
    assert capfd.readouterr().out.splitlines()[-1].endswith(f"-m zoo.qwen3 --multirun sweep.resume={study}")
    words = json.loads((study / "overrides.json").read_text())
    (study / "overrides.json").write_text(json.dumps([word for word in words if word != "seed=9"]))
    assert command("qwen3", ["-m", f"sweep.resume={study}"]) == 1
    assert [run["status"] for run in summary(tmp_path)] == ["interrupted", "done", "done"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim.lr=interval(1e-5,1)", "it was begun with optim.lr=tag(log,interval(1e-5,1e-1))"),
        ("optim.lr=1e-3", "it was begun with optim.lr=tag"),
        ("seed=1,2", "it was begun without seed"),
        ("schedule.steps=7", "it was begun without schedule.steps"),
        ("sweep.direction=maximize", "it was begun without sweep.direction"),
        ("sweep=grid", "it was begun with sweep=optuna"),
        ("output_dir=elsewhere", "no such folder"),
    ],
)
def test_another_search_does_not_go_on(stub, word, said, tmp_path, capsys):
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=1"]) == 0
    study = home(tmp_path)
    before = {path: path.read_bytes() for path in study.iterdir()}
    named = study.name if word.startswith("output_dir") else study
    capsys.readouterr()
    assert guarded(lambda: command("qwen3", ["-m", f"sweep.resume={named}", word])) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1
    assert {path: path.read_bytes() for path in study.iterdir()} == before


def test_the_same_space_in_other_words_is_the_same(stub, tmp_path):
    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=1"]) == 0
    again = ["-m", f"sweep.resume={home(tmp_path)}", "sweep=optuna", "optim.lr=tag(log, interval(0.00001, 0.1))"]
    assert command("qwen3", [*again, "sweep.trials=2", "logger.interval=3"]) == 0
    assert len(summary(tmp_path)) == 2


def test_a_grid_is_no_study(stub, tmp_path, capsys):
    assert command("qwen3", [*stub, "seed=1,4"]) == 0
    assert guarded(lambda: command("qwen3", ["-m", f"sweep.resume={home(tmp_path)}"])) == 2
    assert "holds no study" in capsys.readouterr().err


def test_a_study_that_is_in_use(stub, tmp_path, capsys):
    from engine.rundir import hold

    assert command("qwen3", [*stub, *SEARCH, "sweep.trials=1"]) == 0
    lock = hold(home(tmp_path))
    assert guarded(lambda: command("qwen3", ["-m", f"sweep.resume={home(tmp_path)}"])) == 2
    assert "in use by a running job" in capsys.readouterr().err
    os.close(lock)


def test_a_failed_or_diverged_trial_has_no_value(stub, tmp_path, capfd):
    assert command("qwen3", [*stub, "sweep=optuna", "seed=2,3", "sweep.trials=4"]) == 1
    runs = summary(tmp_path)
    assert {run["status"] for run in runs} <= {"failed (2)", "done"} and {run["value"] for run in runs} == {None}
    with pytest.raises(UserError, match="val_loss: the runs report no such number"):
        command("qwen3", [*stub, *SEARCH, "job.eval_interval=7", f"output_dir={tmp_path / 'other'}"])
