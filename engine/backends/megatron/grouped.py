"""All experts of a rank in two matrices: one grouped matrix product each, whatever the number of experts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hardware.kernels.grouped import GroupedMatmul


class GroupedExperts(MegatronModule):
    """Gated MLPs of E local experts, as megatron-core's MoELayer calls them.

    `weight1` [E * 2 * F, H] and `weight2` [E * H, F] hold the experts one after another, each as an MLP of its own
    would hold it; F is this rank's share of an expert's width.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: Any = None,
        matmul: GroupedMatmul | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts, self._matmul = num_local_experts, matmul
        width, hidden = config.moe_ffn_hidden_size // pg_collection.expt_tp.size(), config.hidden_size
        self.weight1 = self._parameter(num_local_experts * 2 * width, hidden)
        self.weight2 = self._parameter(num_local_experts * hidden, width)

    def _parameter(self, rows: int, columns: int) -> torch.nn.Parameter:
        config = self.config
        weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        own_groups = config.expert_model_parallel_size > 1
        own_groups |= config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        weight.allreduce = not own_groups  # megatron-core's mark of parameters that only some ranks share
        weight.local_experts = self.num_local_experts
        return weight

    def forward(self, x_TH: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """[T, H] of tokens sorted by expert; `probs_T` are the weights of their outputs."""
        counts = tokens_per_expert.to(x_TH.device)
        experts = self.num_local_experts
        gate, up = self._matmul(x_TH, self.weight1.unflatten(0, (experts, -1)), counts).chunk(2, dim=-1)
        inner = (self.config.activation_func(gate) * up * probs_T.unsqueeze(-1)).to(x_TH.dtype)
        return self._matmul(inner, self.weight2.unflatten(0, (experts, -1)), counts), None

    def backward_dw(self) -> None:
        """megatron-core asks for delayed weight gradients here; none are delayed."""
