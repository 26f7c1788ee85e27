# SPDX-License-Identifier: Apache-2.0
"""Every form of data, end to end: the same samples train to the same weights."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from ipufit import (
    Callback,
    DataError,
    DroppedRowsWarning,
    IPUConfig,
    IpufitWarning,
    IPUModel,
    LambdaCallback,
    Optimizer,
    StreamedMetric,
    poptorch,
)
from ipufit.errors import DataRanOutWarning, EmptyUpdatesWarning
from tests import reference
from tests.reference import Items, Restartable, Stream

# On a machine with one processor.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# One short update at the end of both plans, and none without samples.
COUNT, BATCH = 34, 6
X, Y = reference.samples(COUNT)
PLANS = {
    "plain": {},
    "replicas": {"replicas": 2, "device_iterations": 2},
    "accumulation": {
        "micro_batch_size": 1,
        "gradient_accumulation": 3,
        "replicas": 2,
        "device_iterations": 2,
    },
}


@pytest.fixture(scope="module", autouse=True)
def _give_ipus_back():
    """Let go of the models that several tests share: they hold IPUs."""
    yield
    expected.cache_clear()
    mirror.cache_clear()


class Table(Items):
    """Stands for a Hugging Face dataset: rows are dicts with lists of numbers."""

    def __init__(self, columns):
        super().__init__([dict(zip(columns, row)) for row in zip(*columns.values())])
        self.column_names = list(columns)
        self.features = dict.fromkeys(columns)


class StreamedTable:
    """Stands for a Hugging Face dataset that is streamed: no length, no index."""

    def __init__(self, columns):
        self.column_names = list(columns)
        self.features = dict.fromkeys(columns)
        self._table = Table(columns)

    def __iter__(self):
        return (self._table[index] for index in range(len(self._table)))


class InOrder(Sampler):
    """A sampler of one's own."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __iter__(self):
        return iter(range(self._count))


class Uneven(Sampler):
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, count):
        self._count = count

    def __iter__(self):
        indices = iter(range(self._count))
        for size in itertools.count(1):
            batch = list(itertools.islice(indices, size))
            if not batch:
                return
            yield batch


def as_named(samples):
    """A collate function whose batches are mappings, as transformers' are."""
    features, labels = zip(*samples)
    return UserDict(input=torch.stack(features), label=torch.tensor(labels))


def pairs():
    return list(zip(X, Y))


def blocks(*sizes):
    """Batches of such sizes, again and again, to the end."""
    at = 0
    for size in itertools.cycle(sizes):
        if at >= COUNT:
            return
        yield X[at : at + size], Y[at : at + size]
        at += size


def frame():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=["a", "b", "c"])
    return table, pandas.Series(Y.numpy())


def frame_with_target():
    table, target = frame()
    return table.assign(label=target), "label"


def hugging_face():
    datasets = pytest.importorskip("datasets")
    columns = {"input": X.tolist(), "label": Y.tolist()}
    return datasets.Dataset.from_dict(columns), "label"


def poptorchs(mode):
    """A loader of PopTorch's, made for other calls than the model's."""
    options = poptorch.Options().deviceIterations(2)
    return poptorch.DataLoader(
        options, TensorDataset(X, Y), batch_size=4, drop_last=False, mode=mode
    )


