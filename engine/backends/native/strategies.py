"""How the ranks share the model: one class for each strategy, all of them behind the same few methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.backends.native.lora import published_name
from engine.backends.native.model import Memory, layers
from engine.backends.native.shards import Shard, owners, rows_of
from engine.errors import UserError

BROADCAST_BYTES = 64 << 20
# Weights are loaded later. torch 2.5 broadcasts what is there first, and only loses time.
WITHOUT_FIRST_BROADCAST = {"init_sync": False} if "init_sync" in signature(DistributedDataParallel).parameters else {}


class Replicated:
    """Every rank holds the whole model; gradients are averaged by DDP, or by nobody on a single rank."""

    def __init__(self, model: nn.Module, device: torch.device, rank: int, ranks: int, wrap: bool) -> None:
        Memory(device).give(model)
        self.shards = self._cut(model, rank, ranks)
        self.module = model
        if wrap and ranks > 1:
            self.module = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, **WITHOUT_FIRST_BROADCAST
            )

    def _cut(self, model: nn.Module, rank: int, ranks: int) -> list[Shard]:
        named = [(published_name(name), parameter) for name, parameter in model.named_parameters()]
        self._owner = owners([p.numel() * p.requires_grad for _, p in named], ranks)
        return [
            Shard(
                *(name, tuple(p.shape), (0,) * p.dim(), p, p),
                owned=owner == rank,
                updated=p.requires_grad and self.updates(owner, rank),
                trained=p.requires_grad,
            )
            for (name, p), owner in zip(named, self._owner, strict=True)
        ]

    @staticmethod
    def updates(owner: int, rank: int) -> bool:
        return True

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are reduced with the `last` one only."""
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def after_update(self) -> None:
        """After the optimizer's step."""


class Zero1(Replicated):
    """ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054) by whole tensors: one rank updates each."""

    @staticmethod
    def updates(owner: int, rank: int) -> bool:
        return owner == rank

    def after_update(self) -> None:
        pending = [self._broadcast(bucket, source) for source, bucket in self._buckets()]
        for work, flat, bucket in pending:
            work.wait()
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    @staticmethod
    def _broadcast(bucket: list[Tensor], source: int) -> tuple[Any, Tensor, list[Tensor]]:
        flat = _flatten_dense_tensors(bucket)
        return dist.broadcast(flat, src=source, async_op=True), flat, bucket

    def _buckets(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(owner, some of its tensors), about `BROADCAST_BYTES` each, in the same order on every rank."""
        for source in sorted(set(self._owner)):
            bucket: list[Tensor] = []
            for shard, owner in zip(self.shards, self._owner, strict=True):
                if owner == source and shard.parameter.requires_grad:
                    bucket.append(shard.local.detach())
                if sum(t.nbytes for t in bucket) >= BROADCAST_BYTES:
                    yield source, bucket
                    bucket = []
            if bucket:
                yield source, bucket


class FullySharded:
    """FSDP2: every parameter is cut along dimension 0 over the ranks of a mesh's last dimension."""

    def __init__(self, model: nn.Module, device: torch.device, mesh: DeviceMesh, bf16: bool) -> None:
        try:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        except ImportError:
            raise UserError(
                f"parallelism.strategy=fsdp and hsdp need torch 2.6, and this is {torch.__version__}; zero1 would run"
            ) from None

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        memory = Memory(device)
        # A layer gets its memory and gives most of it back before the next one: the whole model never fits a rank.
        for layer in layers(model):
            memory.give(layer)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        memory.give(model)
        self.module = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.shards = [self._shard(published_name(name), p, mesh) for name, p in self.module.named_parameters()]

    @staticmethod
    def _shard(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> Shard:
        assert isinstance(parameter, DTensor)
        local, shape = parameter.to_local().detach(), tuple(parameter.shape)
        first = rows_of(mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), shape[0])
        replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
        offset, trained = (first, *(0 for _ in shape[1:])), parameter.requires_grad
        return Shard(name, shape, offset, parameter, local, owned=replica == 0, updated=trained, trained=trained)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def after_update(self) -> None:
        pass


Strategy = Replicated | FullySharded


def mesh_of(strategy: str, shard_size: Optional[int], device_type: str, ranks: int, ranks_of_host: int) -> DeviceMesh:
    """One dimension for fsdp; (replicas, shards) for hsdp, where a host's ranks share a copy unless told otherwise."""
    if strategy == "fsdp":
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    size = shard_size or ranks_of_host
    if ranks % size:
        raise UserError(
            f"parallelism.shard_size={size} does not divide the {ranks} ranks; a divisor of {ranks} would be right"
        )
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("replicate", "shard"))


def local_grads(shards: Sequence[Shard]) -> list[Tensor]:
    """The gradients there are."""
    return [grad for shard in shards if (grad := shard.grad) is not None and grad.numel()]
