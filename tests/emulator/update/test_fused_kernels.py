# SPDX-License-Identifier: Apache-2.0
"""torch's fused kernels against the same updates in steps, whatever the layout."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ipufit.emulator import optim
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._update import fused_kernels as _fused_kernels
from ipufit.emulator._update.device_optimizer import DeviceOptimizer
from ipufit.emulator._update.fused_kernels import is_dense, same_layout
from ipufit.emulator._update.parameter_groups import group_indices
from tests.strategies import examples

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
quick = settings(max_examples=examples(40))

SIZES = st.integers(1, 5)
SHAPES = st.one_of(
    st.just(()), st.tuples(SIZES), st.tuples(SIZES, SIZES), st.tuples(*[SIZES] * 4)
)
RATES = st.floats(1e-4, 0.3)
FACTORS = st.sampled_from([0.0, 0.3, 0.9])
SCALES = st.sampled_from([1.0, 0.5, 1024.0])
LAYOUTS = st.sampled_from(["contiguous", "transposed", "channels_last", "sliced"])
GRADIENTS = st.sampled_from(["contiguous", "transposed", "channels_last", "expanded"])


def test_new_versions_have_both():
    assert (_fused_kernels.adamw() is not None) == (VERSION >= (2, 4))
    assert (_fused_kernels.sgd() is not None) == (VERSION >= (2, 4))


def lay_out(tensor, layout):
    """The same values in other places of memory."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "expanded" and tensor.dim():
        return tensor[..., :1].expand(tensor.shape)
    if layout == "sliced" and tensor.dim():
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.contiguous()


def train(cls, arguments, shapes, layout, gradient_layout, steps, dtype):
    """Weights and state after some updates."""
    generator = torch.Generator().manual_seed(len(shapes))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    weights = {
        f"w{index}": torch.nn.Parameter(lay_out(value.to(dtype), layout))
        for index, value in enumerate(values)
    }
    half = len(weights) // 2
    tensors = list(weights.values())
    groups = [{"params": tensors[:half]}, {"params": tensors[half:], "lr": 0.05}]
    host = cls([group for group in groups if group["params"]], **arguments)
    reading = OptimizerReader(relax_attribute_checks=False).read(host)
    device = DeviceOptimizer(reading, weights, group_indices(host, weights))
    for _ in range(steps):
        gradients = {
            name: lay_out(torch.randn(w.shape, generator=generator), gradient_layout)
            for name, w in weights.items()
        }
        # 1024 times the gradient, for a loss scaling of 1024.
        device.step({n: host.loss_scaling * g for n, g in gradients.items()})
    return {**weights, **device.state_dict()["ipu_state"]}


def in_steps(*args):
    with mock.patch.object(_fused_kernels, "_kernels", return_value=(None, None)):
        return train(*args)


def assert_same(fused, stepwise):
    assert set(fused) == set(stepwise)
    for name, value in fused.items():
        # Some twenty roundings lie between the two, of values as large as the largest:
        # velocities are multiplied by the loss scaling.
        largest = max(1.0, float(stepwise[name].detach().abs().max()))
        torch.testing.assert_close(
            value, stepwise[name], rtol=2e-5, atol=3e-6 * largest
        )


ARGUMENTS = (st.lists(SHAPES, min_size=1, max_size=4), LAYOUTS, GRADIENTS)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@quick
@given(
    lr=RATES,
    betas=st.tuples(FACTORS, st.sampled_from([0.0, 0.9, 0.999])),
    decay=FACTORS,
    scale=SCALES,
    largest=st.sampled_from([None, 0.5]),
    layouts=st.tuples(*ARGUMENTS),
    steps=st.integers(1, 5),
)
def test_adam_is_the_same(name, lr, betas, decay, scale, largest, layouts, steps):
    arguments = {"lr": lr, "betas": betas, "weight_decay": decay, "eps": 1e-2}
    arguments.update(loss_scaling=scale, max_grad_norm=largest)
    given_all = (getattr(optim, name), arguments, *layouts, steps, torch.float32)
    assert_same(train(*given_all), in_steps(*given_all))


@quick
@given(
    lr=RATES,
    momentum=FACTORS,
    dampening=FACTORS,
    decay=FACTORS,
    nesterov=st.booleans(),
    scale=SCALES,
    largest=st.sampled_from([None, 0.5]),
    layouts=st.tuples(*ARGUMENTS),
    steps=st.integers(1, 5),
)
def test_sgd_is_the_same(
    lr, momentum, dampening, decay, nesterov, scale, largest, layouts, steps
):
    arguments = {"lr": lr, "momentum": momentum, "weight_decay": decay}
    if nesterov and momentum:
        arguments["nesterov"] = True
    else:
        arguments["dampening"] = dampening
    arguments.update(loss_scaling=scale, max_grad_norm=largest)
    given_all = (optim.SGD, arguments, *layouts, steps, torch.float32)
    assert_same(train(*given_all), in_steps(*given_all))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_half_precision_weights_are_the_same_too(name):
    arguments = {"lr": 0.1, "loss_scaling": 2.0}
    given_all = (getattr(optim, name), arguments, [(3, 2), (4,)])
    given_all += ("contiguous", "contiguous", 3, torch.float16)
    fused, stepwise = train(*given_all), in_steps(*given_all)
    assert fused["w0"].dtype == torch.float16
    assert_same(fused, stepwise)


@pytest.mark.skipif(VERSION < (2, 4), reason="has no fused kernels for processors")
@pytest.mark.parametrize(
    ("name", "arguments", "kernel"),
    [
        ("Adam", {"lr": 0.1, "weight_decay": 0.1}, 0),
        ("AdamW", {"lr": 0.1, "max_grad_norm": 1.0}, 0),
        ("SGD", {"lr": 0.1}, 1),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
    ],
)
def test_kernels_are_what_runs(name, arguments, kernel):
    kernels = [mock.Mock(wraps=one) for one in _fused_kernels._kernels()]
    with mock.patch.object(_fused_kernels, "_kernels", return_value=kernels):
        cls = getattr(optim, name)
        train(cls, arguments, [(3,)], "contiguous", "contiguous", 2, torch.float32)
    assert [one.call_count for one in kernels] == [2 * (kernel == 0), 2 * (kernel == 1)]


@quick
@given(st.tuples(*[SIZES] * 4), GRADIENTS, LAYOUTS)
def test_copies_have_the_values_and_the_strides_asked_for(shape, given_, wanted):
    tensor = lay_out(torch.randn(shape), given_)
    strides = lay_out(torch.randn(shape), wanted).stride()
    assume(is_dense(torch.empty_strided(shape, strides)))
    [copy] = same_layout([tensor], [strides])
    assert copy.stride() == strides
    assert torch.equal(copy, tensor)
    assert (copy is tensor) == (tensor.stride() == strides)


@quick
@given(SHAPES, LAYOUTS)
def test_dense_tensors_have_an_element_in_each_place(shape, layout):
    tensor = lay_out(torch.zeros(shape), layout)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    has_gaps = last + 1 != tensor.numel()
    # Of dimensions of size 1 the step doesn't count, but torch may change it.
    assert not (is_dense(tensor) and has_gaps)
    assert is_dense(tensor) or has_gaps or 1 in tensor.shape
