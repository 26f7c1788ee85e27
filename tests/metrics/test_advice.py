# SPDX-License-Identifier: Apache-2.0
"""What a refusal of a metric says to do works when it is done."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUModel
from ipufit.errors import IpufitError
from ipufit.metrics import F1Score, Metric, StreamedFunction

torch.manual_seed(0)
X = torch.randn(24, 3)
CLASSES = torch.arange(24) % 3
ONE_HOT = torch.eye(3)[CLASSES]
LABELS = torch.randint(0, 2, (24, 3)).float()
WEIGHTS = torch.arange(24.0) + 1
IMAGES, MASKS = torch.randn(24, 4, 5), torch.randint(0, 2, (24, 4, 5)).float()


class Shift(nn.Module):
    def __init__(self, channel):
        super().__init__()
        self.by, self.channel = nn.Parameter(torch.zeros(())), channel

    def forward(self, x):
        return (x + self.by).unsqueeze(1) if self.channel else x + self.by


def size(outputs, targets):
    return outputs.flatten(1).square().mean(1)


def run(metric=None, y=CLASSES, loss=size, x=X, channel=False, **options):
    """Train and evaluate with a metric, and return its two values."""
    weights = options.pop("sample_weight", None)
    model = IPUModel(Shift(channel))
    options = options or {"metrics": [metric]}
    model.compile(ipufit.Optimizer("sgd", learning_rate=0.0), loss, **options)
    data = {"sample_weight": weights, "batch_size": 8, "verbose": 0}
    trained = model.fit(x, y, **data).history
    evaluated = model.evaluate(x, y, **data)
    (name,) = evaluated.keys() - {"loss"}
    return trained[name][0], evaluated[name]


def plain_number(outputs, targets):
    return 0.5


def share(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def per_sample(outputs, targets):
    return (outputs.argmax(1) == targets).float()


def three_numbers(outputs, targets):
    return outputs.mean(0)


def a_number_of_three(outputs, targets):
    return outputs.mean(0)[1]


def twice_the_mean(outputs, targets):
    return 2 * nn.functional.cross_entropy(outputs, targets)


class InKerasWords:
    """Makes a class when it is called."""

    def __new__(cls):
        return type("Mine", (Metric,), {"update_state": lambda self: None})("mine")


class Largest:
    """Has the methods of torchmetrics's metrics."""

    def reset(self):
        self.value = torch.tensor(0.0)

    def update(self, outputs, targets):
        self.value = torch.maximum(self.value, outputs.max())

    def compute(self):
        return self.value


class LargestIsBetter(Largest):
    higher_is_better = True


class Mine(Metric):
    def sums(self, outputs, targets, weights=None):
        errors = per_sample(outputs, targets)
        return torch.stack([errors.sum(), torch.ones_like(errors).sum()])

    def result(self, sums):
        return float(sums[0] / sums[1])


def accuracy(x=X, y=CLASSES):
    return float((x.argmax(1) == y).float().mean())


ACCURACY = accuracy()
STRANGE = CLASSES.clone()
STRANGE[4] = 255
MARKED = STRANGE.masked_fill(STRANGE == 255, -100)
POSITIONS = torch.randn(24, 3, 4)
ON_AXIS_1 = torch.eye(3)[torch.randint(0, 3, (24, 4))].movedim(-1, 1)
KEPT = torch.arange(24) != 4
LABELS_RIGHT = float((X > 0).eq(LABELS > 0).float().mean())
PIXELS_RIGHT = float((IMAGES > 0).eq(MASKS > 0).float().mean())
F1 = sum(2 * (x * y).sum() / (x + y).sum() for x, y in zip((X > 0).float().T, LABELS.T))
PAIRS = (X[:, None] > X) & (ONE_HOT[:, None] > ONE_HOT)  # [1s, 0s, classes]
AREA = float((PAIRS.sum((0, 1)) / (ONE_HOT.sum(0) * (1 - ONE_HOT).sum(0))).mean())
WEIGHTED = float((WEIGHTS * per_sample(X, CLASSES)).sum() / WEIGHTS.sum())

