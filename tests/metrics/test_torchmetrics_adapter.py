# SPDX-License-Identifier: Apache-2.0
"""Objects and collections of torchmetrics, and what has their methods."""

import copy
import functools

import numpy as np
import pytest
import sklearn.metrics
import torch

from ipufit import (
    ConfigError,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
    load_checkpoint,
)
from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics import TorchMetric, resolve_metric, resolve_metrics
from tests.metrics.harness import COUNT, figure, labels, scores


class Recorded:
    """Keeps what it's shown; the sum of all outputs is what it comes to."""

    higher_is_better = True

    def __init__(self, value=None):
        self.value = value
        self.shown, self.resets = [], 0

    def update(self, outputs, targets):
        self.shown.append((outputs, targets))

    def compute(self):
        if self.value is not None:
            return self.value
        return torch.stack([outputs.sum() for outputs, _ in self.shown]).sum()

    def reset(self):
        self.shown = []
        self.resets += 1


def test_it_is_shown_batches_and_asked_for_the_figure():
    recorded = Recorded()
    metric = resolve_metric(recorded)
    assert (metric.name, metric.direction) == ("recorded", "max")
    assert recorded.resets == 0  # as the user left it, until it is used
    assert figure(metric, torch.arange(7.0), torch.zeros(7), None, (3,)) == 21.0
    assert [len(outputs) for outputs, _ in recorded.shown] == [3, 3, 1]
    metric.reset()
    assert recorded.resets == 1
    assert np.isnan(metric.result())


def test_a_checkpoint_has_no_tensors_of_it(tmp_path):
    """Some have a network, whose weights would be text among the run's settings."""
    metric = Recorded()
    metric.weights = torch.arange(1000.0)
    model = IPUModel(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse", metrics=[metric])
    keeper = ModelCheckpoint(tmp_path / "kept")
    model.fit(torch.ones(4, 3), torch.ones(4, 1), 4, verbose=0, callbacks=[keeper])
    assert "999.0" not in str(load_checkpoint(tmp_path / "kept").state)


def test_it_has_no_other_weights():
    with pytest.raises(UnsupportedError, match="must be 0 or 1"):
        TorchMetric(Recorded()).update(
            torch.ones(2), torch.ones(2), torch.tensor([1.0, 0.5])
        )


def test_it_gets_the_types_and_shapes_that_it_expects():
    recorded = Recorded()
    metric = TorchMetric(recorded)
    outputs = torch.ones(2, 1, dtype=torch.float16, requires_grad=True)
    metric.update(outputs, torch.ones(2, dtype=torch.int32))
    metric.update(torch.ones(2), torch.ones(2, 1, dtype=torch.bool))
    metric.update(torch.ones(2, 3), torch.ones(2, dtype=torch.int32))
    types = [(x.dtype, y.dtype) for x, y in recorded.shown]
    assert types == [
        (torch.float32, torch.int64),
        (torch.float32, torch.bool),
        (torch.float32, torch.int64),
    ]
    shapes = [(tuple(x.shape), tuple(y.shape)) for x, y in recorded.shown]
    assert shapes == [((2,), (2,)), ((2,), (2,)), ((2, 3), (2,))]
    assert not any(x.requires_grad for x, _ in recorded.shown)


@pytest.mark.parametrize("value", [torch.ones(3), {"a": 1.0}, "x"])
def test_what_is_not_one_number_is_refused(value):
    metric = TorchMetric(Recorded(value))
    metric.update(torch.ones(2), torch.ones(2))
    with pytest.raises(DataError, match=r"'recorded'.*one number"):
        metric.result()


def test_what_lacks_a_direction_is_refused_with_the_way_out():
    class Worst:
        update = compute = reset = lambda self, *given: None

    for given in (Worst(), [Worst()]):
        with pytest.raises(UnsupportedError, match=r"Worst.*no higher_is_better.*None"):
            resolve_metrics(given)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("BinaryF1Score", "binary_f1_score"),
        ("MulticlassAUROC", "multiclass_auroc"),
        ("R2Score", "r2_score"),
    ],
)
def test_names_are_in_snake_case(kind, name):
    assert resolve_metric(type(kind, (Recorded,), {})()).name == name


# torchmetrics itself ------------------------------------------------------------------


@pytest.fixture
def tm():
    return pytest.importorskip("torchmetrics")


