# SPDX-License-Identifier: Apache-2.0
"""Modules and executors that several test modules use; device against host."""

import torch
from torch import nn

import ipufit.emulator as poptorch


class Function(nn.Module):
    """Calls `function(self, *inputs)`; keyword arguments are attributes."""

    def __init__(self, function, *, buffers=None, **attributes):
        super().__init__()
        self.function = function
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def said(caplog):
    """What the emulator has logged: torch logs too, where it lowers programs."""
    records = caplog.records
    return [r.getMessage() for r in records if not r.name.startswith("torch.")]


def run(function, *inputs, options=None, **attributes):
    """Outputs of one call of an inference model of a function or a layer."""
    attributes["called"] = function
    module = Function(lambda _, *given: function(*given), **attributes)
    executor = poptorch.inferenceModel(module, options)
    try:
        return executor(*inputs)
    finally:
        executor.destroy()


def as_on_device(value):
    """What the host computed, in the types that a device returns."""
    if isinstance(value, torch.Tensor):
        narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
        return value.detach().to(narrow.get(value.dtype, value.dtype))
    if isinstance(value, (tuple, list)):
        return [as_on_device(element) for element in value]
    return value


def assert_same(actual, expected):
    torch.testing.assert_close(as_on_device(actual), as_on_device(expected))


def assert_device_equals_host(module, *inputs):
    """Two calls: what was baked in while tracing would show in the second."""
    executor = poptorch.inferenceModel(module)
    try:
        for factor in (1, -2):
            given = [x * factor if x.is_floating_point() else x for x in inputs]
            with torch.no_grad():
                actual = executor(*[x.clone() for x in given])
                expected = module(*[x.clone() for x in given])
            assert_same(actual, expected)
    finally:
        executor.destroy()


X = torch.linspace(-1, 2, 24).reshape(4, 6)


class Linear(nn.Module):
    """Trains `transform(layer, x)` towards zero."""

    def __init__(self, transform):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.transform = transform

    def forward(self, x):
        return (self.transform(self.layer, x) ** 2).mean()


class Marked(Linear):
    def forward(self, x):
        return poptorch.identity_loss(super().forward(x), reduction="none")


class Model(nn.Module):
    """Each update of plain SGD with rate 1 subtracts the input from the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        loss = poptorch.identity_loss(self.weight * x, reduction="sum")
        return loss, self.weight * 1


ONE = torch.ones(1)


def make_options(D=1, G=1, R=1, *mode):  # noqa: N803 - the letters of the user guide
    options = poptorch.Options().deviceIterations(D).replicationFactor(R)
    options.Training.gradientAccumulation(G)
    if mode:
        options.outputMode(*mode)
    return options.autoRoundNumIPUs(True)


def wrap(model=None, options=None, lr=1.0):
    model = Model() if model is None else model
    sgd = poptorch.optim.SGD(model.parameters(), lr=lr)
    return model, poptorch.trainingModel(model, options, sgd)


def on_device(executor):
    """The weight that the device has now, before it is trained on."""
    return executor(torch.zeros(1))[1].item()
