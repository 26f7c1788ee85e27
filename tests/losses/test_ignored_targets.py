# SPDX-License-Identifier: Apache-2.0
"""Ignored targets count by what is left of an update, not of its micro-batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import IPUConfig, IPUModel, NonFiniteLossWarning, Optimizer
from tests.processes import runs
from tests.reference import assert_same_weights, compiled, samples, weights
from tests.strategies import examples

FEATURES, CLASSES = 3, 4


class Tagger(nn.Module):
    """Scores of classes, for each sample or for each of its positions."""

    def __init__(self, positions=0):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(FEATURES, CLASSES * max(positions, 1))
        self.positions = positions

    def forward(self, x):
        scores = self.layer(x)
        return scores.unflatten(1, (CLASSES, -1)) if self.positions else scores


def rows(count, positions, pattern):
    """Inputs, and classes of which those of a pattern of bits are ignored (-100)."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, FEATURES, generator=generator)
    shape = (count, positions) if positions else (count,)
    y = torch.randint(0, CLASSES, shape, generator=generator)
    bits = [pattern >> (at % 40) & 1 for at in range(y.numel())]
    y[torch.tensor(bits, dtype=torch.bool).reshape(shape)] = -100
    return x, y


def loop(module, loss, x, y, size):
    """Plain torch: a mean over what is left of each batch of `size`."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    totals = [0.0, 0]
    for at in range(0, len(x), size):
        outputs, targets = module(x[at : at + size]), y[at : at + size]
        left = int(targets.ne(-100).sum())
        if not left:
            continue  # the mean of nothing: no gradient
        optimizer.zero_grad()
        value = loss(outputs, targets)
        value.backward()
        optimizer.step()
        totals[0] += value.item() * left
        totals[1] += left
    return totals[0] / totals[1] if totals[1] else float("nan")


@pytest.mark.filterwarnings("ignore:.*updates of the last call have padding only")
@settings(max_examples=examples(40))
@given(
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 2),
    iterations=st.integers(1, 2),
    positions=st.sampled_from([0, 0, 3]),
    pattern=st.integers(0, 2**40 - 1),
    rest=st.integers(0, 5),
    loss=st.sampled_from(
        ["cross_entropy", nn.CrossEntropyLoss(), F.cross_entropy, "loader"]
    ),
)
def test_weights_equal_those_of_a_loop_over_whole_updates(
    micro, accumulation, replicas, iterations, positions, pattern, rest, loss
):
    size = micro * accumulation * replicas
    count = 2 * size * iterations + rest
    x, y = rows(count, positions, pattern)
    config = IPUConfig(
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        replicas=replicas,
        device_iterations=iterations,
    )
    is_loader, loss = loss == "loader", "cross_entropy" if loss == "loader" else loss
    data = (DataLoader(TensorDataset(x, y), 5),) if is_loader else (x, y)
    module, plain = Tagger(positions), Tagger(positions)
    model = compiled(module, config, loss=loss, optimizer=Optimizer("sgd", 0.5))
    history = model.fit(*data, shuffle=False, drop_last="pad", verbose=0)
    expected = loop(plain, nn.CrossEntropyLoss(), x, y, size)
    assert_same_weights(module, plain)
    found = history.history["loss"][0]
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)
    left = int(y.ne(-100).sum())
    own = nn.CrossEntropyLoss(reduction="sum")(plain(x), y).item() / max(left, 1)
    tested = model.evaluate(x, y, verbose=0)["loss"]
    assert tested == pytest.approx(own if left else float("nan"), rel=1e-5, nan_ok=True)


class Smoothed(nn.CrossEntropyLoss):
    """A subclass that changes nothing but settings."""

    def __init__(self, mark):
        super().__init__(ignore_index=mark, label_smoothing=0.1)


class Rows(nn.CrossEntropyLoss):
    """A subclass that gives its base the rows of all positions."""

    def forward(self, outputs, targets):
        last = outputs.movedim(1, -1)
        return super().forward(last.reshape(-1, CLASSES), targets[..., None].flatten())


class Holder(nn.Module):
    def __init__(self, mark):
        super().__init__()
        self.entropy = nn.NLLLoss(ignore_index=mark)

    def forward(self, outputs, targets):
        return self.entropy(outputs.log_softmax(1), targets.long())


def of_a_closure(mark):
    entropy = nn.CrossEntropyLoss(ignore_index=mark)
    return lambda outputs, targets: entropy(outputs, targets)


def with_other_terms(mark):
    def loss(outputs, targets):
        value = F.cross_entropy(outputs, targets, ignore_index=mark)
        value *= 2
        smooth = F.cross_entropy(
            outputs * 2, targets, ignore_index=mark, label_smoothing=0.2
        )
        return value + 0.3 * smooth + outputs.square().mean()

    return loss


FUNCTIONS = [
    lambda mark: partial(F.cross_entropy, ignore_index=mark, label_smoothing=0.1),
    lambda mark: partial(F.nll_loss, ignore_index=mark),
    Smoothed,
    lambda mark: Rows(ignore_index=mark),
    Holder,
    of_a_closure,
    with_other_terms,
]


@settings(max_examples=examples(40))
@given(
    layout=st.tuples(*[st.integers(1, 2)] * 4),
    positions=st.sampled_from([0, 3]),
    pattern=st.integers(0, 2**40 - 1),
    mark=st.sampled_from([-100, -1, 0, 255]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
    make=st.sampled_from(FUNCTIONS),
    is_set=st.booleans(),
)
def test_functions_that_ignore_targets_are_those_of_whole_updates(
    layout, positions, pattern, mark, dtype, make, is_set
):
    micro, accumulation, replicas, iterations = layout
    size = micro * accumulation * replicas
    x, y = rows(2 * size * iterations, positions, pattern)
    y[::size] = 1  # plain torch gives NaN where nothing is left
    y[y.eq(mark)] = 2
    y[y.eq(-100)] = mark
    if mark < 0 and dtype is torch.uint8:
        dtype = torch.int16
    module, plain, loss = Tagger(positions), Tagger(positions), make(mark)
    config = IPUConfig(
        micro_batch_size=micro,
        gradient_accumulation=accumulation,
        replicas=replicas,
        device_iterations=iterations,
    )
    model = compiled(
        module,
        config,
        loss=loss,
        optimizer=Optimizer("sgd", 0.1),
        metrics=["accuracy"] + [partial(F.cross_entropy, ignore_index=mark)] * is_set,
    )
    history = model.fit(x, y.to(dtype), size, shuffle=False, verbose=0).history
    optimizer, values, numbers = torch.optim.SGD(plain.parameters(), lr=0.1), [], []
    for at in range(0, len(x), size):
        optimizer.zero_grad()
        value = loss(plain(x[at : at + size]), y[at : at + size])
        value.backward()
        optimizer.step()
        values.append(value.item())
        numbers.append(y[at : at + size].ne(mark).sum().item())
    assert_same_weights(module, plain)
    numbers = [1] * len(values) if make is with_other_terms else numbers
    mean = sum(v * n for v, n in zip(values, numbers)) / sum(numbers)
    assert history["loss"][0] == pytest.approx(mean, rel=1e-4, abs=1e-6)

    tested, outputs = model.evaluate(x, y.to(dtype), verbose=0), plain(x)
    expected = loss(outputs, y).item()
    assert tested["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    hits = outputs.argmax(1).eq(y)[y.ne(mark)].float().mean().item()
    assert tested["accuracy"] == pytest.approx(hits)
    if is_set:
        expected = F.cross_entropy(outputs, y, ignore_index=mark).item()
        assert tested["cross_entropy"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("make", FUNCTIONS[:-1])
def test_updates_of_functions_with_nothing_left_change_no_weight(make, accumulation):
    x = rows(8, 2, 0)[0]
    module = Tagger(2)
    before = weights(module)
    config = IPUConfig(gradient_accumulation=accumulation)
    model = compiled(module, config, loss=make(7))
    model.fit(x, torch.full((8, 2), 7), 4, verbose=0)
    assert all(map(torch.equal, before.values(), weights(module).values()))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_metrics_ignore_what_values_per_sample_ignore(is_weighted):
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, ignore_index=9, reduction="none")

    x, y = rows(16, 0, 0b1011001)
    marked = y.masked_fill(y.eq(-100), 9)
    weight = torch.ones(16) if is_weighted else None
    module = Tagger()
    config = IPUConfig(gradient_accumulation=2)
    model = compiled(
        module, config, loss=loss, optimizer=Optimizer("sgd", 0.0), metrics=["accuracy"]
    )
    history = model.fit(x, marked, 8, sample_weight=weight, verbose=0).history
    hits = module(x).argmax(1).eq(y)[y.ne(-100)].float().mean().item()
    assert history["accuracy"] == [pytest.approx(hits)]
    assert model.evaluate(x, marked, verbose=0)["accuracy"] == pytest.approx(hits)


def shifted(outputs, targets):
    return F.cross_entropy(outputs[..., :-1], targets[:, 1:])


def masked(outputs, targets):
    return F.cross_entropy(outputs, targets.masked_fill(targets.eq(0), -100))


@pytest.mark.parametrize("loss", [shifted, masked])
def test_targets_that_a_function_picks_are_refused_where_their_number_matters(loss):
    x, y = rows(8, 3, 0)
    y[:, -1] = 0
    plain = Tagger(3)
    if loss is shifted:  # nothing is ignored
        model = compiled(Tagger(3), IPUConfig(gradient_accumulation=2), loss=loss)
        model.fit(x, y, 8, verbose=0)
        y[:, -1] = -100
    model = compiled(Tagger(3), IPUConfig(gradient_accumulation=2), loss=loss)
    with pytest.raises(ipufit.DataError, match=r"A loss function ignores.*isn't known"):
        model.fit(x, y, 8, verbose=0)
    model = compiled(Tagger(3), loss=loss, optimizer=Optimizer("sgd", 0.1))
    history = model.fit(x, y, 8, verbose=0).history  # one micro-batch is an update
    assert history["loss"] == [pytest.approx(loss(plain(x), y).item(), rel=1e-5)]
    expected = loss(model.module(x), y).item()
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_computes_with_such_a_mean_is_refused():
    def doubled(outputs, targets):
        return 2 * F.cross_entropy(outputs, targets)

    x, y = rows(8, 0, 0b1001)
    model = compiled(Tagger(), metrics=[doubled])
    with pytest.raises(ipufit.DataError, match="'doubled' ignores targets"):
        model.evaluate(x, y, verbose=0)
    assert model.evaluate(x, y.clamp(min=0), verbose=0)["doubled"] > 0


@pytest.mark.parametrize("index", [-100, -1, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_numbers_of_8_bits_are_no_other_class(index, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(8, FEATURES), torch.tensor([156, 44, 255, 3, 4, 5, 6, 7])
    y = y.to(dtype) if dtype is torch.uint8 else y.clamp(max=127).to(dtype)
    table = {index % 256: 2.0, 44: 3.0}
    modules = []
    for targets in (y, y.long()):
        torch.manual_seed(1)
        module = nn.Linear(FEATURES, 256)
        loss = nn.CrossEntropyLoss(ignore_index=index)
        config = IPUConfig(gradient_accumulation=4)
        model = compiled(module, config, loss=loss)
        model.fit(x, targets, 8, verbose=0, class_weight=table, shuffle=False)
        modules.append(module)
    assert_same_weights(*modules)


METRICS = ["accuracy", "mean_iou", "f1", "top_2_accuracy", "cross_entropy"]


@settings(max_examples=examples(16))
@given(
    mark=st.sampled_from([255, -1, 9]),
    dtype=st.sampled_from([torch.int64, torch.int16, torch.uint8]),
    positions=st.sampled_from([0, 3]),
    pattern=st.integers(0, 2**12 - 1),
    reduction=st.sampled_from(["mean", "sum"]),
    accumulation=st.integers(1, 2),
)
def test_metrics_ignore_the_targets_that_the_loss_ignores(
    mark, dtype, positions, pattern, reduction, accumulation
):
    x, y = rows(12, positions, pattern)
    marked = y.masked_fill(y.eq(-100), mark)
    if dtype is torch.uint8 and mark < 0:
        dtype = torch.int32
    found = []
    for index, targets in ((-100, y), (mark, marked.to(dtype))):
        loss = nn.CrossEntropyLoss(ignore_index=index, reduction=reduction)
        config = IPUConfig(micro_batch_size=3, gradient_accumulation=accumulation)
        model = compiled(Tagger(positions), config, loss=loss, metrics=METRICS)
        history = model.fit(x, targets, shuffle=False, verbose=0).history
        found.append([history, model.evaluate(x, targets, verbose=0)])
    assert str(found[1]) == str(found[0])  # where NaN equals NaN


class Marked(ipufit.Metric):
    """The share of targets with a mark, which it knows by itself."""

    def sums(self, outputs, targets, weights=None):
        return torch.stack([targets.eq(255).sum(), torch.ones_like(targets).sum()])

    def result(self, sums):
        return float(sums[0] / sums[1])


def test_metrics_of_two_classes_ignore_them_and_a_users_own_gets_the_marks():
    x, y = rows(24, 0, 0b1001)
    y = torch.where(y.eq(-100), y, y % 2)
    found = {}
    for mark in (-100, 255):
        names = ["auc", ipufit.metrics.AveragePrecision(), Marked("marked")]
        loss = nn.CrossEntropyLoss(ignore_index=mark)
        torch.manual_seed(3)
        model = compiled(nn.Linear(FEATURES, 2), loss=loss, metrics=names)
        found[mark] = model.evaluate(x, y.masked_fill(y.eq(-100), mark), verbose=0)
    assert found[255].pop("marked") == y.eq(-100).float().mean() > 0
    assert found[-100].pop("marked") == 0
    assert found[255] == found[-100]


def test_a_metric_with_an_index_of_its_own_keeps_it():
    x, y = rows(12, 0, 0)
    loss = nn.CrossEntropyLoss(ignore_index=1)
    own = ipufit.metrics.CrossEntropy(ignore_index=2, name="own")
    model = compiled(Tagger(), IPUConfig(micro_batch_size=4), loss=loss, metrics=[own])
    expected = nn.CrossEntropyLoss(ignore_index=2)(model.module(x), y)
    found = model.evaluate(x, y, verbose=0)["own"]
    assert found == pytest.approx(expected.item(), rel=1e-5)


class NumCounted(ipufit.StreamedMetric):
    ignore_index = -100

    def __init__(self):
        super().__init__("counted")
        self.reset()

    def update(self, outputs, targets, weights=None):
        self.count += int(targets.ne(-100).sum())

    def result(self):
        return float(self.count)

    def reset(self):
        self.count = 0


def test_metrics_of_a_program_that_is_kept_ignore_what_its_function_ignores():
    x, y = torch.ones(8, FEATURES), torch.tensor([0, 255] * 4)
    model, loss = ipufit.IPUModel(Tagger()), of_a_closure(255)
    for _ in range(2):  # the second uses the first one's program
        model.compile("sgd", loss, metrics=[NumCounted()])
        history = model.fit(x, y, batch_size=2, verbose=0)
        assert history.history["counted"] == [4.0]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.c = nn.Linear(FEATURES, 1)

    def forward(self, x):
        scores = self.b(x).log_softmax(1)
        return {"a": self.a(x), "b": scores, "c": self.c(x)}


@pytest.mark.parametrize("is_weighted", [False, True])
def test_each_loss_of_several_outputs_has_a_count_and_an_index_of_its_own(is_weighted):
    x = rows(8, 0, 0)[0]
    y = {
        "a": torch.tensor([0, -100, -100, -100, 1, 2, 3, -100]),
        "b": torch.tensor([1, 1, 1, 0, 2, 2, 1, 1]),
        "c": torch.arange(8.0).reshape(8, 1),
    }
    losses = {
        "a": nn.CrossEntropyLoss(),
        "b": nn.NLLLoss(ignore_index=1),
        "c": nn.MSELoss(),
    }
    factors = torch.arange(1.0, 9.0) if is_weighted else torch.ones(8)
    module, plain = Heads(), Heads()
    config = IPUConfig(gradient_accumulation=2, replicas=2)
    model = compiled(
        module,
        config,
        loss=losses,
        optimizer=Optimizer("sgd", 0.5),
        metrics={"a": "accuracy"},
    )
    weight = factors if is_weighted else None
    model.fit(x, y, 8, sample_weight=weight, shuffle=False, verbose=0)
    outputs = plain(x)
    value = 0
    for name, loss in losses.items():
        loss = type(loss)(
            reduction="none",
            **({"ignore_index": loss.ignore_index} if name != "c" else {}),
        )
        each = loss(outputs[name], y[name]).reshape(8) * factors
        ignored = {"a": -100, "b": 1, "c": None}[name]
        count = 8 if ignored is None else int(y[name].ne(ignored).sum())
        value = value + each.sum() / count
    value.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.sub_(parameter.grad, alpha=0.5)
    assert_same_weights(module, plain)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_updates_with_nothing_left_change_no_weight(accumulation):
    x, y = rows(8, 2, 2**40 - 1)
    module = Tagger(2)
    before = weights(module)
    config = IPUConfig(gradient_accumulation=accumulation)
    compiled(module, config).fit(x, y, 4, verbose=0)
    assert all(
        torch.equal(before[name], value) for name, value in weights(module).items()
    )


def test_smoothed_and_mixed_losses_do_not_depend_on_the_micro_batch():
    x, y = rows(12, 0, 0b101101)
    for settings_of_loss in ({"label_smoothing": 0.1}, {}):
        modules = []
        for accumulation in (1, 3):
            module = Tagger()
            config = IPUConfig(gradient_accumulation=accumulation)
            model = compiled(module, config, **settings_of_loss)
            model.train_on_batch(x, y)
            modules.append(module)
        assert_same_weights(*modules)


def flat(outputs, targets):
    return F.cross_entropy(outputs, targets.flatten())


def fitted(loss="cross_entropy"):
    x, y, _ = runs.samples(32)
    y[torch.arange(32) % 5 < 3] = -100
    y[:16] = -100  # nothing is left of some process's part
    y[3] = 1
    model = runs.model_of(micro_batch_size=2, loss=loss)
    history = model.fit(x, y, 16, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], weights(model.module)


@pytest.mark.parametrize("loss", ["cross_entropy", flat])
def test_processes_count_what_is_left_of_all_their_rows(pool, loss):
    (losses, one), (others, other) = pool.run(fitted, loss)
    alone, expected = fitted(loss)
    assert losses == others == pytest.approx(alone, rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(one[name], other[name])


def test_a_function_may_ignore_targets_in_a_fit_that_validates():
    x, y = samples(64)
    y[::3] = -100
    losses = []
    for loss in (lambda o, t: F.cross_entropy(o, t), "cross_entropy"):
        torch.manual_seed(0)
        model = compiled(config=IPUConfig(gradient_accumulation=2), loss=loss)
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False, validation_data=(x, y))
        losses += [value for [value] in model.history.history.values()]
    assert losses[:2] == pytest.approx(losses[2:])


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y)


class OwnCounted(Own):
    def forward(self, x, y):
        total = F.cross_entropy(self.layer(x), y, reduction="sum")
        return total / y.ne(-100).sum().clamp(min=1)


def test_a_module_of_ignored_targets_alone_is_told_what_divides_by_none():
    x, y = torch.randn(8, FEATURES), torch.full((8,), -100)
    model = IPUModel(Own())
    model.compile("sgd")
    with pytest.warns(NonFiniteLossWarning, match="all ignored .* at least 1"):
        model.fit((x, y), batch_size=4, verbose=0)
    model = IPUModel(OwnCounted())
    model.compile("sgd")
    assert model.fit((x, y), batch_size=4, verbose=0).history["loss"] == [0.0]


def test_fit_shows_the_mean_of_updates_of_what_computes_with_such_a_mean():
    x, y = torch.randn(16, FEATURES), torch.arange(16) % CLASSES
    y[:6] = -100
    still, shown = Optimizer("sgd", learning_rate=0.0), {}
    for name, factor in (("plain", 1), ("twice", 2)):

        def loss(outputs, targets, factor=factor):
            entropy = F.cross_entropy(outputs, targets)
            return entropy if factor == 1 else factor * entropy

        torch.manual_seed(0)
        model = compiled(nn.Linear(FEATURES, CLASSES), loss=loss, optimizer=still)
        found = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
        shown[name] = found[0], model.evaluate(x, y, batch_size=8, verbose=0)["loss"]
    module = model.module
    updates = [F.cross_entropy(module(a), b) for a, b in zip(x.split(8), y.split(8))]
    whole = float(F.cross_entropy(module(x), y).detach())
    assert shown["plain"] == pytest.approx((whole, whole), rel=1e-5)
    of_updates = float(sum(updates).detach())
    assert shown["twice"] == pytest.approx((of_updates, 2 * whole), rel=1e-5)
