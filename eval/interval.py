"""How sure a rate is."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # of the normal distribution, two-sided


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927); (0, 1) without a trial."""
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    rate, square = successes / trials, z * z / trials
    middle = rate + square / 2
    half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
    # At the ends the formula gives exactly 0 and 1, which rounding must not miss.
    low = 0.0 if successes == 0 else max(0.0, (middle - half) / (1 + square))
    return low, 1.0 if successes == trials else min(1.0, (middle + half) / (1 + square))
