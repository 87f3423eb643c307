"""Which rank a run under torchrun names as the cause, from the report that torch itself writes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.launch.torchrun import _root_cause

CASES = [
    # (exit code, second) of each rank, and the rank that is named
    ([(1, 5), (-signal.SIGKILL, 5)], 1),  # torch calls rank 0 the first of those that it saw together
    ([(1, 5), (-signal.SIGKILL, 6)], 1),  # seen together, but the clock went on
    ([(-signal.SIGKILL, 5), (1, 5)], 0),
    ([(-signal.SIGTERM, 7), (-signal.SIGSEGV, 5), (-signal.SIGTERM, 7)], 1),
    ([(1, 5), (-signal.SIGTERM, 5)], None),  # ended by torchrun: what rank 0 said is the cause
    ([(1, 5), (-signal.SIGKILL, 36)], None),  # it did not heed SIGTERM and was killed by torchrun
    ([(1, 5)], None),
]


@pytest.mark.parametrize(("ends", "named"), CASES)
def test_the_killed_rank_is_the_cause(tmp_path: Path, ends: list[tuple[int, int]], named: int | None) -> None:
    failures = {}
    for rank, (code, second) in enumerate(ends):
        failures[rank] = ProcessFailure(rank, 100 + rank, code, "")
        failures[rank].timestamp = 1_700_000_000 + second
    log = tmp_path / "torchrun_0.log"
    log.write_text(f"Traceback\n{ChildFailedError('engine.worker', failures)}\n")
    verdict = _root_cause(log)
    if named is None:
        assert verdict is None
    else:
        assert verdict.status == 128 - ends[named][0] and verdict.message.startswith(f"rank {named} was killed by")


def test_no_report_names_nobody(tmp_path: Path) -> None:
    assert _root_cause(tmp_path / "missing.log") is None
