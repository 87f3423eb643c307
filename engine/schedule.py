"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from engine.schema import Schedule


def learning_rate(step: int, peak: float, schedule: Schedule) -> float:
    """The rate of update `step` (0-based): linear warm-up to `peak`, then the named decay to `min_lr_ratio * peak`.

    The first update already moves (rate peak / warmup_steps) and the last one uses the lowest rate. cosine follows
    Loshchilov and Hutter, 2017 (arXiv 1608.03983) without restarts; wsd (warm-up, stable, decay) follows Hu et al.,
    2024 (arXiv 2404.06395) with a linear decay over the last `decay_steps`.
    """
    done = step + 1
    if done <= schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    floor = peak * schedule.min_lr_ratio
    return floor + (peak - floor) * _remaining(done, schedule)


def _remaining(done: int, schedule: Schedule) -> float:
    """How much of the way from the floor to the peak is left, in [0, 1]."""
    span = max(1, schedule.steps - schedule.warmup_steps)
    progress = min(1.0, (done - schedule.warmup_steps) / span)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "linear":
        return 1.0 - progress
    if schedule.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.name == "wsd":
        decay = schedule.decay_steps or max(1, schedule.steps // 5)
        return min(1.0, max(0.0, (schedule.steps - done) / decay))
    raise ValueError(f"unknown schedule {schedule.name}")
