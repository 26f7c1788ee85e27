# SPDX-License-Identifier: Apache-2.0
"""Values that a program was compiled with: a change counts, or is said."""

from __future__ import annotations

import functools
import logging
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from ipufit import BakedInWarning, Callback, ConfigError, IPUConfig, IPUModel
from tests import reference

X, Y = reference.samples(32)


class Scaled(nn.Module):
    """Reads its numbers in `forward`, and counts how often Python runs it."""

    def __init__(self):
        super().__init__()
        self.net = reference.network()
        self.scale = 1.0
        self.kind = "plain"
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        outputs = self.net(x) * self.scale
        return -outputs if self.kind == "negative" else outputs


def compiled(config=None):
    model = IPUModel(Scaled(), config or IPUConfig())
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    model.compile(optimizer, "cross_entropy")
    return model


def expected(model):
    with torch.no_grad():
        outputs = model.module.net(X) * model.module.scale
        if model.module.kind == "negative":
            outputs = -outputs
        return float(nn.functional.cross_entropy(outputs, Y))


def losses(model):
    """Of a fit with a validation, and of an evaluation."""
    history = model.fit(X, Y, validation_data=(X, Y), verbose=0).history
    return [
        *history["loss"],
        *history["val_loss"],
        model.evaluate(X, Y, verbose=0)["loss"],
    ]


def test_a_change_between_fits_counts():
    model = compiled()
    assert losses(model) == pytest.approx([expected(model)] * 3, rel=1e-5)
    for name, value in (("scale", 5.0), ("kind", "negative"), ("scale", 0.5)):
        setattr(model.module, name, value)
        assert losses(model) == pytest.approx([expected(model)] * 3, rel=1e-5)


def test_a_change_counts_in_evaluate_and_predict_alone_too():
    model = compiled()
    model.evaluate(X, Y, verbose=0)
    model.module.scale = 3.0
    loss = model.evaluate(X, Y, verbose=0)["loss"]
    assert loss == pytest.approx(expected(model), rel=1e-5)
    model.module.scale = 2.0
    with torch.no_grad():
        torch.testing.assert_close(model.predict(X, verbose=0), model.module.net(X) * 2)


class Change(Callback):
    def __init__(self, hook, name, value):
        def change(*_):
            setattr(self.model.module, name, value)

        setattr(self, hook, change)


HOOKS = ["on_train_batch_end", "on_epoch_begin", "on_epoch_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_change_in_mid_fit_is_an_error_that_names_it(hook):
    model = compiled()
    message = r"module\.scale was 1\.0.* is 7\.0"
    with pytest.raises(ConfigError, match=message):
        model.fit(
            X,
            Y,
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=Change(hook, "scale", 7.0),
        )
    history = model.fit(X, Y, verbose=0).history  # the new one counts from now on
    assert history["loss"] == [pytest.approx(expected(model), rel=1e-5)]


def test_a_change_in_mid_evaluation_is_an_error_too():
    model = compiled()
    change = Change("on_test_batch_end", "kind", "negative")
    with pytest.raises(ConfigError, match=r"module\.kind was 'plain'"):
        model.evaluate(X, Y, batch_size=8, callbacks=change, verbose=0)


class Placed(Scaled):
    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(len(X[0])))

    def forward(self, x):
        return super().forward(x[:, self.places])


def test_a_buffer_that_poptorch_has_wrapped_is_no_change():
    model = IPUModel(Placed(), IPUConfig())
    model.compile("sgd", "cross_entropy")

    class Anew(Callback):
        def on_train_batch_end(self, batch, logs):
            same = "".join(["pl", "ain"])  # another object has all values compared
            self.model.module.kind = same

    history = model.fit(X, Y, batch_size=8, verbose=0, callbacks=Anew()).history
    assert len(history["loss"]) == 1


@pytest.mark.parametrize("takes_turns", [False, True])
def test_counters_of_forward_itself_are_no_change(monkeypatch, takes_turns):
    if takes_turns:
        monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    model = compiled()
    for _ in range(2):
        history = model.fit(
            X,
            Y,
            batch_size=8,
            epochs=3,
            validation_data=(X, Y),
            validation_batch_size=8,
            verbose=0,
        )
        assert len(history.epoch) == 3
        model.predict(X[:5], batch_size=5, verbose=0)
    assert model.module.calls > 0
    model.detach()


