# SPDX-License-Identifier: Apache-2.0
"""`PyDataset` passed as it is: the order of its batches, and its hooks."""

import keras
import pytest

import ipufit
from tests.keras.twins import compiled, data, networks

ROWS, SIZE = 48, 4
COUNT = ROWS // SIZE


class Batches(keras.utils.PyDataset):
    """Batches that note what is asked of them."""

    def __init__(self, events, name="t"):
        super().__init__()
        self.x, self.y = data(ROWS)
        self.events, self.name = events, name

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.events.append((self.name, index))
        rows = slice(SIZE * index, SIZE * (index + 1))
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.events.append(f"{self.name} ends")


class Begun(Batches):
    def on_epoch_begin(self):
        self.events.append(f"{self.name} begins")


def hooks(base, events):
    """A callback of either library, which notes epochs and validations."""

    class Noting(base):
        def on_epoch_begin(self, epoch, logs=None):
            events.append(f"epoch {epoch}")

        def on_epoch_end(self, epoch, logs=None):
            events.append(f"epoch {epoch} ended")

        def on_test_begin(self, logs=None):
            events.append("test")

    return Noting()


RUNS = {
    "fit": {"epochs": 3},
    "in order": {"epochs": 2, "shuffle": False},
    "steps": {"epochs": 4, "steps_per_epoch": 6},
    "one step": {"epochs": 2, "steps_per_epoch": 12},
}


def passes_of(events):
    """The numbers of the batches of `t`, in the order in which they came."""
    drawn = [event for event in events if isinstance(event, tuple)]
    return [index for name, index in drawn if name == "t"]


def kinds_of(events):
    """Events since the first epoch has begun; batches in a row are one.

    Keras calls `on_epoch_end` of a validation's data once more before each.
    """
    kinds = []
    for event in events[events.index("epoch 0") :]:
        kind = event if isinstance(event, str) else event[0]
        if kind == "test" and kinds[-1] == "v ends":
            kinds.pop()
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


@pytest.mark.parametrize("kind", [Batches, Begun])
@pytest.mark.parametrize("run", RUNS)
def test_batches_and_hooks_come_as_in_keras(kind, run):
    seen = []
    for model, base in zip(
        compiled(networks()), (keras.callbacks.Callback, ipufit.Callback)
    ):
        events = []
        model.fit(
            kind(events),
            validation_data=kind(events, "v"),
            callbacks=[hooks(base, events)],
            verbose=0,
            **RUNS[run],
        )
        seen.append(events)
    theirs, mine = seen
    assert kinds_of(mine) == kinds_of(theirs)
    order = passes_of(mine)[1:]  # the first batch was drawn to know its shapes
    passes = [order[at : at + COUNT] for at in range(0, len(order), COUNT)]
    assert all(sorted(one) == list(range(COUNT)) for one in passes)
    assert (passes[0] == passes[1]) == (run == "in order")


def test_evaluate_and_predict_go_in_order_and_call_the_hooks():
    _, model = compiled(networks())
    for use in (model.evaluate, model.predict):
        events = []
        use(Begun(events), verbose=0)
        assert passes_of(events)[1:] == list(range(COUNT))
        assert [events[1], events[-1]] == ["t begins", "t ends"]
        assert len(events) == COUNT + 3


@pytest.mark.parametrize("save", [{}, {"save_freq": 4}])
def test_a_resumed_run_goes_on_with_the_same_order(tmp_path, save):
    def run(epochs, folder, **arguments):
        keras.utils.set_random_seed(1)
        _, model = compiled(networks())
        saving = ipufit.ModelCheckpoint(str(tmp_path / folder / "{epoch}"), **save)
        events = []
        fit = {"epochs": epochs, "callbacks": [saving], "verbose": 0}
        return events, model.fit(Batches(events), **fit, **arguments).history

    events, history = run(4, "whole")
    run(2, "first")
    [last] = [path.name for path in sorted((tmp_path / "first").iterdir())][-1:]
    again, resumed = run(4, "rest", resume=tmp_path / "first" / last)
    assert resumed == history
    assert passes_of(again)[-COUNT:] == passes_of(events)[-COUNT:]


def test_padded_batches_come_in_another_order_too():
    events = []
    masked = ipufit.FixedSizeBatches(
        Batches(events), lambda batch: batch[0][:, 0] < 9.0
    )
    _, model = compiled(networks())
    model.fit(masked, epochs=2, verbose=0)
    order = passes_of(events)
    assert events.count("t ends") == 2
    assert sorted(order[:COUNT]) == sorted(order[COUNT:]) == list(range(COUNT))
    assert order[:COUNT] != order[COUNT:]
