"""What writing a checkpoint needs of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from engine.errors import UserError


class Ranks(Protocol):
    """All ranks of a run, as `engine.comm.Comm` offers them. Every call is collective."""

    rank: int
    world: int

    def barrier(self) -> None: ...

    def all_gather(self, message: Any) -> list[Any]:
        """Every rank's JSON-able message, by rank."""


class Alone:
    """A world of one."""

    rank = 0
    world = 1

    def barrier(self) -> None:
        return None

    def all_gather(self, message: Any) -> list[Any]:
        return [message]


def attempt(action: Callable[[], None]) -> Exception | None:
    """The error of `action` instead of raising it; a refused write becomes a UserError."""
    try:
        action()
    except OSError as error:
        return UserError(f"cannot write {error.filename or 'the checkpoint'}: {error.strerror or error}")
    except Exception as error:
        return error
    return None


def agree(ranks: Ranks, error: Exception | None) -> None:
    """Raise on every rank if any rank failed, so that none waits for another in vain. Collective.

    The failing rank raises its own error. The others raise a `UserError` with the first failing rank's words if that
    was a `UserError`, and a RuntimeError otherwise.
    """
    mine = None if error is None else {"user": isinstance(error, UserError), "text": str(error)}
    failures = [(rank, f) for rank, f in enumerate(ranks.all_gather(mine)) if f is not None]
    if error is not None:
        raise error
    if failures:
        rank, first = failures[0]
        raise UserError(first["text"]) if first["user"] else RuntimeError(f"rank {rank} failed: {first['text']}")
