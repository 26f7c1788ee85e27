# SPDX-License-Identifier: Apache-2.0
"""Values that a program was compiled with: a change counts, or is said."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import random
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from ipufit import Callback, ConfigError, IPUModel, poptorch
from ipufit.errors import BakedInWarning
from tests import reference
from tests.resume import settings_of_another_module as settings

X, Y = reference.samples(32)


def losses(model):
    """Of a fit, and of its validation by the program that evaluates."""
    history = model.fit(X, Y, validation_data=(X, Y), verbose=0).history
    return [*history["loss"], *history["val_loss"]]


# Where values are ---------------------------------------------------------------------

SETTING = 1.0
CALLS = 0


class Of(nn.Module):
    """Multiplies the outputs of a network by a number that `read` finds."""

    factor = 1.0

    def __init__(self, **attributes):
        super().__init__()
        self.net = reference.network()
        vars(self).update(attributes)

    def read(self):
        return self.factor

    def forward(self, x):
        return self.net(x) * self.read()


class Config:
    def __init__(self):
        self._k = 1.0
        self.unread = 0

    def __del__(self):  # `forward` doesn't call it
        self.last = self.unread

    @property
    def k(self):
        return self._k


class Slotted:
    __slots__ = ("cache", "k")  # `cache` isn't set

    def __init__(self):
        self.k = 1.0


class Compared(Config):
    def __eq__(self, other):
        return self._k == other


class OwnGet(dict):
    def get(self, key):
        return self[key]


class Fields:
    """As configs of packages are: fields in a private dict, found by `__getattr__`."""

    def __init__(self, **fields):
        vars(self)["_fields"] = fields

    def __getattr__(self, name):
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(name) from None


def of_known_objects():
    big, small = Config(), Config()
    small._k = 3.0
    return {"big": big, "small": small, "holder": [big]}


def of_a_closure():
    factor = 1.0

    def told():
        return factor

    def change(_, value):
        nonlocal factor
        factor = value

    return {"told": told, "change": change}


def with_a_default(self, k=1.0):
    return k


def imported(self):
    from tests.resume import settings_of_another_module as module

    return module.SCALE


def set_at_times(self):
    if not self.kept:
        self.kept = 5.0
    return self.kept


def set_unless_it_fails(self):
    try:
        self.kept = float(self.text)
    except ValueError:
        self.text = ""
    return self.kept


def put(name, key=None):
    def change(module, value):
        owner = getattr(module, name)
        if key is None:
            setattr(module, name, value)
        elif isinstance(owner, dict):
            owner[key] = value
        else:
            setattr(owner, key, value)

    return change


def attributes(**kinds):
    """Attributes of a module, made by functions."""
    return lambda: {name: make() for name, make in kinds.items()}


def one():
    return 1.0


# How the number is read and changed, the attributes, and how a message calls it.
PLACES = {
    "an unset slot": (
        lambda self: self.cfg.cache if hasattr(self.cfg, "cache") else self.cfg.k,
        put("cfg", "cache"),
        attributes(cfg=Slotted), r"module\.cfg\.cache was missing",
    ),
    "__eq__": (
        lambda self: 1.0 + (self.cfg == 3.0), put("cfg", "_k"),
        attributes(cfg=Compared), r"module\.cfg\._k was 1\.0",
    ),
    "known objects": (
        lambda self: self.holder[0].k * self.big.k + self.small.k,
        lambda m, value: m.holder.__setitem__(0, m.small if value == 3.0 else m.big),
        of_known_objects, r"module\.holder\[0\] was module\.big",
    ),
    "keys of a defaultdict": (  # nobody asks it for another
        lambda self: sum(self.d),
        lambda m, value: (m.d.clear(), m.d.update({value: 1.0})),
        lambda: {"d": collections.defaultdict(pytest.fail, {1.0: 1.0})},
        r"module\.d\[1\.0\] was 1\.0",
    ),
    "__getattr__": (
        lambda self: self.cfg.k, lambda m, value: m.cfg._fields.update(k=value),
        lambda: {"cfg": Fields(k=1.0)}, r"\bk'?\]? was 1\.0",
    ),
    "a dict with a get of its own": (
        lambda self: self.d.get("t"), put("d", "t"),
        lambda: {"d": OwnGet(t=1.0)}, r"module\.d\['t'\] was 1\.0",
    ),
    "a global": (
        lambda self: SETTING, lambda m, value: globals().update(SETTING=value),
        dict, r"global SETTING was 1\.0",
    ),
    "another module": (
        imported, lambda m, value: setattr(settings, "SCALE", value),
        dict, r"SCALE was 1\.0",
    ),
    "a module by a shorter name": (
        lambda self: settings.SCALE,
        lambda m, value: setattr(settings, "SCALE", value), dict, r"SCALE was 1\.0",
    ),
    "a class, hidden": (Of.read, put("factor"), dict, r"module\.factor was missing"),
    "a default": (
        with_a_default,
        lambda m, value: setattr(with_a_default, "__defaults__", (value,)),
        dict, r"read\.__defaults__ was \(1\.0,\)",
    ),
    "a closure": (
        lambda self: self.told(), lambda m, value: m.change(m, value),
        of_a_closure, r"closure variable factor was 1\.0",
    ),
    "a computed name": (
        lambda self: getattr(self, f"k{1}"), put("k1"),
        attributes(k1=one), r"module\.k1 was 1\.0",
    ),
    "a lambda in a list": (
        lambda self: sum([(lambda: self.cfg._k)() for _ in range(1)]), put("cfg", "_k"),
        attributes(cfg=Config), r"module\.cfg\._k was 1\.0",
    ),
    "set at times": (
        set_at_times, put("kept"), attributes(kept=one), r"module\.kept was 1\.0"
    ),
    "set unless it fails": (
        set_unless_it_fails, put("kept"),
        attributes(kept=one, text=str), r"module\.kept was 1\.0",
    ),
    "forward": (
        Of.read,
        lambda m, value: setattr(m, "forward", lambda x: m.net(x) * value),
        dict, r"module\.forward was missing",
    ),
    "forward of a part": (
        Of.read,
        lambda m, value: setattr(
            m.net[2],
            "forward",
            lambda x: nn.functional.linear(x, m.net[2].weight, m.net[2].bias) * value,
        ),
        dict, r"module\.net\.2\.forward was missing",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _values_return():
    yield
    globals()["SETTING"] = Of.factor = settings.SCALE = 1.0
    with_a_default.__defaults__ = (1.0,)


def plain(module):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(X), Y))


def still(module, loss="cross_entropy"):
    model = IPUModel(module)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.0), loss)
    return model


@pytest.mark.parametrize("place", PLACES)
def test_a_change_counts_between_runs_and_is_refused_in_a_run(place, moves):
    read, change, attributes, path = PLACES[place]
    # A class of its own, whose code reads the number.
    module = type("Read", (Of,), {"read": read} if read is not Of.read else {})
    model = still(module(**attributes()))
    assert losses(model) == pytest.approx([plain(model.module)] * 2, rel=1e-5)
    before = moves["compiled"]
    losses(model)
    assert moves["compiled"] == before  # nothing is compiled again without a change
    in_run = Callback()
    in_run.on_train_batch_end = lambda *_: change(model.module, 3.0)
    run = {"batch_size": 8, "verbose": 0}
    with pytest.raises(ConfigError, match=f"{path}.* when the model was compiled"):
        model.fit(X, Y, callbacks=in_run, **run)
    assert losses(model) == pytest.approx([plain(model.module)] * 2, rel=1e-5)
    in_run = Callback()
    in_run.on_test_batch_end = lambda *_: change(model.module, 2.0)
    with pytest.raises(ConfigError, match=r"was .* when the model was compiled"):
        model.evaluate(X, Y, callbacks=in_run, **run)


class OfAVocabulary(Of):
    def read(self):
        return self.numbers["999"]


def test_a_large_container_counts_between_runs():
    model = still(OfAVocabulary(numbers={str(i): 1.0 for i in range(1000)}))
    for value in (1.0, 3.0):
        model.module.numbers["999"] = value
        assert losses(model) == pytest.approx([plain(model.module)] * 2, rel=1e-5)


def anew():
    return [lambda: 1.0] * 2


class Loose(Of):
    """Holds what no number comes from, and changes it all the time."""

    def __init__(self):
        super().__init__()
        self.twice = anew()
        self.lock, self.random = threading.Lock(), random.Random(0)
        self.itself, self.shapes = weakref.ref(self), {}
        self.calls, self.owner = 0, None

    def read(self):
        self.calls += 1
        logging.getLogger("tests").debug("read")
        self.shapes[len(self.shapes)] = self.random.random()
        with self.lock:
            return self.twice[0]()

    def forward(self, x):
        self.last = self.itself().read()
        return super().forward(x)


def test_what_is_no_value_may_change_at_any_time(moves):
    model = still(Loose())
    model.module.owner = model
    own = Callback()
    own.on_train_batch_begin = lambda *_: setattr(model.module, "twice", anew())
    own.on_train_batch_end = lambda *_: setattr(own, "seen", model.module.random)
    for _ in range(2):
        model.fit(X, Y, batch_size=8, validation_data=(X, Y), callbacks=own, verbose=0)
    assert moves["compiled"] == 2


def test_a_submodule_replaced_in_mid_fit_is_refused():
    model = still(Of())
    change = Callback()
    change.on_train_batch_end = lambda *_: setattr(
        model.module, "net", reference.network()
    )
    run = {"epochs": 2, "validation_data": (X, Y), "callbacks": change, "verbose": 0}
    with pytest.raises(ConfigError, match=r"module\.net was a Sequential"):
        model.fit(X, Y, **run)


class OfAnObject(Of):
    def read(self):
        return self.cfg.k


def test_what_no_code_reads_may_change_at_any_time():
    model = still(OfAnObject(cfg=Config()))
    change = Callback()

    def count(*_):
        model.module.cfg.unread += 1
        model.module.seen = ["anything"]

    change.on_train_batch_end = count
    model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)
    assert model.module.cfg.unread == 4


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, keyword=1.0):
        result = function(*args)
        return result * keyword

    return wrapper


class Named(Of):
    """Uses names of every kind."""

    in_class = 1.0

    def __init__(self):
        super().__init__(attribute=1.0)

    def method(self, argument):
        import collections.abc as imported_as
        from math import pi as imported

        class Inner:
            entry = 1.0
            twice = entry * 2

        def nested(inside):
            return inside * local if imported and imported_as else 0.0

        local = self.attribute * self.in_class * Inner.twice
        return nested(argument) + sum([0 * number for number in (1, 2)])

    @wrapped
    def forward(self, x):
        outputs = super().forward(x)
        outputs = outputs - outputs.mean(1, keepdim=True)
        return outputs * self.method(argument=1.0) * float(hasattr(self, "text"))


def names_of(code):
    """All names of a function and of those inside it, of whatever kind."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    inner = [one for one in code.co_consts if isinstance(one, type(code))]
    return names.union(*map(names_of, inner))


