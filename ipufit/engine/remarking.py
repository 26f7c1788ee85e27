# SPDX-License-Identifier: Apache-2.0
"""The words of a display about numbers that were chosen for a program."""

from __future__ import annotations

from ipufit.callbacks import ProgressDisplay
from ipufit.planning.choices import Choice


class Remarking(ProgressDisplay):
    """Has a display say more about a program that was compiled.

    Args:
        display: The display.
        remark: The text that it gets.
    """

    def __init__(self, display: ProgressDisplay, remark: str) -> None:
        super().__init__()
        self._display = display
        self._remark = remark

    def compiling(self, what: str) -> None:
        """Pass it on."""
        self._display.compiling(what)

    def noted(self, line: str) -> None:
        """Pass it on."""
        self._display.noted(line)

    def compiled(self, what: str, seconds: float, remark: str = "") -> None:
        """Pass it on, with the remark."""
        self._display.compiled(what, seconds, self._remark)


def remark_on_passes(choice: Choice | None) -> str:
    """The passes of a call, and why not more, if they were chosen for a reason.

    Example:
        >>> remark_on_passes(Choice(16, "32 would pad 80 passes to 96"))
        '16 passes per call (inference_iterations left open); not more because 32 ...'
    """
    if choice is None or not choice.reason:
        return ""
    passes = "1 pass" if choice.value == 1 else f"{choice.value} passes"
    return (
        f"{passes} per call (inference_iterations left open); not more because "
        f"{choice.reason}"
    )
