"""hardware=kunlun on the fake runtime trains on the Megatron backend, and computes what a CPU computes."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from tests.contract.kunlun_run import TINY, Host
from tests.contract.test_kunlun import ONE_OAM_NODE
from tests.freezing import freeze
from tests.ranks import Ranks, run_config


@pytest.mark.slow
def test_two_ranks_train_as_on_a_cpu(tmp_path, ranks: Ranks) -> None:
    """Three steps by the command that a user types, every worker with the exact environment before torch."""
    host = Host(tmp_path, ".".join(version("torch").split(".")[:2]))
    words = ("parallelism=dp2", "parallelism.strategy=zero1")
    rows = host.train("card", *words)
    config = freeze(tmp_path / "cpu" / "run", "qwen3", *words, *TINY)
    assert ranks.call(run_config, 2, config=str(config)) == [0, 0]
    expected = [json.loads(line) for line in (config.parent / "metrics.jsonl").read_text().splitlines()]
    expected = [row for row in expected if "loss" in row]
    assert len(rows) == 3 and rows[2]["loss"] < rows[0]["loss"]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=1e-6)

    workers = host.workers()
    assert len(workers) == 2 and not any(worker["torch"] for worker in workers)
    lines = ONE_OAM_NODE.replace("OMP_NUM_THREADS=2\n", "").splitlines()  # the cores of this machine
    for worker in workers:
        assert {f"{key}={value}" for key, value in worker["environment"].items()} >= set(lines)
