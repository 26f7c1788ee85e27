# SPDX-License-Identifier: Apache-2.0
"""Profiles of the host's part of a run: what it did when, and how long it took."""

from __future__ import annotations

from .facts import facts_of
from .phases import PHASES, Phase
from .recorder import Recorder
from .timeline import Span, Timeline
from .timing import TimedItems, timed, timed_methods

__all__ = [
    "PHASES",
    "Phase",
    "Recorder",
    "Span",
    "TimedItems",
    "Timeline",
    "facts_of",
    "timed",
    "timed_methods",
]
