# SPDX-License-Identifier: Apache-2.0
"""Probes: small programs with fixed numbers, which ask a device one question each.

A probe uses PopTorch's public names alone, so that it runs on IPUs, on the SDK's IPU
Model and on the emulator. It returns tensors, or raises the error of a refusal.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import math
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn

from ipufit import poptorch


@dataclass(frozen=True)
class Probe:
    """One question to a device.

    Attributes:
        name: The name of the function that asks it.
        group: The claim that it belongs to; one row of the table of the page.
        run: The function, which takes nothing.
        num_ipus: IPUs that it needs.
        tolerance: The difference of floats that counts as none, relative to the
            larger of the number and 1; float16 has at least 0.004.
    """

    name: str
    group: str
    run: Callable[[], Any]
    num_ipus: int
    tolerance: float

    @property
    def source(self) -> str:
        """A hash of the function, and of what it uses of this package."""
        texts: dict[str, str] = {}
        left: list[Any] = [self.run]
        while left:
            one = left.pop()
            text = inspect.getsource(one).replace(f'"""{one.__doc__}"""', "")
            texts[one.__qualname__] = text = text[re.search(_BEGIN, text).start() :]  # type: ignore[union-attr]
            names = vars(sys.modules[one.__module__])
            for word in set(re.findall(r"\w+", text)) - texts.keys():
                used = names.get(word)
                if getattr(used, "__module__", "").startswith(__package__):
                    left.append(used)
        text = "".join(texts[name] for name in sorted(texts))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_BEGIN = r"(?m)^(def|class) "  # decorators don't count, nor docstrings

PROBES: dict[str, Probe] = {}
"""All probes by name, in the order of the recording."""


def probe(
    group: str, *, num_ipus: int = 1, tolerance: float = 1e-4
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to `PROBES`."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        name = run.__name__
        assert name not in PROBES, name
        PROBES[name] = Probe(name, group, run, num_ipus, tolerance)
        return run

    return add


# Programs -----------------------------------------------------------------------------


def ramp(*shape: int, step: float = 0.25) -> Any:
    """Return numbers in steps around 0, all of them exact: no generator is asked."""
    count = math.prod(shape)
    numbers: Any = torch.arange(count, dtype=torch.float32)
    return ((numbers - count // 2) * step).reshape(shape)


def filled(module: nn.Module) -> Any:
    """Set all parameters of a module to ramps."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(ramp(*weight.shape, step=0.125))
    return module


class Program(nn.Module):
    """A function of itself and of tensors, with modules and parameters as parts."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        """Call the function."""
        return self.function(self, *inputs)


def settings(
    device_iterations: int = 1,
    accumulation: int = 1,
    replicas: int = 1,
    mode: str = "Default",
) -> Any:
    """Return options with an output mode by name."""
    options = poptorch.Options()
    options.deviceIterations(device_iterations)
    options.replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    if mode != "Default":
        every = 2 if mode == "EveryN" else 1
        options.outputMode(poptorch.OutputMode[mode], every)
    options.showCompilationProgressBar(False)
    return options


def infer(program: Any, *inputs: Any, options: Any = None) -> Any:
    """Return the results of a module, or of a function of tensors, on a device."""
    if not isinstance(program, nn.Module):
        function = program
        program = Program(lambda _, *tensors: function(*tensors))
    model = poptorch.inferenceModel(program.eval(), options or settings())
    results = model(*inputs)
    model.destroy()
    return results


def train(
    program: nn.Module,
    *inputs: Any,
    options: Any = None,
    optimizer: Any = None,
    calls: int = 1,
) -> dict[str, Any]:
    """Return the results of the last call, and the parameters and buffers after it."""
    optimizer = optimizer or poptorch.optim.SGD(program.parameters(), lr=1.0)
    model = poptorch.trainingModel(program.train(), options or settings(), optimizer)
    results = [model(*inputs) for _ in range(calls)][-1]
    model.copyWeightsToHost()
    state = {name: one.clone() for name, one in program.state_dict().items()}
    model.destroy()
    return {"results": results, **state}


def loss_of(value: Tensor) -> Any:
    """Mark the sum of a tensor as the final loss."""
    return poptorch.identity_loss(value.sum(), reduction="none")


# Several questions --------------------------------------------------------------------


class Refusal:
    """The class of an error, and the first line of its message."""

    def __init__(self, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        self.text = f"{type(error).__name__}: {lines[0]}"[:200]


def attempt(run: Callable[[], Any]) -> Any:
    """Return the result of a function, or its refusal."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - any error is the answer
        refusal = Refusal(error)
    gc.collect()  # a model that didn't compile may hold an IPU
    return refusal


def apart(**cases: Callable[[], Any]) -> dict[str, Any]:
    """Return the result or refusal of each function: it compiles by itself."""
    return {name: attempt(case) for name, case in cases.items()}


def operators(*inputs: Any, names: str = "", **cases: Any) -> dict[str, Any]:
    """Return the results of functions of the same tensors, from one program.

    If the program is refused, each function gets one of its own. `names` are names of
    torch.nn.functional or torch.
    """
    cases.update(_named(names))

    def run(some: Mapping[str, Any]) -> dict[str, Any]:
        results = infer(lambda *x: [case(*x) for case in some.values()], *inputs)
        return dict(zip(some, results))

    return _together(run, cases)


def gradients(start: Tensor, names: str = "", **cases: Any) -> dict[str, Any]:
    """Return the gradient of each function's sum at `start`, from one program.

    If the program is refused, each function gets one of its own. `names` are names of
    torch.nn.functional or torch.
    """
    cases.update(_named(names))

    def run(some: Mapping[str, Any]) -> dict[str, Any]:
        weights = {name: nn.Parameter(start.clone()) for name in some}

        def forward(self: Any, one: Tensor) -> Any:
            sums = [case(getattr(self, name)).sum() for name, case in some.items()]
            return loss_of(torch.stack(sums) * one)

        after = train(Program(forward, **weights), torch.ones(1))
        return {name: start - after[name] for name in some}

    return _together(run, cases)


def _named(names: str) -> dict[str, Any]:
    functional = nn.functional
    return {
        name: getattr(functional, name, None) or getattr(torch, name)
        for name in names.split()
    }


def _together(
    run: Callable[[Mapping[str, Any]], dict[str, Any]], cases: Mapping[str, Any]
) -> dict[str, Any]:
    found = attempt(lambda: run(cases))
    if isinstance(found, Refusal):
        alone = apart(
            **{name: partial(run, {name: one}) for name, one in cases.items()}
        )
        return {
            name: one[name] if isinstance(one, dict) else one
            for name, one in alone.items()
        }
    return dict(found)
