"""A layer of experts over ranks: transformers' numbers, whoever holds which expert and however tokens get there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.moe.balance import Coefficients
from tests.parallel import moe_layers as on_ranks
from tests.parallel.moe_layers import HIDDEN, SHARED_WIDTH, TOKENS, Plan
from tests.ranks import Ranks

MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"experts": 6, "topk": 2},
    "softmax_shared_gate": {
        "experts": 6,
        "topk": 3,
        "normalised": False,
        "shared_ffn_hidden_size": SHARED_WIDTH,
        "shared_gate": True,
    },
    "sigmoid_groups_shared": {
        "experts": 12,
        "topk": 4,
        "score_function": "sigmoid",
        "bias": True,
        "groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
        "shared_ffn_hidden_size": SHARED_WIDTH,
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ep2": (2, {"ep": 2}),
    "ep2_tp2": (2, {"ep": 2, "tp": 2, "sp": True}),
    "etp2": (2, {"tp": 2, "sp": True, "etp": 2}),
    "tp2_experts_whole": (2, {"tp": 2, "sp": True}),
}
WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {"grouped": False},
    "allgather": {"dispatcher": "allgather", "grouped": False},
}


def expected(mixture: dict[str, Any]) -> dict[str, Any]:
    """Output and gradients of transformers' block."""
    module = on_ranks.block(mixture)
    x, coefficients = on_ranks.inputs()
    x = x.clone().requires_grad_()
    output = module(x.unsqueeze(0))
    output = (output[0] if isinstance(output, tuple) else output).reshape(TOKENS, HIDDEN)
    (output * coefficients).sum().backward()
    return {"output": output.detach(), "input": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def assert_equal(values: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """What all ranks gave, put together, against transformers' block."""
    for key, mine in (("output", "output"), ("input", "input_grad")):
        got = torch.zeros(TOKENS, HIDDEN)
        for value in values:
            got[slice(*value["rows"])] = value[mine]
        torch.testing.assert_close(got, wanted[key], rtol=1e-5, atol=1e-5)
    router = sum(value["grads"]["router.weight"] for value in values)
    torch.testing.assert_close(router, wanted["gate.weight"], rtol=1e-5, atol=1e-5)
    up, down = torch.zeros_like(wanted["experts.gate_up_proj"]), torch.zeros_like(wanted["experts.down_proj"])
    for value in values:
        rank, size = value["etp"]
        for name, grad in value["grads"].items():
            parts = name.split(".")
            if parts[0] == "experts":
                expert = value["first_expert"] + int(parts[2])
                where = up[expert].chunk(2) if parts[3] == "linear_fc1" else (down[expert],)
                dim = 0 if parts[3] == "linear_fc1" else 1
                for place, share in zip(where, grad.chunk(len(where)), strict=True):
                    place.chunk(size, dim)[rank].add_(share)
    torch.testing.assert_close(up, wanted["experts.gate_up_proj"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(down, wanted["experts.down_proj"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layer_is_transformers_block(ranks: Ranks, layout: str) -> None:
    """Softmax and sigmoid routers, with and without a shared expert, both dispatchers."""
    world, settings = LAYOUTS[layout]
    plans = [(m, Plan(mixture, settings, way)) for m, mixture in MIXTURES.items() for way in WAYS.values()]
    values = ranks.call(on_ranks.several, world, calls=[{"plan": plan} for _, plan in plans])
    for index, (name, plan) in enumerate(plans):
        results = [value[index] for value in values]
        assert_equal(results, expected(MIXTURES[name]))
        counts = sum(result["counts"] for result in results)
        assert counts.sum() == TOKENS * plan.mixture["topk"]


def routed(mixture: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, probabilities and top-k choices (bool) of a softmax router, in plain torch."""
    logits = x @ on_ranks.weights(mixture)["gate.weight"].T
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    for row, values in enumerate(logits.tolist()):
        for expert in sorted(range(len(values)), key=lambda e: -values[e])[: mixture["topk"]]:
            chosen[row, expert] = True
    return logits, logits.softmax(-1), chosen


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_full_expert_turns_tokens_away(ranks: Ranks, policy: str) -> None:
    """Whatever the layout, of a micro-batch each expert takes its capacity, and a dropped token adds nothing."""
    mixture, x = MIXTURES["softmax"], on_ranks.inputs()[0]
    limit = math.ceil(TOKENS * 2 / 6 * 0.75)
    _, probs, chosen = routed(mixture, x)
    weights = probs * chosen / (probs * chosen).sum(-1, keepdim=True)
    kept = torch.zeros_like(chosen)
    for expert in range(6):
        tokens = chosen[:, expert].nonzero().flatten().tolist()
        ranked = sorted(tokens, key=lambda t: -weights[t, expert].item()) if policy == "probs" else tokens
        kept[ranked[:limit], expert] = True
    assert (chosen & ~kept).any()
    tensors, wanted = on_ranks.weights(mixture), torch.zeros(TOKENS, HIDDEN)
    for token, expert in (kept).nonzero().tolist():
        gate, up = (tensors["experts.gate_up_proj"][expert] @ x[token]).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        wanted[token] += weights[token, expert] * (tensors["experts.down_proj"][expert] @ inner)
    for world, settings in (LAYOUTS["single"], LAYOUTS["ep2_tp2"]):
        plan = Plan(mixture, settings, {"capacity_factor": 0.75, "drop": policy})
        values = ranks.call(on_ranks.several, world, calls=[{"plan": plan}])
        got = torch.cat([value[0]["output"] for value in values])
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_losses_on_router_decisions(ranks: Ranks) -> None:
    """Each loss's value and gradient are those of its formula, and tensor-parallel ranks share them."""
    mixture, x = MIXTURES["softmax"], on_ranks.inputs()[0]
    weight = on_ranks.weights(mixture)["gate.weight"].clone().requires_grad_()
    logits = x @ weight.T
    probs, chosen = logits.softmax(-1), routed(mixture, x)[2]
    load = chosen.float().sum(0) / TOKENS
    terms = {
        "aux": 6 * (load * probs.mean(0)).sum() * TOKENS,
        "sequence": 6 * (load / 2 * probs.mean(0)).sum() * TOKENS,
        "z": logits.logsumexp(-1).square().sum(),
    }
    base = expected(mixture)["gate.weight"]
    calls, wanted = [], []
    for index, (name, value) in enumerate(terms.items()):
        (gradient,) = torch.autograd.grad(value, weight, retain_graph=True)
        wanted.append((index, value.item(), base + 0.1 * gradient))
        calls.append({"losses": Coefficients(**{name: 0.1})})
    for world, settings in (LAYOUTS["single"], LAYOUTS["ep2_tp2"]):
        plan = Plan(mixture, settings)
        values = ranks.call(on_ranks.several, world, calls=[{"plan": plan, **call} for call in calls])
        for call, (index, value, gradient) in enumerate(wanted):
            results = [v[call] for v in values]
            assert sum(r["sums"][index].item() for r in results) == pytest.approx(value, rel=1e-5)
            router = sum(r["grads"]["router.weight"] for r in results)
            torch.testing.assert_close(router, gradient, rtol=1e-5, atol=1e-5)


def test_grouped_experts_are_the_same_experts(ranks: Ranks) -> None:
    """One grouped product or one product for each expert: the same numbers."""
    plans = [Plan(MIXTURES["softmax"], {"ep": 2}, {"grouped": grouped}) for grouped in (False, True)]
    values = ranks.call(on_ranks.several, 2, calls=[{"plan": plan} for plan in plans])
    for one_by_one, together in values:
        torch.testing.assert_close(together["output"], one_by_one["output"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together["input_grad"], one_by_one["input_grad"], rtol=1e-5, atol=1e-6)
        for name, matrix in (("weight1", "linear_fc1"), ("weight2", "linear_fc2")):
            parts = [g for n, g in one_by_one["grads"].items() if f".{matrix}." in n]
            torch.testing.assert_close(together["grads"][f"experts.{name}"], torch.cat(parts), rtol=1e-5, atol=1e-5)
