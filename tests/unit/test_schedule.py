"""Learning-rate schedules against arithmetic on paper and, for the shapes, against torch's own schedulers."""

from __future__ import annotations

import math

import pytest
import torch

from engine.schedule import learning_rate
from engine.schema import Schedule


def rates(name: str, steps: int, warmup: int, **extra: object) -> list[float]:
    schedule = Schedule(name=name, steps=steps, warmup_steps=warmup, min_lr_ratio=0.1, **extra)
    return [learning_rate(step, 2.0, schedule) for step in range(steps)]


@pytest.mark.parametrize("name", ["cosine", "wsd", "linear", "constant"])
def test_warm_up_is_linear_from_the_first_update(name: str) -> None:
    assert rates(name, 20, 4)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_cosine_on_paper() -> None:
    got = rates("cosine", 12, 2)
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * k / 10)) / 2 for k in range(1, 11)]
    assert got[2:] == pytest.approx(expected)
    assert got[-1] == pytest.approx(0.2)


def test_cosine_and_linear_against_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    for name, make in {
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=0.2),
        "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=10),
    }.items():
        optimizer = torch.optim.SGD([parameter], lr=2.0)
        scheduler = make(optimizer)
        expected = []
        for _ in range(10):
            optimizer.step()
            scheduler.step()
            expected.append(optimizer.param_groups[0]["lr"])
        assert rates(name, 10, 0) == pytest.approx(expected), name


def test_wsd_is_flat_and_then_falls_to_the_floor() -> None:
    got = rates("wsd", 20, 2, decay_steps=5)
    assert got[1:15] == pytest.approx([2.0] * 14)
    assert got[15:] == pytest.approx([0.2 + 1.8 * k / 5 for k in (4, 3, 2, 1, 0)])


def test_one_step_and_no_warm_up() -> None:
    assert rates("cosine", 1, 0) == pytest.approx([0.2])
    assert rates("constant", 3, 0) == pytest.approx([2.0] * 3)
    assert rates("cosine", 3, 3) == pytest.approx([2 / 3, 4 / 3, 2.0])
