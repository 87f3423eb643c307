"""Several runs of a sweep at a time: how devices are divided, what is said, what stops them."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from engine.cli import command, guarded
from engine.errors import UserError
from engine.sweep.check import check
from engine.sweep.slots import divide
from hardware import registry
from hardware.base import HardwareError
from hardware.nvidia import Nvidia
from tests.unit.sweeps import home, summary


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine with so many GPUs, of 16 cores."""

    def make(count):
        dev = tmp_path / "dev"
        dev.mkdir()
        for number in range(count):
            (dev / f"nvidia{number}").touch()
        plugin = Nvidia(dev, tmp_path / "none")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr("hardware.nvidia.usable_cores", lambda: 16)
        monkeypatch.setattr(registry, "_load", lambda name: plugin)
        return plugin

    return make


def divided(plugin, wanted, *words, runs=8):
    combinations = [["hardware=nvidia", *words, f"seed={number}"] for number in range(runs)]
    return divide(wanted, runs, plugin, lambda: check("qwen3", combinations, "sweep"))


def visible(slots):
    return [environment.get("CUDA_VISIBLE_DEVICES") for environment in slots.environments]


@pytest.mark.parametrize(
    ("count", "wanted", "words", "seen"),
    [
        (8, None, ["parallelism=single"], list("01234567")),
        (8, None, ["parallelism=tp2", "parallelism.dp=1"], ["0,1", "2,3", "4,5", "6,7"]),
        (7, None, ["parallelism=tp2", "parallelism.dp=1"], ["0,1", "2,3", "4,5"]),
        (8, None, ["parallelism=tp2"], [None]),  # an open number of replicas takes all devices
        (8, 2, ["parallelism=tp2"], ["0,1,2,3", "4,5,6,7"]),
        (7, 3, ["parallelism=tp2", "parallelism.dp=1"], ["0,1", "2,3", "4,5"]),
        (8, 1, ["parallelism=single"], [None]),
        (1, None, ["parallelism=single"], [None]),
    ],
)
def test_devices_are_divided(gpus, count, wanted, words, seen):
    slots, plans = divided(gpus(count), wanted, *words)
    assert visible(slots) == seen
    if wanted == 2:
        assert {planned.run.parallelism.dp for planned in plans} == {2}  # of four devices, not of eight


def test_a_part_of_the_devices_that_the_user_left_visible(gpus, monkeypatch):
    plugin = gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,5,1")
    slots, _ = divided(plugin, None, "parallelism=tp2", "parallelism.dp=1")
    assert visible(slots) == ["6,2", "5,1"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,2,5,1"


def test_no_more_slots_than_runs_and_cores_are_shared(gpus):
    slots, _ = divided(gpus(8), None, "parallelism=single", runs=2)
    assert visible(slots) == ["0", "1"]
    assert {environment["OMP_NUM_THREADS"] for environment in slots.environments} == {"8"}  # 16 cores, 2 runs


def test_torchrun_gets_ports_that_differ(gpus):
    slots, _ = divided(gpus(2), None, "parallelism=single", "launcher=torchrun", "launcher.master_port=29500")
    assert [slots.words(slot) for slot in (0, 1)] == [["launcher.master_port=29500"], ["launcher.master_port=29501"]]


@pytest.mark.parametrize(
    ("wanted", "words", "said"),
    [
        (9, ["parallelism=single"], "sweep.slots=9: this machine has 8 devices"),
        (8, ["parallelism=tp2", "parallelism.dp=1"], "sweep.slots=8: too many, .*needs 2 devices"),
        (
            2,
            [
                "parallelism=dp2",
                "launcher=torchrun",
                "launcher.nodes=2",
                "launcher.node_rank=0",
                "launcher.master_addr=a",
            ],
            "sweep.slots=2: .*several nodes",
        ),
    ],
)
def test_more_slots_than_the_devices_hold(gpus, wanted, words, said):
    with pytest.raises(UserError, match=f"^{said}[^\n]*$"):
        divided(gpus(8), wanted, *words)


def test_hardware_that_cannot_divide_its_devices(gpus, monkeypatch):
    plugin = gpus(8)
    monkeypatch.setattr(Nvidia, "share_env", lambda *_: None)
    assert visible(divided(plugin, None, "parallelism=single")[0]) == [None]
    with pytest.raises(UserError, match=r"sweep\.slots=2: hardware=nvidia cannot divide"):
        divided(plugin, 2, "parallelism=single")


def test_hardware_that_is_not_here(monkeypatch, capsys):
    monkeypatch.setattr(registry, "get", lambda name: (_ for _ in ()).throw(HardwareError("hardware=x is not here")))
    assert guarded(lambda: command("qwen3", ["-m", "hardware=nvidia", "seed=1,2"])) == 2
    assert capsys.readouterr().err == "error: hardware=x is not here\n"


def test_a_cpu_runs_as_many_as_it_is_told(stub, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("hardware.cpu.usable_cores", lambda: 12)
    words = ["seed=1,2,7", "sweep.slots=3", "parallelism=dp2"]
    assert command("qwen3", [*stub, *words]) == 1
    said = capfd.readouterr().out
    events = [line for line in said.splitlines() if line.startswith("run ")]
    logs = home(tmp_path) / "logs"
    assert [line for line in events if "started" in line] == [
        f"run {n} of 3 started: seed={s} (log: {logs / f'run_{n}.log'})" for n, s in ((1, 1), (2, 2), (3, 7))
    ]
    ended = sorted(line for line in events if "started" not in line)
    assert ended[0].startswith("run 1 done in ") and ended[0].endswith(": loss 1.0223, validation loss 1.0000")
    assert ended[1].endswith(f": error: seed=2 is no seed (log: {logs / 'run_2.log'})")
    assert "devices" not in said  # what the runs say is in their logs
    folder = tmp_path / "out" / "qwen3" / summary(tmp_path)[0]["folder"].rpartition("/")[2]
    assert (folder / "logs" / "terminal.log").read_text() == "devices None, threads 2\n"  # 12 cores, 3 runs of 2 ranks
    assert [path.name for path in logs.iterdir()] == ["run_2.log"]  # a run without a folder leaves its log here


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_runs(stub, tmp_path, capfd, number):
    def send():
        while not (tmp_path / "out" / "waiting").exists():
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert guarded(lambda: command("qwen3", [*stub, "seed=9", "optim.lr=1,2,3", "sweep.slots=2"])) == 75
    thread.join()
    assert [run["status"] for run in summary(tmp_path)] == ["interrupted", "interrupted", "not started"]
    assert [run["exit_status"] for run in summary(tmp_path)] == [75, 75, None]
