# SPDX-License-Identifier: Apache-2.0
"""Call all of several actions, even if some of them fail."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from .errors import CheckpointError, CheckpointWarning, IpufitWarning, warn


def do_all(actions: Iterable[Callable[[], Any]], *, is_failing: bool = False) -> None:
    """Call all actions, even if some fail; then raise the first error.

    Args:
        actions: Functions to call, one after the other.
        is_failing: If True, an earlier error is about to be raised, so errors of
            actions become warnings.

    Raises:
        BaseException: The error of the first action that failed, unless `is_failing`. A
            KeyboardInterrupt or a SystemExit takes precedence, and is raised in any
            case.

    Warns:
        IpufitWarning: An error that is not raised; a CheckpointWarning if it is about a
            checkpoint.

    Example:
        >>> done = []
        >>> do_all([lambda: done.append(1), lambda: 1 / 0, lambda: done.append(3)])
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
        >>> done
        [1, 3]
    """
    failures: list[BaseException] = []
    for action in actions:
        try:
            action()
        except BaseException as failure:  # noqa: BLE001 - reported below
            failures.append(failure)
    first = next((one for one in failures if not isinstance(one, Exception)), None)
    if first is None and failures and not is_failing:
        first = failures[0]
    try:
        if first is not None:
            raise first
    finally:  # a filter that makes errors of warnings hides none of the failures
        for other in failures:
            if other is not first:
                is_checkpoint = isinstance(other, CheckpointError)
                warn(
                    f"Something else failed besides the error that is raised: "
                    f"{type(other).__name__}: {other}",
                    CheckpointWarning if is_checkpoint else IpufitWarning,
                )
