"""How ranks find each other."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from engine.context import Context
from engine.errors import UserError


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    context = object.__new__(Context)
    context.hardware = SimpleNamespace(set_device=lambda rank: None, dist_backend="gloo")
    context.rank, context.local_rank, context.world = 0, 0, 2
    context.run = SimpleNamespace(faults=SimpleNamespace(timeout_s=1))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match=rf"launcher.master_port={port} is in use"):
            context.start_distributed()
