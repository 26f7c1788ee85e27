# SPDX-License-Identifier: Apache-2.0
"""What users pass as data: its values, what is refused, how it is counted and split."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from ipufit import (
    Callback,
    ConfigError,
    DataError,
    IPUConfig,
    IPUModel,
    Optimizer,
    poptorch,
)
from ipufit._tree import Structure, tree_map
from tests import reference
from tests.reference import Items, Restartable, Stream
from tests.strategies import Pair, examples, nestings

# On a machine with one processor.
pytestmark = [
    pytest.mark.floor,
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create", "ignore::ipufit.errors.IpufitWarning"
    ),
]

X, Y = reference.samples(10)


class Echo(torch.nn.Module):
    """Gives its input back."""

    def forward(self, x):
        return x


class Summed(torch.nn.Module):
    """Takes any inputs, and has something to train."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, *inputs, **named):
        leaves = Structure.of((inputs, named)).flatten((inputs, named))
        rows = [leaf.to(torch.float32).reshape(len(leaf), -1) for leaf in leaves]
        return torch.cat(rows, dim=1).sum(dim=1) * self.weight


def predicted(data, **config):
    return IPUModel(Echo(), IPUConfig(**config)).predict(data, batch_size=2, verbose=0)


def compiled(module=None, loss="mse"):
    return reference.compiled(module or Summed(), loss=loss)


def classifier():
    return compiled(reference.network(), "cross_entropy")


# Values ----------------------------------------------------------------------------

VALUES = {
    "a bool": (True, torch.bool),
    "not a number": (float("nan"), torch.float32),
    "NumPy's float64": (np.float64(1.5), torch.float32),
    "NumPy's bool": (np.bool_(1), torch.bool),
    "an array of one number": (np.array(3), torch.int64),
    "a reversed array": (np.arange(6, dtype=np.int32)[::-1], torch.int32),
    "an array that masks nothing": (np.ma.masked_array([1.0, 2.0]), torch.float32),
    "float64": (torch.ones(2, dtype=torch.float64) / 3, torch.float32),
    "uint8": (torch.ones(2, 2, dtype=torch.uint8), torch.uint8),
    "a strided tensor": (torch.arange(24.0).reshape(2, 4, 3).permute(2, 0, 1), None),
    "one with a gradient": (torch.ones(2, requires_grad=True), torch.float32),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [*((name, 0) for name in VALUES), ("a bool", 1), ("a strided tensor", 1)],
)
def test_values_become_tensors_of_types_that_ipus_have(name, num_workers):
    value, dtype = VALUES[name]
    outputs = predicted(Items([value] * 3), num_workers=num_workers)
    on_ipu = {torch.int64: torch.int32, None: torch.float32}.get(dtype, dtype)
    assert outputs.dtype in (dtype, on_ipu)
    expected = np.asarray(value.detach() if hasattr(value, "detach") else value)
    for row in outputs:
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-6)


@settings(max_examples=examples(50))
@given(nestings.filter(lambda n: Structure.of(n).num_leaves), st.integers(1, 5))
def test_samples_of_any_nesting_are_stacked_leaf_by_leaf(nesting, count):
    def sample(number):
        return tree_map(lambda leaf: leaf + number, nesting)

    def kind(number):  # batches of some kinds are stacked at once, others singly
        return tree_map(np.int32 if count % 2 else int, sample(number))

    outputs = predicted(Items([((kind(i),),) for i in range(count)]))
    for number in range(count):
        row = tree_map(lambda leaf, i=number: int(leaf[i]), outputs)
        assert row == sample(number)


def test_a_subclass_of_a_tensor_dataset_keeps_what_it_adds():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return (2 * super().__getitem__(index)[0],)

    assert torch.equal(predicted(Doubled(X)), 2 * X)


def test_names_and_namedtuples_are_inputs_and_targets():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, a, b):
            return Pair(a * self.weight, b[0] * self.weight)

    y = torch.zeros(10, 3)
    model = compiled(Two())
    figures = model.evaluate({"a": X, "b": (X,)}, Pair(y, y), verbose=0)
    assert figures["loss"] == pytest.approx(float(2 * X.square().mean()), rel=1e-5)


