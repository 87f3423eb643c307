"""Statistics of unions and the normalisation made of them, against numpy on the whole and numbers by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import UserError
from engine.policy.normalise import MODES, Normaliser
from engine.policy.statistics import FIELDS, FILE, Statistics, check, load, save, statistics


def by_hand() -> Statistics:
    """Two dimensions: one with round numbers, one that never changes."""
    rows = (np.array([2.0, 5.0]), np.array([4.0, 0.0]), np.array([-10.0, 5.0]), np.array([10.0, 5.0]))
    return Statistics(*rows, np.array([-6.0, 5.0]), np.array([8.0, 5.0]), 9)


def test_statistics_of_a_union_are_those_of_all_its_values():
    random = np.random.default_rng(0)
    parts = [random.normal(n, n + 1, size=(size, 3)).astype(np.float32) for n, size in enumerate((2000, 1, 37))]
    whole = np.concatenate(parts).astype(np.float64)
    found = statistics(parts)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, whole.std(0), rtol=1e-12)
    np.testing.assert_array_equal(found.q01, np.quantile(whole, 0.01, axis=0))
    np.testing.assert_array_equal(found.q99, np.quantile(whole, 0.99, axis=0))
    np.testing.assert_array_equal(found.min, whole.min(0))
    np.testing.assert_array_equal(found.max, whole.max(0))
    assert found.count == 2038
    averaged = np.mean([np.quantile(part, 0.99, axis=0) for part in parts], axis=0)
    assert np.abs(averaged - found.q99).min() > 0.1, "the data must tell the union from an average"


def test_statistics_need_vectors_of_one_size():
    for parts in ([], [np.zeros((0, 2))], [np.zeros((1, 2)), np.zeros((1, 3))]):
        with pytest.raises(ValueError, match="of one size"):
            statistics(parts)


def test_a_file_gives_them_back_unchanged(tmp_path: Path):
    mine = {"action": statistics([np.random.default_rng(1).normal(size=(50, 4))])}
    save(mine, tmp_path)
    theirs = load(tmp_path)
    for part in FIELDS:
        np.testing.assert_array_equal(getattr(mine["action"], part), getattr(theirs["action"], part))
    check(mine, theirs, "here")
    (tmp_path / FILE).write_text('{"version": 9}')
    with pytest.raises(UserError, match=r"not statistics of version 1"):
        load(tmp_path)


def test_a_policy_and_a_dataset_that_disagree():
    one = by_hand()
    other = Statistics(one.mean, one.std, one.min, one.max, one.q01, np.array([9.0, 5.0]), 9)
    with pytest.raises(
        UserError, match=r"policy: action\[0\]: q99 is 8 in the policy's statistics, 9 in the dataset's"
    ):
        check({"action": one}, {"action": other}, "policy")
    with pytest.raises(UserError, match=r"observation.state: the policy normalises it, and the dataset has no such"):
        check({"observation.state": one}, {"action": one}, "policy")


@pytest.mark.parametrize(
    "mode, wanted",
    [("quantile", [1.0, 0.0]), ("mean_std", [1.5, 0.0]), ("min_max", [0.8, 0.0]), ("none", [8.0, 5.0])],
)
def test_normalised_by_hand(mode: str, wanted: list[float]):
    change = Normaliser(mode, by_hand())
    values = torch.tensor([[8.0, 5.0]])
    torch.testing.assert_close(change(values), torch.tensor([wanted]))
    torch.testing.assert_close(change.inverse(change(values)), values)


def test_clipping_and_inverses():
    clipped = Normaliser("quantile", by_hand(), clip=True)
    assert clipped(torch.tensor([[10.0, 5.0], [-10.0, 5.0]]))[:, 0].tolist() == [1.0, -1.0]
    assert Normaliser("quantile", by_hand())(torch.tensor([15.0, 5.0]))[0] == 2.0
    values = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    values[..., 1] = 5
    for mode in MODES:
        change = Normaliser(mode, by_hand())
        torch.testing.assert_close(change.inverse(change(values)), values, rtol=1e-6, atol=1e-6)
    with pytest.raises(UserError, match="3 numbers, and the statistics are of 2"):
        clipped(torch.zeros(3))
    with pytest.raises(UserError, match="normalisation=z is none of"):
        Normaliser("z", by_hand())
