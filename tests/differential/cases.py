# SPDX-License-Identifier: Apache-2.0
"""How programs are laid out and updated, and what comes of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from ipufit import IPUConfig, IPUModel, LambdaCallback, Optimizer

from .kinds import (
    BEFORE_LOOKING,
    BETWEEN,
    COMPILED_AGAIN,
    MID_FIT,
    SAMPLES,
    Kind,
    Program,
)

MICRO_BATCH = 4


@dataclass(frozen=True)
class Layout:
    """The factors of a call."""

    device_iterations: int = 1
    gradient_accumulation: int = 1
    replicas: int = 1

    @property
    def samples_per_update(self):
        return MICRO_BATCH * self.gradient_accumulation * self.replicas

    def config(self):
        return IPUConfig(micro_batch_size=MICRO_BATCH, **dataclasses.asdict(self))


LAYOUTS = {
    "alone": Layout(),
    "D3": Layout(3),
    "G2": Layout(1, 2),
    "R2": Layout(1, 1, 2),
    "D2G3": Layout(2, 3),
    "D2G2R3": Layout(2, 2, 3),
}


@dataclass(frozen=True)
class Rule:
    """An update rule, for ipufit and for torch.

    Attributes:
        given: What `compile` gets, of the module.
        plain: torch's optimiser.
        max_norm: Of the gradients; None for any.
    """

    given: Callable[[torch.nn.Module], Any]
    plain: Callable[[torch.nn.Module], torch.optim.Optimizer]
    max_norm: float | None = None

    @classmethod
    def of(cls, make):
        return cls(make, make)


RULES = {
    "sgd": Rule.of(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "momentum": Rule.of(lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9)),
    "adam": Rule.of(lambda m: torch.optim.Adam(m.parameters(), lr=0.02)),
    "decay": Rule.of(
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1)
    ),
    "clipped": Rule(
        lambda _: Optimizer("sgd", learning_rate=0.1, global_clipnorm=0.3),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        max_norm=0.3,
    ),
}


@dataclass(frozen=True)
class Case:
    """A kind of program, when it changes, how it is laid out and updated."""

    kind: Kind
    when: str
    layout: str
    rule: str

    @property
    def outcome(self):
        return self.kind.outcomes[self.when]

    @property
    def epochs(self):
        """Those of the first fit; the second has one."""
        return 2 if self.when == MID_FIT else 1

    def __str__(self):
        return f"{self.kind.name}, {self.when}, {self.layout}, {self.rule}"


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        figures: Of every epoch, and of `evaluate`.
        outputs: Of `predict`.
        state: The module's, at the end.
    """

    figures: list[dict[str, float]]
    outputs: Any
    state: dict[str, Tensor]