def test_a_frame_is_a_matrix_and_a_series_a_vector():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})
    assert predicted(frame).tolist() == [[1.0, 0.5, 1.0], [2.0, 1.5, 0.0]]
    assert predicted(frame["a"]).tolist() == [1, 2]
    assert predicted(frame.astype("Float64")).tolist() == predicted(frame).tolist()


# What is refused -------------------------------------------------------------------

CAT, DOG = {"a": 1.0, "kind": "cat"}, {"a": 1.0, "kind": "dog"}
MASKED = np.ma.masked_array(np.arange(6.0).reshape(3, 2), mask=[[0, 0], [0, 1], [1, 0]])
NO_VALUES = {
    "a complex number": (1j, "has a complex"),
    "words": (np.array(["word"]), "which torch can't hold"),
    "complex numbers": (
        np.array([1j]),
        r"has an array of complex128.*x\.real, x\.imag",
    ),
    "dates": (np.array(["2020-01-01"], dtype="M8[D]"), "datetime64"),
    "swapped bytes": (np.zeros(10, ">f4"), "has an array of >f4.* Convert it"),
    "torch's complex numbers": (torch.zeros(2, dtype=torch.complex64), "complex64"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "sparse"),
    "a tensor without values": (torch.zeros(2, device="meta"), "on meta"),
    "a masked array": (
        MASKED,
        r"masked array \(2 of 6 values, the first at \[1, 1\]\), .* \.filled\(value\)",
    ),
    "masked numbers": (MASKED.astype(np.int64)[1], r"masked array \(1 of 2 values"),
    "None among objects": (
        np.array([1, None], dtype=object),
        r"has None at \[1\], a missing value.* fillna",
    ),
}


@pytest.mark.parametrize("name", NO_VALUES)
def test_values_that_an_ipu_cannot_take_are_refused(name):
    value, message = NO_VALUES[name]
    with pytest.raises(DataError, match=message):
        compiled().fit(Items([(value, 1.0)] * 2), batch_size=2, verbose=0)


