# SPDX-License-Identifier: Apache-2.0
"""Loops and branches, traced once, decided on the device; calls of the host."""

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, Linear, X, assert_same

TRUE, FALSE = torch.tensor([True]), torch.tensor([False])


def run(forward, *inputs, **attributes):
    return poptorch.inferenceModel(Function(forward, **attributes))(*inputs)


def looping(count, body):
    return lambda _, *inputs: poptorch.for_loop(count, body, list(inputs))


def no_grad(function):
    with torch.no_grad():
        return function()


# for_loop ---------------------------------------------------------------------


def test_the_body_is_called_once_on_the_device_and_on_the_host():
    calls = []

    def body(x):
        calls.append(x.shape)
        return x * 2

    assert_same(run(looping(5, body), X), [X * 32])
    assert calls == [X.shape]
    assert_same(poptorch.for_loop(5, body, [X]), [X * 2])
    assert len(calls) == 2


def test_a_loop_sees_the_weights_of_the_day():
    def forward(self, x):
        return poptorch.for_loop(2, lambda y: y * self.weight, [x])[0]

    module = Function(forward, weight=nn.Parameter(torch.tensor([2.0])))
    model = poptorch.inferenceModel(module)
    assert model(torch.ones(1)).item() == 4
    with torch.no_grad():
        module.weight.fill_(3.0)
    model.copyWeightsToDevice()
    assert model(torch.ones(1)).item() == 9


def test_changes_of_the_copies_stay_in_the_loop():
    def forward(_, x):
        x = x + 1
        result = poptorch.for_loop(3, lambda y: y.add_(1), [x])[0]
        return result, x

    assert_same(run(forward, X), [X + 4, X + 1])


def test_a_body_may_return_what_it_got_or_captured():
    def forward(_, x, y):
        return poptorch.for_loop(2, lambda a, b: (y, a), [x, x + 1])

    assert_same(run(forward, X, X * 5), [X * 5, X * 5])


def test_random_numbers_differ_between_the_iterations():
    def body(total, last):
        return total + (torch.rand_like(last) == last), torch.rand_like(last)

    total, _ = run(looping(4, body), torch.zeros(50), torch.zeros(50))
    assert total.sum() == 0


