"""What a Kunlun worker's environment holds before torch is imported, since the runtime reads it once, at its import.

Values are those that Baidu's public training scripts for the P800 agree on; docs/hardware.md says what each is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

MARK = "XMLIR_MEGATRON_CORE_XPU_PLUGIN"  # in the environment of every worker that was started properly

COMMON = {
    "BKCL_ALL_TO_ALL_OPT": "1",
    "BKCL_FORCE_L3_RDMA": "0",  # 1 may run out of memory
    "BKCL_RING_HOSTID_USE_RANK": "1",
    "BKCL_TREE_THRESHOLD": "0",  # no trees
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # the runtime raises it to 8 where it is not set
    "FORCE_DISABLE_INPLACE_BF16_CAST": "false",
    "XDNN_FC_GEMM_DTYPE": "int32_with_ll",
    "XMLIR_BATCH_PARALLEL": "false",
    "XMLIR_CUDNN_ENABLED": "1",  # three-dimensional convolutions
    "XMLIR_DIST_ASYNC_ISEND_IRECV": "true",
    "XMLIR_ENABLE_FAST_FC": "true",  # linear layers in bf16 are as slow as in fp32 without it
    "XMLIR_ENABLE_LINEAR_FC_FUSION": "1",
    MARK: "1",
    "XMLIR_PARALLEL_SAVE_MEMORY": "false",
}
OAM = {"CUDA_DEVICE_ORDER": "OAM_ID"}
PCIE = {"BKCL_PCIE_TOPO": "1"}
HYGON = {"BKCL_QPS_PER_CONNECTION": "4", "BKCL_RDMA_VERBS": "1"}  # hosts with Hygon CPUs
NICS = "eth1,eth1,eth2,eth2,eth3,eth3,eth4,eth4"  # one for each card
SOCKET = "eth0"

FORBIDDEN = {
    "XPU_RUN_MODE": "it makes the runtime write hardware registers when it is imported",
    "XTORCHRUN_CLEAN": "it kills other people's processes on the cards",
    "XMLIR_DISABLE_CUDA_ALLOCATOR": "the runtime breaks with it",
}
# The runtime reads these with a number parser that ends the process, or compares the exact text.
WHOLE_NUMBERS = ("BKCL_DEBUG", "XMLIR_ENABLE_LINEAR_FC_FUSION", "XMLIR_FORCE_USE_XPU_GRAPH", "XPYTORCH_RUN_ENHANCE")
EXACT = {"XMLIR_USE_HYDRA_LINEAR": ("0", "1"), "XMLIR_PERSISTENT_CACHE_ENABLED": ("false", "true")}


def profile(form: str, nodes: int, hygon: bool, nics: str, socket: str) -> dict[str, str]:
    """The variables of every worker of a run over so many nodes. `form`: oam or pcie."""
    values = COMMON | (OAM if form == "oam" else PCIE)
    if nodes > 1:
        values |= {"BKCL_ENABLE_XDR": "1", "BKCL_RDMA_NICS": nics, "BKCL_SOCKET_IFNAME": socket}
        values |= HYGON if hygon else {}
    return dict(sorted(values.items()))


def problems(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What a user's variables must not be, one line each."""
    for key, why in FORBIDDEN.items():
        if key in environment:
            yield f"hardware=kunlun: {key} is set, and {why}; unset it"
    for key in WHOLE_NUMBERS:
        value = environment.get(key, "0")
        if not value.lstrip("-").isdigit():
            yield f"hardware=kunlun: {key}={value} must be a whole number; the runtime ends at anything else"
    for key, allowed in EXACT.items():
        value = environment.get(key, allowed[0])
        if value not in allowed:
            yield f"hardware=kunlun: {key}={value} must be exactly {' or '.join(allowed)}"
    chosen = environment.get("XPU_VISIBLE_DEVICES")
    if chosen is not None and environment.get("CUDA_VISIBLE_DEVICES") != chosen:
        yield f"hardware=kunlun: XPU_VISIBLE_DEVICES={chosen} is not counted; set CUDA_VISIBLE_DEVICES={chosen} instead"
