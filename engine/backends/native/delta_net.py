"""Our kernels inside transformers' gated DeltaNet layers, whose torch functions know nothing of packed documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.backends.delta_net import Heads, by_head, gated_norm, mix
from hardware.kernels.delta_rule import DeltaRule

PROJECTIONS = ("in_proj_qkvz", "in_proj_ba", "out_proj")


def delta_nets(model: nn.Module) -> list[nn.Module]:
    """A model's gated DeltaNet layers, found by transformers' names for their parts."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in PROJECTIONS)]


def attach(layers: Sequence[nn.Module], kernels: DeltaRule) -> None:
    """Give layers a forward pass that begins anew with every document. Parameters stay where they are."""

    # Where documents end differs from batch to batch; code compiled around it would be made anew for each.
    @torch.compiler.disable
    def run(*inputs: Any) -> Tensor:
        return mix(*inputs, kernels)

    for layer in layers:
        layer.forward = partial(_forward, layer, run)


def _forward(
    layer: Any,
    run: Callable[..., Tensor],
    hidden_states: Tensor,
    cu_seq_lens_q: Optional[Tensor] = None,
    **_: Any,
) -> Tensor:
    """[B, S, H]; without boundaries every row is a document. There is no cache and no mask in training."""
    rows, length = hidden_states.shape[:2]
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
    heads = Heads(layer.head_k_dim, layer.head_v_dim, layer.num_v_heads // layer.num_k_heads)
    hidden = hidden_states.flatten(0, 1)
    projected = (layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    qkvz, ba = (x.unflatten(-1, (layer.num_k_heads, -1)) for x in projected)
    qkv, z = qkvz.split((heads.mixed, heads.all - heads.mixed), -1)
    conv = by_head(layer.conv1d.weight, heads)
    out = run(qkv, ba, conv, layer.A_log, layer.dt_bias, heads, cu_seq_lens_q)
    z = z.unflatten(-1, (heads.values, heads.value)).flatten(1, 2)
    normed = gated_norm(out, z, layer.norm.weight, layer.norm.variance_epsilon)
    return layer.out_proj(normed.flatten(1)).unflatten(0, (rows, length))
