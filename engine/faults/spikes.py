"""A loss far above the recent ones: seen before the update, and stopped at, skipped or warned of."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.errors import UserError
from engine.schema import Faults

GAUSSIAN = 1.4826  # of a normal distribution: standard deviation over median absolute deviation, 1 / 0.67449
FLOOR = 0.005  # of the median: less than this counts as no spread, so that a flat curve has no spikes
FEWEST = 16  # losses before which nothing is judged


@dataclass(frozen=True)
class Spike:
    """One loss above the limit."""

    loss: float
    limit: float
    skipped: bool


class SpikeRule:
    """A loss is a spike if it exceeds median + threshold * 1.4826 * MAD of the last `spike_window` losses.

    MAD is the median of their distances to their median. That is Hampel's identifier (F. R. Hampel, The influence
    curve and its role in robust estimation, JASA 69, 1974), which outliers in the window do not move as they move a
    mean and a variance. Losses of skipped steps stay out of the window, all others enter it. The loss is the same on
    every rank, and so is the judgement.
    """

    def __init__(self, settings: Faults, state: dict[str, Any] | None = None) -> None:
        """`state` from `state()` goes on where it was taken."""
        state = state or {}
        self._settings = settings
        self._window: deque[float] = deque(state.get("window", ()), maxlen=settings.spike_window)
        self.spikes, self.skipped = int(state.get("spikes", 0)), int(state.get("skipped", 0))
        self._in_a_row = int(state.get("in_a_row", 0))
        self.last: Spike | None = None  # what the last judged loss was

    def accept(self, loss: float) -> bool:
        """Whether the step with this loss is to update the weights."""
        limit = self.limit()
        self.last = None
        if limit is not None and loss > limit:
            self.last = Spike(loss, limit, skipped=self._settings.on_spike != "warn")
            self.spikes += 1
            if self.last.skipped:
                self.skipped += 1
                self._in_a_row += 1
                return False
        self._in_a_row = 0
        self._window.append(loss)
        return True

    def limit(self) -> float | None:
        """The loss above which the next one is a spike; None while too few are known."""
        if len(self._window) < min(FEWEST, self._settings.spike_window):
            return None
        middle = median(self._window)
        spread = GAUSSIAN * median(abs(loss - middle) for loss in self._window)
        return middle + self._settings.spike_threshold * max(spread, FLOOR * abs(middle))

    def check(self, where: str) -> None:
        """UserError if the run is to end at the last judged loss; `where` names step and samples."""
        if self.last is None or not self.last.skipped:
            return
        spike = f"the loss of {where} is {self.last.loss:.4g}, a spike (above {self.last.limit:.4g})"
        if self._settings.on_spike == "stop":
            raise UserError(f"{spike}; no weight was updated; faults.on_spike=skip goes on without such steps")
        if self._in_a_row >= self._settings.max_skips:
            raise UserError(
                f"{spike}, and {self._in_a_row} steps in a row were skipped for that (faults.max_skips); "
                "the loss has changed for good: a lower optim.lr or an earlier checkpoint would be the first to try"
            )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps to judge on alike. Plain JSON, which keeps every bit of a float."""
        counts = {"spikes": self.spikes, "skipped": self.skipped, "in_a_row": self._in_a_row}
        return {"window": list(self._window), **counts}
