"""The rule for loss spikes, against the formula computed by numpy, and what is done about them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.errors import UserError
from engine.faults.spikes import SpikeRule
from engine.schema import Faults


def falling(steps: int, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    return (2.0 + 6.0 * np.exp(-np.arange(steps) / 60) + noise).tolist()


def reference_limit(losses: list[float], window: int, threshold: float) -> float:
    recent = np.array(losses[-window:])
    middle = np.median(recent)
    deviation = np.median(np.abs(recent - middle)) / 0.6744897501960817  # the normal quantile of 3/4
    return float(middle + threshold * max(deviation, 0.005 * middle))


@pytest.mark.parametrize("window", [16, 17, 64])
def test_the_limit_is_hampels(window):
    rule = SpikeRule(Faults(spike_window=window, spike_threshold=6.0))
    losses = falling(120)
    for step, loss in enumerate(losses):
        limit = rule.limit()
        if step < 16:
            assert limit is None
        else:
            assert limit == pytest.approx(reference_limit(losses[:step], window, 6.0), rel=1e-5)
        assert rule.accept(loss)
    assert rule.spikes == 0


def test_ordinary_noise_is_no_spike():
    for seed in range(20):
        rule = SpikeRule(Faults())
        for loss in falling(300, seed):
            rule.accept(loss)
        assert rule.spikes == 0


def test_flat_and_tiny_losses():
    rule = SpikeRule(Faults())
    assert all(rule.accept(1.0) for _ in range(30)) and rule.spikes == 0
    assert rule.limit() == pytest.approx(1.0 + 8.0 * 0.005)
    zero = SpikeRule(Faults())
    assert all(zero.accept(0.0) for _ in range(30)) and zero.spikes == 0


def test_a_warning_updates_and_the_window_moves_on():
    rule = SpikeRule(Faults(spike_window=16))
    for loss in falling(40):
        rule.accept(loss)
    results = [(rule.accept(50.0), rule.last is not None) for _ in range(30)]
    assert all(updated for updated, _ in results)
    assert results[0][1] and not results[-1][1]  # what stays is the new usual
    rule.check("step 1")


def test_skipped_losses_stay_out_of_the_window_until_there_are_too_many():
    rule = SpikeRule(Faults(on_spike="skip", max_skips=3))
    for loss in falling(40):
        rule.accept(loss)
    limit = rule.limit()
    for number in range(3):
        assert not rule.accept(50.0) and rule.limit() == limit
        if number < 2:
            rule.check("step 41")
    with pytest.raises(UserError, match="3 steps in a row were skipped"):
        rule.check("step 43 (samples [0, 7])")
    assert rule.accept(rule.limit() - 0.1) and rule.last is None
    rule.check("step 44")
    assert (rule.spikes, rule.skipped) == (3, 3)


def test_stop():
    rule = SpikeRule(Faults(on_spike="stop"))
    for loss in falling(40):
        rule.accept(loss)
    assert not rule.accept(50.0)
    with pytest.raises(UserError, match=r"step 41 .*is 50, a spike.*no weight was updated"):
        rule.check("step 41 (samples [8, 15])")


@pytest.mark.parametrize("cut", [0, 5, 15, 16, 70, 99])
def test_exact_on_resume(cut):
    settings = Faults(on_spike="skip", spike_window=20)
    losses = falling(100)
    losses[30] = losses[60] = losses[61] = losses[90] = 77.7
    whole, first = SpikeRule(settings), SpikeRule(settings)
    told = [(whole.accept(loss), whole.last) for loss in losses]
    again = [(first.accept(loss), first.last) for loss in losses[:cut]]
    second = SpikeRule(settings, json.loads(json.dumps(first.state())))
    again += [(second.accept(loss), second.last) for loss in losses[cut:]]
    assert again == told and second.state() == whole.state() and whole.skipped == 4
