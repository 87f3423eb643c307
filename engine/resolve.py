"""Fill in everything a run leaves open. Pure: the same config and the same machine give the same result."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional

from engine.effects import ACTING
from engine.errors import UserError
from engine.schema import Launcher, Parallelism, Run
from engine.words import counted

DEFAULT_PORT = 29500
LEAST_SAVE_INTERVAL = 50  # steps; a short run saves at its end only
MICRO_BATCH_TOKENS = 4096  # enough for matrices to be wide, few enough for large models


def model_ranks(layout: Parallelism) -> int:
    """Ranks that hold one copy of the model, data parallelism apart."""
    return layout.tp * layout.pp * layout.cp


def resolve(run: Run, devices: int, run_id: str = "run", compiles: bool = False) -> Run:
    """The run with every open value decided; the argument is left as it was.

    `devices`: accelerators of one node; 0 on a CPU, where the layout says how many processes are ranks.
    `run_id`: what an unnamed run is called. `compiles`: whether the hardware does.
    Raises UserError where ranks and layout cannot agree.
    """
    layout, launcher = _ranks(run, devices)
    data, schedule, checkpoint, job = run.data, run.schedule, run.checkpoint, run.job
    steps = schedule.steps
    if launcher.name == "torchrun" or launcher.nodes > 1:
        alone = launcher.nodes == 1  # then the launcher takes a port that is free
        launcher = _filled(launcher, master_port=None if alone else DEFAULT_PORT, node_rank=0 if alone else None)
    data = _filled(
        data,
        vocab_size=getattr(run.model, "vocab_size", None) if data.tokenizer is None else None,
        cache_dir=f"{run.output_dir}/cache",
        micro_batch_size=_micro_batch_size(data.global_batch_size, data.seq_len, layout),
    )
    if schedule.name == "wsd":
        schedule = _filled(schedule, decay_steps=max(1, min(steps // 5, steps - schedule.warmup_steps)))
    if job.name == "train" and run.model.weights is None and checkpoint.resume is None:
        # Everything else comes from weights, which record the dtypes that an export should have.
        checkpoint = _filled(checkpoint, export_dtype=run.precision.name)
    checkpoint = _filled(checkpoint, save_interval=min(steps, max(LEAST_SAVE_INTERVAL, steps // 10)))
    if job.name == "train":
        job = _filled(job, eval_interval=max(1, steps // 10))
    worth = run.precision.name == "bf16" and job.name == "train"
    worth = worth and obstacle_to_compiling(dataclasses.replace(run, parallelism=layout)) is None
    return dataclasses.replace(
        run,
        run_id=run.run_id or run_id,
        precision=_filled(run.precision, compile=worth and compiles),
        data=data,
        parallelism=layout,
        schedule=schedule,
        checkpoint=checkpoint,
        launcher=launcher,
        job=job,
    )


def obstacle_to_compiling(run: Run) -> Optional[str]:
    """Which layers of the Megatron backend stay as they are; None if the run's can be compiled."""
    layout = run.parallelism
    if run.backend != "megatron":
        return None
    split = next((key for key in ("tp", "cp") if getattr(layout, key) > 1), None)
    if split:
        return f"that communicate (parallelism.{split}={getattr(layout, split)})"
    if layout.recompute == "selective":
        return "that are recomputed in parts (parallelism.recompute=selective)"
    return "with adapters (task=lora)" if run.task.name == "lora" else None