FORMS = {
    "numpy": lambda: (X.numpy(), Y.numpy()),
    "frames": frame,
    "a frame with its target": frame_with_target,
    "a dict": lambda: ({"input": X}, Y),
    "a tuple": lambda: ((X,), (Y,)),
    "a dict and a column's name": lambda: ({"input": X, "label": Y}, "label"),
    "a mapping": lambda: (UserDict(input=X), Y),
    "a tensor dataset": lambda: (TensorDataset(X, Y),),
    "a dataset": lambda: (Items([(x, int(y)) for x, y in pairs()]),),
    "a dataset of rows": lambda: (
        Items([{"input": x, "label": int(y)} for x, y in pairs()]),
        "label",
    ),
    "a table": lambda: (Table({"input": X.tolist(), "label": Y.tolist()}), "label"),
    "a streamed table": lambda: (
        StreamedTable({"input": X.tolist(), "label": Y.tolist()}),
        "label",
    ),
    "a Hugging Face dataset": hugging_face,
    "an iterable dataset": lambda: (Stream(pairs()),),
    "a loader": lambda: (DataLoader(TensorDataset(X, Y), batch_size=5),),
    "a loader with a sampler": lambda: (
        DataLoader(TensorDataset(X, Y), batch_size=5, sampler=InOrder(COUNT)),
    ),
    "a loader with a batch sampler": lambda: (
        DataLoader(TensorDataset(X, Y), batch_sampler=Uneven(COUNT)),
    ),
    "a loader with a collate function": lambda: (
        DataLoader(Items(pairs()), batch_size=5, collate_fn=as_named),
        "label",
    ),
    "a loader of an iterable dataset": lambda: (DataLoader(Stream(pairs()), 5),),
    "a stream": lambda: (Restartable(lambda: blocks(7, 1, 12)),),
    "a stream of arrays": lambda: (
        Restartable(lambda: ((x.numpy(), y.numpy()) for x, y in blocks(9))),
    ),
    "PopTorch's loader": lambda: (poptorchs(poptorch.DataLoaderMode.Sync),),
}
WITH_PROCESSES = {
    "a loader with workers": lambda: (
        DataLoader(TensorDataset(X, Y), batch_size=5, num_workers=2),
    ),
    "a loader with workers that stay": lambda: (
        DataLoader(
            TensorDataset(X, Y), batch_size=5, num_workers=1, persistent_workers=True
        ),
    ),
    "PopTorch's asynchronous loader": lambda: (
        poptorchs(poptorch.DataLoaderMode.Async),
    ),
    "PopTorch's rebatching loader": lambda: (
        poptorchs(poptorch.DataLoaderMode.AsyncRebatched),
    ),
}


def make_model(plan=None, *, metrics=("accuracy",), **settings):
    config = IPUConfig(**{**(PLANS[plan] if plan else {}), **settings})
    return reference.compiled(config=config, optimizer="adam", metrics=list(metrics))


def trained(model, *data):
    """The history of two epochs, and the figures of an evaluation after them."""
    history = model.fit(
        *data, batch_size=BATCH, epochs=2, shuffle=False, drop_last="pad", verbose=0
    )
    figures = model.evaluate(*data, batch_size=4, verbose=0)
    return history, figures


@functools.lru_cache(maxsize=None)
def expected(plan):
    model = make_model(plan)
    history, figures = trained(model, X, Y)
    return model, history.history, figures, model.predict(X, verbose=0)


def assert_as_expected(model, plan, history, figures):
    other, losses, other_figures, _ = expected(plan)
    reference.assert_same_weights(model.module, other.module)
    assert history.history.keys() == losses.keys()
    for name, values in losses.items():
        assert history.history[name] == pytest.approx(values, rel=1e-5), name
    assert len(set(losses["loss"])) == 2
    assert figures == pytest.approx(other_figures, rel=1e-5)
    assert history.dropped_samples == 0


def assert_predicts(model, plan, data):
    """What names its targets has inputs only for `predict`."""
    outputs = model.predict(data, batch_size=4, verbose=0)
    torch.testing.assert_close(outputs, expected(plan)[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        *((form, "accumulation") for form in FORMS if FORMS[form] is not hugging_face),
        pytest.param(
            *("a Hugging Face dataset", "accumulation"), marks=pytest.mark.slow
        ),
        *((form, "plain") for form in ("frames", "an iterable dataset")),
        *((form, "replicas") for form in ("a dataset of rows", "a stream")),
    ],
)
def test_every_form_of_data_trains_to_the_same_weights(form, plan):
    data = FORMS[form]()
    model = make_model(plan)
    assert_as_expected(model, plan, *trained(model, *data))
    if not isinstance(data[-1], str):
        assert_predicts(model, plan, data[0])


@pytest.mark.parametrize("form", WITH_PROCESSES)
def test_forms_with_processes_of_their_own_do_too(form):
    (data,) = WITH_PROCESSES[form]()
    model = make_model("replicas")
    try:
        assert_as_expected(model, "replicas", *trained(model, data))
    finally:
        if hasattr(data, "terminate"):
            data.terminate()


