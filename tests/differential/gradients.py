# SPDX-License-Identifier: Apache-2.0
"""What gradients pass through: layers, losses of all forms, detach, hooks."""

import torch
from torch.nn import functional

from .kinds import (
    BETWEEN,
    COMPILED_AGAIN,
    MID_FIT,
    REFUSED,
    RIGHT,
    SAID,
    STEADY,
    Linear,
    Program,
    kind,
    mean_squares,
    targets,
)

BY_AUTOGRAD = {"is_known_by_autograd": True}


def enter(name, act, outcome=RIGHT, **options):
    kind(name, outcome, **options)(lambda: Program(Linear(act)))


# Stopped gradients, and hooks on them. ------------------------------------------------


def straight_through(hidden):
    return hidden + (hidden.sign() - hidden).detach()


def without_gradients(hidden):
    with torch.no_grad():
        return hidden * 2


def partly_without(hidden):
    with torch.no_grad():
        factor = hidden.abs().clamp(max=2.0)
    return hidden * factor


def hooked(hidden):
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 0.5)
    return hidden


def partly_without_in_place(hidden):
    with torch.no_grad():
        factor = hidden.clone()
        factor.clamp_(max=2.0).add_(1.0)
        first, second = factor.chunk(2, 1)
    return hidden * torch.cat([first, second], 1)


def kept(hidden):
    if hidden.requires_grad:
        hidden.retain_grad()
    return hidden


def narrowed(hidden):
    with torch.autocast("cpu"):
        return (hidden @ torch.eye(2).to(hidden.device)).float()


enter("detach of a factor", lambda h: h * h.detach())
enter("data of a factor", lambda h: h * h.data, SAID, **BY_AUTOGRAD)
enter("straight-through estimator", straight_through)
enter("detach of everything", lambda h: h.detach(), REFUSED, **BY_AUTOGRAD)
enter("no_grad around everything", without_gradients, REFUSED, **BY_AUTOGRAD)
enter("no_grad around a factor", partly_without)
enter("no_grad around changes in place", partly_without_in_place)
enter(
    "argmax as output",
    lambda h: h.argmax(1, keepdim=True).float().repeat(1, 2),
    REFUSED,
    **BY_AUTOGRAD,
)
enter("hook on a hidden value", hooked, REFUSED, **BY_AUTOGRAD)
enter("retained gradient", kept, REFUSED, **BY_AUTOGRAD)
enter("autocast", narrowed, REFUSED)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_, hidden):
        return hidden.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * 0.5


enter("autograd function", Halved.apply, REFUSED, **BY_AUTOGRAD)


@kind("forward without gradients", REFUSED, **BY_AUTOGRAD)
def _():
    class Sealed(Linear):
        @torch.no_grad()
        def forward(self, x):
            return self.layer(x)

    return Program(Sealed())


@kind("detached loss", REFUSED, **BY_AUTOGRAD)
def _():
    return Program(Linear(torch.tanh), lambda o, y: mean_squares(o.detach(), y))


@kind("loss of the targets alone", REFUSED, **BY_AUTOGRAD)
def _():
    return Program(Linear(torch.tanh), lambda o, y: y.square().mean())


HOOKED = {
    STEADY: RIGHT,
    BETWEEN: REFUSED,
    COMPILED_AGAIN: REFUSED,
}


@kind("hook on a weight added", HOOKED)
def _():
    def change(module, _):
        module.layer.weight.register_hook(lambda gradient: gradient * 0.5)

    return Program(Linear(torch.tanh), change=change)


@kind("backward hook of a module added", HOOKED)
def _():
    def change(module, _):
        module[1].register_full_backward_pre_hook(lambda _, given: (given[0] * 0.5,))

    program = layered(torch.nn.Linear(4, 4))
    program.change = change
    return program


# Layers. ------------------------------------------------------------------------------


def layered(*layers):
    # A bias before a norm of the batch has no gradient but rounding's.
    first = torch.nn.Linear(3, 4, bias=False)
    return Program(torch.nn.Sequential(first, *layers, torch.nn.Linear(4, 2)))


