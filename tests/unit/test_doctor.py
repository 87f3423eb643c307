"""`zoo doctor`: what it looks at, what its self-test notices, and how it says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import namedtuple

import pytest
import torch

import engine.doctor.command as doctor_command
from engine.cli import guarded
from engine.doctor import machine, packages, probe
from engine.doctor.command import doctor, examine
from engine.doctor.patience import Patience, Usage, usage
from engine.doctor.report import Finding, Report
from engine.doctor.selftest import self_test
from engine.errors import UserError
from hardware import registry
from hardware.base import HardwareError
from hardware.cpu import Cpu
from hardware.kernels.attention import ReferenceAttention
from hardware.kernels.registry import REFERENCES, Kernel


def by_name(findings):
    return {finding.name: finding for finding in findings}


def events_of(hardware) -> dict[str, dict]:
    events: list[dict] = []
    probe.run(hardware, events.append)
    assert [e["test"] for e in events if "ok" not in e] == [e["test"] for e in events if "ok" in e]
    return {e["test"]: e for e in events if "ok" in e}


def test_a_sound_device_passes_every_test():
    events = events_of(Cpu())
    assert list(events) == list(probe.TESTS) and all(e["ok"] for e in events.values()), events
    assert "TFLOP/s in bfloat16" in events["matmul"]["words"]


class Unmasked(ReferenceAttention):
    def varlen(self, q, k, v, cu_seqlens, max_seqlen, scale=None):
        repeat = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)


class Scaled(ReferenceAttention):
    """The right output and a gradient that is a tenth too large."""

    def varlen(self, q, k, v, cu_seqlens, max_seqlen, scale=None):
        v = 1.1 * v - 0.1 * v.detach()
        return super().varlen(q, k, v, cu_seqlens, max_seqlen, scale)


class Ill(Cpu):
    def __init__(self, attention):
        self._attention = attention

    def attention(self):
        return self._attention

    def kernels(self):
        return (Kernel("swiglu", "fast", "nowhere:nothing", 10),)


@pytest.mark.parametrize(
    ("attention", "part"), [(Unmasked(), "attention's output"), (Scaled(), "attention's gradient of v")]
)
def test_wrong_arithmetic_and_kernels_that_do_not_load_are_noticed(attention, part):
    events = events_of(Ill(attention))
    assert [name for name, e in events.items() if not e["ok"]] == ["attention", "kernels"]
    assert part in events["attention"]["words"] and "more than 2e-02" in events["attention"]["words"]
    assert "swiglu by fast does not load: ModuleNotFoundError" in events["kernels"]["words"]


def test_a_runtime_that_does_not_start_ends_the_test():
    class Dead(Cpu):
        def bootstrap(self):
            raise HardwareError("hardware=cpu: the marker is missing")

    events = events_of(Dead())
    assert list(events) == ["runtime"] and events["runtime"]["words"] == "hardware=cpu: the marker is missing"


START = "import json, os, sys, time; print(json.dumps({'test': 'matmul'}), flush=True); "


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (START + "os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (START + "print('lost', file=sys.stderr); time.sleep(60)", "no answer for 1.5 s: it hangs: lost"),
        (START + "sys.exit('no device')", "exit status 1: no device"),
        (START, "ended without a result"),
    ],
)
def test_a_probe_that_dies_or_hangs_names_the_test(code, words):
    found = self_test(Cpu(), (sys.executable, "-c", code), timeout_s=1.5)
    assert [(f.name, f.state, f.words) for f in found] == [("matmul", "fail", words)]


def test_a_probe_that_comes_on_is_waited_for():
    code = START + "[(time.sleep(1), print(json.dumps({'test': str(i)}), flush=True)) for i in range(3)]; "
    code += "print(json.dumps({'test': '2', 'ok': True, 'words': 'fine', 'seconds': 3}))"
    assert self_test(Cpu(), (sys.executable, "-c", code), timeout_s=2.5) == [Finding("self-test", "2", "ok", "fine", 3)]


def test_what_a_busy_machine_takes_does_not_count():
    """Looks at 10 s, 20 s, ...: the seconds in which the process waited for a processor or a page are not its own."""
    now, seen = [0.0], [Usage()]
    patience = Patience(30, lambda: seen[0], lambda: now[0])

    def after(delayed_s: float = 0.0, faults: int = 0) -> bool:
        now[0] += 10
        seen[0] = Usage(seen[0].delayed_s + delayed_s, seen[0].faults + faults)
        return patience.over()

    assert [after(9.0) for _ in range(20)] == [False] * 20 and patience.spent_s == 20
    assert [after(faults=1) for _ in range(20)] == [False] * 20 and patience.spent_s == 20
    assert not after(99.0) and patience.spent_s == 20  # another thread's delay is the longest now
    assert after() and patience.words().startswith("no answer for 420 s: it hangs, for 390 s of them it waited")
    patience.progress()
    assert [after(), after(), after()] == [False, False, True] and patience.words() == "no answer for 30 s: it hangs"


def test_a_process_that_gets_no_processor_is_delayed():
    spin = "import threading; [threading.Thread(target=lambda: exec('while True: pass')).start() for _ in range(4)]"
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            deadline = time.monotonic() + 20
            while usage(process.pid).delayed_s == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert usage(process.pid).delayed_s > 0
        finally:
            process.kill()
    assert usage(process.pid) == Usage()


def test_a_probe_reads_its_environment_and_noise_is_no_result():
    code = "import json, os; print('noise'); print(json.dumps({'test': 'x', 'ok': True, "
    code += "'words': os.environ['TORCHDYNAMO_DISABLE'], 'seconds': 0.5}))"
    assert self_test(Cpu(), (sys.executable, "-c", code)) == [Finding("self-test", "x", "ok", "1", 0.5)]


def test_missing_packages_are_named_with_what_they_cost(monkeypatch):
    from hardware.nvidia import KERNELS

    monkeypatch.setattr("hardware.kernels.registry.find_spec", lambda name: None)
    monkeypatch.setattr("engine.doctor.packages.find_spec", lambda name: None)
    lines = ["torch==2.11.0", "liger-kernel==0.8.5; extra == 'nvidia'", "optuna>=5; extra == 'optuna'"]
    monkeypatch.setattr("engine.doctor.packages.requires", lambda name: lines)
    found = by_name(packages.kernel_findings(KERNELS))
    offered = {kernel.operation for kernel in KERNELS}
    assert {name: f.state for name, f in found.items()} == {n: "warn" if n in offered else "ok" for n in REFERENCES}
    loss = found["linear_cross_entropy"].words
    assert loss.startswith("torch (liger needs the package liger_kernel)") and "holds the logits" in loss
    assert "`uv sync --extra nvidia` adds it" in loss
    assert all(kernel.costs in found[name].words for name, kernel in REFERENCES.items() if name in offered)
    assert {f.state for f in packages.kernel_findings(())} == {"ok"}  # nothing better is offered


def test_versions_are_held_against_what_is_asked_for(monkeypatch):
    versions = {"torch": "2.10.0+cu128", "transformers": None}
    real = packages._version
    monkeypatch.setattr(packages, "_version", lambda name: versions.get(name, real(name)))
    found = by_name(packages.version_findings())
    assert (found["torch"].state, found["torch"].words) == ("warn", "2.10.0+cu128; Zooforge is tested with ==2.11.0")
    assert found["transformers"].state == "fail" and "transformers==" in found["transformers"].words
    assert found["megatron-core"].state == "ok"


def test_a_place_that_cannot_be_written_and_too_little_room(monkeypatch, tmp_path):
    Usage = namedtuple("Usage", "total used free")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in by_name(machine.host_findings(tmp_path / "file" / "runs"))["disk"].words
    for free, states in ((2**26, ("fail", "warn")), (2**31, ("warn", "ok")), (2**40, ("ok", "ok"))):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: Usage(2**41, 0, free))
        found = by_name(machine.host_findings(tmp_path / "not" / "yet"))
        assert (found["disk"].state, found["shared memory"].state) == states


def test_plugins_say_what_they_see_and_what_stands_in_the_way(monkeypatch):
    class Refusing(Cpu):
        def configure(self, run):
            raise HardwareError("hardware=cpu: all cards are in use\nthe variable X is forbidden")

    def broken(self):
        raise OSError("no bus")

    monkeypatch.setattr("hardware.nvidia.Nvidia.detect", broken)
    found = by_name(machine.detections(Cpu()))
    assert set(registry.PLUGINS) <= set(found)
    assert found["cpu"].state == "ok" and "cores" in found["cpu"].words
    assert (found["nvidia"].state, found["nvidia"].words) == ("warn", "cannot look for its hardware: OSError: no bus")
    assert [f.words for f in machine.obstacles(Refusing())][1] == "the variable X is forbidden"
    assert not list(machine.obstacles(Cpu()))


def test_statuses_lines_and_json(monkeypatch, tmp_path, capsys):
    results = [Finding("self-test", "matmul", "ok", "fine", 0.25)]
    monkeypatch.setattr(doctor_command, "self_test", lambda hardware: results)
    monkeypatch.chdir(tmp_path)
    assert doctor(["hardware=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "self-test matmul: ok, fine (0.25 s)" in lines and lines[-1].startswith("hardware=cpu is healthy")
    results.append(Finding("self-test", "attention", "fail", "2e-1 off"))
    assert doctor(["hardware=cpu", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["healthy"] and said["verdict"] == "hardware=cpu is not healthy: self-test attention"
    assert not list(tmp_path.iterdir())


def test_hardware_that_is_not_here_is_a_finding_and_a_wrong_word_a_mistake(monkeypatch, tmp_path, capsys):
    from hardware.nvidia import Nvidia

    def untested(hardware):
        raise AssertionError("there is nothing to test")

    monkeypatch.setattr(doctor_command, "self_test", untested)
    report = examine(Nvidia(dev=tmp_path, driver=tmp_path / "none"), tmp_path)
    assert "hardware nvidia" in report.verdict() and not [f for f in report.findings if f.section == "self-test"]
    for words, said in (
        (["harware=cpu"], "'harware=cpu' is not known"),
        (["hardware=cpu", "hardware=cpu"], "given twice"),
        (["--nothing"], "--help shows what there is"),
        (["hardware=cpuu"], "did you mean cpu?"),
    ):
        assert guarded(lambda words=words: doctor(words)) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    with pytest.raises(UserError):
        doctor(["hardware="])


def test_a_report_counts_what_it_found():
    report = Report("x", [Finding("host", "disk", "warn", "little")])
    assert report.healthy and report.verdict() == "hardware=x is healthy, with 1 warning"


def test_the_commands_need_no_torch():
    code = (
        "import sys, engine.doctor.command, engine.parity.command, engine.doctor.probe; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.slow
def test_this_machine_is_healthy(tmp_path):
    command = [sys.executable, "-c", "from engine.cli import console; console()", "doctor", "hardware=cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["healthy"], report
    assert [f["name"] for f in report["findings"] if f["section"] == "self-test"] == list(probe.TESTS)