@pytest.mark.parametrize(
    ("mode", "workers", "kind"),
    [("sync", 2, Stream), ("async", 1, Items), ("async_rebatched", 1, Items)],
)
def test_the_models_own_processes_load_the_same_samples(mode, workers, kind):
    model = make_model("replicas", num_workers=workers, loader_mode=mode)
    assert_as_expected(model, "replicas", *trained(model, kind(pairs())))
    assert multiprocessing.active_children() == []


def test_columns_of_predictions_are_inputs_only():
    model, _, _, outputs = expected("plain")
    for data in (
        Table({"input": X.tolist()}),
        StreamedTable({"input": X.tolist()}),
        UserDict(input=X),
    ):
        torch.testing.assert_close(model.predict(data, verbose=0), outputs)


def test_several_targets_are_named_by_their_columns():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = reference.network()

        def forward(self, features):
            outputs = self.net(features)
            return {"kind": outputs, "size": outputs.sum(dim=1)}

    sizes = X.sum(dim=1)
    weights = []
    for data in (
        (X, {"kind": Y, "size": sizes}),
        ({"features": X, "kind": Y, "size": sizes}, ["kind", "size"]),
    ):
        model = reference.compiled(Two(), loss={"kind": "cross_entropy", "size": "mse"})
        model.fit(*data, batch_size=17, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert all(np.array_equal(a, b) for a, b in zip(*weights))


def test_what_predict_does_not_need_may_be_anything():
    data = Items([(x, f"sample {index}") for index, x in enumerate(X)])
    model, _, _, outputs = expected("plain")
    torch.testing.assert_close(model.predict(data, verbose=0), outputs)
    stream = Restartable(lambda: ((x, [str(len(x))] * len(x)) for x, _ in blocks(5, 3)))
    torch.testing.assert_close(model.predict(stream, verbose=0), outputs)


# Numbers and constants ------------------------------------------------------------


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = reference.network()

    def forward(self, features, scale, mode=None):
        assert mode in (None, "train")
        return self.net(features) * scale.reshape(-1, 1)


def scaled_fit(data, **settings):
    model = reference.compiled(Scaled(), replicas=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedRowsWarning)
        history = model.fit(
            data, batch_size=4, shuffle=False, epochs=2, verbose=0, **settings
        )
    return model, history


def test_numbers_in_batches_are_tensors_so_they_may_change():
    # One number per batch of 4: it stands for each of its rows.
    scales = [1.0, 0.5, 2.0, -3.0, 0.25, 1.5, 1.0, 0.75]
    batches = [
        (
            {"features": X[4 * i : 4 * i + 4], "scale": s, "mode": "train"},
            Y[4 * i :][:4],
        )
        for i, s in enumerate(scales)
    ]
    model, history = scaled_fit(Restartable(lambda: iter(batches)))
    rows = torch.tensor(scales).repeat_interleave(4)
    plain = TensorDataset(X[:32], rows, Y[:32])
    plain = Items([((x, s), y) for x, s, y in plain])
    other, other_history = scaled_fit(plain)
    reference.assert_same_weights(model.module, other.module)
    losses = other_history.history["loss"]
    assert history.history["loss"] == pytest.approx(losses, rel=1e-5)


# Every sample once ----------------------------------------------------------------


class Same(torch.nn.Module):
    """Gives its inputs back, so that a prediction tells which samples were seen."""

    def forward(self, x):
        return x


PER_CALL = 8
NUMBERS = torch.rand(3 * PER_CALL, generator=torch.Generator().manual_seed(1)) ** 3


@functools.lru_cache(maxsize=None)
def mirror(**settings):
    model = IPUModel(Same(), IPUConfig(replicas=2, device_iterations=2, **settings))
    model.compile("sgd", "mae")
    return model


def uneven_stream(count):
    def batches():
        at = 0
        for size in itertools.cycle([5, 1, 11]):
            if at >= count:
                return
            rows = NUMBERS[at : min(at + size, count)]
            yield rows, torch.zeros(len(rows))
            at += size

    return Restartable(batches)


def check_each_once(model, data, count):
    outputs = model.predict(data, batch_size=4, verbose=0)
    assert torch.equal(outputs, NUMBERS[:count])
    streamed = list(model.predict(data, batch_size=4, verbose=0, stream=True))
    assert torch.equal(torch.cat(streamed), NUMBERS[:count])
    assert len(streamed) == -(-count // PER_CALL)
    mean = float(NUMBERS[:count].double().mean())
    figures = model.evaluate(data, batch_size=4, verbose=0)
    assert figures["loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "loading"),
    [
        *((count, ()) for count in (1, 5, PER_CALL, 9, 23)),
        (19, ("sync", 2)),
        (1, ("async", 0)),
        (18, ("async_rebatched", 2)),
    ],
)
def test_evaluate_and_predict_see_each_sample_once(count, loading):
    model = mirror(**dict(zip(("loader_mode", "num_workers"), loading)))
    dataset = TensorDataset(NUMBERS[:count], torch.zeros(count))
    streams = () if loading else (Items(list(dataset)), uneven_stream(count))
    for data in (dataset, *streams):
        check_each_once(model, data, count)


@pytest.mark.parametrize("mode", ["async", "async_rebatched"])
def test_a_call_of_one_sample_can_be_loaded_by_another_process(mode):
    model = IPUModel(Same(), IPUConfig(loader_mode=mode))
    outputs = model.predict(NUMBERS[:3], batch_size=1, verbose=0)
    assert torch.equal(outputs, NUMBERS[:3])


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 100])
def test_steps_of_evaluate_and_predict_are_the_first(steps):
    count = min(21, 4 * steps)
    dataset = TensorDataset(NUMBERS[:21], torch.zeros(21))
    for data in (dataset, uneven_stream(21)):
        outputs = mirror().predict(data, batch_size=4, steps=steps, verbose=0)
        assert torch.equal(outputs, NUMBERS[:count])
        figures = mirror().evaluate(data, batch_size=4, steps=steps, verbose=0)
        mean = float(NUMBERS[:count].double().mean())
        assert figures["loss"] == pytest.approx(mean, rel=1e-6)