def test_dropout_may_change_between_fits():
    module = nn.Sequential(nn.Dropout(0.0), reference.network())
    model = IPUModel(module, IPUConfig(seed=1))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.0), "cross_entropy")
    plain = model.fit(X, Y, verbose=0).history["loss"]
    module[0].p = 0.9
    assert model.fit(X, Y, verbose=0).history["loss"] != plain


# Where values are ---------------------------------------------------------------------

SETTING = 1.0
NESTED = types.SimpleNamespace(deep={"k": [1.0]})


class Of(nn.Module):
    """Multiplies the outputs of a network by a number that `read` finds."""

    def __init__(self):
        super().__init__()
        self.net = reference.network()

    def read(self):
        raise NotImplementedError

    def forward(self, x):
        return self.net(x) * self.read()


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0


class Config:
    def __init__(self):
        self._k = 1.0
        self.unread = 0

    @property
    def k(self):
        return self._k


class OfAnObject(Of):
    def __init__(self):
        super().__init__()
        self.cfg = Config()

    def read(self):
        return self.cfg.k

    def change(self, value):
        self.cfg._k = value


class OfSlots(Of):
    def __init__(self):
        super().__init__()
        self.cfg = Slotted()

    def read(self):
        return self.cfg.k

    def change(self, value):
        self.cfg.k = value


class OfADict(Of):
    def __init__(self):
        super().__init__()
        self.d = {"t": {"u": 1.0}}

    def read(self):
        return self.d["t"]["u"]

    def change(self, value):
        self.d["t"]["u"] = value


class OfADictWithAGetOfItsOwn(Of):
    class Settings(dict):
        def get(self, key):
            return self[key]

    def __init__(self):
        super().__init__()
        self.d = self.Settings(t=1.0)

    def read(self):
        return self.d.get("t")

    def change(self, value):
        self.d["t"] = value


class OfADataList(Of):
    def __init__(self):
        super().__init__()
        self.configs = [types.SimpleNamespace(k=1.0)]

    def read(self):
        return self.configs[0].k

    def change(self, value):
        self.configs[0].k = value


class OfAGlobal(Of):
    def read(self):
        return SETTING

    def change(self, value):
        globals()["SETTING"] = value


class OfAGlobalObject(Of):
    def read(self):
        return NESTED.deep["k"][0]

    def change(self, value):
        NESTED.deep["k"][0] = value


class OfAClass(Of):
    factor = 1.0

    def read(self):
        return self.factor

    def change(self, value):
        type(self).factor = value


class OfAHiddenClassValue(OfAClass):
    def change(self, value):
        self.factor = value


class OfADefault(Of):
    def read(self, k=1.0):
        return k

    def change(self, value):
        type(self).read.__defaults__ = (value,)


class OfAClosure(Of):
    def __init__(self):
        super().__init__()
        factor = 1.0

        def told():
            return factor

        def change(value):
            nonlocal factor
            factor = value

        self.told, self.change = told, change

    def read(self):
        return self.told()


class OfAPartial(Of):
    def __init__(self):
        super().__init__()
        self.told = functools.partial(lambda a, b: a * b, 1.0, b=1.0)

    def read(self):
        return self.told()

    def change(self, value):
        self.told.keywords["b"] = value


class OfAnAttributeByName(Of):
    def __init__(self):
        super().__init__()
        self.k1 = 1.0

    def read(self):
        return getattr(self, f"k{1}")

    def change(self, value):
        self.k1 = value


class OfATensor(Of):
    def __init__(self):
        super().__init__()
        self.constants = [torch.ones(())]

    def read(self):
        return float(self.constants[0])

    def change(self, value):
        self.constants[0].fill_(value)


class OfAnArray(Of):
    def __init__(self):
        super().__init__()
        self.table = np.ones(3, np.float32)

    def read(self):
        return float(self.table[1])

    def change(self, value):
        self.table[1] = value


class OfAHook(Of):
    def read(self):
        return 1.0

    def change(self, value):
        self.net.register_forward_hook(lambda net, inputs, outputs: outputs * value)


class OfAForward(Of):
    def read(self):
        return 1.0

    def change(self, value):
        self.forward = lambda x: self.net(x) * value


class OfAMethod(Of):
    def read(self):
        return 1.0

    def change(self, value):
        self.read = lambda: value


