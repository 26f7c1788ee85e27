# SPDX-License-Identifier: Apache-2.0
"""What the device computes otherwise than torch: refused, or computed so."""

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, run

WHOLE = torch.tensor([1, 3, 5])
FLOATS = torch.tensor([1.0, 3.0, 5.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / 2,
        lambda x: x / x,
        lambda x: torch.true_divide(x, x),
        lambda x: (x == 1).sum() / 3,
        lambda x: x // 2,
        lambda x: 7 // x,
        lambda x: x.mean(dtype=torch.float32),
    ],
)
def test_division_of_whole_numbers_is_refused(function):
    """PopTorch, `AtenHandlers.gen.cpp` `divHandler`, `floorDivideHandler`, and
    `ReduceOps.cpp`, which ignores the type asked for; PopART, `floor.cpp`."""
    with pytest.raises(poptorch.Error, match=r"int32, truncated.*\.float\(\)"):
        run(function, WHOLE)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x.float() / 2,
        lambda x, y: 2 / x,  # as the reciprocal, which is cast (PopTorch's own tests)
        lambda x, y: x.reciprocal(),
        lambda x, y: y / x,
        lambda x, y: x / y,
        lambda x, y: y // 2,
        lambda x, y: (x == 1).float().mean(),
    ],
)
def test_other_divisions_are_torchs(function):
    torch.testing.assert_close(run(function, WHOLE, FLOATS), function(WHOLE, FLOATS))


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounding_modes_are_refused(mode):
    """PopTorch's `divHandler` takes two of the three arguments."""
    with pytest.raises(poptorch.Error, match=rf"Write torch.{mode}\(x.float\(\) / y\)"):
        run(lambda x: torch.div(x, 2, rounding_mode=mode), FLOATS)


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize(("correction", "used"), [(0, 0), (1, 1), (2, 1), (3, 1)])
def test_a_correction_is_a_truth_value(name, correction, used):
    """PopTorch, `ArithmeticOps.cpp` `calculateVarMean`."""
    function = getattr(torch, name)
    x = torch.randn(5, 4)
    result = run(lambda x: function(x, dim=0, correction=correction), x)
    torch.testing.assert_close(result, function(x, dim=0, correction=used))


def test_constants_are_computed_by_torch():
    """PopTorch, `EvaluateConstexprs.cpp`."""

    def forward(x):
        whole = torch.arange(4, device="ipu")
        return x + whole.float().var(correction=2) + (whole / 3)[2] + (whole // 2)[3]

    expected = FLOATS + torch.arange(4.0).var(correction=2) + 2 / 3 + 1
    torch.testing.assert_close(run(forward, FLOATS), expected)


@pytest.mark.parametrize("as_method", [False, True])
@pytest.mark.parametrize("name", ["trunc", "frac"])
def test_fractions_go_through_int32(name, as_method):
    """PopTorch, `ArithmeticOps.cpp` `truncHandler`, `fracHandler`."""
    small = torch.tensor([2.7, -2.7, 0.0, 1e9])

    def function(x):
        return getattr(x, name)() if as_method else getattr(torch, name)(x)

    torch.testing.assert_close(run(function, small), function(small))
    large = torch.tensor([1e10])
    assert not torch.equal(run(function, large), function(large))


def test_what_is_kept_of_a_constant_changes_no_call():
    kept = []

    def forward(module, x):
        kept.append(torch.zeros(3, device=x.device))
        return x + kept[-1]

    model = poptorch.inferenceModel(Function(forward))
    before = model(FLOATS)
    kept[0].add_(9.0)
    assert torch.equal(model(FLOATS), before)


def test_a_mark_that_is_changed_leaves_the_marked_loss():
    def forward(self, x):
        loss = (x * self.weight).sum()
        marked = poptorch.identity_loss(loss, reduction="none")
        marked.mul_(2.0)
        return loss, marked

    training = poptorch.trainingModel(
        Function(forward, weight=torch.nn.Parameter(torch.tensor(2.0)))
    )
    loss, marked = training(torch.tensor([1.0, 1.0]))
    assert (float(loss), float(marked)) == (4.0, 8.0)
