"""Rates of a run: tokens and arithmetic a second, time lost to data, time left."""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.metrics.flops import Peak

# Fields of a row that differ from run to run of the same training; comparisons leave them out.
# Skipped samples are counted when they are read, which is ahead of the step.
TIMING_FIELDS = (
    *("tokens_per_s", "samples_per_s", "tflops", "mfu", "mem_bytes", "data_wait_s", "step_s"),
    *("bad_samples", "read_retries"),
)


class Meter:
    """Rates over the last `window` steps, so that a slow first step is soon forgotten."""

    def __init__(
        self,
        total_steps: int,
        flops_per_token: float | None = None,
        peak: Peak | None = None,
        window: int = 20,
        unit: str = "tokens",
    ) -> None:
        self.unit = unit
        self._total, self._flops, self._peak = total_steps, flops_per_token, peak
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=window)  # tokens, step_s, data_wait_s

    def add(self, tokens: int, step_s: float, data_wait_s: float) -> None:
        """One step that processed `tokens` over all ranks in `step_s` seconds, waiting for data included."""
        self._recent.append((tokens, step_s, data_wait_s))

    @property
    def seconds(self) -> float:
        return sum(step_s for _, step_s, _ in self._recent)

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for tokens, _, _ in self._recent) / self.seconds if self.seconds > 0 else 0.0

    @property
    def data_wait_share(self) -> float:
        """0 to 1."""
        return sum(wait for _, _, wait in self._recent) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tflops(self) -> float | None:
        """Model TFLOP/s over all devices."""
        return None if self._flops is None else self.tokens_per_s * self._flops / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the peak, 0 to 1; None without a known peak."""
        if self._flops is None or self._peak is None:
            return None
        return self.tokens_per_s * self._flops / self._peak.flops

    def seconds_left(self, step: int) -> float | None:
        """Until the last step, at the pace of the window; None before the first step."""
        if not self._recent:
            return None
        return (self._total - step) * self.seconds / len(self._recent)

    @property
    def rate(self) -> str:
        """What the rate is called in a row of metrics."""
        return f"{self.unit}_per_s"

    def fields(self) -> dict[str, Any]:
        """The rates for a row of metrics; unknown ones left out."""
        rates = {self.rate: self.tokens_per_s, "tflops": self.tflops, "mfu": self.mfu}
        return {name: value for name, value in rates.items() if value is not None}
