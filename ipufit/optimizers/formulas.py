# SPDX-License-Identifier: Apache-2.0
"""The formulas of schedules: factors on a learning rate, or another value.

They are those of torch's schedulers and of the transformers library, where these have
it. Each takes the `Schedule` that has its settings.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Callable


@dataclass(frozen=True)
class Formula:
    """A formula, and the settings it has besides those of the warm-up.

    Attributes:
        factor: Function of a `Schedule`, the update's index and the number of all.
        settings: Names of its settings.
    """

    factor: Callable[[Any, int, int], float]
    settings: tuple[str, ...] = ()


def _warmed_up(
    rest: Callable[[Any, int, int], float],
) -> Callable[[Any, int, int], float]:
    """Put a warm-up before a formula of the updates after it, and of their number."""

    def factor(schedule: Any, update: int, total: int) -> float:
        warmup = schedule.warmup(total)
        if update < warmup:
            return _between(schedule.initial or 0.0, 1.0, update / warmup)
        return rest(schedule, update - warmup, max(1, total - warmup))

    return factor


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def _constant(schedule: Any, update: int, total: int) -> float:
    return 1.0


def _linear(schedule: Any, update: int, total: int) -> float:
    return _between(1.0, schedule.final or 0.0, min(1.0, update / total))


def _cosine(schedule: Any, update: int, total: int) -> float:
    return _half_cosine(1.0, schedule.final or 0.0, min(1.0, update / total))


def _cosine_restarts(schedule: Any, update: int, total: int) -> float:
    final = schedule.final or 0.0
    if update >= total:
        return final
    share = update * (schedule.cycles or 1) % total / total
    return _half_cosine(1.0, final, share)


def _polynomial(schedule: Any, update: int, total: int) -> float:
    power = 1.0 if schedule.power is None else schedule.power
    left = (1.0 - min(1.0, update / total)) ** power
    return _between(schedule.final or 0.0, 1.0, left)


def _exponential(schedule: Any, update: int, total: int) -> float:
    gamma = 1.0 if schedule.gamma is None else schedule.gamma
    return float(gamma ** (update / (schedule.every_updates or 1)))


def _inverse_sqrt(schedule: Any, update: int, total: int) -> float:
    warmup = schedule.warmup(total)
    timescale = schedule.timescale or warmup or 10_000
    since = max(0, update - warmup)
    return _WARM_CONSTANT(schedule, update, total) * math.sqrt(
        timescale / (since + timescale)
    )


def _step(schedule: Any, update: int, total: int) -> float:
    gamma = 0.1 if schedule.gamma is None else schedule.gamma
    passed = bisect.bisect_right(schedule.boundaries or (), update)
    return float(_WARM_CONSTANT(schedule, update, total) * gamma**passed)


def _one_cycle(schedule: Any, update: int, total: int) -> float:
    """Compute torch's one cycle: `initial` at the first update, `final` at the last."""
    initial = 1.0 / 25.0 if schedule.initial is None else schedule.initial
    final = 1.0 / 25.0 / 1e4 if schedule.final is None else schedule.final
    if schedule.warmup_updates is not None:
        top = schedule.warmup_updates - 1.0
    else:
        share = schedule.warmup_fraction
        top = (0.3 if share is None else share) * total - 1.0
    if update < top:
        return _half_cosine(initial, 1.0, update / top)
    rest = total - 1 - top
    share = min(1.0, (update - top) / rest) if rest > 0 else 1.0
    return _half_cosine(1.0, final, share)


_WARM_CONSTANT = _warmed_up(_constant)

FORMULAS = {
    "constant": Formula(_WARM_CONSTANT),
    "linear": Formula(_warmed_up(_linear), ("final",)),
    "cosine": Formula(_warmed_up(_cosine), ("final",)),
    "cosine_restarts": Formula(_warmed_up(_cosine_restarts), ("final", "cycles")),
    "polynomial": Formula(_warmed_up(_polynomial), ("final", "power")),
    "exponential": Formula(
        _warmed_up(_exponential), ("gamma", "every_updates", "every_epochs")
    ),
    "step": Formula(_step, ("boundaries", "gamma", "boundary_epochs")),
    "inverse_sqrt": Formula(_inverse_sqrt, ("timescale",)),
    "one_cycle": Formula(_one_cycle, ("final",)),
}
"""By name."""

ENDING = ("linear", "cosine", "cosine_restarts", "polynomial", "one_cycle")
"""Names of those that depend on the number of all updates."""
