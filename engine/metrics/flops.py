"""How much arithmetic a training step is, and how much of the hardware's peak it uses. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.checkpoint.weight_map import WeightMap
from engine.family import load_dotted, load_family
from engine.schema import Run
from hardware.base import ChipSpec

EMBEDDINGS = ("embed_tokens.weight", "wte.weight")  # ends of published names


def flops_per_token(model: Any, weight_map: WeightMap, seq_len: int) -> float:
    """Training FLOPs for each token of a transformer: 6 N + 12 L H Q T.

    Source: Chowdhery et al. 2022, PaLM, appendix B. Forward and backward pass of the matrix products; recomputation
    does not count. N are the weights that take part in a matrix product: all matrices, with the output head (a tied one
    too) and without the lookup of input embeddings; of a layer's routed experts those that a token goes to. L layers,
    H heads of Q channels, T = `seq_len`: by the paper's convention the whole T x T square of scores counts, also where
    causal or packed attention skips part of it.
    """
    products = matmul_parameters(weight_map.published, active_share(model))
    heads = model.num_attention_heads * head_dim(model)
    # Recurrent layers read and write a state instead of scores; that is a small part and does not count.
    scored = model.num_hidden_layers - (sum(model.linear()) if hasattr(model, "linear") else 0)
    ahead = getattr(model, "mtp_layers", None) or 0  # each has a layer and uses the head once more
    products += ahead * model.vocab_size * model.hidden_size
    return 6.0 * products + 12.0 * (scored + ahead) * heads * seq_len


def flops_of_run(run: Run) -> float | None:
    """`flops_per_token` of a run's model; None for a model that is no dense transformer."""
    if not all(hasattr(run.model, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")):
        return None
    learn = run.model.mtp_layers if run.mtp.loss_weight else 0
    model = dataclasses.replace(run.model, mtp_layers=learn)
    weight_map = load_dotted(load_family(run.family).of(run.model.model_type).weights)(model)
    return flops_per_token(model, weight_map, run.data.seq_len)


def active_share(model: Any) -> Fraction:
    """The share of its routed experts that a token goes to; 1 without experts."""
    mixture = model.mixture()
    return Fraction(mixture.topk, mixture.experts) if mixture else Fraction(1)


def matmul_parameters(published: Mapping[str, tuple[int, ...]], active: Fraction = Fraction(1)) -> int:
    """Weights in matrix products; input embeddings count only where they are the output head as well.

    Of routed experts, which are published under `.experts.<number>.`, `active` counts.
    """
    untied = "lm_head.weight" in published
    total = Fraction(0)
    for name, shape in published.items():
        if len(shape) >= 2 and not (untied and name.endswith(EMBEDDINGS)):
            total += math.prod(shape) * (active if ".experts." in name else 1)
    return int(total)


def head_dim(model: Any) -> int:
    if hasattr(model, "v_head_dim"):  # latent attention: of its two products one is as wide as keys, one as values
        return (model.head_channels + model.v_head_dim) // 2
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


@dataclass(frozen=True)
class Peak:
    """What utilisation is measured against."""

    flops: float  # for each second, over all devices of the run
    source: str


def peak_of(spec: ChipSpec, precision: str, tf32: bool, devices: int) -> Peak | None:
    """The peak of the run's devices in its precision, or None where nobody publishes one: then there is no MFU."""
    dtype = "tf32" if precision == "fp32" and tf32 and "tf32" in spec.peak_flops else precision
    fact = spec.peak_flops.get(dtype)
    if fact is None or not fact.value:
        return None
    source = f"{fact.value / 1e12:g} TFLOP/s {dtype}, {fact.source} ({fact.confidence})"
    return Peak(fact.value * devices, source if devices == 1 else f"{devices} x {source}")
