"""The training loop over a backend whose losses are written down beforehand."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.base import StepResult
from engine.cli import prepare
from engine.comm import Comm
from engine.context import Context
from engine.errors import Interrupted, UserError
from engine.jobs.start import Start
from engine.loop import Loop
from engine.metrics.writer import MetricsWriter
from hardware import registry

USUAL = [3.0 + 0.1 * math.sin(7 * i) for i in range(40)]


class Scripted:
    """A backend that is one number; every update adds one."""

    dp_rank, dp_size, parameters_total = 0, 1, 1
    modules = dict

    def __init__(self, losses: list[float], val_loss: float = 2.0, norm: float = 1.0) -> None:
        self.losses, self.val_loss, self.norm = list(losses), val_loss, norm
        self.weight = 0

    def train_step(self, batches: Any, lr: float, accept: Any) -> StepResult:
        loss = self.losses.pop(0)
        if not (math.isfinite(loss) and math.isfinite(self.norm)):
            bad = {"bad_tensors": ("model.norm.weight",), "bad_rank": 3} if math.isfinite(loss) else {}
            return StepResult(loss * 10, 10, self.norm, **bad)
        updated = accept(loss)
        self.weight += updated
        return StepResult(loss * 10, 10, 1.0, updated=updated)

    def evaluate(self, batches: Any) -> tuple[float, int]:
        return self.val_loss * 10, 10

    def state(self, kinds: Any) -> Any:
        return iter(())

    def optimizer_step(self) -> int:
        return self.weight


class Manager:
    """Remembers what would be saved, the weight with it."""

    failed = False

    def __init__(self, folder: Path, backend: Scripted) -> None:
        self.folder, self.backend, self.states = folder, backend, {}
        self.saved: Path | None = None

    def save(self, step: int, slices: Any, state: dict[str, Any]) -> Path:
        list(slices)
        self.states[step] = (json.loads(json.dumps(state)), self.backend.weight)
        self.saved = self.folder / f"step_{step}"
        return self.saved

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.saved


def loop(folder: Path, backend: Scripted, *overrides: str, start: Start | None = None) -> tuple[Loop, Manager]:
    words = ["schedule.steps=40", "schedule.warmup_steps=2", "checkpoint.export_hf=false", *overrides]
    run = prepare("qwen3", ["hardware=cpu", f"output_dir={folder}", "run_id=one", "data.global_batch_size=8", *words])
    context = Context(run, folder, registry.get("cpu"))
    context.comm = Comm()
    held_out = SimpleNamespace(
        batches=lambda rows: [], label_bytes=lambda rows: None, coverage=lambda rows: (5, 9, False)
    )
    train = SimpleNamespace(
        ready=lambda seconds: True, next_step=lambda: [], state=lambda step: {"row": step}, stop=lambda: None
    )
    data = SimpleNamespace(validation={"": held_out}, train=train, bad=SimpleNamespace(seen={}), rows=lambda step: {})
    manager = Manager(folder, backend)
    start = start or Start()
    return Loop(context, backend, data, manager, MetricsWriter(folder, run, start.step), start), manager


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_validation_loss_that_is_not_finite_stops_before_the_save(tmp_path):
    made, manager = loop(tmp_path, Scripted(USUAL, val_loss=math.nan), "job.eval_interval=10")
    message = r"validation loss is not finite after step 10 \(val_loss=nan.*there is no checkpoint yet"
    with pytest.raises(UserError, match=message):
        made.run()
    assert manager.states == {} and rows(tmp_path)[-1]["val_loss"] is None


def test_a_gradient_that_is_not_finite_names_rank_and_tensors(tmp_path):
    made, _ = loop(tmp_path, Scripted(USUAL, norm=math.inf))
    with pytest.raises(UserError, match=r"gradient norm is inf at step 1, rank 3 .*for model\.norm\.weight; no weight"):
        made.run()


def test_a_skipped_spike_is_in_metrics_and_result_with_its_samples(tmp_path, capsys):
    losses = [*USUAL[:30], 99.0, *USUAL[31:]]
    backend = Scripted(losses)
    made, manager = loop(tmp_path, backend, "faults.on_spike=skip")
    made.run()
    train = [row for row in rows(tmp_path) if "loss" in row]
    spikes = [row for row in train if "skipped" in row]
    assert [(row["step"], row["skipped"], row["samples"], row["loss"]) for row in spikes] == [
        (31, True, [240, 247], 99)
    ]
    assert (backend.weight, len(train), train[-1]["tokens"]) == (39, 40, 390)
    assert (made.summary()["spikes"], made.summary()["skipped_steps"]) == (1, 1)
    assert "step 31, samples 240 to 247: loss 99 is a spike" in capsys.readouterr().out
    assert manager.states[40][0]["optimizer_step"] == 39


def test_warning_is_the_default_and_updates(tmp_path, capsys):
    backend = Scripted([*USUAL[:30], 99.0, *USUAL[31:]])
    loop(tmp_path, backend)[0].run()
    assert backend.weight == 40 and "faults.on_spike=warn" in capsys.readouterr().out
    assert [row["skipped"] for row in rows(tmp_path) if "skipped" in row] == [False]


def test_stopping_at_a_spike_updates_nothing(tmp_path):
    backend = Scripted([*USUAL[:30], 99.0])
    with pytest.raises(UserError, match=r"step 31 .*is 99, a spike"):
        loop(tmp_path, backend, "faults.on_spike=stop")[0].run()
    assert backend.weight == 30 and rows(tmp_path)[-1]["samples"] == [240, 247]


def test_spikes_are_judged_alike_after_a_resume(tmp_path):
    losses = [*USUAL[:18], 99.0, *USUAL[19:25], 3.6, *USUAL[26:]]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    words = ("faults.on_spike=skip", "checkpoint.save_interval=20", "faults.spike_threshold=4")
    first, manager = loop(whole, Scripted(losses), *words)
    first.run()
    (parts / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text())
    state, weight = manager.states[20]
    again = Scripted(losses[20:])
    again.weight = weight
    start = Start(20, state["tokens"], state["best_val_loss"], state["data"], None, state)
    second, resumed = loop(parts, again, *words, start=start)
    second.run()

    def known(folder):
        return [
            {k: v for k, v in row.items() if k in ("step", "loss", "skipped", "spike_limit")} for row in rows(folder)
        ]

    assert known(parts) == known(whole) and any(row.get("skipped") for row in known(whole)[20:])
    assert resumed.states[40] == manager.states[40]


def test_a_signal_says_which_step_is_saved(tmp_path):
    class Signalled(Scripted):
        def train_step(self, *args):
            if len(self.losses) == 36:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_step(*args)

    made, manager = loop(tmp_path, Signalled(USUAL))
    with pytest.raises(Interrupted, match=r"stopped after step 5, which is saved in .*step_5"):
        made.run()
    assert list(manager.states) == [5]


@pytest.mark.parametrize("step", [0, 5])
def test_a_signal_while_there_is_no_data_is_obeyed_at_once(tmp_path, step):
    made, manager = loop(tmp_path, Scripted(USUAL))
    waits: list[float] = []

    def ready(seconds: float) -> bool:
        if made.step < step:
            return True
        waits.append(seconds)
        if len(waits) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(waits) < 5 and seconds <= 1
        return False

    made.data.train.ready = ready
    with pytest.raises(Interrupted, match=rf"stopped after step {step}, which is saved in .*step_{step}"):
        made.run()
    assert list(manager.states) == [step] and made.backend.weight == step


def test_a_rank_with_data_stops_where_another_waits_for_its_own(tmp_path):
    """The other rank waits twice in its fourth step and is then to stop; this one, ready, must not begin that step."""
    made, manager = loop(tmp_path, Scripted(USUAL), "checkpoint.save_interval=3")
    others = iter([0, 0, 0, 1, 1, 2])  # go, wait, stop
    made.context.comm.most = lambda number: max(number, next(others))
    with pytest.raises(Interrupted, match=r"stopped after step 3, .*step_3"):
        made.run()
    assert list(manager.states) == [3] and made.backend.weight == 3, "what was saved is not saved again"


def test_marks_of_progress(tmp_path):
    made, _ = loop(tmp_path, Scripted(USUAL), "job.eval_interval=20")
    said = []
    page = made.context.page
    page.beat, page.rest = said.append, lambda: said.append("rest")
    made.run()
    assert said[:2] == ["step 1, waiting for data", "step 1, forward and backward"]
    assert said[40:43] == ["step 20, validation", "step 21, waiting for data", "step 21, forward and backward"]
    assert said[-3:-1] == ["step 40, validation", "step 40, saving a checkpoint"] and said[-1] == "rest"


def test_skipped_samples_and_retries_are_counted_and_named(tmp_path, monkeypatch):
    made, _ = loop(tmp_path, Scripted(USUAL))
    monkeypatch.setattr("engine.loop.READS.count", 3)
    made.data.bad.seen = {f"file:{i}": "is not JSON" for i in range(12)}
    made.run()
    train = [row for row in rows(tmp_path) if "loss" in row]
    assert {(row["bad_samples"], row["read_retries"]) for row in train} == {(12, 3)}
    summary = made.summary()
    assert (summary["bad_samples"], summary["read_retries"]) == (12, 3)
    assert list(summary["skipped_samples"]) == [f"file:{i}" for i in range(8)]
