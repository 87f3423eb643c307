"""The routers of a model over a whole step: what their losses count for, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.megatron.context_parallel import all_tokens
from engine.backends.megatron.experts import routers
from engine.backends.megatron.router import Router
from engine.data.batch import Batch, token_counts
from engine.moe.balance import Coefficients, published_aux_loss, step_losses
from engine.moe.bias import update
from engine.moe.load import summary
from engine.schema import Run


class Accounts:
    """Of all routers of this rank. Every method that says so is collective over all ranks of the run."""

    def __init__(self, run: Run, chunks: Sequence[Any], device: torch.device, mode: str) -> None:
        self._routers, self._device, self._run = routers(chunks), device, run
        self._experts, self._topk = run.model.mixture().experts, run.model.mixture().topk
        layers = expert_layers(chunks[0].config)
        self._layers = len(layers)  # those that are reported; layers for multi-token prediction come after them
        spec = chunks[0].predictor_spec
        layers += spec.expert_layers(chunks[0].config.num_layers) if spec else []
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._tokens = 1.0
        self._steps = 0
        # The reference's own loss has the balancing loss only where it is asked to give the router's logits.
        self.pooled = (
            mode == "forward" and getattr(run.model, "output_router_logits", False) and published_aux_loss(run) > 0
        )
        self._losses = step_losses(run)
        if mode == "forward":
            self._losses = Coefficients(aux=published_aux_loss(run) if self.pooled else 0.0)
        for router in self._routers:
            router.objective.losses = self._losses

    def begin(self, batches: Sequence[Batch]) -> None:
        """Before a step: how many supervised tokens there are for each real one. Collective."""
        totals = torch.tensor(token_counts(batches), dtype=torch.float64, device=self._device)
        dist.all_reduce(totals)  # ranks of one replica count the same, which leaves the ratio as it is
        supervised, self._tokens = totals.tolist()
        for router in self._routers:
            router.reset()
            router.objective.scale = max(supervised, 1.0) / max(self._tokens, 1.0)
            router.objective.load_E = None

    def end(self, updated: bool) -> dict[str, Any]:
        """After a step: its metrics. Moves correction biases if weights were updated. Collective."""
        counts, _, sums = self._gathered()
        rate = self._run.moe.bias_update_rate
        for router in self._routers if updated and rate else ():
            if router.expert_bias is not None and router.weight.requires_grad:
                update(router.expert_bias, counts[self._places[router.layer_number - 1]], rate)
        counts, sums = counts[: self._layers], sums[: self._layers]
        tokens = float(counts.sum()) / (self._topk * max(1, self._layers))
        self._steps += 1
        whole = self._steps % self._run.logger.interval == 0
        return summary(counts.cpu(), sums.cpu(), tokens, self._losses, whole)

    def pool(self, batches: Sequence[Batch], forward: Callable[[], Any]) -> float:
        """The reference's balancing loss, times its coefficient, over all layers and rows of a batch. Collective.

        transformers adds up counts and probabilities over all layers and tokens before it multiplies them
        (`load_balancing_loss_func`), so they must be known before a gradient can be taken: `forward` runs the model
        once for that, and the pass that learns finds the loads here.
        """
        self.begin(batches)
        for router in self._routers:
            router.objective.counting = True
        forward()
        for router in self._routers:
            router.objective.counting = False
        counts, mass, _ = self._gathered()
        assignments = counts.sum()
        rows = assignments / self._topk  # tokens, once for each layer
        load, share = counts.sum(0) / rows, mass.sum(0) / rows
        for router in self._routers:
            router.objective.load_E = load.float()
        return float(published_aux_loss(self._run) * self._experts * (load * share).sum())

    def record(self) -> None:
        """Write down the decisions of the forward pass to come."""
        for router in self._routers:
            router.replay.recorded, router.replay.recording = [], True

    def recorded(self, batches: Sequence[Batch]) -> list[dict[int, Tensor]]:
        """What was written down since: for each batch and layer of this stage int64 [B, S, k], on the CPU.

        Collective over the ranks that share a micro-batch, of which one has the answer and the others nothing.
        """
        found: list[dict[int, Tensor]] = [{} for _ in batches]
        for router in self._routers:
            router.replay.recording = False
            for batch, chosen_tk, place in zip(batches, router.replay.recorded, found, strict=False):
                whole = self._all_tokens(router, chosen_tk)
                if router.tp_cp_group.rank() == 0:
                    rows, length = batch.tokens_BS.shape
                    place[router.layer_number - 1] = whole[: rows * length].view(rows, length, -1).cpu()
            router.replay.recorded = []
        return found

    @staticmethod
    def _all_tokens(router: Router, chosen_tk: Tensor) -> Tensor:
        if router.config.sequence_parallel and router.tp_group.size() > 1:
            size, k = chosen_tk.shape
            parts = chosen_tk.new_empty(router.tp_group.size() * size, k)
            dist.all_gather_into_tensor(parts, chosen_tk.contiguous(), group=router.tp_group)
            chosen_tk = parts
        return all_tokens(chosen_tk, router.cp_group) if router.cp_group.size() > 1 else chosen_tk

    def _gathered(self) -> tuple[Tensor, Tensor, Tensor]:
        """Assignments [L, E], scores [L, E] and loss sums [L, 3] of all ranks. Collective."""
        width = self._experts
        table = torch.zeros(len(self._places), 2 * width + 3, dtype=torch.float64, device=self._device)
        for router in self._routers:
            row = table[self._places[router.layer_number - 1]]
            row[:width] += router.counts_E
            row[width : 2 * width] += router.mass_E
            row[2 * width :] += router.sums_3
        dist.all_reduce(table)
        return table[:, :width], table[:, width : 2 * width], table[:, 2 * width :]


def expert_layers(config: Any) -> list[int]:
    """The layers (from 0) that have experts."""
    return [layer for layer, has in enumerate(config.moe_layer_freq) if has]
