# SPDX-License-Identifier: Apache-2.0
"""What the device reads of an optimizer, as the log says, and what may replace what."""

import logging
import math

import pytest
import torch

from ipufit.emulator import MeanReductionStrategy, Options, optim
from ipufit.emulator.errors import Error
from tests.emulator.optimizers._training import Training, make_gradients

F16 = torch.float16
CONSTANT = "Values are constant but do not match"
CONSTNESS = "Can not replace a constant value with a non constant value"


def sgd(**arguments):
    return lambda weights: optim.SGD(weights, 0.1, **arguments)


def adam(**arguments):
    return lambda weights: optim.Adam(weights, **arguments)


def torch_sgd(lr=0.1, **arguments):
    return lambda weights: torch.optim.SGD(weights, lr, **arguments)


def in_groups(weights):
    return optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], 0.1)


def train(make_optimizer, **options):
    """A training of weights of which `make_optimizer` takes a list."""
    return Training(lambda weights: make_optimizer(list(weights.values())), **options)


def compiled(make_optimizer, **options):
    training = train(make_optimizer, **options)
    training.step(make_gradients(0))
    return training


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "poptorch::python")

    def messages(start, level=None):
        return [
            record.getMessage()
            for record in caplog.records
            if record.getMessage().startswith(start)
            and level in (None, record.levelname)
        ]

    return messages


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (sgd(accum_type=F16), True),
        (sgd(), False),
        (sgd(use_combined_accum=True, accum_type=F16), False),
        (adam(accum_type=F16), True),
        (adam(first_order_momentum_accum_type=F16), False),
        (torch.optim.Adam, False),
    ],
)
def test_16_bit_accumulation_runs_as_a_mean(make, expected):
    options = Options()
    used = train(make, options=options).executor.options
    name = "meanAccumulationAndReplicationReductionStrategy"
    is_running = getattr(used.Training, name) == MeanReductionStrategy.Running
    assert is_running is expected
    assert getattr(options.Training, name) == MeanReductionStrategy.Post  # it's a clone


# Refusals -------------------------------------------------------------------------


def refused(make, change, error, match):
    """A change is refused when it is sent, and before that when a model is wrapped."""

    def changed(weights):
        optimizer = make(weights)
        change(optimizer)
        return optimizer

    with pytest.raises(error, match=match):
        train(changed)
    training = train(make)
    change(training.optimizer)
    with pytest.raises(error, match=match):
        training.send()


@pytest.mark.parametrize("where", ["defaults", "group"])
def test_amsgrad_is_refused_wherever_it_is(where):
    def change(adam):
        target = adam.defaults if where == "defaults" else adam.param_groups[0]
        target["amsgrad"] = True

    refused(optim.AdamW, change, ValueError, "Only non-amsgrad")


def set_in_group(name, value):
    return lambda optimizer: optimizer.param_groups[0].update({name: value})


def test_adams_decoupled_weight_decay_is_refused():
    change = set_in_group("decoupled_weight_decay", True)
    refused(torch.optim.Adam, change, ValueError, "use AdamW")


@pytest.mark.parametrize("value", [torch.tensor(0.1), "0.1", None])
def test_values_must_be_numbers(value):
    change = set_in_group("lr", value)
    match = "Expected a number for lr"
    refused(torch_sgd(), change, AssertionError, match)


@pytest.mark.parametrize("value", [[0.9, 0.99], (0.9,), 0.9])
def test_betas_must_be_a_pair(value):
    change = set_in_group("betas", value)
    refused(torch.optim.Adam, change, AssertionError, "Expected a pair for betas")


def test_missing_attributes_are_named():
    def change(sgd):
        del sgd.param_groups[0]["dampening"]

    match = "Mandatory attribute dampening not found"
    refused(sgd(), change, AssertionError, match)


def test_rmsprop_groups_must_agree_on_centered():
    def make(w):
        groups = [{"params": w[:1], "centered": True}, {"params": w[1:]}]
        return optim.RMSprop(groups)

    with pytest.raises(AssertionError, match="same value for the 'centered'"):
        train(make)


def test_senseless_values_are_errors_of_the_device():
    with pytest.raises(Error, match="Maximum norm of gradients cannot be NaN"):
        train(sgd(max_grad_norm=math.nan))
    for scaling in (0.0, math.nan):
        with pytest.raises(Error, match="Loss scaling cannot be 0"):
            train(sgd(loss_scaling=scaling))


def with_value(make, **values):
    """Make an optimizer of `make` whose parameter group has other values."""

    def made(weights):
        optimizer = make(weights)
        optimizer.param_groups[0].update(values)
        return optimizer

    return made


