# SPDX-License-Identifier: Apache-2.0
"""Annotations, overlaps: the same values on host and device; what they refuse."""

import re

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator.core.survey import survey
from tests.emulator import _models
from tests.emulator._models import Function, Linear, X, assert_device_equals_host

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


def test_a_checkpoint_takes_tensors_only():
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(X, 3)


@pytest.mark.parametrize("mode", list(MODE))
def test_a_serialized_product_is_the_product(mode):
    result = poptorch.serializedMatMul(X, X.T, mode, factor=2, keep_precision=True)
    assert torch.equal(result, X @ X.T)


MATRIX = torch.ones(4, 6)
HINTS = {
    r"an operation, 1.5: the proportion must be in \(0,1\]": lambda x: (
        poptorch.set_available_memory(x @ x.T, 1.5)
    ),
    "an operation, 0: ": lambda x: poptorch.set_available_memory(x * 2, 0),
    "of an input or a weight, 0.3": lambda x: poptorch.set_available_memory(x, 0.3) + 1,
    "factor 0 for reducing_dim of size 6": lambda x: poptorch.serializedMatMul(
        x, x.T, MODE.ReducingDim
    ),
    "factor 3 for output_channels of size 4": lambda x: poptorch.serializedMatMul(
        x, x.T, MODE.OutputChannels, 3
    ),
    "factor 3 for input_channels of size 8": lambda x: poptorch.serializedMatMul(
        torch.stack([x, x]), x.T, MODE.InputChannels, 3
    ),
}


@pytest.mark.parametrize("fragment", HINTS)
def test_hints_that_a_device_refuses(fragment):
    """PopART, `builder.cpp:1782` and `matmul.cpp:240`; dead ones are eliminated."""
    hinted = HINTS[fragment]
    hinted(MATRIX)  # the host takes everything
    with pytest.raises(poptorch.Error, match=fragment):
        _models.run(hinted, MATRIX)
    if "input or" not in fragment:
        assert_device_equals_host(Function(lambda _, x: (hinted(x), x + 1)[1]), MATRIX)
    module = Function(lambda _, x: hinted(x))
    remarks = survey(module, [MATRIX], poptorch.Options(), is_training=False).remarks
    ((topic, message, place, is_refused),) = remarks
    assert (topic, is_refused) == ("arguments", True)
    assert re.search(fragment, message)
    assert place.file == __file__


def test_batches_of_rows_are_cut_together():
    """PopTorch makes one matrix of them (`BlasOps.cpp:53`)."""
    x = torch.ones(2, 3, 6)
    product = _models.run(
        lambda x: poptorch.serializedMatMul(x, x[0].T, MODE.InputChannels, 6), x
    )
    assert torch.equal(product, x @ x[0].T)


def test_scopes_change_nothing():
    def forward(_, x):
        with poptorch.NameScope("outer"), poptorch.Attribute(__outline={"a": "b"}):
            return x + 1

    assert_device_equals_host(Function(forward), X)


def test_convolutions_inside_are_as_outside():
    def forward(self, x):
        with poptorch.MultiConv():
            y = self.layer(x)
            return y + self.layer(x.abs())

    torch.manual_seed(0)
    module = Function(forward, layer=torch.nn.Conv1d(2, 3, 3))
    assert_device_equals_host(module, IMAGES)


IMAGES = torch.linspace(-1, 1, 32).reshape(1, 2, 16)
SETTINGS = {
    r"Memory.*\(\[0.5, 0.5, 0.5\]\): .* each of the 2 convolutions": (
        lambda multi: multi.availableMemoryProportions([0.5, 0.5, 0.5])
    ),
    r"partialsTypes\(\[torch.float16, .* each of the 2 convolutions": (
        lambda multi: multi.partialsTypes([torch.half] * 3)
    ),
    r"Proportions\(\[1.5\]\): .* at most 1": (
        lambda multi: multi.availableMemoryProportions(1.5)
    ),
    r"cycleBackOff\(\[0.0\]\): .* above 0": lambda multi: multi.cycleBackOff(0.0),
}


@pytest.mark.parametrize("fragment", SETTINGS)
def test_settings_of_convolutions_that_a_device_refuses(fragment):
    def forward(self, x):
        with SETTINGS[fragment](poptorch.MultiConv()):
            return self.layer(x) + self.layer(x.abs())

    module = Function(forward, layer=torch.nn.Conv1d(2, 3, 3))
    module(IMAGES)
    with pytest.raises(poptorch.Error, match=fragment):
        poptorch.inferenceModel(module)(IMAGES)


