"""kill -9 at random moments over runs that save every other step; a program, so that a start costs no imports.

    python -m tests.e2e.random_kills FOLDER KILLS SEED RANKS

Everything is imported once. Each attempt is a fork that is the controller, with forks of its own as ranks; all of them
are killed at once. Then whatever bears a checkpoint's name is read in full, and the run is resumed, until it ends; its
metrics must be those of the run that nobody disturbed, bit for bit. The last line is what happened, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import engine.backends.native
import engine.jobs.train
import engine.launch
import engine.plan
import engine.report
from engine.checkpoint.paths import complete
from engine.checkpoint.reader import ShardedSource
from engine.cli import command, guarded
from engine.family import load_dotted, load_family
from engine.launch.local import free_port
from engine.worker import run_job
from tests.e2e import commands

SMALL = (
    *("hardware=cpu", "backend=native", "model.vocab_size=300", "model.hidden_size=64", "model.intermediate_size=96"),
    *("model.num_hidden_layers=2", "data=text", "data.path=corpus", "data.seq_len=32", "data.global_batch_size=8"),
    *("data.micro_batch_size=4", "data.held_out=0.2", "schedule.steps=30", "schedule.warmup_steps=2"),
    *("checkpoint.save_interval=2", "checkpoint.export_hf=false", "job.eval_interval=10", "job.eval_rows=8"),
)


def fork(work: Callable[[], int], log: Path | None = None) -> int:
    """The process that does this and ends with its status."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if log:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
        status = work()
    finally:
        sys.stdout.flush()
        os._exit(status)


def launch(run: Any, folder: Any, _hardware: Any) -> int:
    """All ranks as forks; the first status that is not 0."""
    world = run.launcher.nproc_per_node
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> int:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        return run_job(folder.config)

    pids = [fork(lambda number=number: rank(number)) for number in range(world)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return next((status for status in statuses if status), 0)


def attempt(words: list[str], log: Path, delay: float | None, saves: Path | None = None) -> int | None:
    """One start of the command, killed after `delay` seconds: None; or its exit status if it ended before.

    With `saves`, a folder of checkpoints, it is killed in the first save after that time.
    """

    def controller() -> int:
        os.setpgid(0, 0)
        return guarded(lambda: command("qwen3", words))

    pid, end = fork(controller, log), time.monotonic() + (1e9 if delay is None else delay)
    while time.monotonic() < end or (saves is not None and not list(saves.glob("*.tmp"))):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    for target in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGKILL)):
        try:
            target()
        except ProcessLookupError:
            continue
    os.waitpid(pid, 0)
    return None


def readable(run_dir: Path) -> int:
    """Read every checkpoint of a run in full, which checks each byte; their number."""
    found = complete(run_dir / "checkpoints")
    for step, folder in found.items():
        source = ShardedSource(folder)
        assert source.state()["step"] == step
        for kind, name, shape in source.tensors():
            source.read(kind, name, shape, (0,) * len(shape), shape)
    return len(found)


def main(folder: Path, kills: int, seed: int, ranks: int) -> dict[str, Any]:
    """Kill until there were enough of them."""
    os.chdir(folder)
    torch.set_num_threads(1)  # a fork has no copies of OpenMP's threads
    engine.launch.launch = launch
    family = load_family("qwen3")
    for name in (family.reference, family.reference_config, family.config, family.weights):
        load_dotted(name)
    dice, log = random.Random(seed), folder / "log"
    small = [*SMALL, f"parallelism={'single' if ranks == 1 else f'dp{ranks}'}"]
    homes = Path("outputs/qwen3")
    begin = time.monotonic()
    assert attempt([*small, "run_id=whole"], log, None) == 0, log.read_text()
    usual = time.monotonic() - begin
    whole = commands.exact(homes / "whole/metrics.jsonl")
    done, in_save, runs, read, resumed, early = 0, 0, 0, 0, 0, 0
    while done < kills:
        runs += 1
        name, status = f"run{runs}", None
        while status is None:
            # Longer where nothing was saved yet: the machine may be slower than it was.
            delay = dice.uniform(0.1, usual) * (1 + early) if done < kills else None
            saves = homes / name / "checkpoints" if delay is not None and dice.random() < 0.5 else None
            status = attempt([*small, f"run_id={name}", "checkpoint.resume=auto"], log, delay, saves)
            done += status is None
            in_save += status is None and bool(list((homes / name / "checkpoints").glob("*.tmp")))
            found = readable(homes / name)
            early = 0 if found else early + 1
            read, resumed = read + found, resumed + (status is None and found > 0)
        assert status == 0, log.read_text()[-3000:]
        assert commands.exact(homes / name / "metrics.jsonl") == whole, f"{name} is not what the whole run is"
    return {
        "kills": done,
        "unfinished_saves_left": in_save,
        "resumed_from_a_checkpoint": resumed,
        "runs": runs,
        "read": read,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))))
