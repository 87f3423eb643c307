"""Ranks of a real run that are killed or frozen, signals before a run has begun, and a reader that leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e import commands
from tests.e2e.test_kill import SMALL

TWO = ("backend=native", "parallelism=ddp2", "schedule.steps=100000", "checkpoint.save_interval=100000")
TWO += ("job.eval_interval=100000", "logger.interval=100000")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    (place / "corpus").mkdir()
    for i in range(12):
        text = " ".join(f"{k * i % 11} cats chase {k} mice." for k in range(30 + 7 * i))
        (place / "corpus" / f"{i}.txt").write_text(text)
    return place


def ranks_of(run_id: str) -> dict[int, int]:
    """Rank -> process of a run that goes on."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if b"engine.worker" in words and any(f"/{run_id}/config".encode() in word for word in words):
                environment = dict(
                    e.split(b"=", 1) for e in (folder / "environ").read_bytes().split(b"\0") if b"=" in e
                )
                if b"RANK" in environment:
                    found[int(environment[b"RANK"])] = int(folder.name)
        except OSError:
            continue
    return found


def in_the_middle(place: Path, run_id: str, *overrides: str) -> subprocess.Popen[str]:
    """A run of two ranks that has taken some steps."""
    process = commands.start(place, *SMALL, *TWO, f"run_id={run_id}", *overrides)
    metrics = place / f"outputs/qwen3/{run_id}/metrics.jsonl"
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(commands.rows(metrics)) > 3:
            return process
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_nobody_else_speaks(place: Path, launcher: str, rank: int) -> None:
    run_id = f"killed_{launcher}_{rank}"
    process = in_the_middle(place, run_id, f"launcher={launcher}")
    os.kill(ranks_of(run_id)[rank], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137, output
    result = json.loads((place / f"outputs/qwen3/{run_id}/result.json").read_text())
    for text in (output, result["message"]):
        assert f"rank {rank} was killed by SIGKILL" in text
    assert "Traceback" not in output and output.count("error: ") == 1
    assert result["status"] == "failed" and not ranks_of(run_id)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_frozen_rank_is_named_within_the_timeout(place: Path, launcher: str) -> None:
    run_id = f"frozen_{launcher}"
    process = in_the_middle(place, run_id, f"launcher={launcher}", "faults.timeout_s=6")
    os.kill(ranks_of(run_id)[1], signal.SIGSTOP)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - begin < 6 + 10 and process.returncode == 1, output
    assert "no progress for 6 s: rank 1 is behind in step" in output and "stopped (SIGSTOP" in output
    assert "Traceback" not in output and not ranks_of(run_id)
    assert "most recent call first" in (place / f"outputs/qwen3/{run_id}/logs/rank_0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_a_signal_saves_on_all_ranks(place: Path, launcher: str) -> None:
    process = in_the_middle(place, f"saved_{launcher}", f"launcher={launcher}")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 75, output
    assert "stopped after step" in output and "which is saved in" in output and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGTERM, ("launcher=torchrun", "parallelism=dp2"))],
)
def test_a_signal_while_ranks_start_leaves_nothing(place: Path, number: signal.Signals, words: tuple[str, ...]) -> None:
    run_id = f"early{number}{len(words)}"
    process = commands.start(place, *SMALL, f"run_id={run_id}", *words)
    while not ranks_of(run_id) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert output.splitlines()[-1] == "stopped before there was anything to save" and "Traceback" not in output
    assert not (place / "outputs/qwen3" / run_id).exists()


@pytest.mark.slow
def test_a_signal_to_a_sweep_stops_it_with_its_run(place: Path) -> None:
    process = commands.start(place, *SMALL, "--multirun", "optim.lr=1e-3,1e-4", "output_dir=sweep")
    while not list((place / "sweep/qwen3").glob("*/config.yaml")) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in output, output
    assert not list((place / "sweep/qwen3").glob("*/config.yaml"))


@pytest.mark.slow
def test_a_reader_that_leaves(place: Path) -> None:
    command = f"{sys.executable} -m zoo.qwen3 hardware=cpu {' '.join(SMALL)} run_id=head backend=native"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"],
        cwd=place, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0" and "Traceback" not in done.stderr and "Broken" not in done.stderr
    assert json.loads((place / "outputs/qwen3/head/result.json").read_text())["status"] == "done"
