# SPDX-License-Identifier: Apache-2.0
"""PopTorch's optimisers on the host: constructors, state, copies, LAMB's step."""

import copy
import inspect
import logging
import math
import pickle

import pytest
import torch

from ipufit.emulator import optim

pytestmark = [pytest.mark.floor, pytest.mark.looped]

F16, F32 = torch.float16, torch.float32

NAMES = ["Adam", "AdamW", "LAMB", "RMSprop", "SGD"]
ARGUMENTS = {
    name: [*inspect.signature(getattr(optim, name)).parameters] for name in NAMES
}

# PopTorch 3.4 with torch 2.0.1: what holds when nothing but `lr` is given.
ADAM_TYPES = {
    "accum_type": F32,
    "first_order_momentum_accum_type": F32,
    "second_order_momentum_accum_type": F32,
}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, **ADAM_TYPES}
RMSPROP = {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0, **ADAM_TYPES}
SGD = {"lr": 0.1, "momentum": 0, "dampening": 0, "nesterov": False, "accum_type": F32}
DEFAULTS = {
    "Adam": {**ADAM, "weight_decay": 0, "amsgrad": False, "max_grad_norm": math.inf},
    "AdamW": {**ADAM, "weight_decay": 1e-2, "max_grad_norm": math.inf},
    "LAMB": {**ADAM, "weight_decay": 1e-2, "max_weight_norm": 65500.0},
    "RMSprop": {**RMSPROP, "weight_decay": 0, "use_tf_variant": False},
    "SGD": {**SGD, "weight_decay": 0, "max_grad_norm": math.inf},
}
DEFAULTS["AdamW"]["bias_correction"] = DEFAULTS["LAMB"]["bias_correction"] = True
DEFAULTS["SGD"].update(velocity_accum_type=F32, use_combined_accum=False)


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values or (1.0, -2.0)))


def build(name, params=None, **arguments):
    if name == "SGD":
        arguments.setdefault("lr", 0.1)
    return getattr(optim, name)(params or [parameter()], **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_left_out_take_poptorchs_defaults(name):
    optimizer = build(name)
    group = optimizer.param_groups[0]
    for variable, value in {**DEFAULTS[name], "loss_scaling": 1.0}.items():
        is_attribute = variable not in optimizer.defaults
        if is_attribute or variable == "max_weight_norm":
            assert getattr(optimizer, variable) == value
        if not is_attribute:
            assert optimizer.defaults[variable] == group[variable] == value


def constant(optimizer, name):
    return optimizer.variable_attrs.isConstant(name)


@pytest.mark.parametrize("mark", ["markAsConstant", "markAsVariable"])
def test_only_known_attributes_can_be_marked(mark):
    attributes = build("SGD").variable_attrs
    with pytest.raises(AssertionError, match=r"Unknown attribute accum_type, allowed"):
        getattr(attributes, mark)("accum_type")


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name in NAMES
        for argument in ARGUMENTS[name]
        if argument.endswith("accum_type")
    ],
)
def test_accumulators_have_16_or_32_bits(name, argument):
    assert getattr(build(name, **{argument: F16}), argument) == F16
    with pytest.raises(AssertionError, match=r"must be either torch\.float32 or"):
        build(name, **{argument: torch.float64})