DATA = {
    "no arrays": (((), {}), None, "`x` holds no arrays"),
    "numbers as objects": (X.numpy().astype(object), None, r"numbers as objects.*\.as"),
    "rows as objects": (
        np.array([[1], [2, 3]], dtype=object),
        None,
        r"numpy\.stack; pad",
    ),
    "objects": (
        np.array([1, "a"], dtype=object),
        None,
        "`x` has an array of object, wh",
    ),
    "many words for y": (
        X,
        ["cat", "dog"] * 5,
        r"^y=\['cat', .*, \.\.\.\] names columns",
    ),
    "a list of dicts": ([{"a": X[0]}] * 4, ["a"], "torch's DataLoader takes a list"),
    "a list of pairs": (list(zip(X, Y)), None, "list of samples goes into a torch"),
    "a list of rows": (
        list(zip(X, X[:, :1])),
        None,
        "list of samples goes into a torch",
    ),
    "lists of words": (
        [["cat", "dog"]] * 10,
        None,
        r"holds no arrays.*\], \.\.\.\]\.$",
    ),
    "an empty dataset": (Items([]), None, "`x` has no samples"),
    "an empty tensor": (X[:0], None, "`x` has no samples"),
    "a number": (torch.tensor(3.0), None, "`x` holds a single number"),
    "a list for y": (X, Y.tolist(), r"`y` holds a single number .* torch.tensor"),
    "rows as a list": (
        [np.zeros(3) for _ in range(32)],
        torch.zeros(32),
        r"\[3, 3, 3, \.\.\. 32 in all\].* one array, as with torch\.stack",
    ),
    "two loaders": (
        DataLoader(X, 2),
        DataLoader(Y, 2),
        r"`y` is a .*DataLoader, beside .*validation_data=other",
    ),
    "y beside a dataset": (Items([1.0, 2.0]), Y, "`y` was given beside a .*Items"),
    "something else": (3, None, "`x` is a int. Pass tensors"),
    "four parts": (Items([(1, 2, 3, 4)]), None, "have 4 parts"),
    "a column that isn't there": ({"a": X}, "b", "`x` has no column 'b'"),
    "all columns": ({"a": X}, ["a"], "none is left for inputs"),
    "columns of a tuple": (Items([(1, 2)] * 2), ["a"], "it is a tuple"),
    "no targets": (X, None, "`x` has no targets to train with"),
    "words for targets": (
        Items([(1.0, "word")]),
        None,
        "targets of `x` must be numbers: .* 'word'",
    ),
    # Of streams the first batch tells.
    "an empty stream": (iter([]), None, "`x` has no samples"),
    "an empty first batch": (iter([(X[:0],)]), None, "first batch of `x` has no rows"),
    "words in a stream": (iter([("word",)]), None, "A batch of `x` holds no arrays"),
    "a number in a stream": (iter([(1.0,)]), None, "batch of `x` holds a single num"),
    "unequal lengths": (iter([(X, Y[:3])]), None, r"numbers of samples: \[10, 3\]"),
    "samples in a stream": (
        zip(X, X[:, 0]),
        None,
        r"one by one use an IterableDataset",
    ),
    "samples of rows": (zip(X, X[:, :1]), None, r"\[\d, 1\].* use an IterableDataset"),
    "no axes": (iter([(torch.tensor(1.0),)]), None, "an array without axes"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used_is_refused(name):
    x, y, message = DATA[name]
    with pytest.raises(DataError, match=message):
        compiled().fit(x, y, batch_size=1, steps_per_epoch=1, verbose=0)


def test_weights_and_validation_data_are_named():
    for weights in ([1.0] * 10, 1.0, torch.tensor(1.0), np.float32(1.0), np.array(1.0)):
        with pytest.raises(DataError, match="`sample_weight` holds a single number"):
            compiled().fit(X, X[:, 0], sample_weight=weights, verbose=0)
    with pytest.raises(DataError, match="`validation_data` has no samples"):
        compiled().fit(X, X[:, 0], validation_data=Items([]), verbose=0)
    for x in (TensorDataset(X, Y), iter([X]), None, "x"):
        with pytest.raises(DataError, match="the arrays of one batch"):
            compiled().train_on_batch(x)


@pytest.mark.parametrize("dtype", ["float32", "Float64"])
def test_columns_may_have_the_same_name(dtype):
    pandas = pytest.importorskip("pandas")
    rows = [[1.0, 2.0], [3.0, 4.0]]
    frame = pandas.DataFrame(rows, columns=["a", "a"], dtype=dtype)
    model = IPUModel(torch.nn.Linear(2, 1))
    assert torch.equal(model.predict(frame), model.predict(torch.tensor(rows)))


def test_columns_that_lack_values_are_named():
    pandas = pytest.importorskip("pandas")
    for dtype in ("Int64", "Float64", "boolean", object):
        column = pandas.Series([True, True, None], dtype=dtype)
        frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": column})
        with pytest.raises(DataError, match="`x` has NA in its column 'b' in row 2"):
            predicted(frame)
        with pytest.raises(DataError, match="`x` has NA in row 2"):
            predicted(frame["b"])
    with pytest.raises(
        DataError, match=r"hold no numbers: d\. .*get_dummies.*codes\.astype"
    ):
        predicted(frame[["a"]].assign(d=["x", "y", "z"]))
    for dtype, ending in (
        ("category", r"\.codes\.astype.* of a cat"),
        (object, r"\.astype"),
    ):
        words = pandas.Series(["x", "y"], dtype=dtype)
        with pytest.raises(
            DataError, match=f"`x` is a series of {words.dtype}.*{ending}"
        ):
            predicted(words)
        with pytest.raises(DataError, match=f"`y` is the series 'd' of {words.dtype}"):
            compiled().fit(pandas.DataFrame({"a": [1.0, 2.0], "d": words}), "d")
    numbers = pandas.Series([0.5, 1], dtype=object)
    said = r"numbers as objects of Python .* \.astype\(\"float32\"\)"
    with pytest.raises(DataError, match=f"`y` has {said}"):
        compiled().fit(pandas.DataFrame({"a": [1.0, 2.0]}), numbers)
    with pytest.raises(DataError, match=rf"`x`\['n'\] has {said}"):
        predicted(pandas.DataFrame({"a": [1.0, 2.0], "n": numbers}))
    for cells in ([[1, 2], [3]], [[1, 2], [3, 4]], [torch.ones(2), torch.ones(2)]):
        frame = pandas.DataFrame({"a": [1.0, 2.0], "l": pandas.Series(cells)})
        with pytest.raises(DataError, match=r"columns that hold no numbers: l\. "):
            predicted(frame)
    with pytest.raises(DataError, match=r"columns that hold no numbers: l\. "):
        predicted(frame.assign(l=pandas.Series([[1, 2], None])))
    for value in (pandas.NA, np.array([1, pandas.NA], dtype=object)):
        with pytest.raises(DataError, match=r"has <NA>.* a missing value.* fillna"):
            predicted(Items([value]))


ODD = {
    "shape": ((torch.zeros(3), 1.0), r"has shape \(3,\).*different shapes"),
    "type": ((torch.zeros(2), 1), "is of torch.int64 and sample 0 of"),
    "a tuple": (((torch.zeros(2),) * 2, 1.0), "has a tuple"),
    "a word": ((torch.zeros(2), "one"), "has a str, 'one'"),
    "parts": ((torch.zeros(2), 1.0, 1, 1), "have 4 parts"),
    "no target": ((torch.zeros(2),), "nests differently from sample 0"),
    "a large number": ((torch.zeros(2), 2**64), f"has {2**64}"),
}


class Together(Items):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Items, Together])
@pytest.mark.parametrize("name", ODD)
def test_a_sample_unlike_the_first_is_refused_by_its_index(name, kind):
    odd, message = ODD[name]
    data = kind([(torch.zeros(2), 1.0)] * 3 + [odd])
    where = "" if "parts" in message else "Sample 3 of `x` "
    with pytest.raises(DataError, match=f"{where}{message}"):
        compiled().fit(data, batch_size=2, verbose=0)