def nested(x):
    return poptorch.for_loop(2, lambda y: y + 1, [x])[0]


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (nested, "start_for_loop encountered before previous"),
        (lambda x: (x, x), "takes and returns must be tensors of the same"),
        (lambda x: x[0], "takes and returns must be tensors of the same"),
        (lambda x: x > 0, "takes and returns must be tensors of the same"),
        (lambda _: 3.0, "must return tensors"),
    ],
)
def test_the_device_refuses_bodies(body, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(looping(2, body), X)


def test_a_body_must_not_change_what_is_around_it():
    def forward(_, x):
        y = x + 1

        def body(z):
            y.add_(1)
            return z

        return poptorch.for_loop(2, body, [x])[0]

    with pytest.raises(poptorch.Error, match="changes a tensor in place"):
        run(forward, X)


def test_rules_of_operators_hold_in_bodies():
    def pooled(x):
        return x + nn.functional.adaptive_avg_pool1d(x, 4).mean()

    for forward in (looping(2, pooled), lambda _, x: branched(x, pooled)):
        with pytest.raises(poptorch.Error, match="is not divisible"):
            run(forward, X[:, None])
    x = torch.full((4,), 40000.0, dtype=torch.float16)
    summed = run(looping(1, lambda y: y * 0 + y.mean()), x)
    assert_same(summed[0], run(lambda _, y: y * 0 + y.mean(), x))


def branched(x, body):
    return poptorch.cond(x.sum() > 0, body, [x], lambda y: y, [x])


# cond -------------------------------------------------------------------------


def both(forward, *inputs, **attributes):
    """The host and the device agree, with one program for both conditions."""
    module = Function(forward, **attributes)
    model = poptorch.inferenceModel(module)
    for condition in (TRUE, FALSE, TRUE):
        assert_same(
            model(condition, *inputs), no_grad(lambda c=condition: module(c, *inputs))
        )


def test_branches_nest_and_use_weights():
    def forward(self, condition, x):
        def inner(y):
            return poptorch.cond(
                y.sum().reshape(1) > 0, self.layer, [y], lambda: x * 3, []
            )[0]

        result = poptorch.cond(condition, inner, [x], lambda y: inner(-y), [x])[0]
        return result + 1

    both(forward, X, layer=nn.Linear(6, 6))


def test_only_one_branch_runs_on_the_device(capfd):
    def shown(title):
        return lambda x: poptorch.ipu_print_tensor(x, title)

    def forward(_, condition, x):
        return poptorch.cond(condition, shown("then"), [x], shown("else"), [x])[0]

    model = poptorch.inferenceModel(Function(forward))
    model(FALSE, torch.tensor([1]))
    assert capfd.readouterr().err == "else: (1)\n"


def test_a_changed_result_does_not_change_what_it_came_from():
    def forward(_, condition, x):
        y = x + 1
        z = poptorch.cond(condition, lambda: y, [], lambda: y, [])[0]
        z += 1
        return y, z

    assert_same(run(forward, TRUE, X), [X + 1, X + 2])


def test_changes_of_inputs_are_lost_on_the_device_only():
    def forward(_, condition, x):
        y = x + 1
        z = poptorch.cond(condition, lambda a: a.add_(1), [y], lambda a: a, [y])[0]
        return y, z

    assert_same(run(forward, TRUE, X), [X + 1, X + 2])
    assert_same(forward(None, TRUE, X), [X + 2, X + 2])


@pytest.mark.parametrize("other", [lambda x: (x, x), lambda x: x[:1], lambda x: x > 0])
def test_both_bodies_return_the_same_kinds(other):
    def forward(_, condition, x):
        return poptorch.cond(condition, lambda y: y, [x], other, [x])[0]

    with pytest.raises(poptorch.Error, match=r"the bodies of poptorch\.cond return"):
        run(forward, TRUE, X)


def test_branches_return_no_tensors_without_dimensions():
    total = torch.sum

    def forward(_, condition, x):
        return poptorch.cond(condition, total, [x], total, [x])[0]

    with pytest.raises(poptorch.Error, match="`else` branch output has an empty shape"):
        run(forward, TRUE, X)


@pytest.mark.parametrize("condition", [lambda x: x > 0, lambda x: True])
def test_the_condition_is_one_element_on_the_device(condition):
    def forward(_, x):
        return poptorch.cond(condition(x), lambda: x, [], lambda: x, [])[0]

    with pytest.raises(poptorch.Error, match="tensor of one element"):
        run(forward, X)


# `CPU`: calls of the host in the middle of a model ----------------------------------

Y = torch.tensor([2.0])


def test_each_micro_batch_calls_the_host():
    calls = []

    def double(x):
        calls.append(x.tolist())
        return x * 2

    module = Function(
        lambda self, x: self.cpu(x + 1) * 3, cpu=poptorch.CPU(double, "d")
    )
    options = poptorch.Options().deviceIterations(2)
    model = poptorch.inferenceModel(module, options)
    assert model(torch.tensor([1.0, 4.0])).tolist() == [12.0, 30.0]
    assert calls == [[0.0], [2.0], [5.0]]  # first zeros, to learn the shape


@pytest.mark.parametrize("outputs", [lambda x: (x,), lambda x: [x]])
def test_a_list_of_one_result_is_a_list(outputs):
    """PopTorch, `ops.py`: only what the layer itself returned single is unpacked."""
    cpu = poptorch.CPU(outputs, "one")
    assert cpu(X)[0] is X
    module = Function(lambda _, x: [y + 1 for y in cpu(x)])
    assert_same(poptorch.inferenceModel(module)(X), [X + 1])


@pytest.mark.parametrize("layer", [lambda x, y: x + y, lambda x, y: (x + y, x - y)])
def test_the_backends_part_can_be_played_by_hand(layer):
    cpu = poptorch.CPU(layer, "both")
    for method in (cpu.execute, cpu.registerPersistentData):
        with pytest.raises(TypeError):
            method()
    poptorch.inferenceModel(Function(lambda _, x, y: cpu(x, y)))(X, Y)
    cpu.registerPersistentData()
    assert [tensor.shape for tensor in cpu.inputs] == [X.shape, Y.shape]
    assert not any(tensor.any() for tensor in [*cpu.inputs, *cpu.outputs])
    for kept, given in zip(cpu.inputs, (X, Y)):
        kept.copy_(given)
    cpu.execute()
    expected = layer(X, Y)
    assert_same(cpu.outputs, expected if isinstance(expected, tuple) else [expected])


def test_a_module_no_longer_trains():
    layer = torch.nn.Linear(6, 2)
    cpu = poptorch.CPU(layer, "layer")
    assert not layer.weight.requires_grad
    model = poptorch.inferenceModel(Function(lambda _, x: cpu(x)))
    assert_same(model(X), layer(X))


def test_training_is_refused():
    cpu = poptorch.CPU(lambda x: x, "same")
    module = Linear(lambda layer, x: poptorch.identity_loss(cpu(layer(x)), "mean"))
    with pytest.raises(poptorch.Error, match=r"CPU\(\) is only supported in inference"):
        poptorch.trainingModel(module)(X)


def test_calls_must_not_overlap():
    inner = poptorch.CPU(lambda x: x, "inner")
    outer = poptorch.CPU(lambda x: inner(x), "outer")
    assert outer(X) is X
    with pytest.raises(poptorch.Error, match=r"must not overlap.*'inner'"):
        poptorch.inferenceModel(Function(lambda _, x: outer(x)))(X)
