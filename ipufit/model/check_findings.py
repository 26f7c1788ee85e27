# SPDX-License-Identifier: Apache-2.0
"""Findings of a check, made of what a survey, errors and tensors say."""

from __future__ import annotations

import os
import re
from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit.check_report import NOTE, NUMBERS, REFUSED, Finding, parted
from ipufit.data import SampleStructure
from ipufit.errors import IpufitError

_TRACED_NAME = re.compile(r"(?<![\w.])module\.(?=[\w])")
_NARROWED = {
    torch.int64: ("int32", NOTE),
    torch.float64: ("float32", NUMBERS),
    torch.bfloat16: ("float32", NUMBERS),
}


def of_error(error: Exception, topic: str, place: Any = None) -> Finding:
    """The finding that an error is.

    Args:
        error: Error that `fit` would raise.
        topic: Its subject.
        place: Place of the program, as a survey gives it; None for none.
    """
    text = str(error)
    if not isinstance(error, IpufitError):
        text = f"{type(error).__name__}: {text}"
    return _finding(REFUSED, topic, text, place, by_colon=False)


def of_survey(survey: Any) -> list[Finding]:
    """The findings of a survey.

    Args:
        survey: As the emulator gives it.
    """
    found = [
        _finding(
            REFUSED if remark.is_refused else NUMBERS,
            *(remark.topic, remark.message, remark.place),
        )
        for remark in survey.remarks
    ]
    is_refused = any(remark.is_refused for remark in survey.remarks)
    error = survey.error
    is_own = isinstance(error, IpufitError) and not _explains_torch(error)
    if error is not None and (is_own or not is_refused):
        found.append(of_error(error, "program", survey.place))
        is_refused = True
    elif error is not None:
        what = (
            "After what is refused the program ended here, on the first sample: "
            f"{type(error).__name__}: {error}"
        )
        found.append(at(Finding(NOTE, "program", what), survey.place))
    if not survey.is_whole and is_refused:
        what = "What comes after the place where the program ended wasn't looked at"
        advice = "Check again when that is mended."
        found.append(Finding(NOTE, "program", what, advice))
    return found


def of_dtypes(
    module: torch.nn.Module, structure: SampleStructure, tensors: Sequence[Tensor]
) -> list[Finding]:
    """Findings for tensors of 64 bits, which an IPU doesn't have.

    Args:
        module: The user's module.
        structure: Nesting of a batch.
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


def _explains_torch(error: BaseException) -> bool:
    """Whether an error of ours says with which shapes torch has failed."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, IpufitError)


def _finding(
    severity: str, topic: str, message: str, place: Any, *, by_colon: bool = True
) -> Finding:
    what, advice = parted(_TRACED_NAME.sub("", message), by_colon=by_colon)
    finding = Finding(severity, topic, what, advice)
    return finding if place is None else at(finding, place)


def at(finding: Finding, place: Any) -> Finding:
    """The finding with a place of the program, as a survey gives it."""
    first, _, rest = place.module.partition(".")
    module = rest if first == "module" else place.module
    location = f"{os.path.basename(place.file)}:{place.line}" if place.file else ""
    return Finding(
        *(finding.severity, finding.topic, finding.what, finding.advice),
        *(module, location, place.file),
    )
