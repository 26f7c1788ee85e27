# SPDX-License-Identifier: Apache-2.0
"""`check`: all at once that PopTorch would refuse, or compute otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor

from ipufit.batching import BatchPlan
from ipufit.data.loaders import generators_of
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import example_of, fit_sources
from ipufit.data.structure import SampleStructure
from ipufit.engine.loop import Training
from ipufit.engine.program import Surveyed, surveyed
from ipufit.engine.rows import describe_coverage
from ipufit.errors import DataError, IpufitError, OtherNumbersWarning
from ipufit.types import ShownAsText

from .arguments import FitArguments
from .calls import CallPlanner

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
        module: Path of the submodule; "" for the whole, or none.
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
        return tuple(one for one in self.findings if one.severity == severity)

    def __str__(self) -> str:
        """Return a line for each finding, and a last one that counts them."""
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
        found = [asdict(finding) for finding in self.findings]
        data = {"title": self.title, "is_refused": self.is_refused, "findings": found}
        return json.dumps(data, indent=2)

    def table(self) -> Table:
        """Return the table that `print` shows."""
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
    """Return a report without repeated findings, the most serious first.

    Example:
        >>> found = [Finding("slow", "a", "A"), Finding("refused", "b", "B")] * 2
        >>> [one.topic for one in report_of("Net", found).findings]
        ['b', 'a']
    """
    once = sorted(
        dict.fromkeys(findings), key=lambda one: SEVERITIES.index(one.severity)
    )
    return CheckReport(title, tuple(once))


# Findings -----------------------------------------------------------------------------


def findings_of_calls(training: Training) -> list[Finding]:
    """Return findings about the calls of a pass."""
    plan, batches, found = training.plan, training.batches, []
    if batches.num_dropped:
        found.append(
            Finding(
                NOTE,
                "data",
                f"fit leaves out {batches.num_dropped} of {batches.source.num_samples} "
                "samples in every epoch: they don't fill "
                f"{plan.describe_unfilled(batches.num_dropped)}",
                "drop_last='pad' trains on them, too. Or choose factors that divide "
                "the number.",
            )
        )
    if batches.num_empty_updates:
        found.append(
            Finding(
                NUMBERS,
                "data",
                f"{batches.num_empty_updates} of the {plan.device_iterations} updates "
                "of the last call have padding only: gradients are zero, but momentum "
                "and weight decay go on",
                "Lower device_iterations.",
            )
        )
    coverage = describe_coverage(training.options, plan)
    if coverage:
        what = f"loss and metrics cover only a part of the samples: {coverage}"
        found.append(
            Finding(NOTE, "metrics", what, "Leave the output mode at its default.")
        )
    choice = training.choice
    if choice is not None and choice.value == 1 and "hears each" in choice.reason:
        what = f"Each call makes one update, because {choice.reason}"
        advice = "Use hooks of epochs alone, or set hears_every to a number of updates."
        found.append(Finding(SLOW, "calls", what, advice))
    return found


def findings_of_program(
    module: torch.nn.Module,
    plan: BatchPlan,
    structure: SampleStructure,
    seen: Surveyed,
) -> list[Finding]:
    """Return findings about the traced program."""
    found = [finding_of(error, "module") for error in seen.refusals]
    found += findings_of_survey(seen.survey)
    for warning in seen.warnings:
        if isinstance(warning, OtherNumbersWarning):  # a finding of the survey
            continue
        what, advice = _parted(str(warning))
        topic = "baked in" if "BakedIn" in type(warning).__name__ else "buffer"
        found.append(Finding(NUMBERS, topic, what, advice))
    found += _of_norms(seen.survey.norms, plan)
    found += _of_dtypes(module, structure, seen.tensors)
    size = seen.survey.returned_bytes * plan.micro_batches_per_call
    if size > _LARGE_RESULTS:
        what = (
            f"Each call sends {size / 2**20:,.0f} MiB back to the host, because a "
            "metric needs the outputs of all samples"
        )
        advice = "Use metrics that the device adds up, or smaller calls."
        found.append(Finding(SLOW, "outputs", what, advice))
    return found


def _of_norms(norms: list[Any], plan: BatchPlan) -> list[Finding]:
    """Return a finding for layers that normalise over less than the user's batch."""
    if not norms or plan.micro_batch_size == plan.batch_size:
        return []
    names = [norm.module.partition(".")[2] or "the module" for norm in norms]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    layers = (
        "1 layer normalises" if len(names) == 1 else f"{len(names)} layers normalise"
    )
    what = (
        f"{layers} over the {plan.micro_batch_size} samples of a micro-batch, not over "
        f"the {plan.batch_size} of a batch ({shown})"
    )
    advice = "Use a larger micro_batch_size, or GroupNorm, which mixes no samples."
    return [_at(Finding(NUMBERS, "batch norm", what, advice), norms[0])]


def finding_of(error: Exception, topic: str, place: Any = None) -> Finding:
    """Convert an error that `fit` would raise, at a place of a survey, to a finding."""
    text = str(error)
    if not isinstance(error, IpufitError):
        text = f"{type(error).__name__}: {text}"
    return _finding(REFUSED, topic, text, place, by_colon=False)


