# SPDX-License-Identifier: Apache-2.0
"""`check`: everything at once that PopTorch would refuse, or compute otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any, Mapping, NamedTuple

import torch

from ipufit.batching import BatchPlan
from ipufit.callbacks.base import CallbackLike
from ipufit.check_report import (
    NOTE,
    NUMBERS,
    SLOW,
    CheckReport,
    Finding,
    parted,
    report_of,
)
from ipufit.data import (
    HostRandomState,
    Source,
    TrainingBatches,
    column_names,
    example_of,
    fit_sources,
    generators_of,
)
from ipufit.engine import Training, describe_coverage, surveyed
from ipufit.errors import DataError, IpufitError

from .check_findings import at, of_dtypes, of_error, of_survey
from .parts import Model, settings_of
from .training import training_of
from .updates_per_call import updates_per_call


def check(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    callbacks: CallbackLike = None,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    validation_split: float = 0.0,
    steps_per_epoch: int | None = None,
    validation_updates: int | None = None,
    drop_last: bool | str = True,
) -> CheckReport:
    """Say at once all that PopTorch would refuse in a `fit`, or compute otherwise.

    The program that `fit` would run is traced on one micro-batch, by the rules of the
    emulator, and each refusal is noted where a compilation would end at the first one.
    Nothing is compiled or trained, and the model stays as it is. After a refusal code
    goes on with torch's result for the first sample, so what is found behind it may
    depend on that sample.

    Args:
        x: Data as for `fit`.
        y: Targets, as for `fit`.
        batch_size: As for `fit`.
        callbacks: Callbacks of the `fit` to come.
        class_weight: As for `fit`.
        sample_weight: As for `fit`.
        validation_split: As for `fit`.
        steps_per_epoch: As for `fit`.
        validation_updates: As for `fit`.
        drop_last: As for `fit`.

    Returns:
        The findings. `print()` shows them as a table; `is_refused` says whether `fit`
        would fail.

    Raises:
        NotCompiledError: `compile` wasn't called.
        DataError: `x` is a generator, which would lose its first batch.
        UnsupportedError: This process runs on PopTorch itself: `ipufit check` starts
            one of its own.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) * (2 if x.sum() > 0 else 1)
        >>> model = IPUModel(Net(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile("adamw", "cross_entropy")
        >>> x, y = torch.rand(100, 4), torch.randint(0, 3, (100,))
        >>> report = model.check(x, y, batch_size=16)
        >>> [(one.severity, one.topic) for one in report.findings]
        [('refused', 'control flow'), ('good to know', 'data'), ...]
    """
    if hasattr(x, "__next__"):
        raise DataError(
            "`x` is a generator, which can be gone through once: a check would take "
            "its first batch away. Pass one batch, or tensors of its shapes."
        )
    arguments = {name: value for name, value in locals().items() if name != "self"}
    return checked(self, arguments)


_OF_CHOICE = ("drop_last", "validation_split", "steps_per_epoch", "validation_updates")


def checked(model: Model, arguments: Mapping[str, Any]) -> CheckReport:
    """Check a model with the arguments of its `fit`.

    Args:
        model: A compiled model.
        arguments: Arguments of `fit` by name; others than those of `check` don't count.
            A generator loses its first batch.

    Raises:
        NotCompiledError: `compile` wasn't called.
        UnsupportedError: This process runs on PopTorch itself.
    """
    settings_of(model)
    model._executors.fetch_weights()
    before = HostRandomState(generators_of(arguments.get("x")))
    findings: list[Finding] = []
    title = type(model.module).__name__
    try:
        planned = _planned(model, arguments, findings)
        if planned is not None:
            plan = planned.training.plan
            title += f", {plan.samples_per_call} samples per call"
            findings += _of_calls(planned)
            findings += _of_program(model, planned)
    finally:
        before.put_back()
    return report_of(title, findings)


class _Planned(NamedTuple):
    """The parts of a `fit` that is looked at.

    Attributes:
        training: The training.
        batches: Its calls.
    """

    training: Training
    batches: TrainingBatches


def _planned(
    model: Model, arguments: Mapping[str, Any], findings: list[Finding]
) -> _Planned | None:
    """The training of a `fit`; None if its arguments don't allow any.

    Data that is too little for a call is refused, and the program checked all the same.
    """
    given = {"x": None, "y": None, "sample_weight": None, **arguments}
    try:
        source, _ = fit_sources(
            *(given["x"], given["y"], given["sample_weight"]),
            given.get("validation_split", 0.0),
            given.get("validation_data"),
            num_workers=model.config.num_workers,
            processes=model.processes,
        )
        model._data.target_columns = column_names(given["y"]) or ()
        return _training(model, source, given)
    except DataError as error:
        findings.append(of_error(error, "data"))
    except IpufitError as error:
        findings.append(of_error(error, "config"))
        return None
    try:
        data = given["x"], given["y"], given["sample_weight"]
        source = example_of(
            *data, num_workers=model.config.num_workers, processes=model.processes
        )
        return _training(model, source, given)
    except IpufitError:  # of which the first one is known
        return None


def _training(model: Model, source: Source, given: Mapping[str, Any]) -> _Planned:
    callbacks = given.get("callbacks")
    of_choice = {name: given[name] for name in _OF_CHOICE if name in given}
    choose = partial(updates_per_call, model, source, callbacks, None, of_choice)
    planned = training_of(
        model,
        source,
        given.get("batch_size"),
        shuffle=False,
        drop_last=given.get("drop_last", True),
        class_weight=given.get("class_weight"),
        choose=choose,
    )
    return _Planned(*planned)


def _of_calls(planned: _Planned) -> list[Finding]:
    """Findings about the calls of a pass."""
    training, batches = planned
    plan, found = training.plan, []
    if batches.num_dropped:
        found.append(
            Finding(
                NOTE,
                "data",
                f"fit leaves out {batches.num_dropped} of {batches.source.num_samples} "
                "samples in every epoch: they don't fill "
                f"{plan.describe_unfilled(batches.num_dropped)}",
                "Choose factors that divide the number of samples, or drop_last='pad'.",
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
        what = f"Figures are those of a part of the samples: {coverage}"
        found.append(
            Finding(NOTE, "figures", what, "Leave the output mode at its default.")
        )
    choice = training.choice
    if choice is not None and choice.value == 1 and "hears each" in choice.reason:
        what = f"Each call makes one update, because {choice.reason}"
        advice = "Have it look at the ends of epochs, or at every so many updates."
        found.append(Finding(SLOW, "calls", what, advice))
    return found


_LARGE_RESULTS = 64 * 2**20
"""Bytes of a call's results that take noticeable time and memory on the host."""


def _of_program(model: Model, planned: _Planned) -> list[Finding]:
    """Findings about the program that is traced."""
    training, batches = planned
    plan = training.plan
    with torch.no_grad():
        seen = surveyed(
            model.module,
            model.config,
            batches.structure,
            training.figures.objective,
            training.options,
            plan,
            batches.example(),
        )
    found = [of_error(error, "module") for error in seen.refusals]
    found += of_survey(seen.survey)
    for warning in seen.warnings:
        what, advice = parted(str(warning))
        topic = "baked in" if "BakedIn" in type(warning).__name__ else "buffer"
        found.append(Finding(NUMBERS, topic, what, advice))
    found += _of_norms(seen.survey.norms, plan)
    found += of_dtypes(model.module, batches.structure, seen.tensors)
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
    """A finding for layers that mix samples, if they don't see the user's batch."""
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
    return [at(Finding(NUMBERS, "batch norm", what, advice), norms[0])]
