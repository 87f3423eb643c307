"""The native backend's strategies against steps written by hand, and against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.parallel import native_steps as steps
from tests.ranks import Ranks

# name -> (strategy, ranks, other settings)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "single": ("ddp", 1, {}),
    "ddp2": ("ddp", 2, {}),
    "zero1": ("zero1", 2, {"recompute": "selective"}),
    "zero1_4": ("zero1", 4, {}),
    "fsdp2": ("fsdp", 2, {"recompute": "full"}),
    "fsdp4": ("fsdp", 4, {}),
    "hsdp": ("hsdp", 4, {"shard_size": 2}),
}


@lru_cache(maxsize=1)
def expected() -> tuple[Any, Any]:
    return steps.by_hand()


def train(ranks: Ranks, layout: str, values: steps.Values, start: int, stop: int) -> tuple[Any, Any]:
    strategy, world, settings = LAYOUTS[layout]
    run = steps.run_of(strategy, **settings)
    answers = ranks.call(steps.train, world, run=run, values=values, start=start, stop=stop)
    assert all(results == answers[0][0] for results, _ in answers), "ranks report different numbers"
    return answers[0][0], steps.merge([state for _, state in answers])


def assert_same_curve(got: Any, wanted: Any) -> None:
    """Losses and gradient norms within 1e-5 relative; the same number of tokens."""
    assert len(got) == len(wanted)
    for (loss, tokens, norm), (their_loss, their_tokens, their_norm) in zip(got, wanted, strict=True):
        assert tokens == their_tokens
        assert math.isclose(loss, their_loss, rel_tol=1e-5)
        assert math.isclose(norm, their_norm, rel_tol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_equal_a_loop_by_hand(ranks: Ranks, layout: str) -> None:
    results, state = train(ranks, layout, steps.first_values(), 0, steps.STEPS)
    wanted, parameters = expected()
    assert wanted[-1][0] / wanted[-1][1] < wanted[0][0] / wanted[0][1] - 0.3  # the curve moves
    assert_same_curve(results, wanted)
    for key, tensor in parameters.items():
        assert (state[key] - tensor).norm() <= 1e-5 * tensor.norm(), key


@pytest.mark.parametrize(
    ("saved", "resumed"), [("zero1", "fsdp4"), ("fsdp2", "hsdp"), ("hsdp", "zero1_4"), ("zero1_4", "single")]
)
def test_state_continues_in_another_layout(ranks: Ranks, saved: str, resumed: str) -> None:
    half = steps.STEPS // 2
    first, state = train(ranks, saved, steps.first_values(), 0, half)
    _, reloaded = train(ranks, resumed, steps.Values(state), half, half)
    assert state.keys() == reloaded.keys()
    for key, tensor in state.items():
        assert torch.equal(reloaded[key].view(torch.int32), tensor.view(torch.int32)), key
    second, _ = train(ranks, resumed, steps.Values(state), half, steps.STEPS)
    assert_same_curve(first + second, expected()[0])


def test_resumed_in_the_same_layout_nothing_differs(ranks: Ranks) -> None:
    straight, end = train(ranks, "fsdp2", steps.first_values(), 0, steps.STEPS)
    _, state = train(ranks, "fsdp2", steps.first_values(), 0, 5)
    resumed, resumed_end = train(ranks, "fsdp2", steps.Values(state), 5, steps.STEPS)
    assert resumed == straight[5:]
    assert all(torch.equal(end[key], resumed_end[key]) for key in end)


@pytest.mark.parametrize("layout", ["single", "zero1", "fsdp2"])
def test_a_loss_that_is_not_finite_names_its_samples_and_changes_nothing(ranks: Ranks, layout: str) -> None:
    model = steps.model_config(tie_word_embeddings=False)
    values = steps.first_values(model)
    values.tensors["param", "model.embed_tokens.weight"][100] = math.inf
    strategy, world, settings = LAYOUTS[layout]
    run = steps.run_of(strategy, model=model, **settings)
    for (bad_samples, bad_rank, loss, after), same, updates in ranks.call(
        steps.poisoned, world, run=run, values=values
    ):
        assert bad_samples == (4, 5)  # the third micro-batch of two rows
        assert bad_rank == (0 if world == 1 else 1)
        assert not math.isfinite(loss)
        assert same
        assert math.isfinite(after) and updates == 1


@pytest.mark.parametrize("layout", ["ddp2", "fsdp4", "hsdp"])
def test_ranks_may_have_different_numbers_of_batches(ranks: Ranks, layout: str) -> None:
    strategy, world, settings = LAYOUTS[layout]
    answers = ranks.call(steps.uneven, world, run=steps.run_of(strategy, **settings), values=steps.first_values())
    single = ranks.call(steps.uneven, 1, run=steps.run_of("ddp"), values=steps.first_values())[0]
    loss, tokens = steps.loss_by_hand(steps.rows_of_step(3))
    grads = steps.merge([part for *_, part in answers])
    for evaluated, forwarded, logits, _ in answers:
        for loss_sum, num_tokens in (evaluated, forwarded):
            assert num_tokens == tokens and math.isclose(loss_sum, loss, rel_tol=1e-5)
        assert len(logits) in (0, len(single[2]))
    for ours, alone in zip(answers[0][2], single[2], strict=True):
        torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    for key, grad in single[3].items():
        assert (grads[key] - grad).norm() <= 1e-5 * grad.norm(), key


@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_bf16_stays_near_fp32(ranks: Ranks, layout: str) -> None:
    strategy, world, settings = LAYOUTS[layout]
    run = steps.run_of(strategy, "bf16", **settings)
    answers = ranks.call(steps.train, world, run=run, values=steps.first_values(), start=0, stop=steps.STEPS)
    for (loss, tokens, norm), (their_loss, _, their_norm) in zip(answers[0][0], expected()[0], strict=True):
        # bf16 keeps 8 bits: losses differ, by less than 1%.
        assert 0 < abs(loss - their_loss) / tokens < 0.01 * their_loss / tokens
        assert math.isclose(norm, their_norm, rel_tol=0.05)
    assert all(t.dtype == torch.float32 for _, state in answers for t in state.values())


def test_a_shard_size_must_divide_the_ranks(ranks: Ranks) -> None:
    run = replace(steps.run_of("hsdp", shard_size=3))
    with pytest.raises(AssertionError, match=r"parallelism.shard_size=3 does not divide the 2 ranks"):
        ranks.call(steps.train, 2, run=run, values=steps.first_values(), start=0, stop=1)
