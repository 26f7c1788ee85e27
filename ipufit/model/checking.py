# SPDX-License-Identifier: Apache-2.0
"""`check`: find all that PopTorch would refuse, or compute differently than torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import torch
from torch import Tensor

from ipufit.data.loaders import generators_of
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import example_of
from ipufit.data.structure import SampleStructure
from ipufit.engine.loop import Training
from ipufit.engine.program import survey_training
from ipufit.errors import (
    BakedInWarning,
    CoverageWarning,
    DataError,
    DroppedRowsWarning,
    EmptyUpdatesWarning,
    IpufitError,
    OtherNumbersWarning,
)
from ipufit.types import ShownAsText

from .arguments import FitArguments
from .calls import CallPlanner, warn_of_coverage_of_fit
from .fitting import plan_fit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFUSED = "refused"
NUMBERS = "other numbers"
SLOW = "slow"
NOTE = "good to know"

SEVERITIES = (REFUSED, NUMBERS, SLOW, NOTE)
"""The severities of findings, the gravest first.

A refused program doesn't run at all. A program has other numbers than plain torch if a
device computes an operator differently, or computes once what torch computes for every
batch.
"""

_STYLES = {REFUSED: "bold red", NUMBERS: "yellow", SLOW: "cyan", NOTE: "dim"}
_SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z`])")
_TRACED_NAME = re.compile(r"(?<![\w.])module\.(?=[\w])")
_NARROWED = {
    torch.int64: ("int32", NOTE),
    torch.float64: ("float32", NUMBERS),
    torch.bfloat16: ("float32", NUMBERS),
}
_LARGE_RESULTS = 64 * 2**20
"""Bytes of a call's results that take noticeable time and memory on the host."""


