# SPDX-License-Identifier: Apache-2.0
"""Spans of a run in the traces of `torch.profiler`."""

from __future__ import annotations

import contextlib
from typing import ContextManager, Iterable, Iterator, TypeVar

from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.profiler import record_function

T = TypeVar("T")

_NOTHING: ContextManager[None] = contextlib.nullcontext()


def is_recorded() -> bool:
    """Return whether a profiler of torch records this thread."""
    return bool(_profiler_enabled())


def span(*name: str) -> ContextManager[None]:
    """Name the operations inside the context, if a profiler of torch records them.

    Args:
        *name: Parts of the name, which are joined by dots.

    Example:
        >>> from torch.profiler import ProfilerActivity, profile
        >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ...     with span("device call"):
        ...         pass
        >>> [event.key for event in profiler.key_averages()]
        ['device call']
    """
    # Without a profiler `record_function` takes microseconds, and the question none.
    return record_function(".".join(name)) if _profiler_enabled() else _NOTHING


def awaited(items: Iterable[T]) -> Iterator[T]:
    """Yield items, with a span around each wait.

    Example:
        >>> list(awaited([1, 2]))
        [1, 2]
    """
    iterator = iter(items)
    while True:
        with span("host data"):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
