"""The errors a user is meant to read, and the exit codes of a run."""

from __future__ import annotations

EXIT_USER = 2
EXIT_INTERRUPTED = 75


class UserError(Exception):
    """A mistake outside Zooforge: one line that says what is wrong, where, and what would be right.

    The controller and the workers print it without a traceback and exit with 2. Anything else that escapes is a bug.
    """


class OtherRank(UserError):
    """Another rank made the mistake and says so; this one only cannot go on without it."""


class Closed(Exception):
    """Whoever asked for this has gone, and nobody waits for the answer."""


class Interrupted(Exception):
    """The job saved and stopped because a signal asked it to; exit 75, and `checkpoint.resume` goes on."""


class Stopped(KeyboardInterrupt):
    """A signal asked the controller to end before, or after, its workers run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