PLACES = [
    OfAnObject,
    OfSlots,
    OfADict,
    OfADictWithAGetOfItsOwn,
    OfADataList,
    OfAGlobal,
    OfAGlobalObject,
    OfAClass,
    OfAHiddenClassValue,
    OfADefault,
    OfAClosure,
    OfAPartial,
    OfAnAttributeByName,
    OfATensor,
    OfAnArray,
    OfAHook,
    OfAForward,
    OfAMethod,
]


@pytest.fixture(autouse=True)
def _values_return():
    yield
    globals()["SETTING"] = NESTED.deep["k"][0] = OfAClass.factor = 1.0
    OfADefault.read.__defaults__ = (1.0,)


def plain(module):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(X), Y))


def still(module, loss="cross_entropy"):
    model = IPUModel(module)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.0), loss)
    return model


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_change_between_runs_counts_wherever_it_is(place):
    model = still(place())
    for value in (1.0, 3.0):
        if value != 1.0:
            model.module.change(value)
        assert losses(model) == pytest.approx([plain(model.module)] * 3, rel=1e-5)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_batch_end"])
def test_a_change_in_mid_run_is_refused_wherever_it_is(place, hook):
    model = still(place())
    change = Callback()
    setattr(change, hook, lambda *_: model.module.change(3.0))
    run = {"batch_size": 8, "callbacks": change, "verbose": 0}
    with pytest.raises(ConfigError, match=r"was .* when the model was compiled"):
        (model.fit if "train" in hook else model.evaluate)(X, Y, **run)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_nothing_is_compiled_again_without_a_change(place, counted):
    model = still(place())
    losses(model)
    before = counted()
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy")
    losses(model)
    assert counted() == before


@pytest.fixture
def counted(monkeypatch):
    """How many programs were compiled."""
    from ipufit._poptorch import poptorch

    made = []
    compile_ = poptorch.PoplarExecutor.compile

    def compiling(self, *args, **kwargs):
        made.append(self)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(poptorch.PoplarExecutor, "compile", compiling)
    return lambda: len(made)


class Weighted:
    """A loss that is an object, with a number that it reads."""

    def __init__(self):
        self.weight = 1.0

    def __call__(self, outputs, targets):
        return self.weight * nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("form", ["object", "closure", "partial"])
def test_the_values_of_a_loss_count_too(form):
    weighted = Weighted()
    loss = {
        "object": weighted,
        "closure": lambda outputs, targets: weighted(outputs, targets),
        "partial": functools.partial(weighted),
    }[form]
    model = still(reference.network(), loss)
    plain_loss = plain(model.module)
    for weight in (1.0, 4.0):
        weighted.weight = weight
        (got,) = model.fit(X, Y, verbose=0).history["loss"]
        assert got == pytest.approx(weight * plain_loss, rel=1e-5)
    change = Callback()
    change.on_train_batch_end = lambda *_: setattr(weighted, "weight", 2.0)
    with pytest.raises(ConfigError, match=r"\.weight was 4\.0 .* is 2\.0 now"):
        model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)


def test_the_values_of_a_metric_count_too():
    scale = [1.0]
    model = still(reference.network())

    def scaled(outputs, targets):
        return torch.ones_like(outputs[:, 0]) * scale[0]

    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    model.compile(optimizer, "cross_entropy", metrics=[scaled])
    for value in (1.0, 5.0):
        scale[0] = value
        assert model.fit(X, Y, verbose=0).history["scaled"] == [value]


class OfAVocabulary(Of):
    def __init__(self):
        super().__init__()
        self.numbers = {str(i): 1.0 for i in range(1000)}

    def read(self):
        return self.numbers["999"]


def test_a_large_container_counts_between_runs():
    model = still(OfAVocabulary())
    for value in (1.0, 3.0):
        model.module.numbers["999"] = value
        assert losses(model) == pytest.approx([plain(model.module)] * 3, rel=1e-5)


class Loose(Of):
    """Holds what no number comes from, and changes it all the time."""

    def __init__(self):
        super().__init__()
        self.lock, self.random = threading.Lock(), random.Random(0)
        self.itself, self.shapes = weakref.ref(self), {}
        self.calls, self.owner = 0, None

    def read(self):
        self.calls += 1
        logging.getLogger("tests").debug("read")
        self.shapes[len(self.shapes)] = self.random.random()
        with self.lock:
            return 1.0

    def forward(self, x):
        self.last = self.itself().read()
        return super().forward(x)