TRUTHS, LABELS = labels(0, num_classes=2).int(), labels(1).int()
REAL = {
    "binary_auroc": (
        lambda tm: tm.AUROC(task="binary"),
        (scores(2, 1), TRUTHS),
        lambda x, y: sklearn.metrics.roc_auc_score(y, x.reshape(-1)),
    ),
    "multiclass_f1_score": (
        lambda tm: tm.F1Score(task="multiclass", num_classes=4, average="macro"),
        (scores(3, 4), LABELS),
        lambda x, y: sklearn.metrics.f1_score(y, x.argmax(-1), average="macro"),
    ),
    "mean_squared_error": (
        lambda tm: tm.MeanSquaredError(),
        (scores(6), scores(7)),
        lambda x, y: sklearn.metrics.mean_squared_error(y, x),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_torchmetrics_own_are_scikit_learns(tm, name):
    make, (outputs, targets), reference = REAL[name]
    (metric,) = resolve_metrics([make(tm)]).values()
    assert metric.name == name
    assert metric.direction == ("min" if name == "mean_squared_error" else "max")
    weights = torch.ones(COUNT)
    weights[::4] = 0.0
    kept = weights > 0
    expected = pytest.approx(reference(outputs, targets), rel=1e-4)
    assert figure(metric, outputs, targets, None, (5, 9)) == expected
    copied = copy.deepcopy(metric)
    copied.reset()
    expected = pytest.approx(reference(outputs[kept], targets[kept]), rel=1e-4)
    assert figure(copied, outputs, targets, weights, (10,)) == expected
    assert metric.result() != copied.result()


# Collections --------------------------------------------------------------------------


NUM_CLASSES = 3


class Counting(torch.nn.Module):
    """A metric with the methods of torchmetrics: a sum, plus a number of its own."""

    higher_is_better = True

    def __init__(self, plus=0.0):
        super().__init__()
        self.plus, self.total = plus, 0.0

    def update(self, outputs, targets):
        self.total += float(outputs.sum())

    def compute(self):
        return torch.tensor(self.total + self.plus)

    def reset(self):
        self.total = 0.0


class Collection(torch.nn.ModuleDict):
    """What ipufit touches of a `MetricCollection`."""

    compute_groups = update = compute = reset = lambda self, *given: None
    prefix = ""

    def items(self, keep_base=False, copy_state=True):
        assert not keep_base
        return {self.prefix + n: one for n, one in self._modules.items()}.items()


def doubles(*pluses):
    collection = Collection()
    for plus in pluses:
        collection[f"m{plus}"] = Counting(plus)
    return collection


def test_each_member_is_a_metric_under_its_own_name():
    collection = doubles(0, 10)
    collection.prefix = "my_"
    metrics = resolve_metrics(["mae", collection, "mse"])
    assert list(metrics) == ["mae", "my_m0", "my_m10", "mse"]
    assert [metrics[name].direction for name in ("my_m0", "my_m10")] == ["max", "max"]
    for name, plus in (("my_m0", 0), ("my_m10", 10)):
        outputs = torch.arange(7.0)
        assert figure(metrics[name], outputs, outputs, None, (3,)) == 21.0 + plus
    assert list(resolve_metrics(doubles(1, 2))) == ["m1", "m2"]
    assert list(resolve_metrics([doubles(1), doubles(1)])) == ["m1", "m1_1"]


def test_a_metric_is_in_one_place_only():
    collection = doubles(0)
    with pytest.raises(ConfigError, match="'m0' twice, as one object"):
        resolve_metrics([collection, collection])
    with pytest.raises(ConfigError, match="'counting' twice, as one object"):
        resolve_metrics([collection, collection["m0"]])
    with pytest.raises(UnsupportedError, match="has several metrics"):
        resolve_metric(collection)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)

    def forward(self, x):
        x = self.body(x)
        return {"a": x, "b": x * 2}


def test_members_are_figures_of_one_output():
    x, y = torch.rand(8, 2), torch.rand(8, 2)
    model = IPUModel(TwoHeads(), IPUConfig(micro_batch_size=2, device_iterations=2))
    targets = {"a": y, "b": y}

    def evaluated(metrics):
        model.compile("sgd", "mse", metrics=metrics)
        return model.evaluate(x, targets, verbose=0)

    by_name = evaluated({"b": ["mae", doubles(0, 1)]})
    total = model.predict(x, verbose=0)["b"].sum().item()
    assert by_name["b_m0"] == pytest.approx(total, abs=1e-5)
    assert by_name["b_m1"] == pytest.approx(total + 1, abs=1e-5)
    assert "a_m0" not in by_name
    by_place = evaluated(["mae", doubles(0, 1)])  # one for each output, as in Keras
    assert sorted(set(by_place) - {"loss", "a_loss", "b_loss"}) == [
        "a_mae",
        "b_m0",
        "b_m1",
    ]
    assert by_place["b_m1"] == by_name["b_m1"]
    with pytest.raises(ConfigError, match="metrics are a list of 1: give one for each"):
        evaluated(doubles(0, 1))  # its members aren't one for each output


# torchmetrics itself ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("BinaryAccuracy", None),
        ("BinaryAUROC", None),
        ("MulticlassF1Score", 4),
        ("MulticlassAUROC", 4),
        ("MultilabelAUROC", 3),
        ("MultilabelAccuracy", 3),
    ],
)
def test_targets_of_minus_100_do_not_count(tm, name, size):
    make = getattr(tm.classification, name)
    make = make if size is None else functools.partial(make, size)
    torch.manual_seed(0)
    outputs = torch.rand(40) if size is None else torch.rand(40, size).softmax(1)
    shape, high = ((40, 3), 2) if size == 3 else ((40,), size or 2)
    targets = torch.randint(high, shape)
    targets.view(-1)[::4] = -100
    plain, reference = make(), make(ignore_index=-100)
    reference.update(outputs, targets)
    expected = pytest.approx(float(reference.compute()))
    assert figure(TorchMetric(plain), outputs, targets, None, (10, 30)) == expected
    own = make(ignore_index=-1)
    marked = targets.masked_fill(targets.eq(-100), -1)
    assert figure(TorchMetric(own), outputs, marked) == expected


