"""How the experts of a step were loaded, in numbers for metrics.jsonl."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.moe.balance import Coefficients


def summary(counts_LE: Tensor, sums_L3: Tensor, tokens: float, losses: Coefficients, whole: bool) -> dict[str, Any]:
    """A step's row of metrics.

    `counts_LE`: assignments to each expert of each MoE layer; `sums_L3`: the sums of the auxiliary, the sequence and
    the z loss over `tokens` tokens. `moe_imbalance` is the busiest expert's load over the mean for each layer; with
    `whole`, `moe_load` holds every expert's load in thousandths of the mean.
    """
    mean_L1 = counts_LE.mean(1, keepdim=True).clamp(min=1e-9)
    relative = counts_LE / mean_L1
    row: dict[str, Any] = {"moe_imbalance": [round(x, 3) for x in relative.max(1).values.tolist()]}
    for name, coefficient, values in zip(("aux", "sequence", "z"), vars(losses).values(), sums_L3.T, strict=True):
        if coefficient:
            row[f"moe_{name}_loss"] = [float(f"{x:.6g}") for x in (values / max(tokens, 1.0)).tolist()]
    if whole:
        row["moe_load"] = (1000 * relative).round().int().tolist()
    return row