def test_globals_that_are_only_called_like_other_names_may_change(moves):
    method, forward = Named.method.__code__, Named.forward
    codes = [method, forward.__code__, forward.__wrapped__.__code__]
    names = set().union(*map(names_of, codes)) - {"super", "sum", "float", "hasattr"}
    names = {name for name in names if not name.startswith(("__", "."))}
    assert names > {"attribute", "in_class", "method", "argument", "imported", "pi"}
    assert names > {"entry", "nested", "inside", "local", "number", "mean", "keyword"}
    names = [*sorted(names - vars(reference).keys() - globals().keys()), "text"]
    change = Callback()
    change.on_train_batch_end = lambda batch, logs: globals().update(
        dict.fromkeys(names, batch)
    )
    model = still(Named())
    try:
        for _ in range(2):
            model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)
            model.train_on_batch(X, Y)
    finally:
        for name in names:
            del globals()[name]
    assert moves["compiled"] == 2  # of batches of two sizes


class WithLoss(nn.Module):
    """Counts its calls where no snapshot looks."""

    def __init__(self):
        super().__init__()
        self.net, self.loss = reference.network(), nn.CrossEntropyLoss()

    def forward(self, x, y):
        sys.num_calls += 1
        outputs = self.net(x)
        return outputs, self.loss(outputs, y)