@pytest.mark.parametrize("kind", [Items, Together, Stream])
def test_a_constant_that_changes_is_named(kind):
    class Named(Summed):
        def forward(self, a, kind):
            return super().forward(a)

    with pytest.raises(DataError, match=r"inputs\['kind'\] was 'cat' and is 'dog' now"):
        compiled(Named()).fit(kind([(CAT, 1.0), (DOG, 1.0)]), batch_size=2, verbose=0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 4), 1.0), r"shape \(4,\), and the first had"),
        ((torch.zeros(2, 3).int(), 1.0), "torch.int32"),
        ((torch.zeros(2, 3),), "nests differently from the first"),
        ((torch.zeros(2, 3), "word"), "nests differently|a str"),
    ],
)
def test_a_batch_of_a_stream_unlike_the_first_is_refused(batch, message):
    batches = iter([(torch.zeros(2, 3), 1.0), batch])
    with pytest.raises(DataError, match=message):
        compiled().fit(batches, steps_per_epoch=2, verbose=0)


# Counting and going through --------------------------------------------------------


def poptorchs(mode=poptorch.DataLoaderMode.Sync):
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(1)
    return poptorch.DataLoader(options, TensorDataset(X, Y), batch_size=1, mode=mode)


LOADERS = {
    "whole batches": (lambda data: DataLoader(data, 5), 2, 10),
    "a rest": (lambda data: DataLoader(data, 4), 3, 10),
    "drop_last": (lambda data: DataLoader(data, 4, drop_last=True), 2, 8),
    "a sampler": (
        lambda data: DataLoader(data, 3, sampler=SubsetRandomSampler(range(6))),
        2,
        6,
    ),
    "PopTorch's": (lambda data: poptorchs(), None, 8),
    "batches": (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]), None, 3),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_batch_size_and_number_of_samples_are_the_loaders_own(name):
    make, steps, count = LOADERS[name]
    model = classifier()
    loader = make(TensorDataset(X, Y))
    history = model.fit(loader, drop_last="pad", verbose=0)
    assert history.params["steps"] == steps
    assert len(model.predict(loader, verbose=0)) == count


