"""The Megatron rebindings of Kunlun: all there, gone after `revert`, and means that are sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hardware.kunlun.means import by_sum
from hardware.kunlun.megatron import no_options, without_priority
from tests.contract.adapters import KunlunTable, check


def test_every_row_exists_is_applied_once_and_goes_away() -> None:
    """On the installed megatron-core; tests/floor does the same on 0.16."""
    check()


def test_every_row_has_a_reason() -> None:
    KunlunTable().apply()
    KunlunTable().revert()
    assert all(row.reason for row in KunlunTable().table())


@pytest.fixture
def two_ranks(monkeypatch):
    """Collectives of two ranks that hold the same, and a list of what was asked of them."""
    asked = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        asked.append(op)
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    return asked


@pytest.mark.parametrize("async_op", [False, True])
def test_a_mean_is_a_sum_divided(two_ranks, async_op) -> None:
    values = torch.tensor([1.0, -3.0])
    by_sum(dist.all_reduce)(values, op=dist.ReduceOp.AVG, group=None, async_op=async_op)
    assert values.tolist() == [1.0, -3.0] and two_ranks == [dist.ReduceOp.SUM]
    by_sum(dist.all_reduce)(values, group=None)
    assert values.tolist() == [2.0, -6.0]


def test_megatrons_own_mean_of_losses_is_a_sum(two_ranks) -> None:
    adapter = KunlunTable()
    adapter.apply()
    try:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        tracker = {"loss_values": torch.tensor([5.0, 7.0]), "avg_group": SimpleNamespace()}
        MTPLossLoggingHelper.tracker, kept = tracker, MTPLossLoggingHelper.tracker
        MTPLossLoggingHelper.reduce_metrics_in_tracker()
        MTPLossLoggingHelper.tracker = kept
    finally:
        adapter.revert()
    assert tracker["loss_values"].tolist() == [5.0, 7.0] and set(two_ranks) == {dist.ReduceOp.SUM}


def test_streams_have_no_priority_and_groups_no_options() -> None:
    asked = []

    def newer(comm_stream=None, high_priority=False):
        asked.append((comm_stream, high_priority))

    def older(comp_stream=None, comm_stream=None):
        asked.append((comp_stream, comm_stream))

    without_priority(newer)(None, True)
    without_priority(newer)(high_priority=True, comm_stream=1)
    without_priority(older)(1, 2)
    assert asked == [(None, False), (1, False), (1, 2)]
    assert no_options(newer)("dp", {"dp": {}}) is None
