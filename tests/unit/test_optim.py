"""Clipping and AdamW against torch's own."""

from __future__ import annotations

import math
import re

import pytest
import torch

from engine.errors import UserError
from engine.optim.adamw import AdamW
from engine.optim.clip import clip_factor, squared_norm
from engine.optim.groups import Group, divided, groups_of
from engine.schema import Optim

SHAPES = [(5, 3), (7,), (1,), (2, 3, 4), (1, 1)]
CPU = torch.device("cpu")


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_clipping_is_torchs(max_norm: float) -> None:
    ours, theirs = tensors(0), [torch.nn.Parameter(t) for t in tensors(1)]
    for parameter, grad in zip(theirs, tensors(0), strict=True):
        parameter.grad = grad
    norm = math.sqrt(squared_norm(ours, CPU).item())
    torch._foreach_mul_(ours, clip_factor(norm, max_norm))
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm or math.inf).item()
    assert math.isclose(norm, expected, rel_tol=1e-6)
    for mine, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_norm_of_nothing_of_the_huge_and_of_the_not_finite() -> None:
    assert squared_norm([], CPU).item() == 0
    assert math.isclose(squared_norm([torch.full((1,), 1e19)] * 8, CPU).item(), 8e38, rel_tol=1e-6)
    for bad in (math.nan, math.inf):
        assert not math.isfinite(squared_norm([torch.ones(3), torch.tensor([1.0, bad])], CPU).item())


def test_matrices_decay_and_vectors_do_not() -> None:
    items = [((3, 4), "matrix"), ((4,), "norm"), ((2, 3, 4), "experts"), ((1,), "bias")]
    assert divided(items, [], 0.3) == [(["matrix", "experts"], 0.3, 1.0), (["norm", "bias"], 0.0, 1.0)]
    slow = Group("*", lr_scale=0.1, weight_decay=0.5)
    assert divided(items, [slow, slow, Group(), Group()], 0.3) == [
        *((["matrix"], 0.5, 0.1), (["norm"], 0.0, 0.1)),
        *((["experts"], 0.3, 1.0), (["bias"], 0.0, 1.0)),
    ]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ({"lr_scale": 1}, "it is an object with a path"),
        ({"path": "*", "lr_scal": 1}, "lr_scal is no key; did you mean lr_scale?"),
        ({"path": "*", "lr_scale": -1}, "lr_scale=-1: must be a number of 0 or more"),
        ({"path": "*", "frozen": "yes"}, "frozen=yes: must be true or false"),
    ],
)
def test_a_group_that_is_none_is_named(one: object, said: str) -> None:
    with pytest.raises(UserError, match=rf"optim.groups\[1\]: {re.escape(said)}"):
        groups_of([{"path": "a*"}, one])


@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_torchs_also_after_a_restart(fused: bool) -> None:
    config = Optim(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    theirs = [torch.nn.Parameter(t) for t in tensors(2)]
    groups = [
        {"params": [p for p in theirs if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in theirs if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, foreach=False)
    ours = tensors(2)
    optimizer = AdamW(list(zip(SHAPES, ours, strict=True)), config, fused)
    for step in range(6):
        if step == 3:  # a restart: new tensors, new optimizer, the old state
            moments = [{k: optimizer.moment(k, t).clone() for k in ("exp_avg", "exp_avg_sq")} for t in ours]
            ours = [t.clone() for t in ours]
            optimizer = AdamW(list(zip(SHAPES, ours, strict=True)), config, fused)
            for tensor, saved in zip(ours, moments, strict=True):
                for kind, values in saved.items():
                    optimizer.moment(kind, tensor).copy_(values)
            optimizer.set_updates(3)
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for mine, parameter, grad in zip(ours, theirs, tensors(10 + step), strict=True):
            mine.grad, parameter.grad = grad, grad.clone()
        reference.step()
        optimizer.step(0.1 / (step + 1))
    assert optimizer.updates == 6
    for mine, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_rank_without_tensors_still_counts() -> None:
    optimizer = AdamW([], Optim(), fused=True)
    optimizer.step(0.1)
    assert optimizer.updates == 1