def test_a_global_with_the_name_of_an_attribute_calls_nothing(monkeypatch):
    monkeypatch.setattr(sys, "num_calls", 0, raising=False)
    model = reference.compiled(WithLoss(), loss=None)
    globals()["loss"] = 0.0
    try:
        for batch in range(4):  # the loop of Keras: loss = model.train_on_batch(...)
            globals()["loss"] = model.train_on_batch((X, Y))["loss"]
            if batch == 0:
                sys.num_calls = 0
    finally:
        del globals()["loss"]
    assert sys.num_calls == 0


class Global(Of):
    def read(self):
        return SETTING


def test_an_attribute_that_is_only_called_like_a_global_may_change():
    change = Callback()
    change.on_train_batch_end = lambda batch, _: setattr(
        change.model.module, "SETTING", batch
    )
    still(Global()).fit(X, Y, batch_size=8, callbacks=change, verbose=0)


class Sized(Of):
    def read(self):
        return self.net[0].weight.sum().div(2).size().numel() * self.factor()


def test_a_number_with_the_name_of_a_called_method_may_change():
    model = still(Sized(size=0, div=1.0, factor=lambda: 1.0))
    change = Callback()
    change.on_train_batch_end = lambda batch, _: vars(model.module).update(
        size=batch, div=batch
    )
    model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)
    change.on_train_batch_end = lambda *_: setattr(model.module, "factor", lambda: 2.0)
    with pytest.raises(ConfigError, match=r"module\.factor"):
        model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)


