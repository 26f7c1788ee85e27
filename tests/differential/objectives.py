# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics that compute with values which the user changes."""

from __future__ import annotations

import functools

import torch

from .configs import Config
from .kinds import BAKED_IN, Linear, Program, kind, mean_squares

FACTOR = 1.0


def set_factor(value):
    global FACTOR
    FACTOR = value


# Losses. ------------------------------------------------------------------------------


def with_loss(loss, change):
    return Program(Linear(torch.tanh), loss, change=change)


@kind("loss with a closure", BAKED_IN)
def _():
    factor = 1.0

    def loss(outputs, wanted):
        return mean_squares(outputs, wanted) * factor

    def change(_, __):
        nonlocal factor
        factor = 3.0

    return with_loss(loss, change)


@kind("loss with a default", BAKED_IN)
def _():
    def loss(outputs, wanted, factor=1.0):
        return mean_squares(outputs, wanted) * factor

    return with_loss(loss, lambda *_: setattr(loss, "__defaults__", (3.0,)))


def global_loss(outputs, wanted):
    return mean_squares(outputs, wanted) * FACTOR


@kind("loss with a global", BAKED_IN)
def _():
    set_factor(1.0)
    return with_loss(global_loss, lambda *_: set_factor(3.0))


def scaled_loss(outputs, wanted, factor):
    return mean_squares(outputs, wanted) * factor


@kind("loss that is a partial", BAKED_IN)
def _():
    loss = functools.partial(scaled_loss, factor=1.0)
    return with_loss(loss, lambda *_: loss.keywords.update(factor=3.0))


@kind("loss that is a partial of a config", BAKED_IN)
def _():
    config = Config()
    loss = functools.partial(Config.loss, config)
    return with_loss(loss, lambda *_: setattr(config, "factor", 3.0))


@kind("loss that is a method", BAKED_IN)
def _():
    config = Config()
    return with_loss(config.loss, lambda *_: setattr(config, "factor", 3.0))


class LossObject:
    def __init__(self):
        self.weights = {"factor": 1.0}

    def __call__(self, outputs, wanted):
        return mean_squares(outputs, wanted) * self.weights["factor"]


@kind("loss that is an object", BAKED_IN)
def _():
    loss = LossObject()
    return with_loss(loss, lambda *_: loss.weights.update(factor=3.0))


class LossModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.config = Config()

    def forward(self, outputs, wanted):
        return mean_squares(outputs, wanted) * self.factor * self.config.factor


@kind("loss module's attribute", BAKED_IN)
def _():
    loss = LossModule()
    return with_loss(loss, lambda *_: setattr(loss, "factor", 3.0))


@kind("loss module's config", BAKED_IN)
def _():
    loss = LossModule()
    return with_loss(loss, lambda *_: setattr(loss.config, "factor", 3.0))


@kind("torch's loss with an attribute", BAKED_IN)
def _():
    loss = torch.nn.SmoothL1Loss(beta=1.0)
    return with_loss(loss, lambda *_: setattr(loss, "beta", 0.25))


# Metrics. -----------------------------------------------------------------------------


def with_metric(metric, change):
    return Program(Linear(torch.tanh), metric=metric, change=change)


@kind("metric with a closure", BAKED_IN)
def _():
    held = {"limit": 0.5}

    def near(outputs, wanted):
        return (outputs - wanted).abs().lt(held["limit"]).float()

    return with_metric(near, lambda *_: held.update(limit=2.0))


@kind("metric with a default", BAKED_IN)
def _():
    def near(outputs, wanted, limit=0.5):
        return (outputs - wanted).abs().lt(limit).float()

    return with_metric(near, lambda *_: setattr(near, "__defaults__", (2.0,)))


@kind("metric that is an object", BAKED_IN)
def _():
    class Near:
        __name__ = "near"
        limit = 0.5

        def __call__(self, outputs, wanted):
            return (outputs - wanted).abs().lt(self.limit).float()

    near = Near()
    return with_metric(near, lambda *_: setattr(near, "limit", 2.0))