@dataclass(frozen=True, repr=False)
class Finding(ShownAsText):
    """One result of a check.

    Attributes:
        severity: "refused", "other numbers", "slow" or "good to know".
        topic: The subject in a word, such as "operator", "value" or "batch norm".
        what: One sentence or more: the operator, value or setting, and what happens.
        advice: A way out; "" if nothing need be done.
        module: Path of the submodule; "" for the whole module, or if none is known.
        location: File and line, as in "train.py:12"; "" if no line caused it.
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
        """Return the finding in a line."""
        inside = f"in {self.module}" if self.module else ""
        where = ", ".join(filter(None, (self.location, inside)))
        text = (
            f"{self.severity}: {self.what.rstrip('.')}{f' ({where})' if where else ''}"
        )
        return f"{text}. {self.advice}" if self.advice else text


@dataclass(frozen=True, repr=False)
class CheckReport(ShownAsText):
    """The findings of a check, the most serious first.

    Attributes:
        title: Class of the module, and the samples of a call.
        findings: All findings, refusals first.

    Example:
        >>> report = CheckReport("Net", (Finding("slow", "calls", "One update each"),))
        >>> report.is_refused, [finding.topic for finding in report.of("slow")]
        (False, ['calls'])
    """

    title: str
    findings: tuple[Finding, ...]

    @property
    def is_refused(self) -> bool:
        """Whether the model can't run as it is."""
        return bool(self.of(REFUSED))

    def of(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of a severity."""
        return tuple(f for f in self.findings if f.severity == severity)

    def __str__(self) -> str:
        """Return a line for each finding, and a last line with their numbers."""
        return "\n".join([*map(str, self.findings), self._verdict()])

    def as_json(self) -> str:
        """Return the report as JSON: `title`, `is_refused`, and `findings`.

        Example:
            >>> print(CheckReport("Net", ()).as_json())
            {
              "title": "Net",
              "is_refused": false,
              "findings": []
            }
        """
        findings = [asdict(finding) for finding in self.findings]
        parts = {"title": self.title, "is_refused": self.is_refused}
        return json.dumps({**parts, "findings": findings}, indent=2)

    def table(self) -> Table:
        """Return the table that `print` shows."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, caption=self._verdict(), show_lines=True)
        for name, share in (("Severity", 1), ("Where", 2), ("Finding", 6)):
            table.add_column(name, ratio=share, overflow="fold")
        for finding in self.findings:
            where = "\n".join(filter(None, (finding.location, finding.module)))
            text = Text(finding.what)
            if finding.advice:
                text.append(f"\n{finding.advice}", style="italic")
            severity = Text(finding.severity, _STYLES[finding.severity])
            table.add_row(severity, Text(where), text)
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


# Findings -----------------------------------------------------------------------------

_TOPICS: dict[type, tuple[str, str]] = {
    DroppedRowsWarning: (NOTE, "data"),
    EmptyUpdatesWarning: (NUMBERS, "data"),
    CoverageWarning: (NOTE, "metrics"),
    BakedInWarning: (NUMBERS, "baked in"),
}
"""Severity and topic of the warnings of `fit`; all others are about buffers."""


def _finding(
    severity: str,
    topic: str,
    message: str,
    place: Any = None,
    *,
    by_colon: bool = False,
) -> Finding:
    """Make a finding from a message.

    Args:
        severity: As in `Finding`.
        topic: As in `Finding`.
        message: Sentences; the last of several is the advice.
        place: Place from a survey; None for none.
        by_colon: Whether a single sentence may be split at its last colon.

    Example:
        >>> _finding(REFUSED, "value", "Packed sequences are refused: pad them.",
        ...          by_colon=True).advice
        'Pad them.'
        >>> _finding(REFUSED, "value", "f() needs a value. Return it.").advice
        'Return it.'
    """
    message = _TRACED_NAME.sub("", message.strip())
    *sentences, last = _SENTENCE.split(message)
    what, advice = " ".join(sentences), last
    if not sentences:
        what, mark, advice = message.rpartition(": ")
        if not by_colon or not mark or len(advice.split()) < 2:
            what, advice = message, ""
        advice = advice[:1].upper() + advice[1:]
    if place is None:
        return Finding(severity, topic, what, advice)
    first, _, rest = place.module.partition(".")
    module = rest if first == "module" else place.module
    location = f"{os.path.basename(place.file)}:{place.line}" if place.file else ""
    return Finding(severity, topic, what, advice, module, location, place.file)


def _warning_finding(warning: Warning | str) -> Finding:
    severity, topic = _TOPICS.get(type(warning), (NUMBERS, "buffer"))
    return _finding(severity, topic, str(warning), by_colon=True)


def _error_finding(error: Exception, topic: str, place: Any = None) -> Finding:
    text = str(error)
    if not isinstance(error, IpufitError):
        text = f"{type(error).__name__}: {text}"
    return _finding(REFUSED, topic, text, place)


def _program_findings(training: Training) -> Iterator[Finding]:
    """Trace the program, and yield findings about it and its calls."""
    choice, plan, structure = training.choice, training.plan, training.batches.structure
    if choice.value == 1 and "hears each" in choice.reason:
        yield _finding(
            SLOW,
            "calls",
            f"Each call makes one update, because {choice.reason}. Use hooks of epochs "
            "alone, or set hears_every to a number of updates.",
        )
    with torch.no_grad():
        seen = survey_training(training.spec)
    yield from (_error_finding(error, "module") for error in seen.refusals)
    yield from _survey_findings(seen.survey)
    for warning in seen.warnings:
        if not isinstance(warning, OtherNumbersWarning):  # a finding of the survey
            yield _warning_finding(warning)
    norms = seen.survey.norms
    if norms and plan.micro_batch_size != plan.batch_size:
        names = [norm.module.partition(".")[2] or "the module" for norm in norms]
        layers = "layer normalizes" if len(names) == 1 else "layers normalize"
        yield _finding(
            NUMBERS,
            "batch norm",
            f"{len(names)} {layers} over the {plan.micro_batch_size} samples of a "
            f"micro-batch, not over the {plan.batch_size} of a batch "
            f"({_list_first(names, 3)}). Use a larger micro_batch_size, or GroupNorm, "
            "which mixes no samples.",
            norms[0],
        )
    yield from _dtype_findings(training.executors.module, structure, seen.tensors)
    size = seen.survey.returned_bytes * plan.micro_batches_per_call
    if size > _LARGE_RESULTS:
        yield _finding(
            SLOW,
            "outputs",
            f"Each call sends {size / 2**20:,.0f} MiB back to the host, because a "
            "metric needs the outputs of all samples. Use metrics that the device adds "
            "up, or smaller calls.",
        )


def _list_first(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def _survey_findings(survey: Any) -> Iterator[Finding]:
    """Yield the findings of the emulator's survey."""
    times = Counter(remark.message for remark in survey.remarks)
    for remark in survey.remarks:
        is_otherwise = remark.topic == "numbers" and not remark.is_refused
        count = times.pop(remark.message, 0) if is_otherwise else 1
        if not count:  # in fifty layers it is one finding
            continue
        finding = _finding(
            REFUSED if remark.is_refused else NUMBERS,
            *(remark.topic, remark.message, remark.place),
            by_colon=remark.topic != "numbers",
        )
        if count > 1:
            more = f"{finding.what.rstrip('.')} (the first of {count} places)"
            finding = replace(finding, what=more)
        yield finding
    is_refused = any(remark.is_refused for remark in survey.remarks)
    error = survey.error
    cause = None if error is None else error.__cause__
    # Of the others some give the shapes with which torch has failed.
    is_own = isinstance(error, IpufitError) and (
        cause is None or isinstance(cause, IpufitError)
    )
    if error is not None and (is_own or not is_refused):
        yield _error_finding(error, "program", survey.place)
        is_refused = True
    elif error is not None:
        what = (
            "After what is refused the program ended here, on the first sample: "
            f"{type(error).__name__}: {error}"
        )
        yield replace(_finding(NOTE, "program", "", survey.place), what=what)
    if not survey.is_whole and is_refused:
        yield _finding(
            NOTE,
            "program",
            "The code after the place where the program ended wasn't checked. Check "
            "again when that place is mended.",
        )


def _dtype_findings(
    module: torch.nn.Module, structure: SampleStructure, tensors: Sequence[Tensor]
) -> Iterator[Finding]:
    """Yield findings for tensors of 64 bits, which an IPU doesn't have.

    Args:
        module: The user's module.
        structure: Structure of a batch.
        tensors: Tensors of a micro-batch.
    """
    count = structure.num_inputs
    types: list[tuple[str, torch.dtype]] = [
        ("inputs" if index < count else "targets", tensor.dtype)
        for index, tensor in enumerate(tensors[: structure.num_given])
    ]
    types += [(name, weight.dtype) for name, weight in module.named_parameters()]
    # Counters such as those of batch norm are the host's.
    types += [(name, b.dtype) for name, b in module.named_buffers() if b.dim()]
    for wide, (narrow, severity) in _NARROWED.items():
        names = list(dict.fromkeys(name for name, dtype in types if dtype == wide))
        if names:
            kind = str(wide).replace("torch.", "")
            what = f"{kind} becomes {narrow} on an IPU: {_list_first(names, 4)}"
            yield _finding(severity, "dtype", what)


def check_fit(
    planner: CallPlanner, arguments: FitArguments, *, is_spare: bool = False
) -> CheckReport:
    """Check a `fit`.

    The `fit` is planned, which gives its refusals and warnings. If the plan fails, the
    program is checked on the first sample.

    Args:
        planner: Plans the calls of the model.
        arguments: Arguments of the `fit`.
        is_spare: Whether that `fit` won't run, so that a generator may lose its first
            batch.
    """
    if hasattr(arguments.x, "__next__") and not is_spare:
        raise DataError(
            "`x` is a generator, which can be gone through once: a check would take "
            "its first batch away. Pass one batch, or tensors of its shapes."
        )
    planner.require_compiled()
    planner.executors.fetch_weights()
    module, training, findings = planner.module, None, []
    in_order, title = replace(arguments, shuffle=False), type(module).__name__
    with HostRandomState(generators_of(arguments.x)):
        try:
            plan = plan_fit(planner, in_order, resume=False)
        except IpufitError as error:
            topic = "data" if isinstance(error, DataError) else "config"
            findings.append(_error_finding(error, topic))
            with contextlib.suppress(IpufitError):  # of which the first is known
                source = example_of(
                    *arguments.data, is_spare=is_spare, **planner.loading
                )
                training = planner.training(source, in_order)
        else:
            training = plan.training
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                planner.warn_of_tail(training)
                warn_of_coverage_of_fit(training, plan.validations.sets)
            findings += [_warning_finding(warning.message) for warning in caught]
        if training is not None:
            title += f", {training.plan.samples_per_call} samples per call"
            findings += _program_findings(training)
    once = dict.fromkeys(findings)
    gravest_first = sorted(once, key=lambda f: SEVERITIES.index(f.severity))
    return CheckReport(title, tuple(gravest_first))
