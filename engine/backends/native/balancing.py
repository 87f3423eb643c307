"""The losses on router decisions of a reference model, and their numbers: the same as on the Megatron backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.data.batch import Batch, sample_rows, token_counts
from engine.moe.balance import Coefficients, balancing_sum, published_aux_loss, scores, step_losses, z_sum
from engine.moe.bias import is_trained, saved_buffers, update
from engine.moe.load import summary
from engine.moe.route import weigh
from engine.schema import Run


class Balancing:
    """Listens to the routers of a model during forward passes that learn, and over steps adds up what they did."""

    def __init__(self, model: nn.Module, run: Run, device: torch.device, mode: str) -> None:
        self._run, self._device = run, device
        self._mixture = run.model.mixture()
        self._experts, self._topk = self._mixture.experts, self._mixture.topk
        gates = [(name, gate) for name, gate in model.named_modules() if is_router(gate)]
        for name, gate in gates:
            layer = int(re.findall(r"layers\.(\d+)\.", name)[0])
            gate.register_forward_hook(partial(self._hear, layer))
        self._layers = len(gates)
        self._biases = [bias_of(model, name) for name, _ in gates] if self._mixture.bias else []
        self.pooled = (
            mode == "forward" and getattr(run.model, "output_router_logits", False) and published_aux_loss(run) > 0
        )
        self._losses = step_losses(run)
        if mode == "forward":
            self._losses = Coefficients(aux=published_aux_loss(run) if self.pooled else 0.0)
        self._heard: Optional[list[tuple[Tensor, Tensor]]] = None
        self._choices: dict[int, Tensor] = {}
        self._spoken: list[tuple[Tensor, Tensor]] = []  # logits and choices of each router
        self.recorded: Optional[list[dict[int, Tensor]]] = None  # the choices of micro-batches, once there is a list
        self._load_E: Optional[Tensor] = None
        self._scale, self._steps = 0.0, 0
        self._table = torch.zeros(0)

    def forget(self) -> None:
        """Let go of the last micro-batch, whose graph holds the model that holds this."""
        self._spoken, self._heard, self._choices = [], None, {}

    def _hear(self, layer: int, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """A router has spoken: (logits, weights, choices). Given choices take the place of its own."""
        logits, weights, choices = output
        if (given := self._batch.experts.get(layer)) is not None:
            given = given.flatten(0, 1)
            choices = given.where(given >= 0, choices)
            weights = weigh(logits, choices, self._mixture).to(weights.dtype)
        if self._heard is not None:  # not when activations are recomputed
            self._heard.append((logits.view(-1, self._experts), choices.detach()))
            self._choices[layer] = choices.detach()
        return logits, weights, choices

    def begin(self, batches: Sequence[Batch]) -> None:
        """Before a step: how many supervised tokens there are for each real one. Collective."""
        totals = torch.tensor(token_counts(batches), dtype=torch.float64, device=self._device)
        self._sum(totals)
        supervised, tokens = totals.tolist()
        self._scale = max(supervised, 1.0) / max(tokens, 1.0)
        self._table = torch.zeros(self._layers, 2 * self._experts + 3, dtype=torch.float64, device=self._device)

    def listen(self, batch: Batch) -> None:
        """Before the forward pass of a micro-batch."""
        self._batch, self._heard, self._choices = batch, [], {}

    def note(self) -> None:
        """After it: routers that speak again are recomputed."""
        self._spoken, self._heard = self._heard or [], None
        if self.recorded is not None:
            shape = (*self._batch.tokens_BS.shape, -1)
            self.recorded.append({layer: chosen.view(shape).cpu() for layer, chosen in self._choices.items()})

    def term(self, batch: Batch) -> Tensor:
        """After that: what the routers add to the sum of its tokens' losses."""
        rows, length = batch.tokens_BS.shape
        row_T = sample_rows(batch).to(self._device).repeat_interleave(length)
        weights = (self._losses.aux / self._layers, self._losses.sequence, self._losses.z)
        total = torch.zeros((), device=self._device)
        for layer, (logits_TE, chosen_Tk) in enumerate(self._spoken):
            terms = self._terms(self._table[layer], logits_TE, chosen_Tk, row_T, rows)
            total = total + sum(weight * term for weight, term in zip(weights, terms, strict=True))
        return self._scale * total

    def _terms(self, table: Tensor, logits_TE: Tensor, chosen_Tk: Tensor, row_T: Tensor, rows: int) -> list[Tensor]:
        """The three losses' sums of a layer; what happened is added to its row of the table."""
        values_TE, real_T1 = scores(logits_TE, self._mixture.score_function), (row_T >= 0).unsqueeze(1)
        chosen = torch.zeros_like(values_TE, dtype=torch.bool).scatter(1, chosen_Tk, True)
        mass_E = (values_TE * real_T1).sum(0)
        if self._load_E is not None:
            aux = self._experts * (self._load_E * mass_E).sum()
        else:
            aux = balancing_sum(values_TE, chosen, row_T.clamp(max=0), 1, _alone)
        terms = [
            aux,
            balancing_sum(values_TE, chosen, row_T, rows, _alone) / self._topk,
            z_sum(logits_TE, row_T),
        ]
        with torch.no_grad():
            counts = (chosen & real_T1).sum(0)
            table += torch.cat([counts.double(), mass_E.double(), torch.stack(terms).double()])
        return terms

    def end(self) -> dict[str, Any]:
        """After an update: the step's metrics. Moves correction biases. Collective."""
        self._sum(self._table)
        rate = self._run.moe.bias_update_rate
        for (bias_E, trained), row in zip(self._biases, self._table, strict=False):
            if trained and rate:
                update(bias_E, row[: self._experts], rate)
        counts, sums = self._table[:, : self._experts].cpu(), self._table[:, -3:].cpu()
        self._steps += 1
        tokens = float(counts.sum()) / (self._topk * self._layers)
        return summary(counts, sums, tokens, self._losses, self._steps % self._run.logger.interval == 0)

    def pool(self, batches: Sequence[Batch], forward: Callable[[Batch], Any]) -> float:
        """The reference's balancing loss over all rows, times its coefficient. See the Megatron backend. Collective."""
        self.begin(batches)
        with torch.no_grad():
            for batch in batches:
                forward(batch)
                self.term(batch)
        self._sum(self._table)
        counts, mass = self._table[:, : self._experts].sum(0), self._table[:, self._experts : -3].sum(0)
        places = counts.sum() / self._topk  # tokens, once for each layer
        self._load_E = (counts / places).float()
        return float(published_aux_loss(self._run) * self._experts * (counts * mass).sum() / places**2)

    def _sum(self, x: Tensor) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(x)


def is_router(module: nn.Module) -> bool:
    """transformers calls them so: they give (logits, weights, choices)."""
    return type(module).__name__.lower().endswith("topkrouter")


def bias_of(model: nn.Module, router: str) -> tuple[Tensor, bool]:
    """A router's correction bias, its own or that of the block around it, and whether it is trained."""
    for place in (router, router.rpartition(".")[0]):
        for name, buffer in saved_buffers(model.get_submodule(place)):
            return buffer, is_trained(model, f"{place}.{name}")
    raise RuntimeError(f"{router} has no correction bias; the family's mixture says that it has one")


def _alone(x: Tensor) -> Tensor:
    """A rank has all tokens of its micro-batches."""
    return x