@pytest.mark.parametrize(
    "make",
    [
        lambda dataset: DataLoader(dataset, 2),
        lambda dataset: DataLoader(dataset, 2, num_workers=1, persistent_workers=True),
        lambda dataset: poptorch.DataLoader(
            poptorch.Options(), dataset, 2, mode=poptorch.DataLoaderMode.Async
        ),
        lambda dataset: Restartable(lambda: iter(dataset.tensors[0].split(4))),
    ],
)
def test_every_pass_over_a_loader_gives_each_batch_once(make):
    # PopTorch's asynchronous loader begins anew whenever its iterator is asked for.
    loader = make(TensorDataset(torch.arange(6.0)))
    model = IPUModel(Echo())
    try:
        model.predict(loader, steps=1, verbose=0)  # a pass that is left
        for _ in range(3):
            assert model.predict(loader, verbose=0).tolist() == [0, 1, 2, 3, 4, 5]
    finally:
        if hasattr(loader, "terminate"):
            loader.terminate()


def test_the_first_batch_of_a_generator_is_drawn_once():
    drawn = []

    def batches():
        for number, part in enumerate(torch.arange(5.0).split(2)):
            drawn.append(number)
            yield part

    stream = batches()
    model = IPUModel(Echo())
    assert model.predict(stream, verbose=0).tolist() == [0, 1, 2, 3, 4]
    assert drawn == [0, 1, 2]
    with pytest.raises(DataError, match="no samples"):
        model.predict(stream, verbose=0)


def of_loader(generator):
    return {"generator": generator, "shuffle": True}


def of_sampler(generator):
    return {"sampler": RandomSampler(range(10), generator=generator)}


def of_batches(generator):
    sampler = RandomSampler(range(10), generator=generator)
    return {"batch_size": 1, "batch_sampler": BatchSampler(sampler, 2, False)}


@pytest.mark.parametrize("settings_of", [of_loader, of_sampler, of_batches])
def test_checking_leaves_every_generator_of_a_loader_as_it_was(settings_of):
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(X, Y), **{"batch_size": 2, **settings_of(own)})
    before = own.get_state()
    model = classifier()
    assert model.check(loader)
    assert torch.equal(own.get_state(), before)


# Validation ------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_a_split_validates_on_the_last_samples_as_keras_does(count, fraction):
    numbers = torch.arange(float(count))
    model = compiled(loss="mae")
    at = math.floor(count * (1.0 - fraction))
    given_data = {"batch_size": 1, "validation_split": fraction, "verbose": 0}
    if not 0 < at < count:
        with pytest.raises(DataError, match="validation_split="):
            model.fit(numbers, numbers * 0, **given_data)
        return
    model.optimizer.param_groups[0]["lr"] = 0.0
    history = model.fit(numbers, numbers * 0, **given_data).history
    assert history["loss"] == [pytest.approx(float(numbers[:at].mean()), rel=1e-5)]
    assert history["val_loss"] == [pytest.approx(float(numbers[at:].mean()), rel=1e-5)]


@pytest.mark.parametrize("fraction", [float("nan"), 1, -0.1, "0.2"])
def test_a_fraction_that_leaves_nothing_to_one_part_is_refused(fraction):
    for method in ("fit", "batch_plan", "plan", "build"):
        with pytest.raises(ConfigError, match="validation_split="):
            getattr(classifier(), method)(X, Y, validation_split=fraction)


def test_validation_data_may_have_any_form_and_goes_before_a_split():
    rows = Items([{"input": x, "label": int(y)} for x, y in zip(X[:3], Y[:3])])
    loader = DataLoader(TensorDataset(X[:3], Y[:3]), 2, num_workers=1)
    figures = []
    settings_of = {"batch_size": 5, "shuffle": False, "verbose": 0}
    for data in ((X[:3], Y[:3]), [X[:3], Y[:3]], TensorDataset(X[:3], Y[:3]), loader):
        model = classifier()
        history = model.fit(
            X, Y, **settings_of, validation_split=0.5, validation_data=data
        )
        assert history.dropped_samples == 0
        figures.append(history.history)
    table = {"input": X, "label": Y}
    model = classifier()
    named = model.fit(table, "label", validation_data=rows, **settings_of)
    figures.append(named.history)
    assert [len(one["val_loss"]) for one in figures] == [1] * 5
    for one in figures:
        assert one["val_loss"] == pytest.approx(figures[0]["val_loss"], rel=1e-5)


def test_one_loader_trains_and_validates():
    loader = DataLoader(
        TensorDataset(X, Y), 5, num_workers=1, persistent_workers=True
    )  # which allows one iterator at a time
    history = classifier().fit(loader, validation_data=loader, epochs=2, verbose=0)
    assert len(history.history["val_loss"]) == 2


