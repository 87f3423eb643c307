"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

os.environ.pop("UV_RUN_RECURSION_DEPTH", None)  # commands are written differently under `uv run`


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Reused rank processes."""
    pool = Ranks()
    yield pool
    pool.close()
