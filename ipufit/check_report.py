# SPDX-License-Identifier: Apache-2.0
"""The findings of a check of a model: as data, as a table, and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFUSED = "refused"
NUMBERS = "other numbers"
SLOW = "slow"
NOTE = "good to know"

SEVERITIES = (REFUSED, NUMBERS, SLOW, NOTE)
"""The severities of findings, the gravest first.

What is refused doesn't run at all. Other numbers than plain torch's come out of what is
computed otherwise, or once where torch computes it for every batch.
"""

_STYLES = {REFUSED: "bold red", NUMBERS: "yellow", SLOW: "cyan", NOTE: "dim"}
_SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z`])")


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        severity: "refused", "other numbers", "slow" or "good to know".
        topic: The subject in a word, such as "operator", "value" or "batch norm".
        what: One sentence or more: the operator, value or setting, and what happens.
        advice: A way out; "" if nothing need be done.
        module: Path of the submodule in which it is; "" for the whole, or none.
        location: File and line, as in "train.py:12"; "" if no line has caused it.
        path: Path of the file of `location`; "" if no line is known.

    Example:
        >>> print(Finding("refused", "value", ".item() needs a value", "Leave it out",
        ...               "encoder", "train.py:12"))
        refused: .item() needs a value (train.py:12, in encoder). Leave it out
    """

    severity: str
    topic: str
    what: str
    advice: str = ""
    module: str = ""
    location: str = ""
    path: str = field(default="", repr=False)

    def __str__(self) -> str:
        """The finding in a line."""
        inside = f"in {self.module}" if self.module else ""
        where = ", ".join(filter(None, (self.location, inside)))
        text = (
            f"{self.severity}: {self.what.rstrip('.')}{f' ({where})' if where else ''}"
        )
        return f"{text}. {self.advice}" if self.advice else text


@dataclass(frozen=True)
class CheckReport:
    """Everything that a check of a model has found, the gravest first.

    Attributes:
        title: Class of the module, and the samples of a call.
        findings: All findings, those that PopTorch refuses first.

    Example:
        >>> report = CheckReport("Net", (Finding("slow", "calls", "One update each"),))
        >>> report.is_refused, [finding.topic for finding in report.of("slow")]
        (False, ['calls'])
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def is_refused(self) -> bool:
        """Whether the model doesn't run as it is."""
        return bool(self.of(REFUSED))

    def of(self, severity: str) -> tuple[Finding, ...]:
        """The findings of a severity."""
        return tuple(one for one in self.findings if one.severity == severity)

    def __str__(self) -> str:
        """A line for each finding, and a last one that counts them."""
        return "\n".join([*map(str, self.findings), self._verdict()])

    def as_json(self) -> str:
        """The report as JSON: `title`, `is_refused`, and `findings` with their fields.

        Example:
            >>> print(CheckReport("Net", ()).as_json())
            {
              "title": "Net",
              "is_refused": false,
              "findings": []
            }
        """
        found = [asdict(finding) for finding in self.findings]
        data = {"title": self.title, "is_refused": self.is_refused, "findings": found}
        return json.dumps(data, indent=2)

    def table(self) -> Table:
        """The table that `print` shows."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, caption=self._verdict(), show_lines=True)
        for name, share in (("Severity", 1), ("Where", 2), ("Finding", 6)):
            table.add_column(name, ratio=share, overflow="fold")
        for one in self.findings:
            where = "\n".join(filter(None, (one.location, one.module)))
            text = Text(one.what)
            if one.advice:
                text.append(f"\n{one.advice}", style="italic")
            table.add_row(Text(one.severity, _STYLES[one.severity]), Text(where), text)
        return table

    def print(self, console: Console | None = None) -> None:
        """Print the table, or one line if there is nothing to show.

        Args:
            console: Console of rich; standard output by default.
        """
        from rich.console import Console

        console = console or Console()
        if self.findings:
            console.print(self.table())
        else:
            console.print(f"{self.title}: {self._verdict()}", highlight=False)

    def _verdict(self) -> str:
        counts = [(len(self.of(severity)), severity) for severity in SEVERITIES]
        shown = ", ".join(f"{count} {severity}" for count, severity in counts if count)
        if self.is_refused:
            return f"Doesn't run: {shown}."
        return f"Nothing is refused{f': {shown}' if shown else ''}."


def report_of(title: str, findings: list[Finding]) -> CheckReport:
    """A report with each finding once, the gravest first.

    Example:
        >>> found = [Finding("slow", "a", "A"), Finding("refused", "b", "B")] * 2
        >>> [one.topic for one in report_of("Net", found).findings]
        ['b', 'a']
    """
    once = sorted(
        dict.fromkeys(findings), key=lambda one: SEVERITIES.index(one.severity)
    )
    return CheckReport(title, tuple(once))


def parted(message: str, *, by_colon: bool = True) -> tuple[str, str]:
    """Part a message into the problem and the advice at its end.

    Args:
        message: Sentences; the last of several is the advice.
        by_colon: Whether the only sentence may be parted at its last colon.

    Example:
        >>> parted("Packed sequences are not supported: pad them.")
        ('Packed sequences are not supported', 'Pad them.')
        >>> parted("f() needs a value. Values come later. Return them.")
        ('f() needs a value. Values come later.', 'Return them.')
    """
    sentences = _SENTENCE.split(message.strip())
    if len(sentences) > 1:
        return " ".join(sentences[:-1]), sentences[-1]
    what, mark, advice = message.rpartition(": ")
    if not by_colon or not mark or len(advice.split()) < 2:
        return message, ""
    return what, advice[:1].upper() + advice[1:]