@pytest.mark.parametrize(
    ("make", "values", "match"),
    [
        (sgd(), {"lr": -0.1}, r"Negative learning rate \(-0.1\) in SGD"),
        (torch.optim.Adam, {"lr": -1e-3}, r"Negative learning rate \(-0.001\) in Adam"),
        (optim.RMSprop, {"lr": -2}, r"Negative learning rate \(-2\) in Adaptive"),
        (optim.LAMB, {"lr": 0.0}, "Constant, zero learning rate in Adam"),
        (optim.Adam, {"eps": 0.0}, r"Non-positive eps \(0\) in Adam is not supported"),
        (torch.optim.AdamW, {"eps": 0.0}, r"Non-positive eps \(0\) in Adam"),
        (
            lambda w: optim.RMSprop(w, eps=1e-3, first_order_momentum_accum_type=F16),
            {},
            "RMSprop can't add a variable eps",
        ),
        (optim.RMSprop, {"eps": -1.0}, r"Non-positive eps \(-1\) in Adaptive"),
        (optim.Adam, {"betas": (-0.1, 0.9)}, r"Negative beta1 \(-0.1\) in Adam"),
        (optim.LAMB, {"betas": (0.9, -0.5)}, r"Negative beta2 \(-0.5\) in Adam"),
        (optim.RMSprop, {"alpha": -0.1}, r"Negative alpha \(-0.1\) in Adaptive"),
        (optim.RMSprop, {"momentum": -0.1}, r"Negative momentum \(-0.1\) in Adaptive"),
        (sgd(), {"momentum": -0.1}, r"Negative momentum \(-0.1\) in SGD"),
        (sgd(), {"dampening": -0.1}, r"Negative dampening \(-0.1\) in SGD"),
        (sgd(), {"weight_decay": -0.1}, r"Negative weight decay \(-0.1\) in SGD"),
        (
            sgd(momentum=0.9, nesterov=True),
            {"dampening": 0.1},
            r"dampening \(0.1\) in SGD should be zero",
        ),
        (
            sgd(use_combined_accum=True, velocity_scaling=0.0),
            {},
            r"Non-positive velocity scaling \(0\) in SGD",
        ),
        (sgd(loss_scaling=-2.0), {}, "it is the loss scaling where"),
    ],
)
def test_values_that_popart_takes_for_errors_dont_compile(make, values, match):
    training = train(with_value(make, **values))
    with pytest.raises(Error, match=match):
        training.step(make_gradients(0))


def test_a_schedule_that_falls_below_0_is_refused_when_it_does():
    training = compiled(torch_sgd())
    training.optimizer.param_groups[0]["lr"] = -0.1
    with pytest.raises(Error, match=r"Negative learning rate \(-0.1\) in SGD"):
        training.send()


def test_a_learning_rate_of_0_is_accepted_if_it_may_change():
    for make in (sgd(), torch_sgd(), torch_sgd(lr=0.0)):
        compiled(with_value(make, lr=0.0))


# Unexpected attributes ------------------------------------------------------------


def test_custom_optimizers_are_what_they_derive_from_with_a_warning(log):
    class Sub(optim.AdamW):
        pass

    class Native(torch.optim.SGD):
        pass

    compiled(Sub)
    compiled(lambda w: Native(w, 0.1))
    graphs = [line.split(", ")[0] for line in log("Updating graph")]
    assert [graph.split()[-1] for graph in graphs] == ["Adam", "SGD"]
    for name in ("Sub", "Native"):
        [message] = log(f"{name} is a custom optimizer", "WARNING")
        assert "Poptorch does not run Python optimizer code directly" in message


# After compilation ----------------------------------------------------------------


def changed(old, new):
    training = compiled(old)
    training.optimizer = new(list(training.model.parameters()))
    training.send()
    training.step(make_gradients(1))


def test_variables_may_change():
    def make(*arguments, lr=0.1, **more):
        def make(w):
            groups = [{"params": w[:1]}, {"params": w[1:], "lr": lr}]
            return optim.SGD(groups, *arguments, **more)

        return make

    changed(
        make(0.1, 0.9, weight_decay=0.0, loss_scaling=1.0),
        make(0.2, 0.5, lr=7.0, weight_decay=0.1, loss_scaling=8.0),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (optim.Adam, adam(lr=1e-3), CONSTNESS),
        (adam(lr=1e-3), optim.Adam, CONSTNESS),
        (torch_sgd(), torch_sgd(weight_decay=0.1), CONSTNESS),
        (
            lambda w: torch.optim.Adam(w, betas=(0.9, 0.99)),
            lambda w: torch.optim.Adam(w, betas=(0.8, 0.99)),
            CONSTANT,
        ),
        (sgd(), sgd(loss_scaling=2.0), "loss_scaling"),
        (sgd(), optim.Adam, "optimizer of type SGD2"),
        (optim.Adam, optim.RMSprop, "optimizer of type ADAM"),
        (optim.Adam, optim.AdamW, "mode was Adam, now AdamW"),
        (optim.AdamW, optim.LAMB, "mode was AdamW, now Lamb"),
        (sgd(), sgd(use_combined_accum=True), "mode was separate"),
        (sgd(), sgd(max_grad_norm=1.0), "Clip norm settings"),
        (sgd(), sgd(velocity_accum_type=F16), "velocity_accum_type was torch.float32"),
        (
            optim.RMSprop,
            lambda w: optim.RMSprop(w, use_tf_variant=True),
            "use_tf_variant",
        ),
        (in_groups, sgd(), "2 parameter groups"),
    ],
)
def test_what_may_not_change_after_compiling(old, new, message):
    changed(old, old)
    with pytest.raises(Error, match=message) as raised:
        changed(old, new)
    assert raised.value.type == "popart_exception"


def test_a_constant_changed_in_one_group_is_refused():
    training = compiled(sgd())
    training.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(Error, match=CONSTANT + r"\. momentum of group 0"):
        training.send()


def test_accumulating_in_16_bits_needs_another_program():
    with pytest.raises(ValueError, match="executable is already compiled"):
        changed(optim.Adam, adam(accum_type=F16))
