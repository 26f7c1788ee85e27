# SPDX-License-Identifier: Apache-2.0
"""From what users call a metric to the metric."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from ipufit import ConfigError, Metric, StreamedMetric, UnknownNameError
from ipufit.metrics import (
    AUC,
    Accuracy,
    CrossEntropy,
    ExactAUC,
    F1Score,
    FunctionMetric,
    MeanIoU,
    StreamedFunction,
    TorchMetric,
    metric_names,
    resolve_metric,
    resolve_metrics,
)
from tests.interpreters import run_python
from tests.metrics.harness import figure

ROOT = Path(__file__).parent.parent.parent


def bias(outputs, targets):
    return outputs - targets


class Ours(Metric):
    def sums(self, outputs, targets, weights=None):
        return torch.stack([outputs.sum(), torch.full_like(outputs.sum(), 2.0)])


class OfTwo(Ours):
    def __init__(self, first, second):
        super().__init__(f"{first}_{second}")


class Callable:
    def __call__(self, outputs, targets):
        return outputs - targets


class Counted:
    """The methods that make an object one of torchmetrics."""

    higher_is_better = None
    update = compute = reset = lambda self, *given: None


OfKeras = type("AUC", (), {"__module__": "keras.src.metrics"})


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (None, []),
        ("mae", ["mae"]),
        (("mae", "mse"), ["mae", "mse"]),
        (bias, ["bias"]),
        ([lambda x, y: x], ["lambda"]),
        ([partial(partial(lambda x, y: x))], ["lambda"]),
        ([Callable()], ["Callable"]),
        (torch.sub, ["sub"]),
        (["mae", "mae", "mae"], ["mae", "mae_1", "mae_2"]),
        (["mae", FunctionMetric("mae_1", bias), "mae"], ["mae", "mae_1", "mae_2"]),
        (Ours("ours"), ["ours"]),
        ([AUC, F1Score, MeanIoU], ["auc", "f1_score", "mean_iou"]),
        ([AUC(), "AUC", AUC(curve="PR", name="pr")], ["auc", "AUC", "pr"]),
        (
            ["acc", "Precision", "top_3_accuracy"],
            ["acc", "Precision", "top_3_accuracy"],
        ),
        ([Counted(), Counted()], ["counted", "counted_1"]),
        ([FunctionMetric("loss", bias)], ["loss_1"]),
    ],
)
def test_a_metric_has_a_name_of_its_own(metrics, names):
    assert list(resolve_metrics(metrics)) == names


@pytest.mark.parametrize(("name", "k"), [("top_1_accuracy", 1), ("top_3_accuracy", 3)])
def test_top_k_accuracies_have_any_k(name, k):
    outputs = torch.tensor([[0.3, 0.2, 0.1]])
    for label in range(3):
        value = figure(resolve_metric(name), outputs, torch.tensor([label]))
        assert value == float(label < k)


BY_DIRECTION = {
    "max": "accuracy acc binary_accuracy top_5_accuracy AUC pr_auc precision recall f1 "
    "specificity balanced_accuracy iou mean_iou cosine_similarity r2 pearson spearman "
    "exact_auc average_precision explained_variance",
    "min": "mse rmse mae mape msle log_cosh huber hinge squared_hinge "
    "categorical_hinge crossentropy binary_crossentropy kl_divergence poisson "
    "perplexity nll_loss",
    None: "true_positives true_negatives false_positives false_negatives",
}


@pytest.mark.parametrize("direction", BY_DIRECTION)
def test_callbacks_are_told_which_way_is_better(direction):
    for name in BY_DIRECTION[direction].split():
        assert resolve_metric(name).direction == direction


def test_a_metric_is_itself_and_a_class_is_made():
    ours, streamed = Ours("ours"), ExactAUC()
    assert resolve_metric(ours) is ours
    assert resolve_metric(streamed) is streamed
    assert isinstance(resolve_metric(MeanIoU), MeanIoU)
    assert resolve_metric(Ours).name == "ours"
    assert isinstance(resolve_metric(Counted()), TorchMetric)


@pytest.mark.parametrize("metrics", [[3], {"mae": "mae"}, [["mae"]]])
def test_what_is_no_metric_is_refused(metrics):
    with pytest.raises(ConfigError, match="metrics"):
        resolve_metrics(metrics)


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        (OfTwo, r"class OfTwo.*second"),
        (Callable, r"Callable\(\.\.\.\)"),
        (Counted, r"Counted\(\.\.\.\)"),
        (OfKeras(), "Keras.*'auc'"),
    ],
)
def test_what_would_go_wrong_later_is_refused_with_the_way_out(item, hint):
    with pytest.raises(ConfigError, match=hint):
        resolve_metric(item)


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.MSELoss(),
        torch.nn.functional.mse_loss,
        partial(torch.nn.functional.kl_div, log_target=True, reduction="batchmean"),
    ],
)
def test_a_loss_of_torch_is_a_metric_too(loss):
    """Nor a second loss in a training step: tests/losses/test_loss_forms.py."""
    outputs, targets = torch.rand(6, 2), torch.rand(6, 2)
    metric = resolve_metric(loss)
    sums = metric.sums(outputs, targets)
    assert metric.result(sums) == pytest.approx(loss(outputs, targets).item())
    assert "loss" in metric.name.lower() or metric.name == "kl_div"


def test_an_object_with_a_state_is_not_taken_twice():
    """It would see every batch twice."""
    for twice in (ExactAUC(), Counted()):
        with pytest.raises(ConfigError, match="twice"):
            resolve_metrics([twice, twice])
    stateless = Accuracy()
    names = ["accuracy", "accuracy_1"]
    assert list(resolve_metrics([stateless, stateless])) == names
    assert list(resolve_metrics(["spearman"] * 2)) == ["spearman", "spearman_1"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("accurracy", "accuracy"),
        ("pr_acu", "pr_auc"),
        ("top_five_accuracy", "top_5_accuracy"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name, meant):
    with pytest.raises(UnknownNameError, match=rf"{name!r}.*{meant!r}\?"):
        resolve_metrics([name])


def test_every_name_is_in_the_documentation_which_says_if_it_is_streamed():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`\w+`[^|]*)\|.*\| (sums|streamed) \|", page)
    listed = [(n, kind) for row, kind in rows for n in re.findall(r"`(\w+)`", row)]
    assert sorted(name for name, _ in listed) == sorted(metric_names())
    for name, kind in listed:
        is_streamed = isinstance(resolve_metric(name), StreamedMetric)
        assert is_streamed == (kind == "streamed")


def test_the_deviations_from_keras_are_tested():
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    tests = (ROOT / "tests" / "keras" / "test_metrics.py").read_text(encoding="utf-8")
    listed = re.findall(r"`(test_\w+)` \|$", page, re.MULTILINE)
    assert listed == re.findall(r"(?m)^def (test_keras_\w+)", tests)


def test_nothing_optional_is_imported():
    code = (
        "import sys, ipufit.metrics as m\n"
        "[m.resolve_metric(name) for name in m.metric_names()]\n"
        "print({'torchmetrics', 'sklearn', 'scipy', 'keras'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Accuracy(name=3), "Accuracy has name=3: use a name"),
        (lambda: StreamedFunction("f1"), "'f1' isn't a function of outputs"),
        (
            lambda: CrossEntropy(ignore_index=1.5),
            "ignore_index=1.5: use a whole",
        ),
    ],
)
def test_settings_are_checked_when_a_metric_is_made(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_dice_of_masks_is_twice_the_overlap_over_the_sum_of_both():
    masks = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).reshape(1, 1, 2, 2)
    found = torch.tensor([[2.0, -1.0, 3.0, -2.0]]).reshape(1, 1, 2, 2)
    metric = resolve_metric("dice")
    assert metric.name == "dice"
    # One pixel in both, two in each.
    assert metric.result(metric.sums(found, masks)) == pytest.approx(2 * 1 / 4)