# Class weights ---------------------------------------------------------------------


PAIRS = torch.stack([Y, Y], dim=1)


@pytest.mark.parametrize(
    ("y", "given_weights", "message"),
    [
        ((Y, Y), {1: 3.0}, "needs one target"),
        (PAIRS, {1: 3.0}, r"\(\d+, 2\) don't add up to 1.*positions"),
        (PAIRS[:, :1] + 0.25, {1: 3.0}, r"a target is \d.*25\. Pass sample weights"),
        *(
            (Y, table, r"dict\(enumerate\(weights\)\) .* compute_class_weight")
            for table in ([1.0, 2.0], np.ones(2), "balanced")
        ),
        *(
            (Y, table, "class_weight")
            for table in (3, {}, {True: 1}, {1: "a"}, {1: -1}, {1: 1e40})
        ),
    ],
)
def test_what_is_no_table_of_weights_is_refused(y, given_weights, message):
    with pytest.raises((ConfigError, DataError), match=message):
        compiled(loss=lambda outputs, targets: outputs.sum()).fit(
            X, y, class_weight=given_weights, batch_size=5, verbose=0
        )


@pytest.mark.parametrize(
    "targets", [Y, Y.int(), torch.nn.functional.one_hot(Y, 4).float()]
)
def test_each_sample_has_the_weight_of_its_class_and_others_one(targets):
    given = {"batch_size": 5, "shuffle": False, "verbose": 0}
    weights = torch.tensor([{1: 3.0, 2: 0.5}.get(index, 1.0) for index in Y.tolist()])
    one, other = classifier(), classifier()
    expected = one.fit(X, Y, sample_weight=weights, **given).history
    table = dict(zip(np.array([1, 2]), np.float32([3.0, 0.5])))
    history = other.fit(X, targets, class_weight=table, **given).history
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    reference.assert_same_weights(other.module, one.module)


def test_sample_weights_exclude_class_weights():
    with pytest.raises(DataError, match="multiply them"):
        classifier().fit(X, Y, sample_weight=torch.ones(10), class_weight={1: 3})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_that_a_callback_changes_count_in_the_next_epoch(dtype):
    x, y = np.ones((8, 3), dtype), np.zeros((8, 1), dtype)

    class Change(Callback):
        def on_epoch_end(self, epoch, logs=None):
            y[:] = 100.0

    model = IPUModel(torch.nn.Linear(3, 1))
    model.compile(Optimizer("sgd", learning_rate=0.0), "mse")
    history = model.fit(x, y, 4, epochs=2, callbacks=[Change()], verbose=0).history
    assert history["loss"][0] < 100 < 5000 < history["loss"][1]


def test_names_of_classes_are_refused_where_they_are():
    names = np.array(["cat", "dog"] * 5)
    with pytest.raises(DataError, match=r"`y` has an array of <U3.*return_inverse"):
        compiled().fit(X, names, batch_size=5, verbose=0)


TIME_FIRST = {
    "inputs": (torch.zeros(7, 20, 3), torch.zeros(20, 1)),
    "inputs['a']": ({"a": np.zeros((7, 20, 3))}, np.zeros((20, 1))),
    "targets": (torch.zeros(20, 3), torch.zeros(1, 20)),
}


@pytest.mark.parametrize("path", TIME_FIRST)
def test_arrays_with_samples_on_dim_1_are_told_how_to_put_them_first(path):
    x, y = TIME_FIRST[path]
    model = reference.compiled(torch.nn.Linear(3, 1), loss="mse")
    words = rf"Dim 1 of the {re.escape(path)} has 20: .* with \.swapaxes\(0, 1\)\.$"
    with pytest.raises(DataError, match=words):
        model.fit(x, y, verbose=0)
    with pytest.raises(DataError, match=r"Dim 0 must be the same for all\.$"):
        model.fit(x, y[:, :5] if path == "targets" else y[:15], verbose=0)
    with pytest.raises(DataError, match=r"Dim 0 must be the same for all\.$"):
        model.fit(torch.zeros(20, 3), torch.zeros(20, 1), sample_weight=torch.ones(3))
