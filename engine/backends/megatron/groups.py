"""The process groups of a layout: megatron-core's parallel_state, made and destroyed with a backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from engine.errors import UserError
from engine.schema import Run


def start(run: Run) -> None:
    """Make the groups of `run.parallelism`. Ranks are laid out tp first, then cp, dp and pp. Collective."""
    layout = run.parallelism
    check(run, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if run.model.mixture() else layout.tp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(run.seed)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of the last model in this process; shapes differ


def check(run: Run, world: int) -> None:
    """What the controller has checked too; a backend may also be built without it."""
    layout = run.parallelism
    if world // layout.pp % (layout.ep * layout.etp):
        raise UserError(f"ep={layout.ep} x etp={layout.etp} does not divide the {world // layout.pp} ranks of a stage")
    if world % (layout.tp * layout.cp * layout.pp):
        raise UserError(f"tp={layout.tp} x cp={layout.cp} x pp={layout.pp} does not divide {world} ranks")
    if layout.vpp > 1 and layout.pp == 1:
        raise UserError(f"parallelism.vpp={layout.vpp} needs parallelism.pp > 1")
    if layout.strategy not in ("ddp", "zero1"):
        raise UserError(f"parallelism.strategy={layout.strategy}: the megatron backend has ddp and zero1")
    if layout.sp and layout.tp == 1:
        raise UserError("parallelism.sp=true needs parallelism.tp > 1")


_stage: int | None = None


@contextmanager
def building(stage: int | None) -> Iterator[None]:
    """The models built inside are this virtual stage of the rank; None if the pipeline is not interleaved."""
    global _stage
    before, _stage = _stage, stage
    try:
        yield
    finally:
        _stage = before


def virtual_stage() -> int | None:
    """The virtual stage that is being built. A family's `model.py` describes a model and knows nothing of stages."""
    return _stage


def stop() -> None:
    """Destroy the groups, so that another layout can be made in the same process. Collective."""
    # megatron-core only forgets its groups; their connections and threads would pile up.
    groups = parallel_state._global_process_group_list or []
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state._global_process_group_list = None
    parallel_state.destroy_model_parallel()
