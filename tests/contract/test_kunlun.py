"""hardware=kunlun without its runtime: what is found, what workers are given, what is refused, what is rewritten."""

from __future__ import annotations

import ast
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cli import prepare
from engine.errors import UserError
from engine.schema import Run
from hardware import registry
from hardware.base import HardwareError
from hardware.kunlun import Kunlun, cards
from hardware.kunlun.rewrites import rewrites
from tests.unit.test_structure import FAMILIES

FAKE = Path(__file__).parent / "fake_kunlun"

# The exact words of the public scripts that these profiles come from.
ONE_OAM_NODE = """\
BKCL_ALL_TO_ALL_OPT=1
BKCL_FORCE_L3_RDMA=0
BKCL_RING_HOSTID_USE_RANK=1
BKCL_TREE_THRESHOLD=0
CUDA_DEVICE_MAX_CONNECTIONS=1
CUDA_DEVICE_ORDER=OAM_ID
FORCE_DISABLE_INPLACE_BF16_CAST=false
OMP_NUM_THREADS=2
XDNN_FC_GEMM_DTYPE=int32_with_ll
XMLIR_BATCH_PARALLEL=false
XMLIR_CUDNN_ENABLED=1
XMLIR_DIST_ASYNC_ISEND_IRECV=true
XMLIR_ENABLE_FAST_FC=true
XMLIR_ENABLE_LINEAR_FC_FUSION=1
XMLIR_MEGATRON_CORE_XPU_PLUGIN=1
XMLIR_PARALLEL_SAVE_MEMORY=false"""
RDMA = """\
BKCL_ENABLE_XDR=1
BKCL_RDMA_NICS=eth1,eth1,eth2,eth2,eth3,eth3,eth4,eth4
BKCL_SOCKET_IFNAME=eth0"""
TWO_OAM_NODES = "\n".join(sorted([*ONE_OAM_NODE.splitlines(), *RDMA.splitlines()]))
PCIE = ONE_OAM_NODE.replace("CUDA_DEVICE_ORDER=OAM_ID\n", "").replace(
    "BKCL_RING_HOSTID", "BKCL_PCIE_TOPO=1\nBKCL_RING_HOSTID"
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes a Kunlun plugin on a host with these cards, as `xpu-smi` lists them, and these network interfaces."""
    for key in ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PATH", f"{FAKE / 'bin'}:/usr/bin:/bin")
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr("hardware.kunlun.usable_cores", lambda: 16)
    monkeypatch.setattr("hardware.kunlun.cards.is_hygon", lambda: False)

    def make(listed="OAM:0,OAM:4", files=8, nics="eth0,eth1,eth2,eth3,eth4"):
        monkeypatch.setenv("FAKE_CARDS", listed)
        dev = tmp_path / "dev"
        (dev / "net").mkdir(parents=True)
        for name in [f"xpu{i}" for i in range(files)] + (["xpuctrl"] if files else []):
            (dev / name).touch()
        for name in filter(None, nics.split(",")):
            (dev / "net" / name).touch()
        return Kunlun(dev, dev / "net")

    return make


def run_of(nodes=1, launcher="local", **hardware):
    settings = {"form_factor": None, "nics": None, "socket": None} | hardware
    return SimpleNamespace(launcher=SimpleNamespace(nodes=nodes, name=launcher), hardware=SimpleNamespace(**settings))


def block(plugin) -> str:
    return "\n".join(f"{key}={value}" for key, value in sorted(plugin.launch_env(0, 8).items()))


@pytest.mark.parametrize(
    "listed, nodes, expected",
    [
        (",".join(["OAM:0"] * 8), 1, ONE_OAM_NODE),
        (",".join(["OAM:0"] * 8), 2, TWO_OAM_NODES),
        (",".join(["PCIe:0"] * 8), 1, PCIE),
        ("", 1, ONE_OAM_NODE),  # without the tool: what most servers are
    ],
)
def test_environment_of_workers(host, listed, nodes, expected):
    plugin = host(listed)
    plugin.configure(run_of(nodes))
    assert block(plugin) == expected


def test_environment_of_hygon_hosts_and_named_interfaces(host, monkeypatch):
    monkeypatch.setattr("hardware.kunlun.cards.is_hygon", lambda: True)
    plugin = host(nics="ens1,ens9")
    plugin.configure(run_of(2, nics="ens1,ens1", socket="ens9", form_factor="pcie"))
    values = plugin.launch_env(3, 8)
    assert (values["BKCL_RDMA_VERBS"], values["BKCL_QPS_PER_CONNECTION"]) == ("1", "4")
    assert (values["BKCL_RDMA_NICS"], values["BKCL_SOCKET_IFNAME"]) == ("ens1,ens1", "ens9")
    assert values["BKCL_PCIE_TOPO"] == "1" and "CUDA_DEVICE_ORDER" not in values


def test_the_users_values_win(host, monkeypatch):
    plugin = host()
    monkeypatch.setenv("XDNN_FC_GEMM_DTYPE", "float32")
    monkeypatch.setenv("BKCL_TREE_THRESHOLD", "1")
    plugin.configure(run_of())
    values = plugin.launch_env(0, 8)
    assert (values["XDNN_FC_GEMM_DTYPE"], values["BKCL_TREE_THRESHOLD"]) == ("float32", "1")


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("XPU_RUN_MODE", "1", "XPU_RUN_MODE is set, and it makes the runtime write hardware registers"),
        ("XTORCHRUN_CLEAN", "0", "XTORCHRUN_CLEAN is set, and it kills other people's processes"),
        ("XMLIR_DISABLE_CUDA_ALLOCATOR", "true", "XMLIR_DISABLE_CUDA_ALLOCATOR is set"),
        ("BKCL_DEBUG", "INFO", "BKCL_DEBUG=INFO must be a whole number"),
        ("XMLIR_ENABLE_LINEAR_FC_FUSION", "true", "XMLIR_ENABLE_LINEAR_FC_FUSION=true must be a whole number"),
        ("XMLIR_USE_HYDRA_LINEAR", "true", "XMLIR_USE_HYDRA_LINEAR=true must be exactly 0 or 1"),
        ("XMLIR_PERSISTENT_CACHE_ENABLED", "1", "must be exactly false or true"),
        ("XPU_VISIBLE_DEVICES", "2,5", "set CUDA_VISIBLE_DEVICES=2,5 instead"),
    ],
)
def test_variables_that_are_refused(host, monkeypatch, key, value, says):
    plugin = host()
    monkeypatch.setenv(key, value)
    with pytest.raises(HardwareError) as caught:
        plugin.configure(run_of())
    assert says in str(caught.value) and "\n" not in str(caught.value)
    plugin.configure(run_of(launcher="print"))  # the commands may be for another machine


def test_what_cannot_start_is_refused_before_there_is_a_run(host, monkeypatch):
    plugin = host("OAM:90000,OAM:98304", nics="lo,ens3")
    monkeypatch.setattr("hardware.kunlun.find_spec", lambda name: None)
    with pytest.raises(HardwareError) as caught:
        plugin.configure(run_of(2))
    runtime, busy, nics, socket = str(caught.value).splitlines()
    assert "the package torch_xmlir (XPyTorch) is not installed" in runtime
    assert "all cards are in use (0: 90000 of 98304 MiB, 1: 98304 of 98304 MiB)" in busy
    assert nics.startswith("hardware=kunlun: hardware.nics=eth1,eth1,") and nics.endswith(
        "hardware.nics=... names its own"
    )
    assert socket.startswith("hardware=kunlun: hardware.socket=eth0, and this node has only ens3, lo;")
    with pytest.raises(HardwareError, match=r"hardware\.form_factor=sxm must be oam or pcie"):
        plugin.configure(run_of(form_factor="sxm"))


@pytest.mark.parametrize("listed", ["OAM:0,OAM:98304", "OAM:100,OAM:4900"])
def test_one_idle_card_is_enough(host, listed):
    host(listed).configure(run_of())


@pytest.mark.parametrize(
    "files, chosen, devices", [(0, None, 0), (8, None, 8), (8, "2,5", 2), (8, "", 0), (2, "1,7,0", 1)]
)
def test_detection(host, monkeypatch, files, chosen, devices):
    plugin = host(files=files)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = plugin.detect()
    assert (found.available, found.devices) == (devices > 0, devices) and found.why


def test_intels_devices_are_not_kunlun(tmp_path):
    (tmp_path / "xpu0").touch()  # no control device
    assert not Kunlun(tmp_path).detect().available


def test_it_is_found_before_nvidia(host, monkeypatch, tmp_path):
    plugin, load = host(), registry._load
    monkeypatch.setattr(registry, "_load", lambda name: plugin if name == "kunlun" else load(name))
    monkeypatch.setattr("hardware.nvidia.Nvidia._present", lambda self: 8)  # as the masquerade would have it
    assert registry.get("auto") is plugin
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with pytest.raises(HardwareError, match="hardware=kunlun is not on this machine: CUDA_VISIBLE_DEVICES=9 leaves 0"):
        registry.get("kunlun")


def test_a_tool_that_says_something_else_lists_no_cards(tmp_path, monkeypatch):
    tool = tmp_path / "xpu-smi"
    tool.write_text("#!/bin/sh\necho 'error: unknown option -m'; echo 1 2 3; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert cards.listed() == [] and cards.form_factor([]) == "oam"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, []),
        ({"moe.dispatcher": "deepep"}, [("moe.dispatcher", "alltoall")]),
        ({"moe.dispatcher": "allgather"}, []),
        ({"precision.name": "fp8"}, [("precision.name", "bf16")]),
        (
            {"moe.dispatcher": "flex", "precision.name": "fp8_blockwise", "precision.compile": True},
            [("moe.dispatcher", "alltoall"), ("precision.name", "bf16"), ("precision.compile", False)],
        ),
    ],
)
def test_rewrites(settings, expected):
    values = {"moe.dispatcher": "alltoall", "precision.name": "bf16", "precision.compile": False} | settings
    run = SimpleNamespace(moe=SimpleNamespace(), precision=SimpleNamespace())
    for key, value in values.items():
        group, _, name = key.partition(".")
        setattr(getattr(run, group), name, value)
    found = rewrites(run)
    assert [(row.key, row.value) for row in found] == expected and all(row.reason for row in found)


def flat(values, prefix="") -> dict:
    found = {}
    for key, value in vars(values).items():
        found |= flat(value, f"{prefix}{key}.") if hasattr(value, "__dataclass_fields__") else {prefix + key: value}
    return found


# What `auto` becomes by what the hardware supports: nothing else outside `hardware` may differ but a logged rewrite.
RESOLVED = {"precision.compile"}
NATIVE = ("backend=native", "precision=bf16")


def sizes(family: str) -> list[str]:
    return sorted(path.stem for path in (FAMILIES[family] / "model").glob("*.yaml"))


def differences(family: str, *words: str) -> tuple[set[str], set[str]]:
    """(keys outside `hardware` that differ between nvidia and kunlun, keys of the rewrites that kunlun logged)."""
    words = ("launcher=print", "run_id=x", *words)
    theirs, ours = (flat(prepare(family, [f"hardware={name}", *words])) for name in ("nvidia", "kunlun"))
    assert theirs["hardware.rewrites"] == []
    different = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
    kept = {key for key in different if not key.startswith("hardware.")}
    return kept, {record["key"] for record in ours["hardware.rewrites"]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_recipe_as_on_nvidia(family):
    """Frozen configs differ under `hardware`, in the logged rewrites, and in what `auto` became."""
    different, logged = differences(family)
    assert different <= RESOLVED and not logged
    try:
        different, logged = differences(family, *NATIVE)
        assert different == RESOLVED and not logged
        different, logged = differences(family, *NATIVE, "precision.compile=true")
        assert different == logged == {"precision.compile"}
    except UserError as error:
        pytest.skip(f"{family} has no such run: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_recipe_as_on_nvidia_in_every_size(family):
    for size in sizes(family):
        different, logged = differences(family, f"model={size}")
        assert different <= RESOLVED and not logged, size


def test_what_auto_may_become_is_auto_in_every_recipe():
    """The listed keys have no value before the hardware is known, so they are nobody's choice."""
    assert all(attrgetter(key)(Run()) is None for key in RESOLVED)


def test_strict_refuses_a_rewrite_with_what_would_be_right():
    words = ["hardware=kunlun", "launcher=print", "backend=native", "precision=bf16", "precision.compile=true"]
    with pytest.raises(UserError) as caught:
        prepare("qwen3", [*words, "hardware.strict=true"])
    assert str(caught.value).startswith("hardware.strict=true: hardware=kunlun cannot do precision.compile=true; ")
    assert str(caught.value).endswith("; precision.compile=false would be right here")


@pytest.mark.parametrize("file", [*FAKE.glob("*.py"), FAKE / "bin" / "xpu-smi"], ids=lambda file: file.name)
def test_every_faked_behaviour_names_its_source(file):
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        assert (ast.get_docstring(function) or "").startswith("Source: "), function.name