LAYERS = {
    "dropout of 0": lambda: [torch.nn.Dropout(0.0)],
    "dropout in eval mode": lambda: [torch.nn.Dropout(0.5).eval()],
    "LayerNorm": lambda: [torch.nn.LayerNorm(4)],
    "GroupNorm": lambda: [torch.nn.GroupNorm(2, 4)],
    "ELU": lambda: [torch.nn.ELU()],
    "Bilinear-free GELU": lambda: [torch.nn.GELU()],
    "softmax": lambda: [torch.nn.Softmax(1)],
    "Flatten": lambda: [torch.nn.Flatten()],
    "weight norm": lambda: (
        [torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))]
        if hasattr(torch.nn.utils.parametrizations, "weight_norm")
        else [torch.nn.Linear(4, 4)]
    ),
    "Identity": lambda: [torch.nn.Identity()],
}
BATCHED = {
    "BatchNorm": lambda: [torch.nn.BatchNorm1d(4)],
    "BatchNorm of momentum 0.5": lambda: [torch.nn.BatchNorm1d(4, momentum=0.5)],
    "BatchNorm without weights": lambda: [torch.nn.BatchNorm1d(4, affine=False)],
    "two BatchNorms": lambda: [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)],
    "SyncBatchNorm alone": lambda: [torch.nn.SyncBatchNorm(4)],
}


def enter_layers(name, layers, outcome=RIGHT, **options):
    kind(name, outcome, **options)(lambda: layered(*layers()))


for _name, _layers in LAYERS.items():
    enter_layers(_name, _layers)
for _name, _layers in BATCHED.items():
    enter_layers(_name, _layers, has_replicas=False)
enter_layers(
    "frozen BatchNorm", lambda: [torch.nn.BatchNorm1d(4).eval()], REFUSED, **BY_AUTOGRAD
)
enter_layers(
    "BatchNorm without momentum",
    lambda: [torch.nn.BatchNorm1d(4, momentum=None)],
    REFUSED,
)


def set_eval(module, _):
    module[1].eval()


@kind(
    "BatchNorm frozen later",
    {BETWEEN: REFUSED, COMPILED_AGAIN: REFUSED, MID_FIT: REFUSED},
    has_replicas=False,
    **BY_AUTOGRAD,
)
def _():
    program = layered(torch.nn.BatchNorm1d(4))
    program.change = set_eval
    return program


# Losses. ------------------------------------------------------------------------------


def rows(values):
    return values.flatten(1).mean(1)


def enter_loss(name, loss, plain_loss=None, outcome=RIGHT, **options):
    kind(f"loss: {name}", outcome)(
        lambda: Program(
            Linear(torch.tanh),
            loss,
            plain_loss,
            **{key: value() for key, value in options.items()},
        )
    )


def positive():
    return targets().sigmoid()


enter_loss("by name", "mse", mean_squares)
enter_loss("torch's module", torch.nn.MSELoss())
enter_loss("torch's function", functional.mse_loss)
enter_loss("a sum of two", lambda o, y: mean_squares(o, y) + functional.l1_loss(o, y))
enter_loss("weighted", lambda o, y: mean_squares(o, y) * 0.25)
enter_loss("by hand", lambda o, y: (o - y).square().mean())
enter_loss(
    "one per sample",
    lambda o, y: rows((o - y).square()),
    lambda o, y: (o - y).square().mean(),
)
enter_loss(
    "one per element",
    lambda o, y: (o - y).abs(),
    lambda o, y: (o - y).abs().mean(),
)
enter_loss("of shape [1]", lambda o, y: mean_squares(o, y).reshape(1), mean_squares)
enter_loss("L1 by name", "mae", functional.l1_loss)
enter_loss("Huber", torch.nn.HuberLoss(delta=0.5))
enter_loss("smooth L1", torch.nn.SmoothL1Loss())
enter_loss("with a penalty", lambda o, y: mean_squares(o, y) + 0.1 * o.square().mean())
enter_loss(
    "binary cross entropy",
    lambda o, y: functional.binary_cross_entropy_with_logits(o, y),
    y=positive,
)
enter_loss("cosine", lambda o, y: 1 - functional.cosine_similarity(o, y).mean())
enter_loss("of a part", lambda o, y: mean_squares(o[:, :1], y[:, :1]))
enter_loss("square root", lambda o, y: ((o - y).square().mean(1) + 1e-3).sqrt().mean())
enter_loss("log-cosh", lambda o, y: torch.log(torch.cosh(o - y)).mean())
enter_loss("a Python number", lambda o, y: 1.0, outcome=REFUSED)


@kind("weights used twice")
def _():
    class Normed(Linear):
        def forward(self, x):
            return self.layer(x) * (1 + self.layer.weight.square().mean())

    return Program(Normed())


# Metrics. -----------------------------------------------------------------------------


def enter_metric(name, metric):
    kind(f"metric: {name}")(lambda: Program(Linear(torch.tanh), metric=metric))


def near(outputs, wanted):
    return (outputs - wanted).abs().lt(0.5).float()


def error(outputs, wanted):
    return (outputs - wanted).abs().mean(1)


def bias(outputs, wanted):
    return (outputs - wanted).mean()


enter_metric("one per element", near)
enter_metric("one per sample", error)
enter_metric("one per batch", bias)
