"""A plugin of another package: installed as one, found by its entry point, checked, and run like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.cli import prepare
from engine.errors import UserError
from hardware import registry
from hardware.base import CONTRACT_VERSION, HardwareError
from hardware.kernels.registry import choose
from tests.freezing import freeze
from tests.plugin_example.install import install
from tests.ranks import Ranks, run_config

REPO = Path(__file__).parent.parent.parent
TINY = (
    "schedule.steps=3",
    "data.seq_len=64",
    "data.global_batch_size=2",
    "job.eval_rows=2",
    "checkpoint.export_hf=false",
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path with the example in it, and two of its devices in the machine."""
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("EXAMPLE_DEVICES", "2")
    sys.modules.pop("zooforge_example", None)
    yield folder
    sys.modules.pop("zooforge_example", None)


def run_outside(site: str, config: str) -> int:
    """On a rank: `run_config` with the example installed."""
    sys.path.insert(0, site)
    os.environ["EXAMPLE_DEVICES"] = "2"
    try:
        return run_config(config)
    finally:
        sys.path.remove(site)


def test_auto_asks_it_after_the_built_in_accelerators(site, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [plugin.name for plugin in registry.order()] == ["kunlun", "nvidia", "example", "cpu"]
    assert registry.get("auto").name == "example"
    monkeypatch.setenv("EXAMPLE_DEVICES", "0")
    assert registry.get("auto").name == "cpu"
    with pytest.raises(HardwareError, match="hardware=example is not on this machine: EXAMPLE_DEVICES says 0"):
        registry.get("example")


def test_one_that_presents_itself_as_cuda_is_asked_first(site, monkeypatch):
    monkeypatch.setattr(type(registry.plugin("example")), "presents_as_cuda", True)
    assert [plugin.name for plugin in registry.order()] == ["kunlun", "example", "nvidia", "cpu"]


@pytest.mark.parametrize(
    "code, says",
    [
        ("class Example:\n    contract = 99", f"keeps contract 99; this Zooforge needs {CONTRACT_VERSION}"),
        ("class Example: pass", "does not say which contract it keeps"),
        ("import a_driver_that_is_not_here", "does not load: ModuleNotFoundError: No module named 'a_driver"),
        ("raise RuntimeError('driver\\nlog')", "does not load: RuntimeError: driver"),
        ("from hardware.base import Hardware\nclass Example(Hardware):\n    contract = 1", "cannot be made: TypeError"),
        ("class Example:\n    contract = 1\n    name = 'example'", "is no hardware.base.Hardware of that name"),
        ("from hardware.cpu import Cpu as Example", "is no hardware.base.Hardware of that name"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_in_one_line(site, code, says):
    (site / "zooforge_example.py").write_text(code)
    for name in ("example", "auto"):  # `auto` would otherwise run on the CPU of a machine with an accelerator
        with pytest.raises(HardwareError) as caught:
            registry.get(name)
        assert says in str(caught.value) and "zooforge_example:Example" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert registry.get("cpu").name == "cpu"


def test_a_built_in_name_is_taken(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install(tmp_path / "site", cpu="zooforge_example:Example"))
    with pytest.raises(HardwareError, match="zooforge_example:Example calls itself hardware=cpu, which is taken"):
        registry.get("auto")


def test_the_run_is_rewritten_and_frozen(site):
    run = prepare("qwen3", ["hardware=example", "precision=bf16"])
    assert (run.hardware.name, run.precision.name) == ("example", "fp32")
    reason = "this chip adds in single precision only"
    assert run.hardware.rewrites == [{"key": "precision.name", "from": "bf16", "to": "fp32", "reason": reason}]
    assert prepare("qwen3", ["hardware=example"]).hardware.rewrites == []
    with pytest.raises(UserError) as caught:
        prepare("qwen3", ["hardware=example", "precision=bf16", "hardware.strict=true"])
    assert str(caught.value) == (
        f"hardware.strict=true: hardware=example cannot do precision.name=bf16; {reason}; "
        "precision=fp32 would be right here"
    )
    with pytest.raises(UserError, match=r"hardware\.rewrites: a run writes it"):
        prepare("qwen3", ["hardware=example", "hardware.rewrites=[1]"])


def test_its_kernels_are_chosen(site):
    assert str(choose("swiglu", registry.get("example").kernels(), "bf16")) == "example"


def test_the_command_line_takes_it_without_torch(site):
    command = "import sys, engine.cli as c; c.command('qwen3', sys.argv[1:]); print('torch' in sys.modules)"
    words = ["hardware=example", "launcher=print", "precision=bf16"]
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{REPO}", "EXAMPLE_MODE": "quiet"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", command, *words], env=environment, cwd=site, capture_output=True, text=True, check=True
    )
    *_, line, torch_loaded = done.stdout.splitlines()
    assert {"EXAMPLE_MODE=quiet", "OMP_NUM_THREADS=1", "hardware=example"} <= set(line.split())
    assert torch_loaded == "False"
    assert done.stderr == (
        "note: hardware=example: precision.name=bf16 is fp32 here; this chip adds in single precision only\n"
    )


def test_it_trains_on_both_backends(site, tmp_path, ranks: Ranks):
    curves = []
    for backend in ("megatron", "native"):
        words = ("hardware=example", f"backend={backend}", "precision=bf16", *TINY)
        config = freeze(tmp_path / "out" / backend, "qwen3", *words)
        frozen = yaml.safe_load(config.read_text())["hardware"]
        assert frozen["name"] == "example" and frozen["rewrites"][0]["key"] == "precision.name"
        assert ranks.call(run_outside, 1, site=str(site), config=str(config)) == [0]
        rows = [json.loads(line) for line in (config.parent / "metrics.jsonl").read_text().splitlines()]
        curves.append([row["loss"] for row in rows if "loss" in row])
    assert len(curves[0]) == 3 and curves[0] == pytest.approx(curves[1], rel=1e-5)
