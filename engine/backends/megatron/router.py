"""The router: megatron-core's, with this project's choice of experts, losses, capacity and accounting.

Everything counts real tokens only, over all ranks that share a micro-batch, so that no layout changes a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from engine.backends.megatron.attention import Documents
from engine.backends.megatron.context_parallel import in_order, share
from engine.moe.balance import Coefficients, balancing_sum, scores, z_sum
from engine.moe.capacity import capacity, keep
from engine.moe.mixture import Mixture
from engine.moe.route import choose, weigh


@dataclass
class Objective:
    """What the routers of a model add to the loss of the step that runs. One for all of them; the backend sets it."""

    losses: Coefficients
    layers: int  # with experts, in the whole model
    scale: float = 0.0  # supervised tokens of the global batch for each real one; 0: no loss is added
    load_E: Tensor | None = None  # loads that are known already, see `pooled`
    counting: bool = False  # count also where nothing is learnt


class Router(TopKRouter):
    """Chooses the experts of each token."""

    def __init__(self, *args: Any, mixture: Mixture, objective: Objective, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mixture, self.objective = mixture, objective
        # megatron-core's own would move before it is known whether the step is taken, and counts padding.
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(mixture.experts) if mixture.bias else None)
        self.documents: Documents | None = None  # of the tokens to come, see `MoETransformerLayer`
        self.replay: Replay = Replay()
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts_E: Tensor | float = 0.0
        self.mass_E: Tensor | float = 0.0
        self.sums_3: Tensor | float = 0.0

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [t, E] and choices (bool [t, E]) for logits [t, 1, E] of this rank's tokens."""
        objective = self.objective
        logits_TE = logits.view(-1, self.mixture.experts)
        row_T = self._rows(logits_TE)
        learning = self.training and torch.is_grad_enabled()
        self.replay.at(self.documents, self.layer_number, self._share, self.training)
        chosen_Tk = self.replay.decide(choose(logits_TE, self.expert_bias, self.mixture))
        weights_Tk = weigh(logits_TE, chosen_Tk, self.mixture).type_as(logits_TE)
        probs = torch.zeros_like(logits_TE).scatter(1, chosen_Tk, weights_Tk)
        chosen = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_Tk, True)
        if learning or objective.counting:
            probs = self._account(logits_TE, probs, chosen, row_T, learning)
        if self.config.moe_expert_capacity_factor is not None:
            kept = self._kept(probs, chosen, row_T)
            probs, chosen = probs * kept, kept
        return probs, chosen

    def _rows(self, logits_TE: Tensor) -> Tensor:
        """The row of each token here, negative for padding."""
        if self.documents is None or self.documents.rows_t is None:
            return torch.zeros(logits_TE.shape[0], dtype=torch.int64, device=logits_TE.device)
        return self._share(self.documents.rows_t)

    def _share(self, x_t: Tensor) -> Tensor:
        """This tensor-parallel rank's part of what all of them know, under sequence parallelism."""
        return x_t.chunk(self.tp_group.size())[self.tp_group.rank()] if self.config.sequence_parallel else x_t

    def _account(self, logits_TE: Tensor, probs: Tensor, chosen: Tensor, row_T: Tensor, learning: bool) -> Tensor:
        """Count, and add the losses where something is learnt."""
        objective, losses = self.objective, self.objective.losses
        with torch.no_grad():
            real = chosen & (row_T >= 0).unsqueeze(1)
            self.counts_E = self.counts_E + real.sum(0).double()
        terms = [torch.zeros((), device=probs.device)] * 3
        if losses.aux or losses.sequence:
            values_TE = scores(logits_TE, self.mixture.score_function)
            self.mass_E = self.mass_E + (values_TE.detach() * (row_T >= 0).unsqueeze(1)).sum(0).double()
        if losses.aux:
            terms[0] = self._aux(values_TE, chosen, row_T)
        if losses.sequence:
            rows = self.documents.rows if self.documents else 1
            terms[1] = balancing_sum(values_TE, chosen, row_T, rows, self._sum) / self.topk
        if losses.z:
            terms[2] = z_sum(logits_TE, row_T)
        self.sums_3 = self.sums_3 + torch.stack(terms).detach().double()
        if learning and objective.scale and losses:
            weights = (losses.aux / objective.layers, losses.sequence, losses.z)
            total = sum(weight * objective.scale * term for weight, term in zip(weights, terms, strict=True))
            probs = MoEAuxLossAutoScaler.apply(probs, total)
        return probs

    def _aux(self, values_TE: Tensor, chosen: Tensor, row_T: Tensor) -> Tensor:
        if self.objective.load_E is None:
            return balancing_sum(values_TE, chosen, row_T.clamp(max=0), 1, self._sum)
        mass_E = (values_TE * (row_T >= 0).unsqueeze(1)).sum(0)
        return values_TE.shape[1] * (self.objective.load_E * mass_E).sum()

    def _sum(self, x: Tensor) -> Tensor:
        """Over the ranks that share a micro-batch."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(x, group=self.tp_cp_group)
        return x

    @torch.no_grad()
    def _kept(self, probs: Tensor, chosen: Tensor, row_T: Tensor) -> Tensor:
        """The assignments that fit, decided over all tokens of the micro-batch in order; padding takes no room."""
        real = chosen & (row_T >= 0).unsqueeze(1)
        known = torch.cat([probs.detach().float(), real.float(), (row_T >= 0).float().unsqueeze(1)], dim=1)
        size = self.tp_cp_group.size()
        if size > 1:
            everyone = known.new_empty(size * known.shape[0], known.shape[1])
            dist.all_gather_into_tensor(everyone, known.contiguous(), group=self.tp_cp_group)
            known = everyone
        cp = self.cp_group.size()
        if cp > 1:
            known = in_order(known, cp)
        experts = self.config.num_moe_experts
        limit = capacity(int(known[:, -1].sum()), self.topk, experts, self.config.moe_expert_capacity_factor)
        kept = keep(known[:, :experts], known[:, experts:-1] > 0, limit, self.config.moe_token_drop_policy)
        return self._share(share(kept, cp, self.cp_group.rank()) if cp > 1 else kept)


class Replay:
    """Router decisions written down, or given."""

    def __init__(self) -> None:
        self.recording = False
        self.recorded: list[Tensor] = []  # [t, k] of each micro-batch in order
        self._given: Tensor | None = None
        self._writes = False

    def at(self, documents: Documents | None, layer_number: int, share: Any, training: bool) -> None:
        """Get ready for the next micro-batch."""
        # Where activations are recomputed a micro-batch comes twice, without and with gradients.
        self._writes = self.recording and torch.is_grad_enabled() == training
        given = documents.experts.get(layer_number - 1) if documents is not None and documents.experts else None
        self._given = None if given is None else share(given)

    def decide(self, chosen_tk: Tensor) -> Tensor:
        """The given experts in the place of the chosen ones, except where they are below 0 (padding)."""
        if self._given is not None:
            chosen_tk = self._given.where(self._given >= 0, chosen_tk)
        if self._writes:
            self.recorded.append(chosen_tk)
        return chosen_tk