# Padding --------------------------------------------------------------------------


def plain_epoch(module, x, y, batch_size, weights=None):
    """Plain torch's training with the short last batch; the loss over samples."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"weights": weights, "has_rest": True}
    done = reference.train(module, optimizer, x, y, batch_size, **given)
    return float(done.losses.mean())


def test_updates_of_padding_alone_are_said():
    model = make_model(device_iterations=2, micro_batch_size=2)
    with pytest.warns(EmptyUpdatesWarning, match="padding only"):
        history = model.fit(X[:5], Y[:5], drop_last="pad", verbose=0)
    assert history.dropped_samples == 0


def test_a_loader_that_gives_less_than_it_says_is_padded_all_the_same():
    def without_zeros(samples):
        kept = [(x, y) for x, y in samples if y]
        return [torch.stack(parts) for parts in zip(*kept)]

    zeros = Y.eq(0)
    assert 0 < zeros.sum() < COUNT
    other = reference.network()
    loss = plain_epoch(other, X[~zeros], Y[~zeros], 17)
    loader = DataLoader(TensorDataset(X, Y), 17, collate_fn=without_zeros)
    model = IPUModel(reference.network())
    own = torch.optim.SGD(model.module.parameters(), lr=0.1)
    model.compile(own, "cross_entropy")
    history = model.fit(loader, drop_last="pad", verbose=0)
    reference.assert_same_weights(model.module, other)
    assert history.history["loss"] == [pytest.approx(loss, rel=1e-5)]


def test_what_a_stream_leaves_out_is_said_when_it_is_known():
    model = make_model()
    data = Restartable(lambda: blocks(5))
    with pytest.warns(DroppedRowsWarning, match="leaves out 4 samples"):
        history = model.fit(data, batch_size=10, verbose=0)
    assert history.dropped_samples == 4


# Weights --------------------------------------------------------------------------


SAMPLE_WEIGHTS = 2 * torch.rand(COUNT, generator=torch.Generator().manual_seed(3))
CLASS_WEIGHTS = {0: 0.5, 2: 3.0}
WEIGHTED = {
    "sample weights": lambda: (X, Y),
    "samples with weights": lambda: (
        Items([(x, y, float(w)) for x, y, w in zip(X, Y, SAMPLE_WEIGHTS)]),
    ),
    "batches with weights": lambda: (
        DataLoader(TensorDataset(X, Y, SAMPLE_WEIGHTS), batch_size=5),
    ),
    "class weights": lambda: (X, Y),
    "class weights of one-hot targets": lambda: (
        X,
        torch.nn.functional.one_hot(Y, reference.NUM_CLASSES).float(),
    ),
    "class weights with a loader": lambda: (
        DataLoader(TensorDataset(X, Y), batch_sampler=Uneven(COUNT)),
    ),
}


@pytest.mark.parametrize("plan", ["plain", "accumulation"])
@pytest.mark.parametrize("form", WEIGHTED)
def test_weights_are_kerass(plan, form):
    weights, keywords = SAMPLE_WEIGHTS, {}
    if form.startswith("class"):
        weights = torch.tensor([CLASS_WEIGHTS.get(int(y), 1.0) for y in Y])
        keywords = {"class_weight": CLASS_WEIGHTS}
    elif form == "sample weights":
        keywords = {"sample_weight": weights}
    check_weighting(plan, WEIGHTED[form](), keywords, weights)


def check_weighting(plan, data, keywords, w):
    """Against plain torch, and Keras: sum(w * l) / N, sum(w * m) / sum(w)."""
    other = reference.network()
    loss = plain_epoch(other, X, Y, BATCH, w)
    model = IPUModel(reference.network(), IPUConfig(**PLANS[plan]))
    own = torch.optim.SGD(model.module.parameters(), lr=0.1)
    model.compile(own, "cross_entropy", None, ["accuracy"], ["accuracy"])
    history = model.fit(
        *data,
        batch_size=BATCH,
        shuffle=False,
        drop_last="pad",
        verbose=0,
        validation_data=(X, Y),
        **keywords,
    ).history
    reference.assert_same_weights(model.module, other)
    assert history["loss"] == [pytest.approx(loss, rel=1e-5)]
    assert history["accuracy"] != history["weighted_accuracy"]
    # Neither kind of weight reaches the validation data, which has none of its own.
    plain = reference.evaluate(other, X, Y)
    assert history["val_loss"] == [pytest.approx(plain["loss"], rel=1e-5)]
    assert history["val_accuracy"] == history["val_weighted_accuracy"]
    figures = model.evaluate(X, Y, sample_weight=w, verbose=0)
    with torch.no_grad():
        outputs = other(X)
        each = torch.nn.functional.cross_entropy(outputs, Y, reduction="none")
    hits = outputs.argmax(dim=1).eq(Y).float()
    assert figures["loss"] == pytest.approx(float((w * each).sum() / COUNT), rel=1e-5)
    assert figures["weighted_accuracy"] == pytest.approx(
        float((w * hits).sum() / w.sum()), rel=1e-5
    )
    assert figures["accuracy"] == pytest.approx(plain["accuracy"], rel=1e-5)


# Epochs of so many steps ----------------------------------------------------------


class Steps(Callback):
    """Counts the updates of every epoch."""

    def __init__(self):
        self.counts = []

    def on_epoch_begin(self, epoch, logs):
        self.counts.append(0)

    def on_train_batch_end(self, batch, logs):
        self.counts[-1] += 1


FIVE = {
    "arrays": lambda: reference.Recorded(X[:20], Y[:20]),
    "a stream": lambda: Restartable(lambda: itertools.islice(blocks(4), 5)),
}


@pytest.mark.parametrize("form", FIVE)
def test_five_batches_in_epochs_of_two_give_two_two_and_one(form):
    # As Keras 3.15.1 counts, with a warning for the epoch that is cut short.
    model, steps = make_model(), Steps()
    with pytest.warns(DataRanOutWarning, match="after 1 updates of epoch 3") as caught:
        model.fit(
            FIVE[form](),
            batch_size=4,
            epochs=5,
            steps_per_epoch=2,
            shuffle=False,
            callbacks=steps,
            verbose=0,
        )
    assert steps.counts == [2, 2, 1, 2, 2]
    assert len(caught) == 1


def endless():
    return itertools.chain.from_iterable(blocks(6, 1, 9) for _ in itertools.count())


def test_a_generator_without_end_needs_steps():
    model, steps = make_model("replicas"), Steps()
    history = model.fit(
        endless(),
        batch_size=BATCH,
        epochs=3,
        steps_per_epoch=4,
        callbacks=steps,
        verbose=0,
    )
    assert steps.counts == [2, 2, 2]  # calls of two updates
    assert len(history.history["loss"]) == 3
    x = torch.cat([x for x, _ in itertools.islice(endless(), 20)])[:72]
    y = torch.cat([y for _, y in itertools.islice(endless(), 20)])[:72]
    other = make_model("replicas")
    other.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    reference.assert_same_weights(model.module, other.module)


def test_a_generator_that_runs_out_ends_the_training():
    model, steps = make_model(), Steps()
    with pytest.warns(DataRanOutWarning, match=r"epoch 2.*Training ends"):
        history = model.fit(
            itertools.islice(blocks(8), 4),
            batch_size=4,
            epochs=5,
            steps_per_epoch=5,
            callbacks=steps,
            verbose=0,
        )
    assert steps.counts == [5, 3]
    assert len(history.history["loss"]) == 2


@pytest.mark.parametrize("form", ["arrays", "stream"])
def test_validation_steps_are_always_the_first(form):
    data = (X, Y) if form == "arrays" else Restartable(lambda: blocks(5, 2))
    model = make_model()
    model.compile(Optimizer("sgd", lr=0.0), "cross_entropy")
    history = model.fit(
        X,
        Y,
        batch_size=17,
        epochs=3,
        validation_data=data,
        validation_steps=2,
        validation_batch_size=4,
        verbose=0,
    ).history
    expected = reference.evaluate(model.module, X[:8], Y[:8])["loss"]
    assert history["val_loss"] == pytest.approx([expected] * 3, rel=1e-5)


# Processes and their memory -------------------------------------------------------


class Kept(StreamedMetric):
    """Keeps what it is shown, as metrics may, and adds it up at the end."""

    def update(self, outputs, targets, weights=None):
        self.targets.append(targets)

    def result(self):
        seen = torch.cat(self.targets).double()
        return float((seen * torch.arange(1, len(seen) + 1)).sum())

    def reset(self):
        self.targets = []


@pytest.mark.parametrize(("mode", "workers"), [("async", 2), ("async_rebatched", 0)])
def test_memory_that_is_used_again_corrupts_neither_metrics_nor_weights(mode, workers):
    results = []
    for settings_ in ({}, {"loader_mode": mode, "num_workers": workers}):
        model = make_model("replicas", metrics=[Kept("kept")], **settings_)
        history = model.fit(
            X,
            Y,
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            drop_last="pad",
            validation_data=(X, Y),
            validation_batch_size=4,
            verbose=0,
        )
        results.append((history.history, model))
    (plain, model), (loaded, other) = results
    for name, values in plain.items():
        assert loaded[name] == pytest.approx(values, rel=1e-6), name
    in_order = float((Y.double() * torch.arange(1, COUNT + 1)).sum())
    assert plain["kept"] == plain["val_kept"] == [in_order, in_order]
    reference.assert_same_weights(model.module, other.module, rtol=0, atol=0)


class Odd(Dataset):
    """Its last sample is odd, or missing."""

    def __init__(self, last=None):
        self._last = last

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if index < COUNT - 1:
            return X[index], int(Y[index])
        if self._last is None:
            raise OSError("the disk is gone")
        return self._last


LOADING = {
    "workers": {"num_workers": 2},
    "both": {"loader_mode": "async", "num_workers": 1},
}


@pytest.mark.parametrize("loading", LOADING)
def test_no_process_is_left_after_a_stop_or_an_error(loading):
    model = make_model(**LOADING[loading])
    with pytest.raises(ValueError, match="steps_per_epoch"):
        model.fit(X, Y, steps_per_epoch=0)
    assert multiprocessing.active_children() == []
    held = []
    for kind in (None, ArithmeticError, KeyboardInterrupt):

        def act(batch, logs, kind=kind):
            if kind is not None:
                raise kind
            model.stop_training = True

        acting = LambdaCallback(on_train_batch_end=act)
        given = {"epochs": 3, "validation_data": (X, Y), "callbacks": acting}
        with pytest.raises(kind) if kind else contextlib.nullcontext() as caught:
            model.fit(X, Y, batch_size=2, verbose=0, **given)
        held.append(caught)  # as an interactive session keeps the last traceback
        assert multiprocessing.active_children() == []
    assert len(model.fit(X, Y, batch_size=17, verbose=0).epoch) == 1


@pytest.mark.parametrize("loading", LOADING)
def test_a_sample_that_fails_in_another_process_says_why_and_ends_it(loading):
    model = make_model(**LOADING[loading])
    with pytest.raises((DataError, OSError), match="the disk is gone"):
        model.fit(Odd(), batch_size=2, shuffle=False, verbose=0)
    assert multiprocessing.active_children() == []
    with pytest.raises(DataError, match=r"Sample 33 of `x`.*different shapes"):
        model.fit(Odd((X[0, :1], 1)), batch_size=2, shuffle=False, verbose=0)
    assert multiprocessing.active_children() == []
    if loading == "workers":
        with pytest.raises(DataError, match=r"Sample 33 of `x` is of torch.float32"):
            model.evaluate(Odd((X[0], 1.5)), batch_size=2, verbose=0)
        assert multiprocessing.active_children() == []


def test_a_prediction_that_is_not_gone_through_leaves_no_process():
    model = mirror(loader_mode="sync", num_workers=2)
    parts = model.predict(NUMBERS, batch_size=4, stream=True, verbose=0)
    assert torch.equal(next(parts), NUMBERS[:PER_CALL])
    assert multiprocessing.active_children()
    parts.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "name", ["coo_matrix", "csr_array", "dia_matrix", "dok_matrix", "lil_array"]
)
def test_sparse_matrices_are_the_dense_ones(name):
    sparse = pytest.importorskip("scipy.sparse")
    make = getattr(sparse, name)
    x, y = X.numpy() * (X.numpy() > 0), Y.numpy()

    def figures(data):
        torch.manual_seed(0)
        model = reference.compiled(torch.nn.Linear(3, 4))
        settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        history = model.fit(data, y, validation_data=(data, y), **settings)
        model.fit(data, y, validation_split=0.5, **settings)
        of_dict = model.predict({"input": data}, verbose=0)
        rows = model.predict(data, verbose=0)
        loss = model.evaluate(data, y, verbose=0)
        return history.history, loss, rows.tolist(), of_dict.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedRowsWarning)
        assert figures(make(x)) == figures(x)


def test_sparse_batches_are_made_dense():
    sparse = pytest.importorskip("scipy.sparse")
    batches = [(sparse.csr_matrix(x), y) for x, y in zip(X.split(6), Y.split(6))]
    model = reference.compiled(torch.nn.Linear(3, 4))
    wanted = model.evaluate(X, Y, verbose=0)["loss"]
    assert model.evaluate(iter(batches), verbose=0)["loss"] == pytest.approx(wanted)


class Teaching(torch.nn.Module):
    """A decoder that may be taught, and decodes alone else."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(9, 9)

    def forward(self, source, before=None):
        return self.words(source) + (0 if before is None else self.words(before))