@pytest.mark.parametrize(
    ("forward", "fragment"),
    [
        (lambda self, x: self.layer(self.layer(x).relu()), "the result of another one"),
        (lambda self, x: self.back(x), "Unexpected end_multi_conv"),
    ],
)
def test_other_convolutions_are_refused_inside(forward, fragment):
    layers = torch.nn.Conv1d(2, 2, 3), torch.nn.ConvTranspose1d(2, 2, 3)

    def inside(self, x):
        with poptorch.MultiConv():
            return forward(self, x)

    module = Function(inside, layer=layers[0], back=layers[1])
    with pytest.raises(poptorch.Error, match=fragment):
        poptorch.inferenceModel(module)(IMAGES)


# Losses on the host; `test_losses.py` has them on the device -------------------------

LOSSES = torch.tensor([[1.0, 2.0], [3.0, 6.0]])


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 12.0), ("mean", 3.0)])
def test_a_loss_is_reduced_over_all_elements(reduction, expected):
    result = poptorch.identity_loss(LOSSES, reduction=reduction)
    assert result.dim() == 0
    assert result.item() == expected


@pytest.mark.parametrize("reduction", ["average", None, 0])
def test_other_reductions_are_refused(reduction):
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(LOSSES, reduction)


# Attributes of custom operations, as PopTorch's C++ asks for them (`_utils.py`) ------


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


# Overlapped transfers: what is marked, and what compiling refuses -------------------

OVERLAP = poptorch.OverlapMode.OverlapAccumulationLoop


def options():
    result = poptorch.Options()
    result.setExecutionStrategy(poptorch.ShardedExecution())
    result.TensorLocations.numIOTiles(32)
    return result


def run(forward, opts=None):
    return _models.run(forward, X, options=opts or options())


def mark_in(x, mode=OVERLAP):
    return poptorch.set_overlap_for_input(x, mode)


def mark_out(x, mode=OVERLAP):
    return poptorch.set_overlap_for_output(x, mode)


@pytest.mark.parametrize("mark", [mark_in, mark_out])
def test_on_the_host_a_mark_returns_what_it_gets(mark):
    nested = {"a": [X, 3], "b": (X,)}
    assert mark(nested) is nested


def test_marked_inputs_and_outputs_keep_their_values():
    def forward(x):
        x = mark_in(x)
        return mark_out([x + 1, x * 2])

    first, second = run(forward)
    assert torch.equal(first, X + 1)
    assert torch.equal(second, X * 2)


def used_twice(x):
    return x + 1, mark_in(x)


def no_input(x):
    y = x + 1
    return y, mark_in(y)


def no_output(x):
    return mark_out(x) + 1


def returned_twice(x):
    y = x + 1
    return y, mark_out(y)


def mark_returned_twice(x):
    y = mark_out(x + 1)
    return y, y


@pytest.mark.parametrize(
    ("forward", "fragment"),
    [
        (used_twice, "must be the only op applied to an input.*input 0"),
        (no_input, "not a tensor input to the model"),
        (no_output, "not a tensor output to the model"),
        (returned_twice, "returned twice"),
        (mark_returned_twice, "returned twice"),
    ],
)
def test_a_mark_in_the_wrong_place_is_refused(forward, fragment):
    with pytest.raises(poptorch.Error, match=fragment):
        run(forward)


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        (
            options().setExecutionStrategy(poptorch.PipelinedExecution()),
            r"supported with poptorch\.Pipelined",
        ),
        (
            poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution()),
            "No IO tiles allocated",
        ),
        (options().outputMode(poptorch.OutputMode.Final), r"OutputMode.Sum, not Final"),
    ],
)
def test_options_without_an_overlap_are_refused(opts, message):
    with pytest.raises(poptorch.Error, match=message):
        run(lambda x: mark_in(x), opts)
    run(lambda x: mark_in(x, poptorch.OverlapMode.NoOverlap), opts)


@pytest.mark.parametrize("mark", [mark_in, mark_out])
def test_a_mark_without_an_overlap_has_its_place_too(mark):
    """PopTorch, `OverlappedIO.cpp:166`."""
    with pytest.raises(poptorch.Error, match=r"not a tensor \w+put to the model"):
        run(lambda x: mark(x * 2, poptorch.OverlapMode.NoOverlap) + 1)


def test_the_loss_may_be_a_marked_output():
    class Marked(Linear):
        def forward(self, x):
            loss = poptorch.identity_loss(super().forward(x), "mean")
            return mark_out(loss)

    opts = options().outputMode(poptorch.OutputMode.All)
    model = poptorch.trainingModel(Marked(lambda layer, x: layer(x)), opts)
    assert model(X).item() > 0
