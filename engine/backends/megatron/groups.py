"""The process groups of a layout: megatron-core's parallel_state, made and destroyed with a backend."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from engine.errors import UserError
from engine.schema import Run


def start(run: Run) -> None:
    """Make the groups of `run.parallelism`. Ranks are laid out tp first, then dp, then pp. Collective."""
    layout = run.parallelism
    check(run, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(run.seed)


def check(run: Run, world: int) -> None:
    """What the controller has checked too; a backend may also be built without it."""
    layout = run.parallelism
    for axis in ("cp", "ep"):
        if (size := getattr(layout, axis)) > 1:
            raise UserError(f"parallelism.{axis}={size}: the megatron backend has no {axis} yet; set it to 1")
    if world % (layout.tp * layout.pp):
        raise UserError(f"tp={layout.tp} x pp={layout.pp} does not divide {world} ranks")
    if layout.strategy not in ("ddp", "zero1"):
        raise UserError(f"parallelism.strategy={layout.strategy}: the megatron backend has ddp and zero1")
    if layout.sp and layout.tp == 1:
        raise UserError("parallelism.sp=true needs parallelism.tp > 1")


def stop() -> None:
    """Destroy the groups, so that another layout can be made in the same process. Collective."""
    # megatron-core only forgets its groups; their connections and threads would pile up.
    groups = parallel_state._global_process_group_list or []
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state._global_process_group_list = None
    parallel_state.destroy_model_parallel()