def test_a_value_that_makes_a_run_compile_anew_is_named(capsys):
    model = still(Global())
    for value in (0.0, 1.0, 1.0):
        globals()["SETTING"] = value
        model.fit(X, Y, verbose=2)
        model.evaluate(X, Y, verbose=2)
        model.train_on_batch(X[:8], Y[:8])
    line = "Compiling anew: global SETTING was 0.0 and is 1.0 now\n"
    shown = capsys.readouterr()
    assert shown.out.count(line) == 2
    assert shown.out.count("anew") == 2
    assert shown.err == f"ipufit: {line}"


HOOKS = ["on_epoch_begin", "on_epoch_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_change_in_any_hook_of_a_fit_is_refused(hook):
    model = still(OfAnObject(cfg=Config()))
    change = Callback()
    setattr(change, hook, lambda *_: setattr(model.module.cfg, "_k", 7.0))
    run = {"batch_size": 8, "epochs": 2, "verbose": 0}
    with pytest.raises(ConfigError, match=r"module\.cfg\._k was 1\.0.* is 7\.0"):
        model.fit(X, Y, callbacks=change, **run)


class Counting(Of):
    """Counts how often Python runs it, and keeps what it computes."""

    def __init__(self):
        super().__init__(calls=0, seen={}, kind="plain")
        self.register_buffer("places", torch.arange(len(X[0])))

    def forward(self, x):
        global CALLS
        CALLS += 1
        self.calls += 1
        self.hidden = super().forward(x[:, self.places])
        self.seen["hidden"] = self.hidden
        return self.hidden * (2 if self.kind == "plain" else 1)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_what_forward_counts_and_keeps_is_no_change(monkeypatch, takes_turns):
    if takes_turns:
        monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    model = reference.compiled(Counting())
    looked = []

    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            same = "".join(["pl", "ain"])  # another object has all values compared
            self.model.module.kind = same

        def on_epoch_end(self, epoch, logs=None):
            module = self.model.module.eval()
            with torch.no_grad():
                looked.append(module(X[:5]).mean())
            module.train()

    fit = {"batch_size": 8, "verbose": 0, "validation_data": (X, Y)}
    for _ in range(2):
        model.fit(X, Y, epochs=2, callbacks=Look(), **fit)
        model.predict(X[:5], batch_size=5, verbose=0)
    assert len(set(looked)) == 4
    assert model.module.calls > 4
    assert model.module.seen["hidden"].shape == (5, 4)
    model.detach()


class Alternating(Of):
    steps = 0

    def read(self):
        self.steps += 1
        return 2.0 if self.steps % 2 else 1.0


def test_a_number_that_forward_changes_and_reads_is_said():
    model = still(Alternating(steps=0))
    with pytest.warns(BakedInWarning, match=r"changes module\.steps \(from 0 to 1\)"):
        model.fit(X, Y, batch_size=8, verbose=0)


class Warming(Of):
    steps = 0

    def read(self):
        self.steps += 1
        return 1.0 if self.steps > 100 else 0.1


def test_a_number_that_forward_changes_and_compares_is_said():
    with pytest.warns(BakedInWarning, match=r"changes module\.steps \(from 0 to 1\)"):
        still(Warming(steps=0)).fit(X, Y, batch_size=8, verbose=0)


class Counted(Of):
    def read(self):
        self.calls += 1
        return self.factor


def test_a_count_that_forward_keeps_may_be_changed_by_others():
    model = still(Counted(calls=0))
    change = Callback()
    change.on_train_batch_end = lambda batch, _: setattr(model.module, "calls", -batch)
    model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)
    change.on_train_batch_end = lambda batch, _: setattr(model.module, "factor", 2.0)
    with pytest.raises(ConfigError, match=r"module\.factor was missing .* is 2\.0 now"):
        model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)


