"""The vendor's Kunlun image holds Python 3.10, torch 2.5.1 and megatron-core 0.16: Zooforge runs there from source."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.kunlun_run import REPO, Host
from tests.floor.environment import VERSION, build, interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter of an environment with the floor's packages."""
    found = interpreter()
    if found is None:
        pytest.skip(f"no Python {VERSION} is installed here, and none is downloaded")
    own, why = build(tmp_path_factory.mktemp("floor") / "env", found)
    if own is None:
        pytest.skip(why)
    yield own


def test_the_environment_is_the_floor(python: str) -> None:
    code = "import sys; from importlib.metadata import version as v; print(sys.version_info[:2], *map(v, sys.argv[1:]))"
    done = subprocess.run(
        [python, "-c", code, "torch", "megatron-core"], capture_output=True, text=True, check=True, cwd=REPO
    )
    assert done.stdout.strip() == "(3, 10) 2.5.1 0.16.1"


def test_two_ranks_train_on_the_megatron_backend(python: str, tmp_path: Path) -> None:
    """Three steps with the fake runtime, alike whether the ranks share the data or the matrices."""
    host = Host(tmp_path, "2.5", python)
    data, tensor = (host.train(layout, f"parallelism={layout}") for layout in ("dp2", "tp2"))
    assert len(data) == 3 and data[2]["loss"] < data[0]["loss"]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in data] == pytest.approx([row[key] for row in tensor], rel=1e-4)


def test_every_rebinding_of_megatron_exists_and_goes_away(python: str) -> None:
    """The rows of both adapters, on this megatron-core as on the newest."""
    code = "from tests.contract.adapters import check; check()"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == 0, done.stderr
