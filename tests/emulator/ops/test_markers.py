# SPDX-License-Identifier: Apache-2.0
"""Annotations: the same values on the host and on the device; what they refuse."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X, assert_device_equals_host

MODE = poptorch.MatMulSerializationMode

MARKERS = {
    "nop": poptorch.nop,
    "recomputationCheckpoint": poptorch.recomputationCheckpoint,
    "set_available_memory": lambda x: poptorch.set_available_memory(x, 0.3),
}


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_gives_the_same_tensor(name):
    assert MARKERS[name](X) is X


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_changes_nothing_on_the_device(name):
    assert_device_equals_host(Function(lambda _, x: MARKERS[name](x * 2) + 1), X)


@pytest.mark.parametrize("name", ["nop", "set_available_memory"])
def test_what_is_no_tensor_is_refused(name):
    with pytest.raises(poptorch.Error, match="Got float"):
        MARKERS[name](1.0)


def test_a_checkpoint_keeps_the_container():
    a, b = torch.ones(1), torch.zeros(1)
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert poptorch.recomputationCheckpoint((a, b)) == (a, b)
    assert poptorch.recomputationCheckpoint() == ()


def test_a_checkpoint_of_one_in_a_list_is_its_rows():
    rows = poptorch.recomputationCheckpoint([torch.tensor([1.0, 2.0])])
    assert rows == [torch.tensor(1.0), torch.tensor(2.0)]


def test_a_checkpoint_takes_tensors_only():
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(X, 3)


@pytest.mark.parametrize("mode", list(MODE))
def test_a_serialized_product_is_the_product(mode):
    result = poptorch.serializedMatMul(X, X.T, mode, factor=2, keep_precision=True)
    assert torch.equal(result, X @ X.T)


@pytest.mark.parametrize(
    "arguments",
    [("none",), (MODE.Disabled, 1.0), (MODE.Disabled, 1, 1)],
)
def test_a_serialized_product_checks_types(arguments):
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(X, X.T, *arguments)


def test_scopes_change_nothing():
    def forward(_, x):
        with poptorch.NameScope("outer"), poptorch.Attribute(__outline={"a": "b"}):
            return x + 1

    assert_device_equals_host(Function(forward), X)


def test_a_name_scope_needs_a_string():
    with pytest.raises(AssertionError, match="NameScope must be a string"):
        poptorch.NameScope(3)


def test_convolutions_inside_are_as_outside():
    def forward(self, x):
        with poptorch.MultiConv():
            y = self.layer(x)
            return y + self.layer(x.abs())

    torch.manual_seed(0)
    module = Function(forward, layer=torch.nn.Conv1d(2, 3, 3))
    images = torch.linspace(-1, 1, 32).reshape(1, 2, 16)
    assert_device_equals_host(module, images)


# Losses on the host; `test_losses.py` has them on the device -------------------------

LOSSES = torch.tensor([[1.0, 2.0], [3.0, 6.0]])


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 12.0), ("mean", 3.0)])
def test_a_loss_is_reduced_over_all_elements(reduction, expected):
    result = poptorch.identity_loss(LOSSES, reduction=reduction)
    assert result.dim() == 0
    assert result.item() == expected


def test_no_reduction_keeps_the_shape_and_copies():
    result = poptorch.identity_loss(LOSSES, reduction="none")
    assert torch.equal(result, LOSSES)
    assert result is not LOSSES


def test_gradients_pass_a_loss():
    x = LOSSES.clone().requires_grad_()
    poptorch.identity_loss(x * x, "mean").backward()
    assert torch.equal(x.grad, LOSSES / 2)


@pytest.mark.parametrize("reduction", ["average", None, 0])
def test_other_reductions_are_refused(reduction):
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(LOSSES, reduction)


# Attributes of custom operations, as PopTorch's C++ asks for them (`_utils.py`) ------


def test_attributes_are_read_as_json():
    assert poptorch.accessAttributes('{"alpha": [1, 2]}') == {"alpha": [1, 2]}


def test_an_address_stands_for_the_attributes_that_an_operation_was_called_with():
    attributes = {"alpha": 0.5}
    poptorch.attributes_lists.append(attributes)
    try:
        text = f"{poptorch.ATTR_PREFIX}{hex(id(attributes))}"
        assert poptorch.accessAttributes(text) is attributes
    finally:
        poptorch.attributes_lists.remove(attributes)


@pytest.mark.parametrize("text", [3, None, "alpha", "attr:xyz", "attr:0x1"])
def test_other_names_of_attributes_are_errors(text):
    with pytest.raises(ValueError, match=r"attribute_id_str|invalid literal"):
        poptorch.accessAttributes(text)
