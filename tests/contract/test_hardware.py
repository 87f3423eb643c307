"""Every hardware plugin keeps the contract, and the registry never falls back."""

import subprocess
import sys

import pytest

from engine.cli import prepare
from hardware import host, registry
from hardware.base import CONTRACT_VERSION, Detection, Hardware, HardwareError
from hardware.cpu import Cpu
from hardware.kernels.registry import REFERENCES
from hardware.nvidia import Nvidia
from hardware.nvidia.chips import peak_flops
from tests.plugin_example.install import install


@pytest.fixture
def driver(tmp_path):
    """Makes an Nvidia plugin that sees `files` device files and a driver that knows `gpus`."""

    def make(files=0, gpus=0):
        dev, proc = tmp_path / "dev", tmp_path / "gpus"
        dev.mkdir()
        proc.mkdir()
        for name in [f"nvidia{i}" for i in range(files)] + ["nvidiactl", "nvidia-uvm"]:
            (dev / name).touch()
        for i in range(gpus):
            (proc / f"0000:0{i}:00.0").mkdir()
        return Nvidia(dev, proc)

    return make


@pytest.mark.parametrize("name", [*registry.PLUGINS, "example"])
def test_plugin_conforms(name, tmp_path, monkeypatch):
    if name not in registry.PLUGINS:
        monkeypatch.syspath_prepend(install(tmp_path))
    plugin = registry.plugin(name)
    assert isinstance(plugin, Hardware) and plugin.name == name and plugin.contract == CONTRACT_VERSION
    assert isinstance(plugin.detect(), Detection)
    assert plugin.device_type and plugin.dist_backend
    for capability in ("compile", "pin_memory", "overlap", "fused_adamw", "tf32", "no such thing"):
        assert isinstance(plugin.supports(capability), bool)
    assert not plugin.supports("no such thing")
    attention = plugin.attention()
    assert callable(attention.varlen) and callable(attention.causal) and callable(attention.tails)
    run = prepare("qwen3", [f"hardware={name}", "launcher=print"])
    plugin.configure(run)
    environment = plugin.launch_env(0, 2)
    assert environment and all(isinstance(text, str) for pair in environment.items() for text in pair)
    assert all(rewrite.reason for rewrite in plugin.rewrites(run))
    assert all(kernel.operation in REFERENCES for kernel in plugin.kernels())


def test_stage_0_needs_no_torch_and_little_time():
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from hardware import registry\n"
        "plugin = registry.get(); plugin.launch_env(0, 2); registry._load('nvidia').detect()\n"
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, torch_loaded = answer.split()
    assert torch_loaded == "False"
    assert float(seconds) < 1.0


@pytest.mark.parametrize(
    "files, gpus, chosen, devices",
    [
        (0, 0, None, 0),
        (8, 8, None, 8),
        (2, 8, None, 2),  # a container with two of the host's eight
        (0, 4, None, 4),
        (8, 8, "", 0),
        (8, 8, "-1", 0),
        (8, 8, "2,5", 2),
        (8, 8, "0,1,-1,2", 2),
        (8, 8, "7,8,0", 1),
        (8, 8, "3,3", 0),
        (8, 8, "GPU-8932f937,GPU-7a20", 2),
        (8, 8, "MIG-5d1f", 1),
        (8, 8, "none", 0),
    ],
)
def test_nvidia_detection(driver, monkeypatch, files, gpus, chosen, devices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = driver(files, gpus).detect()
    assert (found.available, found.devices) == (devices > 0, devices)
    assert found.why


def test_registry_prefers_the_accelerator_and_falls_back_only_for_auto(monkeypatch, driver):
    assert registry.get("cpu").name == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plugin = driver(2, 2)
    monkeypatch.setattr(registry, "_load", lambda name: plugin if name == "nvidia" else Cpu())
    assert registry.get("auto") is plugin
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert registry.get("auto").name == "cpu"
    with pytest.raises(HardwareError, match="hardware=nvidia is not on this machine: CUDA_VISIBLE_DEVICES= leaves"):
        registry.get("nvidia")


def test_unknown_name_lists_near_ones():
    with pytest.raises(HardwareError, match="hardware=nvida is not known; did you mean nvidia"):
        registry.get("nvida")


@pytest.mark.parametrize("name", registry.PLUGINS)
def test_launch_env_shares_the_cores_and_leaves_the_users_values(name, monkeypatch):
    plugin = registry._load(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, nproc, threads in ((2, 1, "2"), (16, 3, "5"), (2, 8, "1")):
        monkeypatch.setattr(f"hardware.{name}.usable_cores", lambda cores=cores: cores)
        assert plugin.launch_env(0, nproc)["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert plugin.launch_env(0, 8)["OMP_NUM_THREADS"] == "7"


def test_a_cpu_run_sees_no_accelerator(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = Cpu().launch_env(0, 1)
    assert env["CUDA_VISIBLE_DEVICES"] == "" and env["TORCHDYNAMO_DISABLE"] == "1"


def test_cores_under_a_container_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(host, "QUOTA", tmp_path / "cpu.max")
    assert host.usable_cores() == 64
    for text, cores in (("max 100000", 64), ("250000 100000", 2), ("10000 100000", 1)):
        host.QUOTA.write_text(text)
        assert host.usable_cores() == cores


@pytest.mark.parametrize(
    "name, bf16",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("Quadro P400", None),
    ],
)
def test_peak_flops_of_known_chips(name, bf16):
    facts = peak_flops(name)
    assert facts["bf16"].value == bf16
    assert set(facts) == {"bf16", "fp16", "tf32", "fp32"} and all(fact.source for fact in facts.values())


def test_cpu_facts_and_memory():
    plugin = Cpu()
    spec, before = plugin.spec(), plugin.memory()
    assert spec.name and spec.memory_bytes == before.total
    assert all(fact.value is None and fact.confidence == "unknown" for fact in spec.peak_flops.values())
    held = bytearray(64 * 2**20)
    assert plugin.memory().used - before.used > 50 * 2**20
    assert plugin.memory().peak >= plugin.memory().used - 2**20
    del held
    plugin.reset_peak_memory()
    report = plugin.memory_report()
    assert "GiB" in report and "\n" not in report


def test_cpu_knows_its_out_of_memory_errors():
    import torch

    plugin = Cpu()
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert plugin.is_out_of_memory(caught.value)
    assert plugin.is_out_of_memory(MemoryError())
    assert not plugin.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not plugin.is_out_of_memory(KeyError("not enough memory"))


def test_nvidia_knows_its_out_of_memory_errors():
    import torch

    plugin = Nvidia()
    assert plugin.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    assert plugin.is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not plugin.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_nvidia_bootstrap_says_why_in_one_line():
    if Nvidia().detect().available:
        pytest.skip("a GPU is here")
    with pytest.raises(HardwareError, match="hardware=nvidia") as caught:
        Nvidia().bootstrap()
    assert "\n" not in str(caught.value)
