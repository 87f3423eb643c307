"""`engine.backends.base.Backend` on megatron-core."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from engine.backends.base import Accept, ForwardResult, Slice, StepResult, TensorSource, always
from engine.backends.megatron import groups
from engine.backends.megatron.accounts import Accounts
from engine.backends.megatron.dsa import IndexerAccounts
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.mtp import freeze
from engine.backends.megatron.optimizer import AdamW
from engine.backends.megatron.pipeline import MicroResult, holds_logits, reports, run_microbatches
from engine.backends.megatron.state import Entry, entries, fill, pieces, slices
from engine.backends.sources import add_up, source_metrics, source_names
from engine.checkpoint.weight_map import WeightMap
from engine.comm import Comm
from engine.data.batch import Batch
from engine.errors import OtherRank, UserError
from engine.faults.finite import gather_bad_tensors, not_finite
from engine.inspect.modules import by_published_name, watched
from engine.schema import Run


class MegatronBackend:
    """One rank's stage of a model, or its virtual stages; the optimizer and the layout."""

    def __init__(
        self,
        run: Run,
        chunks: Sequence[CausalLM],
        weight_map: WeightMap,
        device: torch.device,
        mode: str,
        kernels: Mapping[str, str],
        fused_adamw: bool,
    ) -> None:
        """`chunks` are the virtual stages of an interleaved pipeline, in order, or the only stage."""
        self._run, self._mode, self._device = run, mode, device
        self._chunks = [chunk.to(device) for chunk in chunks]
        self._config = chunks[0].config  # the one that megatron-core's schedules read
        self._model: list[CausalLM] | list[DistributedDataParallel] = self._chunks
        self._optimizer: AdamW | None = None
        self._accounts = Accounts(run, chunks, device, mode) if run.model.mixture() else None
        self._indexers: IndexerAccounts | None = None
        if run.indexer.loss > 0 and mode == "train":
            layers = sum(not follows for follows in run.model.follows())
            self._indexers = IndexerAccounts(chunks, layers, device)
        spec = chunks[0].predictor_spec
        # Of the layers for multi-token prediction: how many learn here.
        self._predictors = len(spec.layers) if spec and spec.weight and mode != "weights" else 0
        for chunk in self._chunks if mode == "train" and not self._predictors else ():
            freeze(chunk)
        self._entries = entries(self._chunks, weight_map)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.published = weight_map.published
        self._sources = source_names(run)
        # The plugin's own are not chosen among; what single layers chose.
        modules = (module for chunk in chunks for module in chunk.modules())
        self.kernels = {k: v for m in modules for k, v in getattr(m, "kernels", {}).items()} | dict(kernels)
        self.parameters_total = sum(math.prod(shape) for shape in weight_map.parameters.values())
        if mode == "train":
            self._wrap(run.parallelism.strategy == "zero1", run.parallelism.overlap)
            self._optimizer = AdamW(run, self._model, fused_adamw)

    def _wrap(self, sharded: bool, overlap: bool) -> None:
        """Gradients in fp32 buffers, summed over data- and context-parallel ranks."""
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and sharded,
        )
        self._model = [
            # Reducing the first stage's gradients is what the end of a step waits for; the others' hides anyway.
            DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=stage > 0)
            for stage, chunk in enumerate(self._chunks)
        ]
        self._config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            no_sync = [model.no_sync for model in self._model]
            self._config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _train_mode(self, on: bool) -> None:
        for chunk in self._chunks:
            chunk.train(on)

    def train_step(self, batches: Sequence[Batch], lr: float, accept: Accept = always) -> StepResult:
        self._train_mode(True)
        self._optimizer.zero_grad()
        if self._accounts:
            self._accounts.begin(batches)
        if self._indexers:
            self._indexers.begin(batches)
        results = run_microbatches(
            self._model, self._config, batches, self._device, backward=True, predictors=self._predictors
        )
        loss_sum, num_tokens = self._totals(results)
        if not math.isfinite(loss_sum):
            bad_rank, bad_samples = self._bad(batches, results)
            return StepResult(loss_sum, num_tokens, math.nan, bad_samples, bad_rank)
        update = accept(loss_sum / max(1, num_tokens))
        norm = self._optimizer.step(lr, update)
        if not math.isfinite(norm):
            return StepResult(loss_sum, num_tokens, norm, (), *self._bad_gradients())
        metrics = self._accounts.end(update) if self._accounts else {}
        metrics |= self._indexers.end() if self._indexers else {}
        metrics |= self._source_metrics(batches, results)
        metrics |= self._ahead(results)
        return StepResult(loss_sum, num_tokens, norm, updated=update, metrics=metrics)

    def _source_metrics(self, batches: Sequence[Batch], results: Sequence[MicroResult]) -> dict[str, float]:
        """The loss of each source of a mixture. Collective."""
        if not self._sources:
            return {}
        rows = [(b, r.rows_B) for b, r in zip(batches, results, strict=False)] if reports() else []
        totals = add_up(len(self._sources), rows, self._device, with_tokens=holds_logits())
        dist.all_reduce(totals)
        return source_metrics(self._sources, totals)

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        return self._totals(self._forward_only(batches))

    def forward(self, batches: Sequence[Batch], grad: bool) -> ForwardResult:
        balancing = 0.0
        if self._accounts and self._accounts.pooled:
            balancing = self._accounts.pool(batches, lambda: self._forward_only(batches))
        if self._accounts:
            self._accounts.record()
        if grad:
            if self._model is self._chunks:
                self._wrap(sharded=False, overlap=False)
            self._train_mode(True)
            for model in self._model:
                model.zero_grad_buffer()
            results = run_microbatches(self._model, self._config, batches, self._device, True, True, self._predictors)
        else:
            results = self._forward_only(batches, want_logits=True, predictors=self._predictors)
        logits = [result.logits_BSV for result in results[: len(batches)]] if holds_logits() else None
        loss_sum, num_tokens = self._totals(results)
        experts = self._accounts.recorded(batches) if self._accounts else []
        losses = self._ahead(results)
        return ForwardResult(logits, loss_sum + balancing * num_tokens, num_tokens, experts, losses)

    def _ahead(self, results: Sequence[MicroResult]) -> dict[str, float]:
        """The losses of the layers for multi-token prediction, in nats per token that they learn. Collective."""
        if not self._predictors:
            return {}
        totals = torch.zeros(self._predictors, 2, dtype=torch.float64, device=self._device)
        for result in results if reports() else ():
            totals += result.ahead_D2
        dist.all_reduce(totals)
        losses = [loss / max(1.0, tokens) for loss, tokens in totals.tolist()]
        each = {f"mtp_loss.{depth + 1}": loss for depth, loss in enumerate(losses) if len(losses) > 1}
        return {"mtp_loss": sum(losses) / len(losses), **each}

    def _forward_only(
        self, batches: Sequence[Batch], want_logits: bool = False, predictors: int = 0
    ) -> list[MicroResult]:
        self._train_mode(False)
        hooked = [model for model in self._model if getattr(model, "use_forward_hook", False)]
        for model in hooked:  # they gather parameters for the step to come; this gathers them now
            model.disable_forward_pre_hook()
        try:
            return run_microbatches(self._model, self._config, batches, self._device, False, want_logits, predictors)
        finally:
            for model in hooked:
                model.enable_forward_pre_hook()

    def _totals(self, results: Sequence[MicroResult]) -> tuple[float, int]:
        """Loss sum and supervised tokens over all ranks. Collective."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        if reports() and results:
            totals[0] = torch.stack([result.loss_sum for result in results]).sum()
            totals[1] = sum(result.num_tokens for result in results)
        dist.all_reduce(totals)
        loss_sum, num_tokens = totals.tolist()
        return loss_sum, int(num_tokens)

    def _bad(self, batches: Sequence[Batch], results: Sequence[MicroResult]) -> tuple[int | None, tuple[int, ...]]:
        """The first rank with a loss that is not finite, and the samples of all such micro-batches. Collective."""
        mine: list[int] | None = None
        if reports():
            bad = [b for b, r in zip(batches, results, strict=False) if not math.isfinite(r.loss_sum.item())]
            mine = [sample for batch in bad for sample in batch.sample_ids] if bad else None
        answers = Comm(self._device).all_gather(mine)
        ranks = [rank for rank, samples in enumerate(answers) if samples is not None]
        samples = sorted({sample for samples in answers if samples is not None for sample in samples})
        return (ranks[0] if ranks else None), tuple(samples)

    def _bad_gradients(self) -> tuple[int | None, tuple[str, ...]]:
        """The rank whose gradients alone are not finite, if it is one, and the tensors that have them. Collective."""
        held = (entry for entry in self._entries if getattr(entry.parameter, "main_grad", None) is not None)
        grads = ((entry, entry.parameter.main_grad.view(-1)) for entry in held)
        mine = not_finite((piece.name, piece.view) for entry, grad in grads for piece in pieces(entry, grad, 0))
        tensors, rank = gather_bad_tensors(mine, Comm(self._device))
        return rank, tensors

    def state(self, kinds: Sequence[str]) -> Iterator[Slice]:
        for entry in self._entries:
            if not entry.copies and entry.trained:
                for kind in kinds:
                    held = self._held(kind, entry)
                    if held is not None:
                        yield from slices(kind, entry, *held)

    def _held(self, kind: str, entry: Entry) -> tuple[Tensor, int] | None:
        """The elements that this rank answers for, flat, and where they start in the parameter."""
        whole = entry.owner == entry.group.rank()
        if entry.buffer or not entry.parameter.requires_grad:
            return (entry.parameter.detach().view(-1), 0) if whole and kind == "param" else None
        if kind == "grad":
            return (entry.parameter.main_grad.view(-1), 0) if whole else None
        if self._optimizer is None:
            return (entry.parameter.detach().view(-1), 0) if whole else None
        share = self._optimizer.share(entry.parameter)
        if share is None or (share.end - share.start == entry.parameter.numel() and not self._sharded and not whole):
            return None
        tensor = share.main if kind == "param" else share.state[kind]
        return tensor.detach().view(-1), share.start

    @property
    def _sharded(self) -> bool:
        return self._run.parallelism.strategy == "zero1"

    def load_state(self, source: TensorSource, kinds: Sequence[str]) -> None:
        error: UserError | None = None
        try:
            with torch.no_grad():
                for entry in self._entries:
                    for kind in kinds:
                        self._fill(kind, entry, source)
        except UserError as caught:
            error = caught
        if Comm(self._device).any(error is not None):  # none may wait for another in vain
            raise error or OtherRank("another rank could not read its weights; its message says why")
        if self._optimizer is not None:
            self._optimizer.main_to_model()

    def _fill(self, kind: str, entry: Entry, source: TensorSource) -> None:
        if entry.buffer and kind != "param":
            return
        if self._optimizer is None or (kind == "param" and not entry.parameter.requires_grad):
            fill(kind, entry, entry.parameter.detach().view(-1), 0, source)
        elif entry.parameter.requires_grad and (share := self._optimizer.share(entry.parameter)) is not None:
            tensor = share.main if kind == "param" else share.state[kind]
            fill(kind, entry, tensor.detach().view(-1), share.start, source)

    def optimizer_step(self) -> int:
        return self._optimizer.updates

    def set_optimizer_step(self, step: int) -> None:
        self._optimizer.set_updates(step)

    def modules(self) -> dict[str, torch.nn.Module]:
        # The last stage's copy of tied embeddings is a head there.
        held = (entry for entry in self._entries if not getattr(entry.parameter, "shared", False))
        names = {id(entry.parameter): [block.name for block in entry.blocks] for entry in held}
        return by_published_name(self._chunks, names, watched(self.published))

    def close(self) -> None:
        """Destroy the process groups of the layout; another backend may follow. Collective."""
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            if hasattr(module, "token_dispatcher"):
                # It keeps the last micro-batch's graph, a cycle that Python's collector cannot see, and its groups.
                module.token_dispatcher = None
        groups.stop()
