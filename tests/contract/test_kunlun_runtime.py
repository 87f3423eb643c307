"""hardware=kunlun on a fake runtime: every fault is one line, the patches are verified, collectives pass through."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from engine.launch.local import free_port
from hardware.kunlun.environment import COMMON
from tests.contract.kunlun_run import REPO, Host
from tests.contract.kunlun_run import environment as fake_environment

TORCH = ".".join(version("torch").split(".")[:2])


def environment(**own: str) -> dict[str, str]:
    return fake_environment(TORCH, **own)


def start(**own: str) -> subprocess.CompletedProcess[str]:
    """`bootstrap` in a process of its own, and whether torch was imported."""
    code = (
        "import sys\nfrom hardware.base import HardwareError\nfrom hardware.kunlun import Kunlun\n"
        "try: Kunlun().bootstrap(); print('up')\n"
        "except HardwareError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code], env=environment(**own), capture_output=True, text=True)


@pytest.mark.parametrize(
    "own, says",
    [
        ({"FAKE_XPYTORCH": "import-error"}, "only half installed: importing it fails with ImportError: libxpurt.so.1"),
        ({"FAKE_XPYTORCH": "no-marker"}, "only half installed: its start did not print 'SYMBOL_REWRITE torch success'"),
        ({"FAKE_XPYTORCH": "no-count"}, "only half installed: torch_xmlir has no _XMLIRC._xpu_get_devices_number"),
        ({"PYTHONPATH": str(REPO)}, "the package torch_xmlir (XPyTorch) is not installed"),
        ({"XTORCHRUN_CLEAN": "1"}, "XTORCHRUN_CLEAN is set"),
    ],
)
def test_a_runtime_that_is_not_whole_is_one_line(own, says):
    done = start(**own)
    message, torch_loaded = done.stdout.splitlines()
    assert says in message and torch_loaded == "False", done.stderr


def test_a_worker_without_the_environment_is_refused(monkeypatch):
    code = "from hardware.kunlun.runtime import start; start()"
    bare = {key: value for key, value in environment().items() if key not in COMMON}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True)
    assert "XMLIR_MEGATRON_CORE_XPU_PLUGIN is not set" in done.stderr.splitlines()[-1]


RANK = """
import os, sys
from hardware.base import HardwareError
from hardware.kunlun import Kunlun

def refused():
    try: Kunlun().bootstrap()
    except HardwareError as error: return str(error)

said = [refused()]
os.environ["ZOOFORGE_KUNLUN_TORCH"] = sys.argv[1]
os.environ["FAKE_XPU_CARDS"] = "0"
said.append(refused())
del os.environ["FAKE_XPU_CARDS"]
plugin = Kunlun()
plugin.bootstrap()
import torch, torch.distributed as dist

assert (plugin.device(1).type, plugin.dist_backend) == ("cuda", "nccl")
assert torch.cuda.get_device_name(0) == "GPU" and torch.cuda.device_count() == 2
dist.init_process_group(plugin.dist_backend)
assert dist.get_backend() == "nccl"
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
said.append(str(total.item()))

os.environ["FAKE_XPYTORCH"] = "plugin-error"
from hardware.kunlun.megatron import start_plugin
try: start_plugin("0.19.2")
except HardwareError as error: said.append(str(error))
del os.environ["FAKE_XPYTORCH"]
start_plugin("0.19.2")
import xpu_plugin
said.append(str(xpu_plugin.CALLS))
dist.destroy_process_group()

from hardware.kernels.gated_mlp import swiglu, swiglu_backward
from hardware.kernels.registry import choose
choice = choose("swiglu", plugin.kernels(), "bf16", strict=True)
kernel = choice.kernel.load()
for rows, width in ((5, 7), (1, 1), (0, 4)):
    fused = torch.randn(rows, 2 * width).bfloat16()
    grad = torch.randn(width, rows).bfloat16().t()  # not contiguous, as a gradient may be
    torch.testing.assert_close(kernel.forward(fused), swiglu(fused))
    for ours, theirs in zip(kernel.backward(fused, grad), swiglu_backward(fused, grad)):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)
said.append(str(choice))
for trap in (lambda: dist.all_reduce(total, op=dist.ReduceOp.AVG), lambda: total.copy_(total, non_blocking=True)):
    try: trap()
    except RuntimeError as error: said.append(str(error))
print("\\n".join(said))
"""


def test_two_ranks_start_and_reduce():
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, TORCH],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), ZOOFORGE_KUNLUN_TORCH="", **world),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        assert "SYMBOL_REWRITE torch success" in err  # what the runtime says is shown, not swallowed
        mismatch, nothing, total, plugin, calls, kernel, mean, copy = out.splitlines()
        assert f"torch_xmlir 3.6.0.0 is published for torch 2.5 and 2.9, and this is {TORCH}" in mismatch
        assert "no device is visible (runtime 0, torch 0)" in nothing
        assert total == "3.0"
        assert plugin == (
            "hardware=kunlun: xpu_plugin does not take megatron-core 0.19.2: RuntimeError: cannot patch this version"
        )
        assert calls == "['init', 'init']"
        assert kernel == "xpytorch"
        assert "AVG is not supported" in mean and "not finished" in copy  # so training reaches neither


def test_a_command_gives_workers_the_environment_before_torch_and_leaves_nothing_when_it_fails(tmp_path):
    host = Host(tmp_path, TORCH, cards="PCIe:0,PCIe:0")
    done = host.command(["hardware=auto", "parallelism=dp2"], FAKE_XPYTORCH="no-marker")
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: hardware=kunlun: the runtime is only half installed: its start did not print 'SYMBOL_REWRITE torch "
        "success'; python -m torch_xmlir --doctor says more"
    ]
    assert "Traceback" not in done.stderr and not (tmp_path / "outputs").exists()
    workers = host.workers()
    assert len(workers) == 2
    for worker in workers:
        assert not worker["torch"]
        assert worker["environment"].items() >= (COMMON | {"BKCL_PCIE_TOPO": "1"}).items()
        assert "CUDA_DEVICE_ORDER" not in worker["environment"]


@pytest.mark.parametrize(
    "cards, own, says",
    [
        ("OAM:90000,OAM:98304", {}, "all cards are in use (0: 90000 of 98304 MiB, 1: 98304 of 98304 MiB)"),
        (
            "OAM:0,OAM:0",
            {"CUDA_VISIBLE_DEVICES": ""},
            "CUDA_VISIBLE_DEVICES= leaves 0 of 2 XPUs",
        ),
        (
            "OAM:0,OAM:0",
            {"XPU_RUN_MODE": "1"},
            "XPU_RUN_MODE is set",
        ),
        ("OAM:0,OAM:0", {"FAKE_XPYTORCH": "import-error"}, "only half installed: importing it fails with ImportError"),
        ("OAM:0,OAM:0", {"FAKE_XPYTORCH": "no-count"}, "only half installed: torch_xmlir has no _XMLIRC"),
        pytest.param(
            *("OAM:0,OAM:0", {"FAKE_XPU_CARDS": "0"}, "no device is visible (runtime 0, torch 0)"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("OAM:0,OAM:0", {"ZOOFORGE_KUNLUN_TORCH": ""}, "is published for torch 2.5 and 2.9, and this is"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_command_that_cannot_run_ends_with_one_line(tmp_path, cards, own, says):
    """Exit status 2, no traceback, no run folder."""
    done = Host(tmp_path, TORCH, cards=cards).command(["hardware=kunlun"], **own)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0], done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "outputs").exists()