def findings_of_survey(survey: Any) -> list[Finding]:
    """Convert a survey to findings.

    Args:
        survey: The emulator's survey.
    """
    times, found = Counter(remark.message for remark in survey.remarks), []
    for remark in survey.remarks:
        is_otherwise = remark.topic == "numbers" and not remark.is_refused
        count = times.pop(remark.message, 0) if is_otherwise else 1
        if not count:  # in fifty layers it is one finding
            continue
        one = _finding(
            REFUSED if remark.is_refused else NUMBERS,
            *(remark.topic, remark.message, remark.place),
            by_colon=remark.topic != "numbers",
        )
        if count > 1:
            more = f"{one.what.rstrip('.')} (the first of {count} places)"
            one = replace(one, what=more)
        found.append(one)
    is_refused = any(remark.is_refused for remark in survey.remarks)
    error = survey.error
    cause = None if error is None else error.__cause__
    # Of the others some give the shapes with which torch has failed.
    is_own = isinstance(error, IpufitError) and (
        cause is None or isinstance(cause, IpufitError)
    )
    if error is not None and (is_own or not is_refused):
        found.append(finding_of(error, "program", survey.place))
        is_refused = True
    elif error is not None:
        what = (
            "After what is refused the program ended here, on the first sample: "
            f"{type(error).__name__}: {error}"
        )
        found.append(_at(Finding(NOTE, "program", what), survey.place))
    if not survey.is_whole and is_refused:
        what = "What comes after the place where the program ended wasn't looked at"
        advice = "Check again when that is mended."
        found.append(Finding(NOTE, "program", what, advice))
    return found


def _of_dtypes(
    module: torch.nn.Module, structure: SampleStructure, tensors: Sequence[Tensor]
) -> list[Finding]:
    """Return findings for tensors of 64 bits, which an IPU doesn't have.

    Args:
        module: The user's module.
        structure: Structure of a batch.
        tensors: Tensors of a micro-batch.
    """
    count = structure.num_inputs
    named: list[tuple[str, torch.dtype]] = [
        ("inputs" if index < count else "targets", tensor.dtype)
        for index, tensor in enumerate(tensors[: structure.num_given])
    ]
    named += [(name, weight.dtype) for name, weight in module.named_parameters()]
    # Counters such as those of batch norm are the host's.
    named += [(name, b.dtype) for name, b in module.named_buffers() if b.dim()]
    found = []
    for dtype, (becomes, severity) in _NARROWED.items():
        names = list(dict.fromkeys(name for name, one in named if one == dtype))
        if not names:
            continue
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        kind = str(dtype).replace("torch.", "")
        what = f"{kind} becomes {becomes} on an IPU: {shown}"
        found.append(Finding(severity, "dtype", what))
    return found


def _finding(
    severity: str, topic: str, message: str, place: Any, *, by_colon: bool = True
) -> Finding:
    what, advice = _parted(_TRACED_NAME.sub("", message), by_colon=by_colon)
    finding = Finding(severity, topic, what, advice)
    return finding if place is None else _at(finding, place)


def _at(finding: Finding, place: Any) -> Finding:
    """Return the finding with a place from a survey."""
    first, _, rest = place.module.partition(".")
    module = rest if first == "module" else place.module
    location = f"{os.path.basename(place.file)}:{place.line}" if place.file else ""
    return Finding(
        *(finding.severity, finding.topic, finding.what, finding.advice),
        *(module, location, place.file),
    )


def _parted(message: str, *, by_colon: bool = True) -> tuple[str, str]:
    """Split a message into the problem and the advice at its end.

    Args:
        message: Sentences; the last of several is the advice.
        by_colon: Whether a single sentence may be split at its last colon.

    Example:
        >>> _parted("Packed sequences are not supported: pad them.")
        ('Packed sequences are not supported', 'Pad them.')
        >>> _parted("f() needs a value. Values come later. Return them.")
        ('f() needs a value. Values come later.', 'Return them.')
    """
    sentences = _SENTENCE.split(message.strip())
    if len(sentences) > 1:
        return " ".join(sentences[:-1]), sentences[-1]
    what, mark, advice = message.rpartition(": ")
    if not by_colon or not mark or len(advice.split()) < 2:
        return message, ""
    return what, advice[:1].upper() + advice[1:]


def check_fit(calls: CallPlanner, arguments: FitArguments) -> CheckReport:
    """Check a `fit`; a generator loses its first batch.

    Data that is too little for a call is refused, and the program is checked
    nevertheless.

    Args:
        calls: Plans the calls of the model.
        arguments: Arguments of the `fit`.
    """
    before = HostRandomState(generators_of(arguments.x))
    module, findings, training = calls.module, [], None
    in_order = replace(arguments, shuffle=False)
    title = type(module).__name__
    try:
        try:
            source, _ = fit_sources(
                *arguments.data,
                arguments.validation_split,
                arguments.validation_data,
                **calls.loading,
            )
            training = calls.training(source, replace(in_order, validation_split=0.0))
        except DataError as error:
            findings.append(finding_of(error, "data"))
            with contextlib.suppress(IpufitError):  # of which the first is known
                source = example_of(*arguments.data, **calls.loading)
                training = calls.training(source, in_order)
        except IpufitError as error:
            findings.append(finding_of(error, "config"))
        if training is not None:
            plan, batches = training.plan, training.batches
            title += f", {plan.samples_per_call} samples per call"
            findings += findings_of_calls(training)
            with torch.no_grad():
                seen = surveyed(training.spec)
            findings += findings_of_program(module, plan, batches.structure, seen)
    finally:
        before.put_back()
    return report_of(title, findings)
