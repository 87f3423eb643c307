"""kill -9 in the middle of a step and in the middle of a save: what is resumed continues bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e import commands

SMALL = (
    "model.vocab_size=300",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_hidden_layers=2",
    "data=text",
    "data.path=corpus",
    "data.seq_len=32",
    "data.global_batch_size=8",
    "data.micro_batch_size=4",
    "data.held_out=0.2",
    "schedule.steps=10",
    "schedule.warmup_steps=2",
    "checkpoint.save_interval=5",
    "checkpoint.export_hf=false",
    "job.eval_interval=5",
    "job.eval_rows=8",
)

# On PYTHONPATH this module is imported before anything else: the process ends inside the second checkpoint's writing.
DIE_IN_A_SAVE = """
import os, signal
bring_to_disk = os.fsync
def fsync(handle):
    if "step_00000010.tmp" in os.readlink(f"/proc/self/fd/{handle}"):
        os.kill(os.getpid(), signal.SIGKILL)
    bring_to_disk(handle)
os.fsync = fsync
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kill")
    (place / "corpus").mkdir()
    for i in range(12):
        text = " ".join(f"{k * i % 11} cats chase {k} mice." for k in range(30 + 7 * i))
        (place / "corpus" / f"{i}.txt").write_text(text)
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict]:
    """The rows of the run that nobody disturbs."""
    status, output = commands.run(place, *SMALL, "run_id=whole")
    assert status == 0, output
    return commands.exact(place / "outputs/qwen3/whole/metrics.jsonl")


@pytest.mark.slow
def test_killed_in_a_step(place: Path, whole: list[dict]) -> None:
    metrics = place / "outputs/qwen3/step/metrics.jsonl"
    commands.kill_after(commands.start(place, *SMALL, "run_id=step"), metrics, 7)
    status, output = commands.run(place, *SMALL, "run_id=step", "checkpoint.resume=auto")
    assert status == 0, output
    assert commands.exact(metrics) == whole


def test_killed_in_a_save(place: Path, whole: list[dict]) -> None:
    (place / "site").mkdir()
    (place / "site" / "sitecustomize.py").write_text(DIE_IN_A_SAVE)
    status, output = commands.run(place, *SMALL, "run_id=save", path=place / "site")
    assert status != 0 and str(int(signal.SIGKILL)) in output, output
    run_dir = place / "outputs/qwen3/save"
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir() if p.is_dir()) == [
        "step_00000005",
        "step_00000010.tmp",
    ]
    # Named by its folder, as the report says it.
    status, output = commands.run(place, *SMALL, "checkpoint.resume=outputs/qwen3/save")
    assert status == 0, output
    assert commands.exact(run_dir / "metrics.jsonl") == whole
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_stopped_by_a_signal(place: Path, whole: list[dict]) -> None:
    """SIGTERM saves, exits 75 and says how to go on."""
    process = commands.start(place, *SMALL, "run_id=stopped", "schedule.steps=400")
    metrics = place / "outputs/qwen3/stopped/metrics.jsonl"
    while not (metrics.exists() and commands.rows(metrics)) and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "checkpoint.resume=" in output
    assert list((metrics.parent / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_signal_after_the_last_step_lets_the_run_finish(place: Path) -> None:
    small = [s for s in SMALL if s != "checkpoint.export_hf=false"]
    process = commands.start(place, *small, "run_id=late", "job.sample_tokens=400", "model.max_position_embeddings=512")
    run_dir = place / "outputs/qwen3/late"
    while not (run_dir / "checkpoints/step_00000010").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert json.loads((run_dir / "result.json").read_text())["status"] == "done"
    assert (run_dir / "hf" / "model.safetensors").exists() and (run_dir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments(tmp_path: Path, place: Path, ranks: int) -> None:
    """Every checkpoint can be read and every resumed run ends as if nothing had happened."""
    shutil.copytree(place / "corpus", tmp_path / "corpus")
    kills = int(os.environ.get("ZOOFORGE_KILLS", "12"))
    program = [sys.executable, "-m", "tests.e2e.random_kills", str(tmp_path), str(kills), str(ranks), str(ranks)]
    done = subprocess.run(program, cwd=commands.REPO, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    happened = json.loads(done.stdout.splitlines()[-1])
    assert happened["kills"] >= kills and happened["resumed_from_a_checkpoint"] > 0, happened