class Cut(Of):
    def forward(self, x):
        return self.net(x).clamp(max=self.limit)


class OnDeviceOnly(Of):
    def read(self):
        return self.limit if poptorch.isRunningOnIpu() else 1.0


@pytest.mark.parametrize("kind", [Cut, OnDeviceOnly])
def test_a_change_that_shows_in_no_result_on_the_host_is_refused(kind):
    model = still(kind(limit=1e4))
    change = Callback()
    change.on_train_batch_end = lambda *_: setattr(model.module, "limit", 1e5)
    with pytest.raises(ConfigError, match=r"module\.limit was 10000\.0"):
        model.fit(X, Y, batch_size=8, callbacks=change, verbose=0)


class Drawing(Of):
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
    model = still(Drawing(draw=draw))
    with pytest.warns(BakedInWarning, match=f"draws random numbers from {source}"):
        getattr(model, use)(X, Y, batch_size=8, verbose=0)


def test_random_numbers_of_torch_in_forward_are_the_device_s():
    model = still(Drawing(draw=lambda: torch.rand(1)))
    model.fit(X, Y, batch_size=8, shuffle=True, verbose=0)


class NoisyOnHost(Of):
    def forward(self, x):
        return self.net(x) * self.noise.sample().to(x.device)


@pytest.mark.parametrize("use", ["fit", "evaluate"])
def test_a_sample_of_a_distribution_of_the_host_is_said(use):
    model = still(NoisyOnHost(noise=torch.distributions.Uniform(0.0, 1.0)))
    with pytest.warns(BakedInWarning, match=r"samples module\.noise, a Uniform that"):
        getattr(model, use)(X, Y, batch_size=8, verbose=0)
    assert not {"sample", "rsample"} & vars(model.module.noise).keys()
    getattr(model, use)(X, Y, batch_size=8, verbose=0)  # says it once


class OfATable(Of):
    def read(self):
        return float(self.table[149][149])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: [*([1.0] * 150 for _ in range(149)), [np.ones(())] * 150],
            marks=pytest.mark.slow,
        ),
        lambda: np.ones((2049, 2048), np.float32),
        lambda: torch.ones(2049, 2048),
    ],
    ids=["objects", "array", "tensor"],
)
def test_what_is_too_large_to_compare_in_a_run_counts_between_runs(make, moves):
    model = still(OfATable(table=make()))
    losses(model)
    model.module.table[149][149] = 3.0
    for _ in range(2):
        assert losses(model) == pytest.approx([plain(model.module)] * 2, rel=1e-5)
        assert moves["compiled"] == 4


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    calls: int = 0


class Configured(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 4)
        self.settings = Settings()

    def forward(self, x):
        return super().forward(x) * self.settings.scale


def test_other_fields_of_a_dataclass_may_change():
    class Counts(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.settings.calls += 1

    class Changes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.settings.scale = 3.0

    model = reference.compiled(Configured())
    model.fit(X, Y, batch_size=8, callbacks=[Counts()], verbose=0)
    assert model.module.settings.calls
    with pytest.raises(ConfigError, match=r"scale was 2.0 .* and is 3.0 now"):
        model.fit(X, Y, batch_size=8, epochs=2, callbacks=[Changes()], verbose=0)
