# SPDX-License-Identifier: Apache-2.0
"""Small programs on the emulated device, and what a check says of them."""

import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator.core.survey import survey
from tests.emulator._models import Function, run

infer = run
"""Runs a function of tensors on a device: `infer(function, x)`."""


class WithLoss(nn.Module):
    """Trains a module on the mean of its result's squares, or on the result itself."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *tensors):
        result = self.module(*tensors)
        loss = result if result.dim() == 0 else (result**2).mean()
        return result, poptorch.identity_loss(loss, reduction="none")


def as_module(program):
    """A module of a function; a module itself."""
    if isinstance(program, nn.Module):
        return program
    return Function(lambda _, *tensors: program(*tensors))


def reports(program, *tensors, trains=False):
    """What a check says of a module or a function: messages, refusals first."""
    module = as_module(program)
    module = WithLoss(module) if trains else module
    found = survey(module, tensors, poptorch.Options(), is_training=trains)
    assert found.error is None, found.error
    ordered = sorted(found.remarks, key=lambda remark: not remark.is_refused)
    return [remark.message for remark in ordered]


def gradients(program, *tensors, weights):
    """Gradients of some weights on a device, after one update of SGD with rate 1.

    Args:
        program: A module; or a function of `weights` (tensors), then `tensors`.
    """

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(w.clone()) for w in weights)

        def forward(self, *given):
            return program(*self.weights, *given)

    module = WithLoss(Weighted())
    before = [weight.detach().clone() for weight in module.module.weights]
    options = poptorch.Options()
    sgd = poptorch.optim.SGD(module.parameters(), lr=1.0)
    model = poptorch.trainingModel(module, options, sgd)
    model(*tensors)
    model.copyWeightsToHost()
    model.destroy()
    return [b - w.detach() for b, w in zip(before, module.module.weights)]


def trained(module, *tensors):
    """Names of the parameters that one update on a device changes."""
    wrapped = WithLoss(module)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    sgd = poptorch.optim.SGD(wrapped.parameters(), lr=1.0)
    model = poptorch.trainingModel(wrapped, poptorch.Options(), sgd)
    model(*tensors)
    model.copyWeightsToHost()
    model.destroy()
    return {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
