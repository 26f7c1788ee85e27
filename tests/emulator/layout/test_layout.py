# SPDX-License-Identifier: Apache-2.0
"""Rows to micro-batches and results to rows, against a reference made of loops."""

# ruff: noqa: N803, N806 - D, G, R, B and S are the letters of the user guide
import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode
from tests.emulator._models import Function, make_options
from tests.strategies import examples

pytestmark = pytest.mark.looped

MODES = [OutputMode.All, OutputMode.Final, OutputMode.Sum, OutputMode.EveryN]
Pair = collections.namedtuple("Pair", ["first", "second"])
small = st.integers(1, 3)
quick = settings(max_examples=examples(60))


def rows_of(d, g, r, b, *, G, R, B):
    """data.md 11.1, one row at a time."""
    return ((d * G + g) * R + r) * B + b


def reference(outputs_of, D, G, R, mode, period=1):
    """Blocks in the order they come back; `outputs_of(d, g, r)` is one micro-batch."""
    blocks = []
    if mode == OutputMode.Sum:
        for r in range(R):
            parts = [outputs_of(d, g, r) for d in range(D) for g in range(G)]
            blocks.append(sum(parts[1:], parts[0]))
    else:
        step = 0
        for d in range(D):
            for g in range(G):
                step += 1
                is_last = d == D - 1 and g == G - 1
                wanted = {
                    OutputMode.All: True,
                    OutputMode.Final: is_last,
                    OutputMode.EveryN: step % period == 0,
                }[mode]
                if wanted:
                    blocks += [outputs_of(d, g, r) for r in range(R)]
    if blocks[0].dim() == 0:
        return blocks[0] if len(blocks) == 1 else torch.stack(blocks)
    return torch.cat(blocks)