def test_targets_that_the_loss_ignores_do_not_count(tm):
    x, y = torch.randn(24, 4), torch.randint(NUM_CLASSES, (24,))
    y[::3] = 255
    model = IPUModel(torch.nn.Linear(4, NUM_CLASSES))
    loss = torch.nn.CrossEntropyLoss(ignore_index=255)
    metric = tm.classification.MulticlassAccuracy(NUM_CLASSES, average="micro")
    model.compile("sgd", loss, metrics=[metric])
    history = model.fit(x, y, 8, verbose=0).history
    tested = model.evaluate(x, y, verbose=0)["multiclass_accuracy"]
    hits = model.module(x).argmax(1).eq(y)[y.ne(255)].float().mean()
    assert tested == pytest.approx(hits.item())
    assert 0 <= history["multiclass_accuracy"][0] <= 1


def collection_of(tm, **settings):
    own = {"num_classes": NUM_CLASSES, "average": "macro"}
    return tm.MetricCollection(
        {
            "f1": tm.classification.MulticlassF1Score(**own),
            "precision": tm.classification.MulticlassPrecision(**own),
            "auroc": tm.classification.MulticlassAUROC(NUM_CLASSES),
        },
        **settings,
    )


def trained_and_evaluated(metrics, x, y, **config):
    torch.manual_seed(0)
    model = IPUModel(torch.nn.Linear(4, NUM_CLASSES), IPUConfig(**config))
    model.compile("sgd", "cross_entropy", metrics=metrics)
    history = model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
    return history.history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)


@pytest.mark.parametrize("groups", [True, False, [["f1", "precision"], ["auroc"]]])
def test_figures_are_torchmetrics_own_of_all_samples(tm, groups):
    torch.manual_seed(1)
    x, y = torch.randn(48, 4), torch.randint(0, NUM_CLASSES, (48,))
    given = collection_of(tm, prefix="p/", postfix="_q", compute_groups=groups)
    layout = {"micro_batch_size": 2, "replicas": 2, "device_iterations": 3}
    history, figures, outputs = trained_and_evaluated(
        ["accuracy", given], x, y, **layout
    )
    reference = collection_of(tm, prefix="p/", postfix="_q", compute_groups=False)
    reference.update(outputs, y)
    expected = {name: value.item() for name, value in reference.compute().items()}
    assert set(expected) == {"p/f1_q", "p/precision_q", "p/auroc_q"}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert set(history) == {"loss", "accuracy", *expected}
    alone, _, _ = trained_and_evaluated(
        [given["p/f1_q"], given["p/precision_q"], given["p/auroc_q"]], x, y, **layout
    )
    assert alone["multiclass_f1_score"] == history["p/f1_q"]
    assert alone["multiclass_precision"] == history["p/precision_q"]
    assert alone["multiclass_auroc"] == history["p/auroc_q"]


def test_members_that_agree_at_first_keep_their_own_figures(tm):
    """torchmetrics makes one group of them after the first batch."""
    outputs = torch.tensor([0.1, 0.9, 0.9, 0.1, 0.6, 0.6])
    targets = torch.tensor([0, 1, 1, 0, 1, 1])
    accuracy = tm.classification.BinaryAccuracy
    used = tm.MetricCollection({"low": accuracy(0.5), "strict": accuracy(0.8)})
    metrics = resolve_metrics([copy.deepcopy(used)])
    values = [figure(one, outputs, targets, None, (2,)) for one in metrics.values()]
    assert values == pytest.approx([1.0, 4 / 6])
    for rows in (slice(0, 2), slice(2, 6)):
        used.update(outputs[rows], targets[rows])
    assert used.compute()["strict"] == 1.0  # what is avoided
    metrics = resolve_metrics([used])  # its groups share their states by now
    for metric in metrics.values():
        metric.reset()
    values = [figure(one, outputs, targets, None, (2,)) for one in metrics.values()]
    assert values == pytest.approx([1.0, 4 / 6])
