"""Which source each row of training comes from: a function of the row's global number alone."""

from __future__ import annotations

import numpy as np

from engine.data.mixture import PERIOD, turns


class Turns:
    """The sources' turns, which repeat after PERIOD rows.

    Any window of PERIOD rows, wherever it begins, holds each source exactly as often as the first one does. Within the
    period the source whose rows lag furthest behind its share comes next, so that the mixture is even at any scale.
    """

    def __init__(self, weights: list[float]):
        self.rows = np.array(turns(weights), dtype=np.int64)  # of each source in a period
        counts = np.zeros(len(weights), dtype=np.int64)
        self._source = np.zeros(PERIOD, dtype=np.int64)
        self._before = np.zeros((PERIOD + 1, len(weights)), dtype=np.int64)
        for n in range(PERIOD if len(weights) > 1 else 0):
            # A source is chosen only while it is behind its share, so none gets more than its rows by the end.
            source = int(np.argmax(self.rows * (n + 1) - counts * PERIOD))
            self._source[n] = source
            counts[source] += 1
            self._before[n + 1] = counts
        if len(weights) == 1:
            self._before[:, 0] = np.arange(PERIOD + 1)

    def place(self, row: int) -> tuple[int, int]:
        """The source of a global row, and the row's number among those of that source."""
        source = int(self._source[row % PERIOD])
        return source, int(self.before(row)[source])

    def before(self, row: int) -> np.ndarray:
        """int64: how many rows of each source come before a global row."""
        periods, rest = divmod(row, PERIOD)
        return periods * self.rows + self._before[rest]