CASES = [  # what is refused, words, and what the words say, with its value
    (
        lambda: run(InKerasWords()),
        "sums(outputs, targets, weights), which are added over batches, and result(",
        [lambda: run(Mine("mine"))],
        ACCURACY,
    ),
    (
        lambda: run(plain_number),
        "compute with torch's operations, without .item() or .numpy()",
        [lambda: run(share)],
        ACCURACY,
    ),
    (
        lambda: run(weighted_metrics=[share], sample_weight=WEIGHTS),
        "Let it return one value per sample",
        [lambda: run(weighted_metrics=[per_sample], sample_weight=WEIGHTS)],
        WEIGHTED,
    ),
    (
        lambda: run("accuracy", STRANGE),
        "Mark those that don't count by -100, or by ignore_index=255 of torch.nn.Cros",
        [
            lambda: run("accuracy", MARKED),
            lambda: run("accuracy", STRANGE, nn.CrossEntropyLoss(ignore_index=255)),
        ],
        accuracy(X[KEPT], CLASSES[KEPT]),
    ),
    (
        lambda: run("accuracy", CLASSES[:, None], x=X[:, :1]),
        "For more than two classes the model must have an output for each",
        [lambda: run("accuracy", CLASSES[:, None])],
        ACCURACY,
    ),
    (
        lambda: run("accuracy", LABELS),
        "use a binary loss such as 'bce', metric 'binary_accuracy'",
        [
            lambda: run("accuracy", LABELS, "bce"),
            lambda: run("binary_accuracy", LABELS),
        ],
        LABELS_RIGHT,
    ),
    (
        lambda: run("f1", LABELS),
        "one such as ipufit.metrics.F1Score(multi_label=True)",
        [lambda: run(F1Score(multi_label=True), LABELS)],
        float(F1 / 3),
    ),
    (
        lambda: run("accuracy", MASKS, x=IMAGES),
        "or masks with a channel axis, [N, 1, H, W]",
        [lambda: run("accuracy", MASKS.unsqueeze(1), x=IMAGES, channel=True)],
        PIXELS_RIGHT,
    ),
    (
        lambda: run("accuracy", ON_AXIS_1, x=POSITIONS),
        "If classes are on axis 1, give class indices",
        [lambda: run("accuracy", ON_AXIS_1.argmax(1), x=POSITIONS)],
        accuracy(POSITIONS, ON_AXIS_1.argmax(1)),
    ),
    (
        lambda: run(twice_the_mean, MARKED),
        "pass torch.nn.CrossEntropyLoss(ignore_index=...) itself",
        [
            lambda: run(nn.CrossEntropyLoss(), MARKED),
            lambda: run(nn.CrossEntropyLoss(ignore_index=255), STRANGE),
        ],
        float(nn.functional.cross_entropy(X, MARKED)),
    ),
    (
        lambda: run(Largest()),
        "no higher_is_better as metrics of torchmetrics have. Set it to True, False",
        [lambda: run(LargestIsBetter())],
        float(X.max()),
    ),
    (
        lambda: run("exact_auc", loss="cross_entropy"),
        "or give one-hot targets",
        [lambda: run("exact_auc", ONE_HOT, loss="cross_entropy")],
        AREA,
    ),
    (
        lambda: run("categorical_accuracy"),
        "'sparse_",
        [lambda: run("sparse_categorical_accuracy")],
        ACCURACY,
    ),
    (
        lambda: run("sparse_categorical_accuracy", ONE_HOT),
        "with classes on the last axis they would have shape (",
        [lambda: run("sparse_categorical_accuracy", ONE_HOT.argmax(-1))],
        ACCURACY,
    ),
    (
        lambda: run(weighted_metrics=["spearman"], y=X, sample_weight=WEIGHTS),
        "Put it in metrics instead of weighted_metrics",
        [lambda: run("spearman", X, sample_weight=WEIGHTS)],
        1.0,
    ),
    (
        lambda: run(StreamedFunction(three_numbers)),
        "use an average, or a metric for each number",
        [lambda: run(StreamedFunction(a_number_of_three))],
        float(X[:, 1].mean()),
    ),
    (
        lambda: run(ipufit.metrics.Accuracy("mine")),
        "the keyword name= for the name of a metric",
        [lambda: run(ipufit.metrics.Accuracy(name="accuracy"))],
        ACCURACY,
    ),
]


@pytest.mark.parametrize(("refused", "words", "followed", "value"), CASES)
def test_an_advice_works(refused, words, followed, value):
    with pytest.raises(IpufitError) as caught:
        refused()
    assert words in str(caught.value)
    for program in followed:
        assert program() == pytest.approx((value, value), rel=1e-5)
