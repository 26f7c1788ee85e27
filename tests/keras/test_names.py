# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/keras.md` lists what of Keras's losses and metrics isn't here."""

import inspect
import re
from pathlib import Path

import numpy as np
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
    names = [name for row in table("loss of Keras")[:-2] for name in words(row[0])]
    for name in names:
        with pytest.raises(ValueError, match=r"(Write|Pass) a"):
            model.compile("sgd", name)


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


@pytest.fixture(scope="module")
def functions():
    names = {"torch": torch, "ipufit": ipufit}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.S)[0], names)
    return names


@pytest.mark.parametrize(
    ("name", "loss", "to", "targets"),
    [
        (
            "focal",
            keras.losses.BinaryFocalCrossentropy(from_logits=True),
            None,
            ONE_HOT,
        ),
        (
            "categorical_focal",
            keras.losses.CategoricalFocalCrossentropy(from_logits=True),
            None,
            ONE_HOT,
        ),
        ("tversky", keras.losses.Dice(axis=1), torch.sigmoid, ONE_HOT),
        (
            "generalized",
            keras.losses.CategoricalGeneralizedCrossEntropy(),
            lambda outputs: outputs.softmax(-1),
            LABELS,
        ),
    ],
)
def test_functions_of_the_page_are_keras_losses(functions, name, loss, to, targets):
    model = ipufit.IPUModel(torch.nn.Identity())
    model.compile("sgd", functions[name])
    outputs = LOGITS if to is None else to(LOGITS)
    expected = float(loss(targets, outputs))
    result = model.evaluate(LOGITS, targets, batch_size=8, verbose=0)
    assert result["loss"] == pytest.approx(expected, rel=1e-4)


def test_precision_at_recall_of_the_page_is_keras(functions):
    targets = (LOGITS[:, 0] + LOGITS[:, 1] > 0).float()
    metric = keras.metrics.PrecisionAtRecall(0.8, num_thresholds=20_000)
    metric.update_state(targets, LOGITS[:, 0].sigmoid())
    model = ipufit.IPUModel(torch.nn.Identity())
    model.compile("sgd", "bce", metrics=[functions["streamed"]])
    result = model.evaluate(LOGITS[:, 0], targets, batch_size=8, verbose=0)
    expected = np.asarray(keras.ops.convert_to_numpy(metric.result()))
    assert result["precision_at_recall"] == pytest.approx(float(expected), rel=1e-5)