class Rows(torch.nn.Module):
    """Returns its rows and a scalar; trains nothing that matters."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        loss = poptorch.identity_loss(self.weight * x.sum(), reduction="sum")
        return x, x.mean() + 0 * loss  # what no output depends on is eliminated


# Any factors ------------------------------------------------------------------


@quick
@given(small, small, small, small, st.sampled_from(MODES), st.data())
def test_every_leaf_of_every_mode_is_where_the_reference_puts_it(
    D, G, R, B, mode, data
):
    period = data.draw(st.sampled_from([n for n in range(1, D + 1) if D % n == 0]))
    executor = poptorch.trainingModel(Rows(), make_options(D, G, R, mode, period))
    x, mean = executor(torch.arange(float(D * G * R * B)))

    def block(d, g, r):
        return torch.tensor(
            [float(rows_of(d, g, r, b, G=G, R=R, B=B)) for b in range(B)]
        )

    torch.testing.assert_close(x, reference(block, D, G, R, mode, period))
    scalar = reference(lambda *at: block(*at).mean(), D, G, R, mode, period)
    torch.testing.assert_close(mean, scalar)
    assert mean.dim() == (0 if mean.numel() == 1 else 1)


@quick
@given(small, small, st.sampled_from([(4, 2), (4, 4), (2, 2), (6, 3)]), st.booleans())
def test_replicas_of_a_group_read_the_same_rows(D, B, sizes, is_orthogonal):
    R, S = sizes
    kind = poptorch.CommGroupType
    options = make_options(D, 1, R)
    options.inputReplicaGrouping(
        S, kind.Orthogonal if is_orthogonal else kind.Consecutive
    )
    groups = R // S
    executor = poptorch.inferenceModel(torch.nn.Identity(), options)
    out = executor(torch.arange(float(D * groups * B)))

    def block(d, g, r):
        group = r % groups if is_orthogonal else r // S
        return torch.tensor([(d * groups + group) * B + b for b in range(B)]).float()

    assert out.tolist() == reference(block, D, 1, R, OutputMode.All).tolist()


# Structures -------------------------------------------------------------------


def test_outputs_are_fresh_at_every_call():
    executor = poptorch.inferenceModel(torch.nn.Identity())
    x = torch.ones(2)
    first = executor(x)
    first.zero_()
    assert x.tolist() == [1, 1]
    assert executor(x).tolist() == [1, 1]


@pytest.mark.parametrize("mode", MODES)
def test_a_constant_comes_back_once_in_every_mode(mode):
    def forward(self, x):
        return x, torch.tensor([7, 8])

    options = make_options(2, 1, 2, mode, 2)
    _, constant = poptorch.inferenceModel(Function(forward), options)(torch.ones(4))
    assert constant.tolist() == [7, 8]
    assert constant.dtype == torch.int32


def test_a_tensor_that_was_created_and_then_filled_is_no_constant():
    def forward(self, x):
        y = torch.zeros(2)
        y[0] = x[0]
        return y

    out = poptorch.inferenceModel(Function(forward), make_options(2, 1, 1))(
        torch.ones(2) * 3
    )
    assert out.tolist() == [3, 0, 3, 0]


def test_a_tensor_left_on_the_host_comes_back_as_it_was_traced():
    def forward(self, x):
        self.count += 1
        return x, self.count

    model = Function(forward, count=torch.tensor([0.0]))
    executor = poptorch.inferenceModel(model, make_options(2, 1, 1))
    with pytest.warns(UserWarning, match="expected to be on the IPU but is on cpu"):
        first = executor(torch.ones(2))
    assert first[1].tolist() == [1]
    assert executor(torch.ones(2))[1].tolist() == [1]
    assert model.count.tolist() == [1]


def test_outputs_that_share_memory_with_a_weight_are_values_of_their_moment():
    def forward(self, x):
        self.count += 1
        return x, self.count, self.count[0]

    _, count, first = poptorch.inferenceModel(
        Function(forward, buffers={"count": torch.zeros(2)}), make_options(3, 1, 1)
    )(torch.ones(3))
    assert count.tolist() == [1, 1, 2, 2, 3, 3]
    assert first.tolist() == [1, 2, 3]


def test_sums_are_made_in_the_type_of_the_output():
    options = make_options(2, 1, 1, OutputMode.Sum)
    half = torch.full((2,), 60000.0, dtype=torch.float16)
    total = poptorch.inferenceModel(torch.nn.Identity(), options)(half)
    assert total.dtype == torch.float16
    assert torch.isinf(total).all()


# Inputs changed in place ------------------------------------------------------


class Overwrite(torch.nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
@pytest.mark.parametrize("iterations", [1, 3])
def test_an_input_changed_in_place_is_written_back(dtype, iterations):
    x = torch.arange(3).to(dtype)
    executor = poptorch.inferenceModel(Overwrite(), make_options(iterations, 1, 1))
    assert executor(x).tolist() == [2, 4, 6]
    assert x.tolist() == [1, 2, 3]
    assert x.dtype == dtype


def test_replicas_that_share_rows_do_not_see_each_others_changes():
    options = make_options(1, 1, 2).inputReplicaGrouping(
        2, poptorch.CommGroupType.Consecutive
    )
    out = poptorch.inferenceModel(Overwrite(), options)(torch.zeros(2))
    assert out.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(1),
        lambda x: x.t_(),
        lambda x: x.squeeze_(),
        lambda x: x.transpose_(0, 1),
    ],
)
def test_an_input_gets_no_other_shape_in_place(change, iterations):
    class Reshape(nn.Module):
        def forward(self, x):
            return change(x) * 2

    x = torch.arange(8.0).reshape(8, 1)
    executor = poptorch.inferenceModel(Reshape(), make_options(iterations, 1, 1))
    with pytest.raises(poptorch.Error, match="changes the shape of an input in place"):
        executor(x)
    assert x.shape == (8, 1)


@pytest.mark.parametrize("iterations", [1, 3])
def test_an_input_that_is_transposed_in_place_is_written_back(iterations):
    class Transpose(nn.Module):
        def forward(self, x):
            return x.t_() + 1

    x = torch.arange(4.0 * iterations).reshape(-1, 2)
    expected = torch.cat([rows.t() for rows in x.split(2)])
    executor = poptorch.inferenceModel(Transpose(), make_options(iterations, 1, 1))
    assert torch.equal(executor(x), expected + 1)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.as_strided((2, 2), (2, 1), 1),
        lambda x: torch.as_strided(input=x, size=(3,), stride=(2,), storage_offset=0),
        lambda x: torch.as_strided_scatter(x, x[0], (3,), (1,), 2),
        lambda x: torch.relu(x).as_strided((4,), (1,)),
        lambda x: (x * 1).resize_(3),
    ],
)
def test_strides_of_its_own_find_the_rows_of_a_micro_batch(read, iterations, mode):
    class Read(nn.Module):
        def forward(self, x):
            return read(x)

    x = torch.arange(60.0).reshape(20, 3)[2 : 2 + 2 * iterations]  # in larger memory
    executor = poptorch.inferenceModel(Read(), make_options(iterations, 1, 1, mode))
    blocks = [read(rows.clone()) for rows in x.split(2)]
    expected = torch.cat(blocks if mode == OutputMode.All else blocks[-1:])
    for _ in range(2):
        assert torch.equal(executor(x), expected)


# Programs without host data ---------------------------------------------------------


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y):
        out = self.layer(x)
        return out, nn.functional.cross_entropy(out, y)


def options(enabled=True):
    return poptorch.Options().enableSyntheticData(enabled)


def test_outputs_have_their_shapes_and_nothing_in_them():
    executor = poptorch.inferenceModel(nn.Linear(4, 2), options().deviceIterations(3))
    output = executor(torch.ones(6, 4))
    assert output.shape == (6, 2)
    assert not output.any()


def test_inputs_that_a_model_writes_stay_as_they_are():
    class Writes(nn.Module):
        def forward(self, x):
            x += 1
            return x

    given = torch.zeros(2)
    poptorch.inferenceModel(Writes(), options())(given)
    assert given.tolist() == [0, 0]
    poptorch.inferenceModel(Writes(), options(False))(given)
    assert given.tolist() == [1, 1]


def test_training_on_synthetic_data_brings_nothing_back():
    """PopART streams neither weights nor the optimiser's state then."""
    module = Loss()
    before = module.layer.weight.detach().clone()
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.1)
    executor = poptorch.trainingModel(module, options(), optimizer)
    for _ in range(2):
        outputs, loss = executor(torch.ones(1, 4), torch.tensor([1]))
    assert outputs.shape == (1, 2)
    assert loss.shape == ()
    executor.copyWeightsToHost()
    assert torch.equal(module.layer.weight.detach(), before)
    for _ in range(2):
        state = optimizer.state_dict()["ipu_state"]
        moments = [t for name, t in state.items() if name.startswith("Accl")]
        assert len(moments) == 4
        assert not any(t.any() for t in moments)
        executor.detachFromDevice()
        executor.attachToDevice()
    assert torch.equal(module.layer.weight.detach(), before)
