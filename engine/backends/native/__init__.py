"""The native backend: transformers' own model classes under DDP, ZeRO-1, FSDP2 or HSDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from engine.backends.native import attention
from engine.backends.native.backend import NativeBackend
from engine.backends.native.loss import loss_sum
from engine.backends.native.model import fill_buffers, layers, meta_model, recompute
from engine.backends.native.shards import covers
from engine.backends.native.strategies import FullySharded, Replicated, Strategy, Zero1, mesh_of
from engine.checkpoint.weight_map import WeightMap
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.optim.adamw import AdamW
from engine.schema import Run
from hardware.base import Hardware


def build(run: Run, family: Family, hardware: Hardware, mode: str) -> NativeBackend:
    """See `engine.backends.base.Builder`. Weights are always held in fp32, which holds any published dtype exactly.

    In bf16 the model computes under autocast; under fsdp and hsdp its gathered parameters are bf16 and gradients are
    reduced in fp32. `precision.compile` compiles each layer and the loss.
    """
    _check(run, hardware)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = hardware.device(int(os.environ.get("LOCAL_RANK", 0)))
    tf32 = run.precision.tf32 and mode == "train" and hardware.supports("tf32")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")

    attention.register(hardware.attention())
    model = meta_model(family, run.model)
    weight_map: WeightMap = load_dotted(family.weights)(run.model)
    if not covers(model.named_parameters(), weight_map):
        raise RuntimeError(f"zoo.{family.name}: the reference's tensors are not the published ones")
    fill_buffers(model, device)
    recompute(model, run.parallelism.recompute)
    if run.precision.compile:
        for layer in layers(model):
            layer.forward = torch.compile(layer.forward)  # its hooks, which gather the parameters, stay outside

    bf16 = run.precision.name == "bf16"
    strategy = _strategy(run, hardware, model, device, (rank, ranks), bf16, mode)
    optimizer = None
    if mode == "train":
        tensors = [(shard.shape, shard.local) for shard in strategy.shards if shard.updated and shard.local.numel()]
        optimizer = AdamW(tensors, run.optim, fused=hardware.supports("fused_adamw"))
    return NativeBackend(
        strategy,
        optimizer,
        device,
        (rank, ranks),
        weight_map=weight_map,
        clip_grad=run.optim.clip_grad,
        autocast=bf16 and not isinstance(strategy, FullySharded),
        loss_sum=torch.compile(loss_sum) if run.precision.compile else loss_sum,
    )


def _strategy(
    run: Run,
    hardware: Hardware,
    model: torch.nn.Module,
    device: torch.device,
    ranks: tuple[int, int],
    bf16: bool,
    mode: str,
) -> Strategy:
    name, size = run.parallelism.strategy, run.parallelism.shard_size
    if name in ("fsdp", "hsdp") and dist.is_initialized():
        of_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks[1]))
        return FullySharded(model, device, mesh_of(name, size, hardware.device_type, ranks[1], of_host), bf16)
    kind = Zero1 if name == "zero1" else Replicated
    return kind(model, device, *ranks, wrap=mode != "weights")


def _check(run: Run, hardware: Hardware) -> None:
    layout = run.parallelism
    for key in ("tp", "pp", "cp", "ep"):
        if getattr(layout, key) != 1:
            raise UserError(
                f"parallelism.{key}={getattr(layout, key)}: backend=native has data parallelism only; use megatron"
            )
    if layout.strategy not in ("ddp", "zero1", "fsdp", "hsdp"):
        raise UserError(f"parallelism.strategy={layout.strategy} is not known; ddp, zero1, fsdp or hsdp would be right")
    if run.precision.compile and not hardware.supports("compile"):
        raise UserError(f"precision.compile=true: hardware={hardware.name} does not compile; false would be right here")