def _micro_batch_size(global_batch_size: int, seq_len: int, layout: Parallelism) -> int:
    """The most rows that divide a rank's share of the global batch and give it no more than MICRO_BATCH_TOKENS.

    An interleaved pipeline needs a micro-batch for each of its ranks at least.
    """
    share, most = global_batch_size // layout.dp, max(1, MICRO_BATCH_TOKENS * layout.cp // seq_len)
    if layout.vpp > 1:
        most = min(most, max(1, share // layout.pp))
    return max((n for n in range(1, min(share, most) + 1) if share % n == 0), default=1)


def _filled(group: Any, **defaults: Any) -> Any:
    """The group with these values where it has None."""
    return dataclasses.replace(group, **{k: v for k, v in defaults.items() if getattr(group, k) is None})


def _ranks(run: Run, devices: int) -> tuple[Parallelism, Launcher]:
    """Decide how many ranks a node runs and how many replicas that makes."""
    layout, launcher = run.parallelism, run.launcher
    need, nodes = model_ranks(layout), launcher.nodes
    if run.job.name in ACTING and launcher.nproc_per_node is None:
        world = 1  # one policy; evaluations are divided by eval.shard
    elif launcher.nproc_per_node is not None:
        world = nodes * launcher.nproc_per_node
    elif layout.dp is not None:
        world = need * layout.dp
    elif devices and (launcher.name != "print" or nodes * devices >= need):
        world = nodes * devices
    else:
        world = math.lcm(need * _least_replicas(layout), nodes)
    _check_world(run, world, need, devices)
    layout = dataclasses.replace(layout, dp=world // need)
    return layout, dataclasses.replace(launcher, nproc_per_node=world // nodes)


def _least_replicas(layout: Parallelism) -> int:
    """Replicas on a machine that does not suggest a number: as few as show the strategy and hold the experts."""
    return 2 * (layout.shard_size or 1) if layout.strategy == "hsdp" else replica_unit(layout)


def replica_unit(layout: Parallelism) -> int:
    """The number that dp must be a multiple of, so that whole groups of ranks share experts or weights."""
    if layout.strategy == "hsdp":
        return layout.shard_size or 1
    own = layout.tp * layout.cp
    return math.lcm(own, layout.ep * layout.etp) // own


def _check_world(run: Run, world: int, need: int, devices: int) -> None:
    layout, launcher = run.parallelism, run.launcher
    nodes = launcher.nodes
    spelled = " x ".join(f"{k} {getattr(layout, k)}" for k in ("tp", "pp", "cp") if getattr(layout, k) > 1) or "tp 1"
    if layout.dp is not None and world != need * layout.dp:
        want = need * layout.dp
        raise UserError(
            f"parallelism={layout.name} ({spelled} x dp {layout.dp}) needs {counted(want, 'rank')}, but "
            f"launcher.nodes={nodes} x launcher.nproc_per_node={launcher.nproc_per_node} gives {world}; "
            + _ways(want, layout, nodes, world)
        )
    if world % need:
        where = (
            f"launcher.nproc_per_node={launcher.nproc_per_node}"
            if launcher.nproc_per_node
            else counted(devices, "device")
        )
        raise UserError(
            f"parallelism={layout.name} ({spelled}) needs a multiple of {need} ranks, but {where} on "
            f"{counted(nodes, 'node')} gives {world}; " + _ways(need * max(1, world // need), layout, nodes, world)
        )
    if world % nodes:
        raise UserError(
            f"launcher.nodes={nodes} does not divide the {counted(world, 'rank')} of parallelism={layout.name}; set "
            f"parallelism.dp={world // need * nodes} ({counted(world * nodes, 'rank')}) or launcher.nodes=1"
        )
    if devices and world // nodes > devices and launcher.name != "print":
        raise UserError(
            f"parallelism={layout.name} ({spelled}) needs {counted(world // nodes, 'device')}, and this machine "
            f"has {devices}; use a smaller layout, or several nodes with launcher=torchrun launcher.nodes=..."
        )


def _ways(want: int, layout: Parallelism, nodes: int, world: int) -> str:
    """What would make ranks and layout agree."""
    ways, need = [], model_ranks(layout)
    if want % nodes == 0:
        ways.append(f"launcher.nproc_per_node={want // nodes}")
    if world % (need * replica_unit(layout)) == 0:
        ways.append(f"parallelism.dp={world // need}")
    return f"set {' or '.join(ways)}" if ways else "change the layout or the number of nodes"