def made(kind: Kind) -> Program:
    torch.manual_seed(0)
    return kind.make()


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(mine: Outcome, theirs: Outcome) -> None:
    """Fail unless all numbers agree, and outputs are of the same kinds."""
    assert len(mine.figures) == len(theirs.figures)
    for place, (one, other) in enumerate(zip(mine.figures, theirs.figures)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            told = f"{name} of {place}: {one[name]} instead of {value}"
            assert abs(one[name] - value) <= 2e-4 * abs(value) + 1e-5, told
    assert_alike(mine.outputs, theirs.outputs, "predicted")
    assert_alike(mine.state, theirs.state, "state")


def assert_alike(one: Any, other: Any, path: str) -> None:
    """The same values in objects of the same kinds."""
    if isinstance(other, Tensor):
        assert isinstance(one, Tensor), path
        torch.testing.assert_close(
            one.double(), other.double(), rtol=2e-3, atol=2e-4, msg=path
        )
        return
    assert type(one) is type(other), f"{path}: {type(one)} instead of {type(other)}"
    if isinstance(other, Mapping):
        assert list(one) == list(other), path
        for key, value in other.items():
            assert_alike(one[key], value, f"{path}[{key!r}]")
        for name, value in getattr(other, "__dict__", {}).items():
            assert_alike(getattr(one, name), value, f"{path}.{name}")
    elif isinstance(other, (tuple, list)):
        assert len(one) == len(other), path
        for place, value in enumerate(other):
            assert_alike(one[place], value, f"{path}[{place}]")
    elif hasattr(other, "__dict__"):
        assert_alike(vars(one), vars(other), path)
    else:
        assert one == other, path


# The program in a plain torch loop --------------------------------------------------


def mean(values):
    return float(torch.stack([torch.mean(value) for value in values]).mean())


def run_plainly(case: Case) -> Outcome:
    """What plain torch makes of it."""
    program = made(case.kind)
    layout, rule = LAYOUTS[case.layout], RULES[case.rule]
    module = program.module
    x, y = (torch.as_tensor(data) for data in (program.x, program.y))
    if x.dtype == torch.float64:
        x = x.float()
    optimizer = rule.plain(module)
    figures = []

    def epoch():
        losses, values = [], []
        for update in torch.arange(SAMPLES).split(layout.samples_per_update):
            optimizer.zero_grad(set_to_none=True)
            parts = update.split(MICRO_BATCH)
            for part in parts:
                outputs = module(x[part])
                loss = program.torch_loss(outputs, y[part])
                (loss / len(parts)).backward()
                losses.append(loss.detach())
                if program.metric:
                    values.append(program.metric(outputs, y[part]).detach().mean())
            if rule.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), rule.max_norm)
            optimizer.step()
        found = {"loss": mean(losses), **looked("val_")}
        if values:
            found[program.metric.__name__] = mean(values)
        figures.append(found)

    def looked(prefix):
        modes = [part.training for part in module.modules()]
        module.eval()
        losses, values = [], []
        with torch.no_grad():
            for part in torch.arange(SAMPLES).split(MICRO_BATCH):
                outputs = module(x[part])
                losses.append(program.torch_loss(outputs, y[part]))
                if program.metric:
                    values.append(program.metric(outputs, y[part]).mean())
        for part, mode in zip(module.modules(), modes):
            part.training = mode
        found = {f"{prefix}loss": mean(losses)}
        if values:
            found[prefix + program.metric.__name__] = mean(values)
        return found

    def change():
        with torch.no_grad():
            program.change(module, optimizer)

    for number in range(case.epochs):
        epoch()
        if case.when == MID_FIT and number == 0:
            change()
    if case.when in (BETWEEN, COMPILED_AGAIN):
        change()
    if case.when == COMPILED_AGAIN:
        optimizer = rule.plain(module)
    epoch()
    if case.when == BEFORE_LOOKING:
        change()
    figures.append(looked(""))
    module.eval()
    with torch.no_grad():
        outputs = module(x)
    return Outcome(figures, outputs, state_of(module))


# The program trained and looked at by ipufit ----------------------------------------


def run(case: Case) -> Outcome:
    """What ipufit makes of it."""
    program = made(case.kind)
    layout, rule = LAYOUTS[case.layout], RULES[case.rule]
    model = IPUModel(program.module, layout.config())
    metrics = [program.metric] if program.metric else None
    figures = []

    def compile_model():
        model.compile(rule.given(program.module), program.loss, metrics=metrics)

    def change():
        with torch.no_grad():
            program.change(model.module, model.optimizer)

    def fit(epochs, *callbacks):
        history = model.fit(
            program.x,
            program.y,
            epochs=epochs,
            shuffle=False,
            validation_data=(program.x, program.y),
            callbacks=list(callbacks),
            verbose=0,
        ).history
        for epoch in range(epochs):
            figures.append({name: values[epoch] for name, values in history.items()})

    def change_once(epoch, _):
        if epoch == 0:
            change()

    compile_model()
    first = [LambdaCallback(on_epoch_end=change_once)] if case.when == MID_FIT else []
    fit(case.epochs, *first)
    if case.when in (BETWEEN, COMPILED_AGAIN):
        change()
    if case.when == COMPILED_AGAIN:
        compile_model()
    fit(1)
    if case.when == BEFORE_LOOKING:
        change()
    figures.append(dict(model.evaluate(program.x, program.y, verbose=0)))
    outputs = model.predict(program.x, verbose=0)
    return Outcome(figures, outputs, state_of(model.module))
