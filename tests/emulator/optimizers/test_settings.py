# SPDX-License-Identifier: Apache-2.0
"""Reading optimisers into settings, and what may replace what after compiling."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.emulator import optim
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._optimizers.values import check_replaceable
from ipufit.emulator.errors import Error

F16 = torch.float16
CONSTANT = "Values are constant but do not match"
CONSTNESS = "Can not replace a constant value with a non constant value"


def weights():
    return [torch.nn.Parameter(torch.ones(2))]


def read(optimizer, **options):
    return OptimizerReader(relax_attribute_checks=False, **options).read(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (optim.SGD(weights(), 0.1, use_combined_accum=True), "SGD1"),
        (optim.SGD(weights(), 0.1), "SGD2"),
        (torch.optim.SGD(weights(), 0.1), "SGD2"),
        (optim.Adam(weights()), "ADAM"),
        (torch.optim.Adam(weights()), "ADAM"),
        (optim.AdamW(weights()), "ADAMW"),
        (torch.optim.AdamW(weights()), "ADAMW"),
        (optim.AdamW(weights(), bias_correction=False), "ADAMW_NO_BIAS"),
        (optim.RMSprop(weights()), "RMSPROP"),
        (torch.optim.RMSprop(weights(), centered=True), "RMSPROP_CENTERED"),
        (optim.LAMB(weights()), "LAMB"),
        (optim.LAMB(weights(), bias_correction=False), "LAMB_NO_BIAS"),
    ],
)
def test_the_kind_follows_class_and_attributes(optimizer, kind):
    assert read(optimizer).kind.name == kind


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.Adamax])
def test_other_optimizers_are_refused(cls):
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        read(cls(weights()))


@given(
    momentum=st.sampled_from([0.0, 0.5]),
    dampening=st.sampled_from([0.0, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
)
def test_torchs_sgd_has_constants_where_values_are_ordinary(
    momentum, dampening, weight_decay
):
    group = read(
        torch.optim.SGD(weights(), 0.1, momentum, dampening, weight_decay)
    ).groups[0]
    assert group.lr == (0.1, False)
    assert group.momentum == (momentum, momentum == 0.0)
    assert group.dampening == (dampening, dampening == 0.0)
    assert group.weight_decay == (weight_decay, weight_decay == 0.0)


@pytest.mark.parametrize(("nesterov", "is_one"), [(True, 1.0), (False, 0.0)])
def test_nesterov_of_torchs_sgd_is_constant(nesterov, is_one):
    sgd = torch.optim.SGD(weights(), 0.1, 0.9, nesterov=nesterov)
    assert read(sgd).groups[0].nesterov == (is_one, True)


@pytest.mark.parametrize(
    ("cls", "arguments", "name", "is_const"),
    [
        (torch.optim.Adam, {}, "lr", False),
        (torch.optim.Adam, {"eps": 1e-8}, "eps", True),
        (torch.optim.Adam, {"eps": 1e-6}, "eps", False),
        (torch.optim.Adam, {"betas": (0.5, 0.6)}, "beta1", True),
        (torch.optim.Adam, {"weight_decay": 0.01}, "weight_decay", False),
        (torch.optim.AdamW, {}, "weight_decay", True),
        (torch.optim.AdamW, {"weight_decay": 0.0}, "weight_decay", False),
        (torch.optim.RMSprop, {"alpha": 0.5}, "alpha", True),
        (torch.optim.RMSprop, {"momentum": 0.5}, "momentum", False),
        (optim.Adam, {}, "lr", True),
        (optim.Adam, {"eps": 1e-8}, "eps", False),
        (optim.Adam, {"betas": (0.5, 0.6)}, "beta1", False),
        (optim.Adam, {"betas": (0.5, 0.6)}, "beta2", False),
        (optim.Adam, {}, "beta2", True),
        (optim.AdamW, {"weight_decay": 0.01}, "weight_decay", False),
        (optim.RMSprop, {"alpha": 0.5}, "alpha", False),
        (optim.RMSprop, {}, "momentum", True),
        (optim.LAMB, {}, "max_weight_norm", True),
        (optim.LAMB, {"max_weight_norm": 3.0}, "max_weight_norm", False),
    ],
)
def test_what_is_constant(cls, arguments, name, is_const):
    settings = read(cls(weights(), **arguments))
    assert getattr(settings.groups[0], name).is_const is is_const
    assert getattr(settings.defaults, name).is_const is is_const


def test_loss_scaling_is_variable_if_given_or_automatic():
    assert read(optim.SGD(weights(), 0.1)).scaling == (1.0, True)
    assert read(optim.SGD(weights(), 0.1, loss_scaling=1.0)).scaling == (1.0, False)
    automatic = read(optim.SGD(weights(), 0.1), automatic_loss_scaling=True)
    assert automatic.scaling == (1.0, False)
    assert automatic.loss_scaling == 1.0
    native = torch.optim.SGD(weights(), 0.1)
    assert read(native).scaling == (1.0, True)
    native.loss_scaling = 2.0
    assert read(native).scaling == (2.0, False)


def test_a_groups_own_loss_scaling_is_not_read():
    groups = [{"params": weights(), "loss_scaling": 5.0}]
    assert read(optim.SGD(groups, 0.1)).loss_scaling == 1.0


def test_groups_and_defaults_are_read_apart():
    groups = [{"params": weights(), "lr": 0.5}, {"params": weights()}]
    settings = read(optim.SGD(groups, 0.1))
    assert settings.defaults.lr.value == 0.1
    assert [group.lr.value for group in settings.groups] == [0.5, 0.1]
    assert settings.variables(None) is settings.defaults
    assert settings.variables(0).lr.value == 0.5


def test_readings_compare_equal_until_a_value_changes():
    sgd = optim.SGD(weights(), 0.1, accum_type=F16, max_grad_norm=2.0)
    before = read(sgd)
    assert read(sgd) == before
    assert (before.accum_type, before.max_grad_norm) == (F16, 2.0)
    sgd.param_groups[0]["lr"] = 0.2
    assert read(sgd) != before


def test_torch_and_poptorch_optimizers_of_equal_values_read_equal():
    native = torch.optim.SGD(weights(), 0.1)
    assert read(native) == read(optim.SGD(weights(), 0.1))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optim.SGD(weights(), 0.1, accum_type=F16), True),
        (optim.SGD(weights(), 0.1), False),
        (optim.SGD(weights(), 0.1, use_combined_accum=True, accum_type=F16), False),
        (optim.Adam(weights(), accum_type=F16), True),
        (optim.Adam(weights(), first_order_momentum_accum_type=F16), False),
        (torch.optim.Adam(weights()), False),
    ],
)
def test_16_bit_accumulation_runs_as_a_mean(optimizer, expected):
    assert read(optimizer).uses_running_mean is expected


@pytest.mark.parametrize("where", ["defaults", "group"])
def test_amsgrad_is_refused_wherever_it_is(where):
    adam = optim.AdamW(weights())
    target = adam.defaults if where == "defaults" else adam.param_groups[0]
    target["amsgrad"] = True
    with pytest.raises(ValueError, match="Only non-amsgrad"):
        read(adam)


def test_adams_decoupled_weight_decay_is_refused():
    adam = torch.optim.Adam(weights())
    adam.param_groups[0]["decoupled_weight_decay"] = True
    with pytest.raises(ValueError, match="use AdamW"):
        read(adam)


@pytest.mark.parametrize("value", [torch.tensor(0.1), "0.1", None])
def test_values_must_be_numbers(value):
    sgd = torch.optim.SGD(weights(), 0.1)
    sgd.param_groups[0]["lr"] = value
    with pytest.raises(AssertionError, match="Expected a number for lr"):
        read(sgd)


@pytest.mark.parametrize("value", [[0.9, 0.99], (0.9,), 0.9])
def test_betas_must_be_a_pair(value):
    adam = torch.optim.Adam(weights())
    adam.param_groups[0]["betas"] = value
    with pytest.raises(AssertionError, match="Expected a pair for betas"):
        read(adam)


def test_missing_attributes_are_named():
    sgd = optim.SGD(weights(), 0.1)
    del sgd.param_groups[0]["dampening"]
    with pytest.raises(AssertionError, match="Mandatory attribute dampening not found"):
        read(sgd)


def test_types_are_checked_again_when_read():
    adam = optim.Adam(weights())
    adam.accum_type = torch.float64
    with pytest.raises(ValueError, match="accum_type must be"):
        read(adam)


def test_rmsprop_groups_must_agree_on_centered():
    groups = [{"params": weights(), "centered": True}, {"params": weights()}]
    with pytest.raises(AssertionError, match="same value for the 'centered'"):
        read(optim.RMSprop(groups))


def test_senseless_values_are_errors_of_the_device():
    with pytest.raises(Error, match="Maximum norm of gradients cannot be NaN"):
        read(optim.SGD(weights(), 0.1, max_grad_norm=math.nan))
    with pytest.raises(Error, match="Loss scaling cannot be 0"):
        read(optim.SGD(weights(), 0.1, loss_scaling=0.0))


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, "poptorch::python")
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records]


def test_attributes_added_later_are_warned_of_once(log):
    reader = OptimizerReader(relax_attribute_checks=False)
    sgd = optim.SGD(weights(), 0.1)
    sgd.param_groups[0]["present"] = 1
    reader.read(sgd)
    assert log() == []
    sgd.param_groups[0]["initial_lr"] = 0.1
    sgd.defaults["colour"] = "red"
    sgd.lr = 0.5
    for _ in range(2):
        reader.read(sgd)
    start = "Ignoring unexpected"
    assert log() == [
        ("WARNING", f"{start} default group variable in SGD2 optimizer: ['colour']"),
        ("WARNING", f"{start} optimizer attribute in SGD2 optimizer: ['lr']"),
        ("WARNING", f"{start} group 0 attribute in SGD2 optimizer: ['initial_lr']"),
    ]


def test_warnings_can_be_relaxed(log):
    reader = OptimizerReader(relax_attribute_checks=True)
    sgd = optim.SGD(weights(), 0.1)
    reader.read(sgd)
    sgd.lr = 0.5
    reader.read(sgd)
    assert [level for level, _ in log()] == ["DEBUG"]


def test_swapping_torchs_for_poptorchs_optimizer_is_no_surprise(log):
    reader = OptimizerReader(relax_attribute_checks=False)
    reader.read(torch.optim.SGD(weights(), 0.1))
    reader.read(optim.SGD(weights(), 0.1))
    assert log() == []


def test_loading_a_state_adds_nothing_unexpected(log):
    for cls in (optim.SGD, optim.AdamW, optim.RMSprop, optim.LAMB):
        reader = OptimizerReader(relax_attribute_checks=False)
        optimizer = cls(weights(), lr=0.1)
        reader.read(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state_dict = optimizer.get_state_dict  # as executors do
        reader.read(optimizer)
    assert log() == []


def test_custom_optimizers_are_what_they_derive_from_with_a_warning(log):
    class Sub(optim.AdamW):
        pass

    class Native(torch.optim.SGD):
        pass

    assert read(Sub(weights())).kind.name == "ADAMW"
    assert read(Native(weights(), 0.1)).kind.name == "SGD2"
    messages = [message for _, message in log()]
    assert len(messages) == 2
    for message in messages:
        assert "Poptorch does not run Python optimizer code directly" in message


def changed(old, new):
    check_replaceable(read(old), read(new))


def test_variables_may_change():
    groups = [{"params": weights()}, {"params": weights()}]
    old = optim.SGD(groups, 0.1, 0.9, weight_decay=0.0, loss_scaling=1.0)
    new = optim.SGD(groups, 0.2, 0.5, weight_decay=0.1, loss_scaling=8.0)
    new.param_groups[1]["lr"] = 7.0
    changed(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (optim.Adam(weights()), optim.Adam(weights(), lr=1e-3), CONSTNESS),
        (optim.Adam(weights(), lr=1e-3), optim.Adam(weights()), CONSTNESS),
        (
            torch.optim.SGD(weights(), 0.1),
            torch.optim.SGD(weights(), 0.1, weight_decay=0.1),
            CONSTNESS,
        ),
        (
            torch.optim.Adam(weights(), betas=(0.9, 0.99)),
            torch.optim.Adam(weights(), betas=(0.8, 0.99)),
            CONSTANT,
        ),
        (
            optim.SGD(weights(), 0.1),
            optim.SGD(weights(), 0.1, loss_scaling=2.0),
            "loss_scaling",
        ),
        (optim.SGD(weights(), 0.1), optim.Adam(weights()), "optimizer of type SGD2"),
        (optim.Adam(weights()), optim.RMSprop(weights()), "optimizer of type ADAM"),
        (optim.Adam(weights()), optim.AdamW(weights()), "mode was Adam, now AdamW"),
        (optim.AdamW(weights()), optim.LAMB(weights()), "mode was AdamW, now Lamb"),
        (
            optim.SGD(weights(), 0.1),
            optim.SGD(weights(), 0.1, use_combined_accum=True),
            "mode was separate",
        ),
        (
            optim.SGD(weights(), 0.1),
            optim.SGD(weights(), 0.1, max_grad_norm=1.0),
            "Clip norm settings",
        ),
        (
            optim.SGD(weights(), 0.1),
            optim.SGD(weights(), 0.1, velocity_accum_type=F16),
            "velocity_accum_type was torch.float32",
        ),
        (
            optim.RMSprop(weights()),
            optim.RMSprop(weights(), use_tf_variant=True),
            "use_tf_variant",
        ),
        (
            optim.SGD([{"params": weights()}, {"params": weights()}], 0.1),
            optim.SGD(weights(), 0.1),
            "2 parameter groups",
        ),
    ],
)
def test_what_may_not_change_after_compiling(old, new, message):
    changed(old, old)
    with pytest.raises(Error, match=message) as raised:
        changed(old, new)
    assert raised.value.type == "popart_exception"


def test_a_constant_changed_in_one_group_is_refused():
    sgd = optim.SGD(weights(), 0.1)
    old = read(sgd)
    sgd.param_groups[0]["momentum"] = 0.9
    with pytest.raises(Error, match=CONSTANT + r"\. momentum of group 0"):
        check_replaceable(old, read(sgd))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (optim.AdamW(weights()), optim.AdamW(weights(), bias_correction=False)),
        (
            optim.Adam(weights()),
            optim.Adam(weights(), first_order_momentum_accum_type=F16),
        ),
        (
            optim.SGD(weights(), 0.1),
            optim.SGD([{"params": weights()}, {"params": weights()}], 0.1),
        ),
        (optim.SGD(weights(), 0.1), torch.optim.SGD(weights(), 0.2)),
        (
            torch.optim.SGD(weights(), 0.1, dampening=0.1),
            torch.optim.SGD(weights(), 0.1),
        ),
    ],
)
def test_what_poptorch_does_not_compare(old, new):
    changed(old, new)


def test_accumulating_in_16_bits_needs_another_program():
    with pytest.raises(ValueError, match="executable is already compiled"):
        changed(optim.Adam(weights()), optim.Adam(weights(), accum_type=F16))
