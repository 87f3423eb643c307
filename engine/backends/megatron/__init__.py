"""The Megatron backend: models of megatron-core's parts, used as they come from its package."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.backends.compiled import check
from engine.family import Family, load_dotted
from engine.lora.names import trained_adapters, with_adapters
from engine.schema import Run
from hardware.base import Hardware

if TYPE_CHECKING:
    from engine.backends.megatron.backend import MegatronBackend


def build(run: Run, family: Family, hardware: Hardware, mode: str) -> MegatronBackend:
    """See `engine.backends.base.Builder`. Close the backend before building another in the same process."""
    check(run, hardware)
    hardware.megatron().apply()  # before anything imports megatron-core
    from engine.backends.megatron import groups
    from engine.backends.megatron.backend import MegatronBackend
    from engine.backends.megatron.fuse import fuse

    groups.start(run)
    try:
        chunks = []
        for stage in range(run.parallelism.vpp):
            with groups.building(stage if run.parallelism.vpp > 1 else None):
                chunks.append(load_dotted(family.megatron)(run.model, run, hardware))
        device = hardware.device(int(os.environ.get("LOCAL_RANK", "0")))
        weight_map = load_dotted(family.weights)(run.model)
        if run.indexer.stage == "dense" and mode == "train":
            from engine.backends.megatron.dsa import warm_up

            weight_map = warm_up(chunks, weight_map)
        if adapters := trained_adapters(run, mode):
            from engine.backends.megatron.lora import attach

            for chunk in chunks:
                attach(chunk, weight_map, adapters)
            weight_map = with_adapters(weight_map, adapters)
        kernels = fuse(run, hardware, chunks) if mode == "train" else {}
        return MegatronBackend(run, chunks, weight_map, device, mode, kernels, hardware.supports("fused_adamw"))
    except BaseException:
        groups.stop()
        raise
