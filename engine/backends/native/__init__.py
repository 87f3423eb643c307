"""The native backend: transformers' own model classes under DDP, ZeRO-1, FSDP2 or HSDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from engine.backends.compiled import check, compile_method
from engine.backends.native import attention, lora, sparse
from engine.backends.native.backend import NativeBackend
from engine.backends.native.balancing import Balancing
from engine.backends.native.delta_net import attach as attach_delta_rule
from engine.backends.native.delta_net import delta_nets
from engine.backends.native.fuse import fuse_layers, fuse_loss
from engine.backends.native.model import fill_buffers, kept_tensors, layers, make_buffers, meta_model, recompute
from engine.backends.native.objective import LanguageModel, Objective
from engine.backends.native.shards import covers
from engine.backends.native.strategies import FullySharded, Replicated, Strategy, Zero1, mesh_of
from engine.backends.sources import source_names
from engine.checkpoint.weight_map import WeightMap
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.lora.names import trained_adapters, with_adapters
from engine.optim.adamw import AdamW
from engine.optim.groups import group_of, groups_of
from engine.optim.split import MainWeights
from engine.schema import Run
from hardware.base import Hardware
from hardware.kernels.registry import choose

FUSED = ("swiglu", "linear_cross_entropy", "split_adamw")  # operations that stand in the place of torch's own
NOT_FUSED = (
    "kernels.strict=true: several replicas compute with torch's own operations (autocast), not with the hardware's "
    "kernels; parallelism=fsdp or a single rank has them"
)


def build(run: Run, family: Family, hardware: Hardware, mode: str) -> NativeBackend:
    """See `engine.backends.base.Builder`. Weights are always held in fp32, which holds any published dtype exactly.

    In bf16 a single rank trains a bf16 model whose fp32 main weights the optimizer holds; several replicas compute
    under autocast; under fsdp and hsdp gathered parameters are bf16 and gradients are reduced in fp32.
    `precision.compile` compiles each layer and the loss.
    """
    _check(run, hardware)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = hardware.device(int(os.environ.get("LOCAL_RANK", 0)))
    tf32 = run.precision.tf32 and mode == "train" and hardware.supports("tf32")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")

    own: Objective | None = load_dotted(family.native) if family.native else None  # of a model that is no decoder
    bf16 = run.precision.name == "bf16"
    chooser = choose("sparse_attention", hardware.kernels(), run.precision.name, run.kernels.strict)
    if own is None:
        attention.register(hardware.attention(), chooser.kernel.load())
    sharded = run.parallelism.strategy in ("fsdp", "hsdp") and dist.is_initialized()
    # Several replicas sum gradients in fp32, so there the parameters themselves stay fp32.
    fused = bf16 and mode == "train" and run.task.name != "lora" and (ranks == 1 or sharded)
    main = fused and not sharded
    if run.kernels.strict and mode == "train" and not fused:
        raise UserError(NOT_FUSED)
    operations = [name for name in FUSED if fused and (main if name == "split_adamw" else own is None)]
    chosen = {name: choose(name, hardware.kernels(), "bf16", run.kernels.strict) for name in operations}
    dtype = torch.bfloat16 if main else torch.float32
    model = own.meta_model(run, dtype) if own else meta_model(family, run.model, dtype)
    weight_map: WeightMap = load_dotted(family.weights)(run.model)
    if adapters := trained_adapters(run, mode):
        lora.attach(model, weight_map, adapters)
        weight_map = with_adapters(weight_map, adapters)
    if own is None and sparse.attach(model, chooser.kernel.load(), getattr(run.model, "index_pairs", False)):
        chosen["sparse_attention"] = chooser
    groups = groups_of(run.optim.groups) if mode == "train" else []
    for name, parameter in model.named_parameters():
        if name in weight_map.unlearned or (group_of(name, groups).frozen and not adapters):
            parameter.requires_grad_(False)
    buffers = make_buffers(model, weight_map, device, rank)
    held = [(lora.published_name(n), p) for n, p in model.named_parameters()]
    if not covers([*held, *((shard.name, shard.local) for shard in buffers)], weight_map):
        raise RuntimeError(f"zoo.{family.name}: the reference's tensors are not the published ones")
    others = kept_tensors(weight_map, device, (rank, ranks))
    for shard in others:
        shard.trained = adapters is None
    buffers += others
    fill_buffers(model, device)
    loss_head = None
    if fused and not own:
        loss_head = fuse_loss(model, chosen["linear_cross_entropy"].kernel.load())
        fuse_layers(model, chosen["swiglu"].kernel.load())
    if recurrent := delta_nets(model):
        choice = choose("gated_delta_rule", hardware.kernels(), run.precision.name, run.kernels.strict)
        chosen["gated_delta_rule"] = choice
        attach_delta_rule(recurrent, choice.kernel.load())
    recompute(model, run.parallelism.recompute)
    if run.precision.compile:
        for layer in layers(model):
            compile_method(layer)  # hooks that gather parameters stay outside

    strategy = _strategy(run, hardware, model, device, (rank, ranks), bf16, mode)
    for shard in (*strategy.shards, *buffers):
        # What stands still is held all the same, unless it is the base that adapters are trained on.
        shard.trained |= shard.name in weight_map.unlearned or (mode == "train" and not adapters)
    optimizer: AdamW | MainWeights | None = None
    if mode == "train":
        held_here = [shard for shard in strategy.shards if shard.updated and shard.local.numel()]
        tensors = [(shard.shape, shard.local) for shard in held_here]
        own_groups = [group_of(shard.name, groups) for shard in held_here] if groups else []
        optimizer = (
            MainWeights(tensors, run.optim, chosen["split_adamw"].kernel.load(), own_groups)
            if main
            else AdamW(tensors, run.optim, hardware.supports("fused_adamw"), own_groups)
        )
    backend = NativeBackend(
        strategy,
        optimizer,
        device,
        (rank, ranks),
        weight_map=weight_map,
        clip_grad=run.optim.clip_grad,
        autocast=bf16 and not (main or isinstance(strategy, FullySharded)),
        objective=own or LanguageModel(bool(run.precision.compile), loss_head),
        sources=source_names(run) if mode == "train" else (),
        buffers=buffers,
        ema_decay=run.optim.ema_decay if run.task.name != "lora" else None,
        kernels={name: str(choice) for name, choice in chosen.items()} | attention.sinks(model, hardware.attention()),
    )
    if run.model.mixture():
        backend.balancing = Balancing(model, run, device, mode)
    return backend


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
    check(run, hardware)
