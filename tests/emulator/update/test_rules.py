# SPDX-License-Identifier: Apache-2.0
"""Rules of optimisers: one for each kind, and the same numbers in both forms."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from ipufit.emulator import optim
from ipufit.emulator._optimizers.kinds import OptimizerKind
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._update import adaptive, sgd
from ipufit.emulator._update.operations import FOREACH, TRACED, Operations
from ipufit.emulator._update.rule import STEP, WEIGHT, Operands

SHAPES = [(3, 2), (4,), ()]
OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "dampening": 0.5, "weight_decay": 0.1, "loss_scaling": 4.0}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "loss_scaling": 4.0}),
    ("AdamW", {"lr": 0.1}),
    ("RMSprop", {"lr": 0.1, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.1, "centered": True, "momentum": 0.5}),
    ("RMSprop", {"lr": 0.1, "use_tf_variant": True, "momentum": 0.5}),
    ("LAMB", {"lr": 0.1, "max_weight_norm": 1.0}),
    ("LAMB", {"lr": 0.1, "bias_correction": False, "weight_decay": 0.0}),
]


def test_each_kind_has_one_rule():
    assert not sgd.RULES.keys() & adaptive.RULES.keys()
    assert {*sgd.RULES, *adaptive.RULES} == set(OptimizerKind)


def test_forms_are_complete():
    assert len(fields(Operations)) > 10
    for field in fields(Operations):
        assert callable(getattr(FOREACH, field.name))
        assert callable(getattr(TRACED, field.name))


def randoms(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(rule, scalars, tensors, gradients, loss_scaling, is_traced):
    """Tensors by slot, after three updates in one of the two forms."""
    n = {name: variable.value for name, variable in scalars.items()}
    n["lossScaling"] = loss_scaling
    for step in (1.0, 2.0, 3.0):
        numbers = {**n, **rule.factors(n, step)}
        if not is_traced:
            given = Operands(FOREACH, tensors, numbers)
            rule.update(given, rule.direction(given, gradients))
            continue
        numbers = {name: torch.tensor(float(one)) for name, one in numbers.items()}
        for index, gradient in enumerate(gradients):
            own = {slot: values[index] for slot, values in tensors.items()}
            given = Operands(TRACED, own, numbers)
            rule.update(given, rule.direction(given, gradient))
            for slot, values in tensors.items():
                values[index] = own[slot]
    return tensors


@pytest.mark.parametrize(("name", "arguments"), OPTIMIZERS)
def test_both_forms_compute_the_same(name, arguments):
    weights = randoms(0)
    optimizer = getattr(optim, name)(weights, **arguments)
    settings = OptimizerReader(relax_attribute_checks=False).read(optimizer)
    variables = settings.variables(0)
    rule = {**sgd.RULES, **adaptive.RULES}[settings.kind](settings, variables)
    scalars = rule.scalars(variables, settings.scaling)
    results = []
    for is_traced in (False, True):
        states = [rule.initial_state(weight, scalars) for weight in weights]
        slots = [slot for slot in states[0] if slot != STEP]
        tensors = {slot: [state[slot] for state in states] for slot in slots}
        tensors[WEIGHT] = [weight.clone() for weight in weights]
        scaling = settings.loss_scaling
        found = updated(rule, scalars, tensors, randoms(1), scaling, is_traced)
        assert not torch.equal(found[WEIGHT][0], weights[0])
        results.append(found)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
