# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/keras.md` lists what of Keras's losses and metrics isn't here."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit.errors import UnknownNameError
from ipufit.losses import resolve_loss

keras = pytest.importorskip("keras")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "keras.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTION = TEXT.split("## Names that are missing")[1].split("\n## ")[0]


def table(heading):
    """The rows of the table whose first column has a heading, as lists of cells."""
    rows = SECTION.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


def words(cell):
    return re.findall(r"`(\w+)", cell)


def public(module):
    return {
        name: item
        for name, item in vars(module).items()
        if callable(item) and not name.startswith("_")
    }


def is_metric(name):
    try:
        ipufit.metrics.resolve_metric(name)
    except ValueError:
        return hasattr(ipufit.metrics, name)
    return True


def is_loss(name):
    try:
        resolve_loss(name)
    except ValueError:
        return False
    return True


def arguments(kind):
    return set(inspect.signature(kind).parameters) - {"name", "dtype", "kwargs"}


@pytest.mark.parametrize(
    ("heading", "module", "is_here"),
    [
        ("metric of Keras", keras.metrics, is_metric),
        ("loss of Keras", keras.losses, is_loss),
        ("schedule of Keras", keras.optimizers.schedules, lambda name: False),
    ],
)
def test_names_that_are_not_here_are_listed(heading, module, is_here):
    listed = {name for row in table(heading) for name in words(row[0])}
    assert listed == {name for name in public(module) if not is_here(name)}


def test_errors_of_names_that_are_not_here_say_what_to_write():
    """All but the two of `keras.losses.Loss` and of configurations."""
    model = ipufit.IPUModel(torch.nn.Linear(1, 1))
    names = [name for row in table("metric of Keras")[:-1] for name in words(row[0])]
    for name in names:
        with pytest.raises(UnknownNameError, match=f"metric '{name}'. Write"):
            model.compile("sgd", "mse", metrics=[name])
        if name[0].isupper():
            with pytest.raises(AttributeError, match=f"attribute '{name}'. Write"):
                getattr(ipufit.metrics, name)
    names = [name for row in table("loss of Keras")[:-2] for name in words(row[0])]
    for name in names:
        with pytest.raises(ValueError, match=r"(Write|Pass) a"):
            model.compile("sgd", name)
        if name[0].isupper():
            with pytest.raises(AttributeError, match=r"(Write|Pass) a"):
                getattr(ipufit.losses, name)


@pytest.mark.parametrize(
    ("heading", "module", "is_here"),
    [
        ("argument of a metric", keras.metrics, is_metric),
        ("argument of a loss", keras.losses, is_loss),
    ],
)
def test_arguments_that_are_not_here_are_listed(heading, module, is_here):
    """Losses are names here, and have none."""
    ours = ipufit.metrics if module is keras.metrics else None
    missing = {
        (argument, name)
        for name, kind in public(module).items()
        if inspect.isclass(kind) and is_here(name)
        for argument in arguments(kind) - arguments(getattr(ours, name, object))
    }
    listed = {
        (argument, name)
        for row in table(heading)
        for argument in words(row[0])
        for name in words(row[1])
    }
    assert listed == missing


# The functions of the page -----------------------------------------------------------

LOGITS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(6, (40,), generator=torch.Generator().manual_seed(2))
ONE_HOT = torch.eye(6)[LABELS]
MARKS = (LOGITS.flip(0) > 0).float()


@pytest.fixture(scope="module")
def functions():
    names = {"torch": torch, "ipufit": ipufit}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.S)[0], names)
    return names


@pytest.mark.parametrize(
    ("name", "loss", "to", "targets"),
    [
        (
            "binary_focal_crossentropy",
            keras.losses.BinaryFocalCrossentropy(from_logits=True),
            torch.clone,
            MARKS,
        ),
        (
            "focal",
            keras.losses.BinaryFocalCrossentropy(True, 0.3, 1.5, from_logits=True),
            torch.clone,
            MARKS,
        ),
        (
            "categorical_focal_crossentropy",
            keras.losses.CategoricalFocalCrossentropy(from_logits=True),
            torch.clone,
            ONE_HOT,
        ),
        ("dice", keras.losses.Dice(axis=1), torch.sigmoid, MARKS),
        ("tversky", keras.losses.Tversky(axis=1), torch.sigmoid, MARKS),
        ("missing", keras.losses.Tversky(0.7, 0.3, axis=1), torch.sigmoid, MARKS),
        ("categorical_hinge", keras.losses.CategoricalHinge(), torch.clone, ONE_HOT),
        (
            "generalized",
            keras.losses.CategoricalGeneralizedCrossEntropy(),
            lambda outputs: outputs.softmax(-1),
            LABELS,
        ),
    ],
)
@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_losses_and_gradients_are_keras(functions, name, loss, to, targets, shift):
    """By name, or with a function of the page. Keras's alpha is of false negatives."""
    linear = torch.nn.Linear(6, 6)
    torch.nn.init.constant_(linear.bias, shift)
    value = loss(targets, to(linear(LOGITS)))
    (gradient,) = torch.autograd.grad(value, [linear.weight])
    expected = linear.weight.detach() - gradient
    model = ipufit.IPUModel(linear, ipufit.IPUConfig(micro_batch_size=8))
    model.compile(torch.optim.SGD(linear.parameters(), 1.0), functions.get(name, name))
    history = model.fit(LOGITS, targets, batch_size=40, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx([value.item()], rel=1e-4)
    torch.testing.assert_close(linear.weight.detach(), expected, rtol=1e-4, atol=1e-5)