WORDS = torch.randint(2, 9, (8, 5), generator=torch.Generator().manual_seed(0))
TRIPLE = TensorDataset(WORDS, WORDS.roll(1, 1), WORDS.flip(1))


@pytest.mark.parametrize(
    "data", [TRIPLE, DataLoader(TRIPLE, 4), [TRIPLE[:4], TRIPLE[4:]].__iter__()]
)
def test_targets_in_the_third_part_are_told(data):
    model = IPUModel(Teaching())
    model.compile("sgd", "sparse_categorical_crossentropy")
    size = {"batch_size": 4} if data is TRIPLE else {}
    with pytest.warns(IpufitWarning, match=r"third part of `x` .*\(\(a, b\), targets"):
        model.fit(data, **size, verbose=0)


@pytest.mark.parametrize(
    "weights", [WORDS % 2, WORDS % 2 > 0, WORDS.float(), WORDS[:, 0]]
)
def test_weights_in_the_third_part_are_taken_as_such(weights):
    model = IPUModel(Teaching())
    model.compile("sgd", "sparse_categorical_crossentropy")
    data = TensorDataset(WORDS, WORDS, weights)
    model.fit(data, batch_size=4, verbose=0)
    model.fit(WORDS, WORDS, sample_weight=WORDS, batch_size=4, verbose=0)
