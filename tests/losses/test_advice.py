# SPDX-License-Identifier: Apache-2.0
"""What the refusals of losses say to do instead: it is done, and trains."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from ipufit import ConfigError, DataError, IPUModel, UnsupportedError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(4))
Y = torch.arange(8) % 3
ONE_HOT = F.one_hot(Y, 3).float()
REFUSALS = (ConfigError, DataError, UnsupportedError)


class Ending(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(4, 3), end

    def forward(self, x):
        return self.end(self.layer(x))


def trained(end, loss, y, **settings):
    model = IPUModel(Ending(end))
    model.compile("sgd", loss)
    history = model.fit(X, y, batch_size=4, verbose=0, **settings).history
    assert torch.isfinite(torch.tensor(history["loss"])).all()
    model.evaluate(X, y, batch_size=4, verbose=0)


def same(h):
    return h


def three(h):
    return h, h * 2, h + 1


NAMES = [name for name in vars(nn) if name.endswith("Loss")]


@pytest.mark.parametrize("name", NAMES)
def test_the_class_of_a_name_is_taken_or_wrapped(name):
    try:
        IPUModel(nn.Linear(4, 3)).compile("sgd", name)
    except REFUSALS as error:
        message = str(error)
    else:
        return
    if "a part of the module" in message:  # it has weights
        return
    code = re.search(r"pass (torch\.nn\.\w+\(.*?\)) itself", message)
    if code is not None:
        IPUModel(nn.Linear(4, 3)).compile("sgd", eval(code[1]))
        return
    if "ctc_loss" in message:
        code = re.search(r"(lambda x, y: .*\))\.$", message)[1]
        loss = eval(code, {"torch": torch, "lengths_of_x": torch.full((4,), 5)})
        outputs = torch.zeros(4, 5, 3).log_softmax(-1)
        assert loss(outputs, (Y[:4, None] % 2 + 1, torch.ones(4).long())).isfinite()
        return
    code = re.search(r"compile\(loss=(.*?)\)\.(?: As y|$)", message)[1]
    loss = eval(code, {"module_loss": getattr(nn, name)()})
    signs = torch.ones(8) if "Ranking" not in name else torch.ones(8, 3)
    targets = ONE_HOT if "Gaussian" in name else signs
    targets = torch.zeros(8) if "As y give zeros" in message else targets

    def end(h):
        return (h, h.square() + 1) if "Gaussian" in name else three(h)

    trained(end, loss, targets)


WAYS_OUT = {  # outputs; the loss, the targets: refused, and as advised; words
    "one class": (
        lambda h: h[:, :1],
        ("cross_entropy", "binary_cross_entropy"),
        (Y[:, None].gt(0).float(),),
        "use 'binary_cross_entropy'",
    ),
    "classes on the last axis": (
        lambda h: h[:, None].expand(-1, 2, -1),
        ("cross_entropy", "sparse_categorical_crossentropy"),
        (torch.stack([Y, Y], 1),),
        "Use 'sparse_categorical_crossentropy'",
    ),
    "classes on the last axis of torch's module": (
        lambda h: h[:, None].expand(-1, 2, -1),
        (nn.CrossEntropyLoss(), "sparse_categorical_crossentropy"),
        (Y[:, None].expand(-1, 2),),
        "use the loss 'sparse_categorical_crossentropy'",
    ),
    "classes on the last axis of torch's function": (
        lambda h: h[:, None, None].expand(-1, 2, 5, -1),
        (lambda o, t: F.cross_entropy(o, t), "sparse_categorical_crossentropy"),
        (Y[:, None, None].expand(-1, 2, 5),),
        "use the loss 'sparse_categorical_crossentropy'",
    ),
    "numbers of classes": (
        same,
        ("mse", "cross_entropy"),
        (Y,),
        "use 'cross_entropy'",
    ),
    "whole numbers": (
        same,
        (lambda o, t: (o.argmax(1) == t).int(), lambda o, t: o.square().mean()),
        (Y,),
        "Compute it from the outputs themselves",
    ),
    "no tensor": (
        same,
        (lambda o, t: 1.0, lambda o, t: (o.mean(1) - t).abs()),
        (Y,),
        "compute it from outputs and targets with torch's",
    ),
    "a sum": (
        same,
        (
            lambda o, t: (o * t).sum(),
            lambda o, t: (o * t).flatten(1).sum(1).mean(),
        ),
        (ONE_HOT,),
        r"x.flatten\(1\).sum\(1\).mean\(\) in the place of x.sum\(\)",
    ),
    "one-hot numbers": (
        same,
        ("cross_entropy",),
        (ONE_HOT.long(), ONE_HOT),
        r"y.float\(\) of a tensor",
    ),
    "class indices that are floats": (
        same,
        (nn.CrossEntropyLoss(),),
        (Y.float(), Y.float().long()),
        r"y.long\(\) of a tensor",
    ),
    "one output for two classes": (
        lambda h: h[:, :1],
        ("cross_entropy", "bce"),
        (torch.arange(1, 9) % 2,),
        "There is one output, for class 0: 'bce' takes",
    ),
    "one target for two outputs": (
        lambda h: (h, h),
        ("mse",),
        (ONE_HOT, [ONE_HOT, ONE_HOT]),
        r"one for each output, in a list or .*item is \(x, \[a, b\]\).* \[a, None\]\.",
    ),
    "a missing name": (
        lambda h: {"a": h, "b": h},
        ({"a": "mse", "b": "mse"},),
        ({"a": ONE_HOT}, {"a": ONE_HOT, "b": ONE_HOT}),
        "have no 'b', which the model returns",
    ),
    "three targets": (
        lambda h: (h, h),
        ("mse",),
        ([ONE_HOT] * 3, {"output_1": ONE_HOT, "output_2": ONE_HOT}),
        "give one for each, or a dict by the outputs' names",
    ),
    "losses in a short list": (
        three,
        (["mse", "mse"], ["mse", "mse", None]),
        ([ONE_HOT] * 3,),
        "None for those without a loss",
    ),
    "an output that isn't there": (
        lambda h: {"a": h, "b": h},
        ({"c": "mse"}, {"b": "mse"}),
        ([ONE_HOT] * 2,),
        "output 'c', and the model returns a, b",
    ),
    "a sum beside a mean": (
        lambda h: (h, h),
        ([nn.MSELoss(reduction="sum"), "mse"], [nn.MSELoss(), "mse"]),
        ([ONE_HOT] * 2,),
        "Use one kind",
    ),
    "class weights of torch": (
        same,
        (nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss()),
        (Y,),
        r"use fit\(class_weight=",
    ),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_what_a_refusal_says_trains(name):
    end, losses, targets, words = WAYS_OUT[name]
    with pytest.raises(REFUSALS, match=words):
        trained(end, losses[0], targets[0])
    settings = {"class_weight": {0: 2.0}} if "class weights" in name else {}
    trained(end, losses[-1], targets[-1], **settings)


@pytest.mark.parametrize("loss", ["cross_entropy", "sparse_categorical_crossentropy"])
def test_classes_are_not_to_be_moved_where_targets_fit_no_axis(loss):
    targets = torch.zeros(8, 5, dtype=torch.long)
    with pytest.raises(DataError, match=r"Expected target size .* got \[4, 5\]$"):
        trained(lambda h: h[:, None].expand(-1, 4, -1), loss, targets)


def test_a_class_out_of_range_names_the_classes_there_are():
    with pytest.raises(DataError, match=r"Target 3 is out .* for classes 0 to 2, "):
        trained(same, "cross_entropy", Y + 3)


def test_one_value_for_each_sample_can_be_weighted():
    weights = {"sample_weight": torch.rand(8)}
    with pytest.raises(UnsupportedError, match="Let it return one value per sample"):
        trained(same, lambda o, t: (o - t).square().mean(), ONE_HOT, **weights)
    trained(same, lambda o, t: (o - t).square().mean(1), ONE_HOT, **weights)
