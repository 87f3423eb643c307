"""The Megatron backend over gloo ranks: transformers' numbers in every layout, and states that move between layouts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import TRAINED
from tests.parallel import megatron_ranks as on_ranks
from tests.parallel.megatron_ranks import DENSE, PACKED, Plan, assemble, assert_curve, global_batch, relative
from tests.ranks import Ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2": (2, {}),
    "dp2_ddp": (2, {"strategy": "ddp"}),
    "dp2_overlap": (2, {"overlap": True}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2_selective": (2, {"pp": 2, "recompute": "selective"}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2}),
    "tp2_sp_pp2_full": (4, {"tp": 2, "sp": True, "pp": 2, "recompute": "full"}),
    "tp2_sp_dp2": (4, {"tp": 2, "sp": True}),
    "pp2_dp2_overlap": (4, {"pp": 2, "overlap": True}),
    "pp4": (4, {"pp": 4}),
    "cp2": (2, {"cp": 2}),
    "cp2_tp2_selective": (4, {"cp": 2, "tp": 2, "recompute": "selective"}),
    "cp2_tp2_sp": (4, {"cp": 2, "tp": 2, "sp": True}),
    "cp2_pp2_full": (4, {"cp": 2, "pp": 2, "recompute": "full"}),
    "cp2_dp2_overlap": (4, {"cp": 2, "overlap": True}),
    "cp4": (4, {"cp": 4}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2_vpp2_dp2_overlap": (4, {"pp": 2, "vpp": 2, "overlap": True}),
    "pp2_vpp2_cp2": (4, {"pp": 2, "vpp": 2, "cp": 2}),
}
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied_one_kv_head": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    # Three layers do not divide over two stages.
    "biases_three_layers": {"attention_bias": True, "num_hidden_layers": 3, "num_key_value_heads": 4},
    "llama3_rope": {
        "num_hidden_layers": 2,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn_rope": {
        "num_hidden_layers": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "linear_rope": {"num_hidden_layers": 2, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
}
QUICK = (("tied", "tp2_sp"), ("untied_one_kv_head", "tp2_pp2"), ("tied", "cp2"), ("tied", "pp2_vpp2"))
SLOW = [(case, layout) for case in tuple(CASES)[:3] for layout in LAYOUTS if (case, layout) not in QUICK]
SLOW += [(case, "single") for case in tuple(CASES)[3:]]
# More stages than layers, or layers that do not divide over virtual stages.
SLOW = [(c, n) for c, n in SLOW if c != "biases_three_layers" or (n != "pp4" and "vpp" not in LAYOUTS[n][1])]
BATCHES = {"packed": global_batch(PACKED, 1), "dense": global_batch(DENSE, 2)}
STEPS = [global_batch(PACKED if step % 2 else DENSE, 10 + step) for step in range(10)]


@cache
def expected(case: str) -> dict[str, Any]:
    """Weights, forward numbers and ten AdamW steps of the reference, in this process."""
    model = on_ranks.reference(CASES[case])
    weights = on_ranks.weights_of(model)
    forward = {}
    for name, rows in BATCHES.items():
        model.zero_grad()
        logits, loss = on_ranks.reference_loss(model, rows)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        forward[name] = ([row.detach() for row in logits], loss.item(), gradients)
    curve = on_ranks.reference_steps(model, STEPS)
    return {"weights": weights, "forward": forward, "curve": curve, "after": dict(model.named_parameters())}


@pytest.mark.parametrize(("case", "layout"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_reference_numbers(ranks: Ranks, case: str, layout: str) -> None:
    """Logits, loss, gradients, packed and unpacked, and ten steps of AdamW are those of plain torch."""
    world, settings = LAYOUTS[layout]
    plan, wanted = Plan(settings, CASES[case]), expected(case)
    calls = [
        (on_ranks.forward, {"plan": plan, "weights": wanted["weights"], "rows": rows, "size": 1})
        for rows in BATCHES.values()
    ]
    steps = {"plan": plan, "weights": wanted["weights"], "steps": STEPS, "size": 2, "evaluate": True}
    values = ranks.call(on_ranks.sequence, world, calls=[*calls, (on_ranks.train, steps)])
    for index, (logits, loss, gradients) in enumerate(wanted["forward"].values()):
        check_forward([value[index] for value in values], logits, loss, gradients)
    curves, states, held_out = zip(*(value[2] for value in values), strict=True)
    assert all(curve == curves[0] for curve in curves)
    assert_curve(curves[0], wanted["curve"])
    assert held_out[0] == pytest.approx([loss for loss, _ in wanted["curve"]], rel=1e-5)
    state = assemble(part for share in states for part in share)
    assert set(state) == set(wanted["weights"])
    far = {n: relative(state["param", n], p.detach()) for n, p in wanted["after"].items()}
    assert max(far.values()) < 1e-4, far


def check_forward(values: list[Any], logits: list[Tensor], loss: float, gradients: dict[str, Tensor]) -> None:
    """What all ranks returned of `on_ranks.forward`, against the reference."""
    got: dict[int, Tensor] = {}
    for value in values:
        got |= value[0]
    assert len(got) == len(logits)
    assert max((got[row] - wanted).abs().max().item() for row, wanted in enumerate(logits)) < 1e-4
    assert all(abs(value[1] - loss) < 1e-5 for value in values)
    assembled = assemble(part for value in values for part in value[2])
    assert {name for _, name in assembled} == set(gradients)
    far = {name: relative(assembled["grad", name], wanted) for name, wanted in gradients.items()}
    assert max(far.values()) < 1e-4, far


def train(ranks: Ranks, layout: str, weights: Any, steps: Any, precision: str = "fp32", **more: Any) -> Any:
    """Curve and whole state of a run in one layout."""
    world, settings = LAYOUTS[layout]
    call = {"plan": Plan(settings, precision=precision), "weights": weights, "steps": steps, "size": 2, **more}
    values = ranks.call(on_ranks.sequence, world, calls=[(on_ranks.train, call)])
    return values[0][0][0], assemble(part for value in values for part in value[0][1])


@pytest.mark.parametrize(
    "layouts",
    [
        ("tp2_sp", "pp2"),
        pytest.param(("dp2", "dp2"), marks=pytest.mark.slow),
        pytest.param(("tp2_pp2", "dp2_ddp"), marks=pytest.mark.slow),
        pytest.param(("dp2_overlap", "tp2_sp_dp2"), marks=pytest.mark.slow),
        pytest.param(("pp2_vpp2_dp2_overlap", "cp2_tp2_sp"), marks=pytest.mark.slow),
        pytest.param(("cp2", "single"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_state_moves_between_layouts(ranks: Ranks, layouts: tuple[str, str], precision: str) -> None:
    """Bit for bit into another layout; the curve goes on as if nothing had happened, exactly so in the same layout."""
    first, second = layouts
    whole, _ = train(ranks, first, expected("tied")["weights"], STEPS[:6], precision)
    curve, state = train(ranks, first, expected("tied")["weights"], STEPS[:3], precision)
    assert curve == whole[:3]
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert any(bool(state["exp_avg_sq", name].any()) for kind, name in state if kind == "param")
    _, unchanged = train(ranks, second, state, [], precision, updates=3)
    assert set(unchanged) == set(state)
    assert all(torch.equal(unchanged[key], state[key]) for key in state)
    rest, _ = train(ranks, second, state, STEPS[3:6], precision, updates=3)
    if first == second:
        assert rest == whole[3:]
    else:
        assert_curve(rest, whole[3:], 1e-5 if precision == "fp32" else 2e-2)


def test_bf16_follows_fp32(ranks: Ranks) -> None:
    """Rounded to eight bits the losses stay near; the main copy keeps what bf16 cannot hold."""
    wanted = expected("tied")
    curve, state = train(ranks, "tp2_sp", wanted["weights"], [STEPS[0]] * 6, "bf16")
    exact, _ = train(ranks, "tp2_sp", wanted["weights"], [STEPS[0]] * 6)
    assert_curve(curve, exact, 3e-2)
    assert curve[-1][0] < curve[0][0]
    weight = state["param", "model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


UNEQUAL = ([(9,), (9,)], [(5, 12), (17,)], [(1,), (1,)], [(40,), (39, 1)])  # micro-batches of 2 rows each


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2_sp_pp2_full", "cp4", "pp2_vpp2", "pp2_vpp2_cp2"))],
)
def test_unequal_micro_batches(ranks: Ranks, layout: str) -> None:
    """Micro-batches of different lengths, of one token even, count by their tokens."""
    groups = [global_batch(documents, 30 + index) for index, documents in enumerate(UNEQUAL)]
    rows = [row for group in groups for row in group]
    model = on_ranks.reference({})
    logits, loss = on_ranks.reference_loss(model, rows)
    loss.backward()
    world, settings = LAYOUTS[layout]
    call = {"plan": Plan(settings), "weights": expected("tied")["weights"], "rows": rows, "size": 2}
    values = ranks.call(on_ranks.sequence, world, calls=[(on_ranks.forward, call)])
    gradients = {n: p.grad for n, p in model.named_parameters()}
    check_forward([value[0] for value in values], [row.detach() for row in logits], loss.item(), gradients)


def test_rank_without_data(ranks: Ranks) -> None:
    """One row over two data-parallel ranks: the second adds zero, forwards and backwards."""
    rows = global_batch([(17,)], 3)
    model = on_ranks.reference({})
    logits, loss = on_ranks.reference_loss(model, rows)
    loss.backward()
    call = {"plan": Plan({}), "weights": expected("tied")["weights"], "rows": rows, "size": 1}
    values = ranks.call(on_ranks.one_row_only, 2, **call)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    check_forward(values, [logits[0].detach()], loss.item(), gradients)


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2_pp2", "cp2", "pp2_vpp2"))]
)
def test_loss_that_is_not_finite(ranks: Ranks, layout: str) -> None:
    """Every rank reports the same samples, and no weight, moment or count changes."""
    world, settings = LAYOUTS[layout]
    weights = dict(expected("tied")["weights"])
    poisoned = weights["param", "model.embed_tokens.weight"].clone()
    poisoned[7] = float("nan")
    weights["param", "model.embed_tokens.weight"] = poisoned
    rows = [(tokens.where(tokens != 7, 8), labels, starts) for tokens, labels, starts in STEPS[0]]
    rows[2][0][0] = 7  # an input of the third row only, which is in another rank's share at dp2
    untied = {"tie_word_embeddings": False}  # a tied NaN row would reach every sample through the head
    weights["param", "lm_head.weight"] = expected("untied_one_kv_head")["weights"]["param", "lm_head.weight"]
    for kind in TRAINED[1:]:
        weights[kind, "lm_head.weight"] = torch.zeros_like(weights["param", "lm_head.weight"])
    values = ranks.call(on_ranks.one_step, world, plan=Plan(settings, untied), weights=weights, rows=rows)
    results = [result for result, _, _ in values]
    assert {result.bad_samples for result in results} == {(2,)}
    first = {"dp2": 1, "tp2_pp2": 2, "cp2": 0, "pp2_vpp2": 1}  # the first rank that makes a loss of the third row
    assert {result.bad_rank for result in results} == {first[layout]}
    assert all(result.loss_sum != result.loss_sum for result in results)
    assert all(updates == 0 for _, updates, _ in values)
    state = assemble(part for _, _, share in values for part in share)
    assert all(torch.equal(state[key], weights[key]) for key in state if key[1] != "model.embed_tokens.weight")


@pytest.mark.parametrize("layout", ["tp2_pp2", pytest.param("single", marks=pytest.mark.slow)])
def test_weights_only(ranks: Ranks, layout: str) -> None:
    """Mode "weights" holds a bf16 checkpoint bit for bit and gives it back whole."""
    world, settings = LAYOUTS[layout]
    weights = {key: tensor.bfloat16() for key, tensor in expected("tied")["weights"].items() if key[0] == "param"}
    values = ranks.call(on_ranks.hold, world, plan=Plan(settings, precision="bf16"), weights=weights)
    state = assemble(part for share in values for part in share)
    assert set(state) == set(weights)
    assert all(torch.equal(state[key], weights[key]) and state[key].dtype == torch.bfloat16 for key in state)
