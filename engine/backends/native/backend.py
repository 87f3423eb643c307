"""The native backend: a reference module, wrapped by a strategy, behind the backend protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.backends.base import EMA, Accept, ForwardResult, Slice, StepResult, TensorSource, always
from engine.backends.native.balancing import Balancing
from engine.backends.native.failures import gather_bad_samples
from engine.backends.native.objective import Keep, Objective
from engine.backends.native.shards import Shard, pieces
from engine.backends.native.strategies import Strategy, local_grads
from engine.backends.sources import add_up, source_metrics
from engine.checkpoint.weight_map import WeightMap
from engine.comm import Comm
from engine.data.batch import Batch
from engine.faults.finite import gather_bad_tensors, not_finite
from engine.inspect.modules import by_published_name, watched
from engine.optim.adamw import MOMENTS, AdamW
from engine.optim.average import Average
from engine.optim.clip import clip_factor, squared_norm
from engine.optim.split import MainWeights


class NativeBackend:
    """One rank of a data-parallel group that is the whole world."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: AdamW | MainWeights | None,
        device: torch.device,
        ranks: tuple[int, int],
        weight_map: WeightMap,
        clip_grad: float,
        autocast: bool,
        objective: Objective,
        kernels: Optional[dict[str, str]] = None,
        sources: Sequence[str] = (),
        buffers: Sequence[Shard] = (),
        ema_decay: Optional[float] = None,
    ) -> None:
        """`ranks` is (rank, world size).

        Losses of a mixture's `sources` are reported apart. `buffers` are saved with the weights. With `ema_decay` each
        rank also averages the weights that it updates.
        """
        self.dp_rank, self.dp_size = ranks
        self._map = weight_map
        self.published, self.still = weight_map.published, weight_map.unlearned | weight_map.kept
        self.parameters_total = sum(math.prod(shape) for shape in weight_map.parameters.values())
        self._strategy, self._optimizer, self._device = strategy, optimizer, device
        self._clip_grad, self._autocast, self._objective = clip_grad, autocast, objective
        self.unit, self.kernels = objective.unit, kernels or {}
        self._sum_fp32 = isinstance(optimizer, MainWeights)
        self._sources = tuple(sources)
        self._row_losses: list[tuple[Batch, Tensor]] = []
        self.balancing: Optional[Balancing] = None  # of models with experts
        self._shards = [shard for shard in (*strategy.shards, *buffers) if shard.local.numel()]
        self._updated = [shard for shard in self._shards if shard.updated]
        self._owned = [shard for shard in self._shards if shard.owned]
        self._average: Optional[Average] = None
        if ema_decay is not None and optimizer is not None:
            self._average = Average([shard.local for shard in self._updated], ema_decay)
        self.averages = self._average is not None

    # training

    def train_step(self, batches: Sequence[Batch], lr: float, accept: Accept = always) -> StepResult:
        assert self._optimizer is not None, "built without an optimizer"
        self._mode(training=True)
        losses, tokens = self._accumulate(batches)
        sums = torch.stack(
            [torch.stack(losses).double().sum(), squared_norm(local_grads(self._owned), self._device), tokens]
        )
        self._all_reduce(sums[:2])
        loss, square, count = sums.tolist()  # the step's only wait for the device
        norm = math.sqrt(square) if square >= 0 else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm)):
            samples, rank = gather_bad_samples(losses, batches, self.dp_rank, self.dp_size)
            tensors: tuple[str, ...] = ()
            if math.isfinite(loss):
                mine = not_finite((shard.name, grad) for shard in self._shards if (grad := shard.grad) is not None)
                tensors, rank = gather_bad_tensors(mine, Comm(self._device))
            self._zero_grad()
            return StepResult(loss, int(count), norm, samples, rank, tensors)
        if not accept(loss / max(1, int(count))):
            self._zero_grad()
            return StepResult(loss, int(count), norm, updated=False)
        self._update(norm, lr)
        return StepResult(loss, int(count), norm, metrics=self._metrics())

    def _metrics(self) -> dict[str, Any]:
        """What the step says of experts and sources. Collective."""
        metrics: dict[str, Any] = self.balancing.end() if self.balancing else {}
        if self._sources:
            totals = add_up(len(self._sources), self._row_losses, self._device, self._objective.row_counts)
            self._all_reduce(totals)
            metrics |= source_metrics(self._sources, totals)
        return metrics

    def _accumulate(self, batches: Sequence[Batch], keep: Optional[Keep] = None) -> tuple[list[Tensor], Tensor]:
        """Gradients of the global mean loss. Returns the micro-batches' loss sums and the global number of tokens."""
        tokens = self._count(batches)
        # DDP and FSDP average over the ranks; the loss is the sum over them, divided by the global count.
        scale = (self.dp_size / tokens.clamp(min=1)).float()
        losses = []
        self._row_losses.clear()
        if self.balancing is not None:
            self.balancing.begin(batches)
        for index, batch in enumerate(batches):
            with self._strategy.synchronised(last=index == len(batches) - 1):
                loss = self._loss(batch, keep)
                learned = loss if self.balancing is None else loss + self.balancing.term(batch)
                (learned * scale).backward()
            losses.append(loss.detach())
            if self._sum_fp32 and len(batches) > 1:
                for shard in self._shards:
                    shard.add_up()
        return losses, tokens

    def _loss(self, batch: Batch, keep: Optional[Keep] = None) -> Tensor:
        batch = batch.to(self._device)
        if self.balancing is not None:
            self.balancing.listen(batch)
        if self._sources and keep is None:
            rows = self._objective.row_losses(self._module, batch)
            self._row_losses.append((batch, rows.detach()))
            loss = rows.sum()
        else:
            loss = self._objective.loss_sum(self._module, batch, keep)
        if self.balancing is not None:
            self.balancing.note()
        return loss

    def _module(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model in the run's precision."""
        with self._precision():
            return self._strategy.module(*args, **kwargs)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _update(self, norm: float, lr: float) -> None:
        grads = {shard.local: grad for shard in self._updated if (grad := shard.grad) is not None}
        self._optimizer.update(grads, lr, clip_factor(norm, self._clip_grad))
        if self._average is not None:
            self._average.update(self._optimizer.main)
        self._zero_grad()
        self._strategy.after_update()

    def _zero_grad(self) -> None:
        for shard in self._strategy.shards:
            shard.parameter.grad = shard.summed = None

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Items of all ranks that the loss is a sum over."""
        count = sum(self._objective.count(batch) for batch in batches)
        tokens = torch.full((), count, dtype=torch.float64, device=self._device)
        self._all_reduce(tokens)
        return tokens

    def _all_reduce(self, tensor: Tensor) -> None:
        if self.dp_size > 1:
            dist.all_reduce(tensor)

    def _mode(self, training: bool) -> None:
        """Adapters drop what they read only while they are trained."""
        if self._strategy.module.training != training:
            self._strategy.module.train(training)

    # evaluation

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        self._mode(training=False)
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in self._even(batches):
            loss += self._loss(batch)
            self._row_losses.clear()
        tokens = self._count(batches)
        self._all_reduce(loss)
        total, count = torch.stack([loss, tokens]).tolist()
        return total, int(count)

    def forward(self, batches: Sequence[Batch], grad: bool) -> ForwardResult:
        logits: list[Tensor] = []

        def keep(values: Tensor) -> None:
            logits.append(values.float().cpu())

        even = self._even(batches)
        self._zero_grad()
        balancing = 0.0
        if self.balancing is not None and self.balancing.pooled:
            balancing = self.balancing.pool(even, self._loss)
        if self.balancing is not None:
            self.balancing.recorded = []
        if grad:
            losses, tokens = self._accumulate(even, keep)
        else:
            with torch.no_grad():
                losses = [self._loss(batch, keep) for batch in even]
            tokens = self._count(batches)
        total = (
            torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=self._device)
        )
        self._all_reduce(total)
        num_tokens = int(tokens.item())
        experts = (self.balancing.recorded or [])[: len(batches)] if self.balancing is not None else []
        return ForwardResult(logits[: len(batches)], total.item() + balancing * num_tokens, num_tokens, experts)

    @torch.no_grad()
    def outputs(self, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """What the objective's model gives for each batch of this rank, on the CPU. Collective."""
        self._mode(training=False)
        found = []
        for batch in self._even(batches):
            values = self._objective.outputs(self._module, batch.to(self._device))
            found.append({name: value.float().cpu() for name, value in values.items()})
        return found[: len(batches)]

    def _even(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, and fully masked ones until all ranks have as many: a sharded model's forward is collective."""
        most = torch.tensor(len(batches), device=self._device)
        if self.dp_size > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        missing = int(most) - len(batches)
        return [*batches, *([self._objective.empty(batches)] * missing if missing else [])]

    # state

    def state(self, kinds: Sequence[str]) -> Iterator[Slice]:
        for shard in self._owned:
            for kind in self._kinds(kinds, shard):
                for piece in pieces(shard, self._tensor(kind, shard), self._map):
                    yield Slice(kind, piece.name, piece.shape, piece.offset, piece.view)

    @staticmethod
    def _kinds(kinds: Sequence[str], shard: Shard) -> Sequence[str]:
        """Those that there are of a tensor."""
        if not shard.trained:
            return ()
        without = shard.buffer or not shard.parameter.requires_grad
        return [kind for kind in kinds if kind == "param"] if without else kinds

    @torch.no_grad()
    def load_state(self, source: TensorSource, kinds: Sequence[str]) -> None:
        for shard in self._shards:
            for kind in kinds:
                if kind == "param" or shard.updated:
                    target = self._tensor(kind, shard)
                    for piece in pieces(shard, target, self._map):
                        extent = tuple(piece.view.shape)
                        piece.view.copy_(source.read(kind, piece.name, piece.shape, piece.offset, extent))
                    if kind == "param" and isinstance(self._optimizer, MainWeights) and shard.parameter.requires_grad:
                        self._optimizer.set_main(shard.local, target)
                    if kind == "param" and self._average is not None and shard.updated:
                        self._average.of(shard.local).copy_(target)  # what a run without an average begins with

    def _tensor(self, kind: str, shard: Shard) -> Tensor:
        if kind == "param" and isinstance(self._optimizer, MainWeights) and shard.parameter.requires_grad:
            return self._optimizer.main(shard.local)
        if kind == "param":
            return shard.local.detach()
        if kind == EMA and self._average is not None:
            return self._average.of(shard.local)
        if kind in MOMENTS and self._optimizer is not None:
            return self._optimizer.moment(kind, shard.local)
        grad = shard.grad if kind == "grad" else None
        if grad is None:
            raise ValueError(f"no '{kind}' of {shard.name} here")
        return grad

    def optimizer_step(self) -> int:
        return self._optimizer.updates if self._optimizer is not None else 0

    def set_optimizer_step(self, step: int) -> None:
        if self._optimizer is not None:
            self._optimizer.set_updates(step)

    def modules(self) -> dict[str, nn.Module]:
        names = {id(shard.parameter): (shard.name,) for shard in self._strategy.shards}
        return by_published_name([self._strategy.module], names, watched(self.published))

    def close(self) -> None:
        """Let go of the model and its process groups' users."""
        self._zero_grad()
        if self.balancing is not None:
            self.balancing.forget()
        self._shards, self._updated, self._owned, self._optimizer, self._average = [], [], [], None, None
        del self._strategy
