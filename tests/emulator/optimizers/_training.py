# SPDX-License-Identifier: Apache-2.0
"""Models whose gradients are their inputs, to train with any optimizer."""

import torch

import ipufit.emulator as poptorch

SHAPES = {"a": (3, 2), "b": (4,), "c": ()}


class Products(torch.nn.Module):
    """The gradient of each weight is the input of the same place."""

    def __init__(self, weights, used=None):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, torch.nn.Parameter(weight.detach().clone()))
        self._used = used or list(weights)

    def forward(self, *gradients):
        weights = [getattr(self, name) for name in self._used]
        products = [(w * g[0]).sum() for w, g in zip(weights, gradients)]
        return poptorch.identity_loss(torch.stack(products).sum(), reduction="sum")


def make_weights(shapes=SHAPES, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }


def make_gradients(step, shapes=SHAPES):
    return make_weights(shapes, seed=1000 + step)


class Training:
    """A model that trains on the device.

    Attributes:
        optimizer: What `make_optimizer` made of the model's parameters by name.
    """

    def __init__(self, make_optimizer, weights=None, used=None, options=None):
        self.model = Products(make_weights() if weights is None else weights, used)
        self.optimizer = make_optimizer(dict(self.model.named_parameters()))
        self.executor = poptorch.trainingModel(self.model, options, self.optimizer)

    def step(self, gradients):
        used = [gradients[name] for name in self.model._used]
        self.executor(*(gradient[None] for gradient in used))

    def send(self):
        self.executor.setOptimizer(self.optimizer)

    @property
    def weights(self):
        self.executor.copyWeightsToHost()
        return {n: w.detach().clone() for n, w in self.model.named_parameters()}

    @property
    def state(self):
        return self.optimizer.state_dict()["ipu_state"]

    @property
    def values(self):
        return self.optimizer.state_dict()["ipu_param"]


def of(cls, **arguments):
    """Make a function that constructs an optimizer of all weights."""
    return lambda weights: cls(weights.values(), **arguments)