def test_velocity_scaling_belongs_to_combined_sgd(caplog):
    groups = [{"params": [parameter()]}, {"params": [parameter()]}]
    groups[1]["velocity_scaling"] = 4.0
    combined = optim.SGD(groups, 0.1, velocity_scaling=2.0, use_combined_accum=True)
    combined.add_param_group({"params": [parameter()]})
    assert combined.defaults["velocity_scaling"] == 2.0
    assert [g["velocity_scaling"] for g in combined.param_groups] == [2.0, 4.0, 2.0]
    assert not constant(combined, "velocity_scaling")
    assert not caplog.records

    with caplog.at_level(logging.WARNING, "poptorch::python"):
        separate = build("SGD", velocity_scaling=2.0)
    assert "velocity_scaling" not in separate.defaults
    assert "use_combined_accum" in caplog.text


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_on_the_host_they_step_as_torchs(name):
    ours, theirs = parameter(1.0, -2.0, 0.5), parameter(1.0, -2.0, 0.5)
    optimizer = build(name, [ours], lr=0.1, weight_decay=0.1, loss_scaling=1024.0)
    reference = getattr(torch.optim, name)([theirs], lr=0.1, weight_decay=0.1)
    for scale in (1.0, -0.5, 2.0):
        for weight in (ours, theirs):
            weight.grad = scale * torch.tensor([0.1, 0.2, -3.0])
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_weight_norm", [None, 0.5, 0.0])
def test_lamb_follows_the_formula_on_the_host(bias_correction, max_weight_norm):
    weight = parameter(1.0, -2.0, 0.5)
    optimizer = optim.LAMB(
        [weight],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-3,
        weight_decay=0.1,
        bias_correction=bias_correction,
        max_weight_norm=max_weight_norm,
    )
    w = weight.detach().double()
    m, v = torch.zeros(3).double(), torch.zeros(3).double()
    for t, scale in enumerate((1.0, -0.5, 2.0), start=1):
        gradient = scale * torch.tensor([0.1, 0.2, -3.0])
        weight.grad = gradient
        optimizer.step()
        m = 0.8 * m + 0.2 * gradient
        v = 0.9 * v + 0.1 * gradient**2
        mc = m / (1 - 0.8**t) if bias_correction else m
        vc = v / (1 - 0.9**t) if bias_correction else v
        x = mc / (vc.sqrt() + 1e-3) + 0.1 * w
        largest = 65500.0 if max_weight_norm is None else max_weight_norm
        trust = min(float(w.norm()), largest) / float(x.norm()) if largest else 1.0
        w = w - 0.1 * trust * x
    assert torch.allclose(weight.detach().double(), w, rtol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"eps": math.nan}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}],
)
def test_lamb_refuses_senseless_values(arguments):
    with pytest.raises(ValueError, match="LAMB's"):
        optim.LAMB([parameter()], **arguments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_keep_poptorchs_attributes(name, duplicate):
    optimizer = build(name, weight_decay=0.5, loss_scaling=8.0, accum_type=F16)
    twin = duplicate(optimizer)
    for attribute in ("loss_scaling", *DEFAULTS[name].keys() - optimizer.defaults):
        assert getattr(twin, attribute) == getattr(optimizer, attribute)
    assert not constant(twin, "weight_decay")
    assert constant(twin, "eps")
    assert twin.param_groups[0]["weight_decay"] == 0.5
    twin.param_groups[0]["params"][0].grad = torch.ones(2)
    twin.step()


def pickled(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


def device_state(value):
    return {
        "ipu_state": {"Accl1___w": torch.tensor([value])},
        "ipu_param": {"lossScaling_FLOAT": torch.tensor(value)},
    }


def loaded(value, **arguments):
    optimizer = build("SGD", **arguments)
    optimizer.load_state_dict({**optimizer.state_dict(), **device_state(value)})
    return optimizer


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickled])
def test_copies_carry_the_state_and_upload_it(twin):
    optimizer = loaded(2.0)
    optimizer.ipu_state_is_dirty = False
    other = twin(optimizer)
    assert other.state_dict()["ipu_state"]["Accl1___w"] == 2.0
    assert other.ipu_state_is_dirty
    assert not twin(build("SGD")).ipu_state_is_dirty


def test_an_empty_state_is_refused():
    with pytest.raises(RuntimeError, match="because it is empty"):
        build("SGD").set_state_dict({})
    with pytest.raises(KeyError, match="param_groups"):  # torch's part comes first
        build("SGD").load_state_dict({})


def test_a_torch_state_is_refused_after_torch_has_loaded_it():
    optimizer = build("SGD", lr=0.1)
    state = torch.optim.SGD([parameter()], lr=0.7).state_dict()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7