def test_what_is_no_value_may_change_at_any_time(counted):
    model = still(Loose())
    model.module.owner = model
    own = Callback()
    own.on_train_batch_end = lambda *_: setattr(own, "seen", model.module.random)
    for _ in range(2):
        model.fit(X, Y, batch_size=8, validation_data=(X, Y), callbacks=own, verbose=0)
    assert counted() == 2


def test_a_submodule_replaced_in_mid_fit_is_refused():
    model = still(OfAClass())
    change = Callback()
    change.on_train_batch_end = lambda *_: setattr(
        model.module, "net", reference.network()
    )
    run = {"epochs": 2, "validation_data": (X, Y), "callbacks": change, "verbose": 0}
    with pytest.raises(ConfigError, match=r"module\.net was a Sequential"):
        model.fit(X, Y, **run)


def test_what_no_code_reads_may_change_at_any_time():
    model = still(OfAnObject())
    change = Callback()

    def count(*_):
        model.module.cfg.unread += 1
        model.module.seen = ["anything"]

    change.on_train_batch_end = count
    model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)
    assert model.module.cfg.unread == 4


class Alternating(Of):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def read(self):
        self.steps += 1
        return 2.0 if self.steps % 2 else 1.0


def test_a_number_that_forward_changes_and_reads_is_said():
    model = still(Alternating())
    with pytest.warns(BakedInWarning, match=r"changes module\.steps \(from 0 to 1\)"):
        model.fit(X, Y, batch_size=8, verbose=0)


class Drawing(Of):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def read(self):
        return 1.0 + self.draw()


def layer_drop():
    return float(random.random() < 0.5)


def numpys():
    return float(np.random.rand())


@pytest.mark.parametrize(
    ("draw", "source"), [(layer_drop, "Python's random"), (numpys, r"numpy\.random")]
)
@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_random_numbers_of_python_s_in_forward_are_said(draw, source, use):
    model = still(Drawing(draw))
    with pytest.warns(BakedInWarning, match=f"draws random numbers from {source}"):
        getattr(model, use)(X, Y, batch_size=8, verbose=0)


def test_random_numbers_of_torch_in_forward_are_the_device_s():
    model = still(Drawing(lambda: torch.rand(1)))
    model.fit(X, Y, batch_size=8, shuffle=True, verbose=0)


class Noisy(Of):
    def __init__(self):
        super().__init__()
        self.noise = torch.distributions.Uniform(0.0, 1.0)


class NoisyOnHost(Noisy):
    def forward(self, x):
        return self.net(x) * self.noise.sample().to(x.device)


class NoisyOnDevice(Noisy):
    def forward(self, x):
        return self.net(x) * torch.distributions.Uniform(0.0, 1.0).sample()


@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_a_sample_of_a_distribution_of_the_host_is_said(use):
    model = still(NoisyOnHost())
    with pytest.warns(BakedInWarning, match=r"samples module\.noise, a Uniform that"):
        getattr(model, use)(X, Y, batch_size=8, verbose=0)
    assert not {"sample", "rsample"} & vars(model.module.noise).keys()
    getattr(model, use)(X, Y, batch_size=8, verbose=0)  # says it once


def test_a_distribution_that_forward_makes_is_the_device_s():
    model = still(NoisyOnDevice())
    model.fit(X, Y, batch_size=8, shuffle=True, verbose=0)


def test_beyond_the_bound_compile_makes_it_count(monkeypatch):
    monkeypatch.setattr("ipufit.engine.constants.DEPTH", 1)
    model = still(OfADict())
    losses(model)
    model.module.change(3.0)
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy")
    assert losses(model) == pytest.approx([plain(model.module)] * 3, rel=1e-5)


class Keeping(Scaled):
    """Keeps what it computes, for somebody to look at."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def forward(self, x):
        self.hidden = super().forward(x)
        self.seen["hidden"] = self.hidden
        return self.hidden * 2


def test_the_module_may_run_on_the_host_in_mid_fit_and_keep_what_it_computes():
    class Look(Callback):
        def on_epoch_end(self, epoch, logs=None):
            module = self.model.module.eval()
            with torch.no_grad():
                looked.append(module(X[:5]).mean())
            module.train()

    looked = []
    model = IPUModel(Keeping())
    model.compile("sgd", "cross_entropy")
    fit = {"batch_size": 8, "verbose": 0, "validation_data": (X, Y)}
    model.fit(X, Y, epochs=3, callbacks=Look(), **fit)
    assert len(set(looked)) == 3
    assert model.module.seen["hidden"].shape == (5, 4)
