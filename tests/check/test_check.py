# SPDX-License-Identifier: Apache-2.0
"""`model.check`: what it finds, where, and that it leaves everything as it was."""

from __future__ import annotations

import inspect
import io
import json
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import ipufit
from ipufit import IPUConfig, IPUModel, NotCompiledError
from ipufit._poptorch import operator_rules, poptorch
from ipufit.errors import DataError, UnsupportedError

X, Y = torch.zeros(16, 4), torch.zeros(16, 4)


def model_of(module, loss="mse", config=None, **compiled):
    model = IPUModel(module, config or IPUConfig(micro_batch_size=4))
    model.compile("sgd", loss, **compiled)
    return model


class Net(nn.Module):
    """A linear layer, and a function of it."""

    def __init__(self, function=None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.function = function
        self.table = torch.ones(4)
        self.count = 0

    def forward(self, x):
        y = self.layer(x)
        return y if self.function is None else self.function(self, y)


def found(module, x=X, y=Y, batch_size=8, **settings):
    return model_of(module, **settings).check(x, y, batch_size).findings


def refused(module, **settings):
    return [one for one in found(module, **settings) if one.severity == "refused"]


def marked_line(function):
    """Line of a function's source that ends with the comment `# here`."""
    lines, first = inspect.getsourcelines(function)
    [index] = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"test_check.py:{first + index}"


def reads_a_value(net, y):
    scale = y.mean().item()  # here
    return y * scale


def branches(net, y):
    if y.sum() > 0:  # here
        y = y * 2
    return y


def has_a_dynamic_shape(net, y):
    kept = y[y > 0]  # here
    return y + kept.mean()


def does_not_compile(net, y):
    places = torch.searchsorted(net.total, y)  # here
    return y + places


def mixes_devices(net, y):
    return y + net.table  # here


def reassigns(net, y):
    net.total = net.total + y.mean(0)  # here
    return y


def divides_whole_numbers(net, y):
    share = y.argmax(1) / 2  # here
    return y + share[:, None]


def upsamples(net, y):
    way = {"scale_factor": 2, "mode": "linear"}
    longer = nn.functional.interpolate(y[:, None], **way)  # here
    return y + longer.mean()


def asks_for_fake_tensors(net, y):
    if isinstance(y, torch._subclasses.FakeTensor):
        return y
    return y * (2 if y.max() > 0 else 1)  # here


def takes_a_triangle(net, y):
    upper = torch.triu(y)  # here
    return y + upper


def fails(net, y):
    return y @ torch.ones(3, 3, device=y.device)  # here


def waits(net, y):
    while y.norm() >= 0:  # here
        y = y / 2
    return y


@pytest.mark.parametrize(
    ("function", "topic", "words"),
    [
        (reads_a_value, "value", ".item() needs the value"),
        (branches, "control flow", "the truth value"),
        (asks_for_fake_tensors, "control flow", "the truth value"),
        (has_a_dynamic_shape, "shape", "indexing with a mask"),
        (does_not_compile, "operator", "torch.searchsorted (aten::searchsorted)"),
        (mixes_devices, "host tensor", "Expected an IPU tensor"),
        (reassigns, "buffer", "Buffer total is reassigned"),
        (divides_whole_numbers, "numbers", "Division of whole numbers"),
        (upsamples, "arguments", "Unsupported upsample mode"),
        (takes_a_triangle, "arguments", "torch.triu is only supported"),
        (fails, "program", "Net failed with inputs of float32 [4, 4]: "),
        (waits, "control flow", "the truth value"),
    ],
)
def test_refusals_have_their_line(function, topic, words):
    [one] = refused(Net(function))
    assert one.topic == topic
    assert words in one.what
    assert one.location == marked_line(function)
    assert one.path.endswith("tests/check/test_check.py")
    if function is waits:
        [end] = [f.what for f in found(Net(waits)) if "asked 100 times" in f.what]
        assert "for what is refused" in end


class Attending(nn.Module):
    """Stacks of torch's layers with masks, whose values torch may compare."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(4, 2, 1, 1, 4, 0.0, batch_first=True)
        self.register_buffer("mask", torch.zeros(1, 1))

    def forward(self, x):
        x = x[:, None]
        return self.layers(x, x, src_mask=self.mask, tgt_mask=self.mask)[:, 0]


def test_nothing_is_found_in_masks_of_torch_s_stacks():
    assert refused(Attending()) == []


def test_all_refusals_come_at_once_with_the_paths_of_their_modules():
    functions = [reads_a_value, branches, has_a_dynamic_shape, mixes_devices]
    network = nn.Sequential(Net(), nn.Sequential(*map(Net, functions)))
    findings = refused(network)
    assert {one.location for one in findings} == set(map(marked_line, functions))
    assert {one.module for one in findings} == {f"1.{index}" for index in range(4)}


def test_layers_of_torch_are_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2)

        def forward(self, x):
            return self.lstm(x[None])[0][0]  # here

    [one] = refused(Recurrent())
    assert one.module == "lstm"
    assert one.location == marked_line(Recurrent)
    assert one.what == "Only LSTM with 1 layer supported, not 2"
    assert one.advice == "Put several one after the other."


def test_what_fails_after_a_refusal_is_no_refusal():
    def fails(net, y):
        kept = y[y.sum(1) > 0]
        return kept.reshape(2, -1) @ y[:3]

    findings = found(Net(fails))
    assert [one.topic for one in findings if one.severity == "refused"] == ["shape"]
    words = [one.what for one in findings if one.topic == "program"]
    assert any("the program ended here" in what for what in words)
    assert any("wasn't checked" in what for what in words)


def test_what_is_refused_gives_the_values_of_the_data():
    seen = []

    def reads(net, y):
        while y.norm() > 1:
            y = y / 2
        seen.append(net.layer.bias.numpy().sum())
        seen.append((y[0] * 0 + net.total).sum().item())
        seen.append(y[:, net.total > 2].shape)
        return y

    net = Net(reads)
    net.total += torch.arange(4)
    findings = found(net, 100 * torch.ones(16, 4))
    topics = [one.topic for one in findings]
    assert topics == ["control flow", "value", "value", "shape"]
    assert seen == [pytest.approx(net.layer.bias.sum().item()), 6.0, (4, 1)]


def with_mask(net, y):
    return y * (y > 0)


def writes(net, y):
    copy = y.new_zeros(4, 4)
    copy[:, :2] = y[:, :2]
    view = copy.view(4, 2, 2).transpose(1, 2)
    first = view[:, :1]
    view[:, :1] = first * 2
    return view.reshape(4, 4)


TYPES = {
    "product": lambda net, y: y @ torch.eye(4, dtype=torch.int64, device=y.device),
    "whole layer": lambda net, y: net.layer((y > 0).long()),
    "softmax": lambda net, y: y * (y > 0).long().softmax(1),
    "mask": lambda net, y: y * (1 - (y > 0)),
    "view": lambda net, y: y.t().view(-1, 4),
    "plain": with_mask,
    "bits of masks": lambda net, y: y * ((y > 0) | (y < -1)),
    "gather": lambda net, y: y.gather(1, y.argsort(1)),
    "where": lambda net, y: torch.where(y > 0, 1, 0) * y,
    "views that are written to": writes,
}


@pytest.mark.parametrize("function", TYPES.values(), ids=TYPES)
def test_types_are_refused_where_fit_refuses_them(function):
    reports = found(Net(function))
    model = model_of(Net(function))
    try:
        model.fit(X, Y, batch_size=8, verbose=0)
    except DataError:
        [one] = [one for one in reports if one.severity == "refused"]
        assert "Net failed with inputs of float32 [4, 4]" in one.what
        named = " in `layer`, Linear(4, 4), which got int64 [4, 4]: " in one.what
        assert named is (function is TYPES["whole layer"])
    else:
        assert all(one.severity != "refused" for one in reports)


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (Net().requires_grad_(False), {}, "Nothing would be trained"),
        (Net(), {"loss": None}, "There is no loss"),
        (Net(), {"x": X[:3], "y": Y[:3]}, "`x` has 3 samples"),
        (Net(), {"batch_size": 7}, "batch_size=7"),
    ],
)
def test_errors_of_ipufit_are_refusals(module, settings, said):
    assert any(said in one.what for one in refused(module, **settings))


def test_what_fit_refuses_of_validations_is_refused_and_the_program_checked():
    model = model_of(Net(branches))
    findings = model.check(X, Y, 8, validation_updates=2).findings
    refusals = [one for one in findings if one.severity == "refused"]
    assert [one.topic for one in refusals] == ["config", "control flow"]
    assert "there is nothing to validate on" in refusals[0].what
    with pytest.raises(ipufit.ConfigError, match="nothing to validate on"):
        model.fit(X, Y, 8, validation_updates=2, verbose=0)


# Other numbers, and what is good to know ----------------------------------------------


def severities(findings, topic):
    return [one.severity for one in findings if one.topic == topic]


def test_batch_norm_sees_a_micro_batch():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    [one] = [f for f in found(net) if f.topic == "batch norm"]
    assert one.severity == "other numbers"
    assert "the 4 samples of a micro-batch, not over the 8 of a batch (1)" in one.what
    assert not severities(found(net, batch_size=4), "batch norm")


def test_samples_that_are_left_out():
    [one] = [f for f in found(Net(), X[:14], Y[:14]) if f.topic == "data"]
    assert one.severity == "good to know"
    assert "leaves out 6 of 14 samples" in one.what
    assert not severities(found(Net()), "data")


def test_calls_are_made_of_the_samples_that_a_split_leaves():
    x, model = torch.zeros(100, 4), model_of(nn.Linear(4, 4))
    report = model.check(x, x, 4, validation_split=0.2)
    assert model.batch_plan(x, x, 4, validation_split=0.2).updates == 20
    assert report.title == "Linear, 80 samples per call"


class UNet(nn.Module):
    """Halves an image once, and enlarges it to the size of what it skips."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 2, 3, padding=1) for n in (1, 2))
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        wide = self.first(x).relu()
        deep = self.second(nn.functional.max_pool2d(wide, 2, 2)).relu()
        size = wide.shape[-2:]
        deep = nn.functional.interpolate(deep, size=size, mode="bilinear")
        return self.last(torch.cat([wide, deep], 1))


def bert_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, "gelu", batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten())


def prelu_network():
    return nn.Sequential(nn.Linear(4, 4), nn.PReLU())


IMAGES = torch.zeros(16, 1, 10, 9)


@pytest.mark.parametrize(
    ("network", "x", "said"),
    [
        (bert_layer, X, "the tanh form"),
        (prelu_network, X, "has no gradient"),
    ],
)
def test_what_a_device_computes_otherwise(network, x, said):
    findings = found(network(), x, x)
    assert [one.severity for one in findings if one.topic == "numbers"] == [
        "other numbers"
    ]
    [one] = [one for one in findings if one.topic == "numbers"]
    assert said in one.what


def test_shapes_that_a_device_changes_are_followed():
    """Images of 8 and 9 columns can't be joined, which a compilation refuses."""
    findings = [one for one in found(UNet(), IMAGES, IMAGES) if one.topic == "numbers"]
    assert {one.severity for one in findings} == {"refused", "other numbers"}
    assert all("the factor of the height for both" in one.what for one in findings)
    with pytest.raises(poptorch.Error, match="Expected size 9 but got size 8"):
        model_of(UNet()).fit(IMAGES, IMAGES, batch_size=8, verbose=0)


def dropped(function=nn.functional.dropout, **arguments):
    return lambda net, y: y + function(y, **arguments)


GRAVE = {
    "prelu": lambda net, y: y + nn.functional.prelu(y, y.new_ones(1)),
    "cdist": lambda net, y: y + torch.cdist(y, y).mean(),
    "cdist of views": lambda net, y: y + torch.cdist(y[None], y[None]).mean(),
    "fmod": lambda net, y: y + torch.fmod(y, net.layer.bias),
    "norm": lambda net, y: y + y.detach().norm(p=0),
    "index_put": lambda net, y: torch.index_put(
        y, [torch.zeros(1, dtype=torch.long)], y[:1], accumulate=True
    ),
    "data": lambda net, y: y + (y.round() - y).data,
    "dropout": dropped(p=0.5, training=True),
    "dropout1d": dropped(nn.functional.dropout1d, p=0.5, training=True),
}
"""What a device computes gravely otherwise, by the name that a warning has."""
HARMLESS = [
    lambda net, y: nn.functional.leaky_relu(y),
    lambda net, y: y + nn.functional.prelu(y.detach(), y.new_ones(1)),
    lambda net, y: y + torch.cdist(y, y[:2]).mean(),
    lambda net, y: y + torch.cdist(y.detach(), y.detach()).mean(),
    lambda net, y: nn.functional.gelu(y),
    dropped(p=0.0, training=True),
    dropped(p=0.5, training=False),
]


def warnings_of_a_run(function, epochs=3):
    """Train and predict; return the warnings of either."""
    model, said = model_of(Net(function)), []
    for run in (
        lambda: model.fit(X + 1.0, Y, batch_size=8, epochs=epochs, verbose=0),
        lambda: [model.predict(X, batch_size=8, verbose=0) for _ in range(2)],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        is_grave = ipufit.errors.OtherNumbersWarning
        said.append([str(one.message) for one in caught if one.category is is_grave])
    return said


@pytest.mark.parametrize("name", GRAVE)
def test_fit_and_predict_warn_once_of_what_is_gravely_otherwise(name):
    kind = name.split()[0]
    trained, predicted = warnings_of_a_run(GRAVE[name])
    assert len(trained) == (not kind.startswith("dropout"))
    assert len(predicted) == (kind not in ("prelu", "cdist", "fmod", "data"))
    assert all(text.startswith(f"`{kind}` (") for text in [*trained, *predicted])
    if trained:  # check says the same, and nothing twice
        [one] = [one for one in found(Net(GRAVE[name])) if one.topic == "numbers"]
        assert one.what in trained[0]


@pytest.mark.parametrize("function", HARMLESS)
def test_fit_and_predict_are_silent_about_the_rest(function):
    assert warnings_of_a_run(function) == [[], []]


def test_a_slope_that_trains_is_enough_for_the_warning():
    weight = torch.ones(1, requires_grad=True)
    call = nn.functional.prelu, (X, weight), {}, X  # PopTorch's results need no grad
    grave = partial(operator_rules().grave_messages, *call)
    assert len(grave(is_training=True)) == 1
    with torch.no_grad():
        assert grave(is_training=True) == []


def test_many_layers_are_one_warning():
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.PReLU())]
    model = model_of(nn.Sequential(*layers, nn.Linear(4, 4)))
    with pytest.warns(
        ipufit.errors.OtherNumbersWarning, match="before it .* trains"
    ) as caught:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert len(caught) == 1


def test_the_warning_of_a_nan_loss_names_check():
    model = model_of(Net(lambda net, y: y.log()))
    with pytest.warns(ipufit.NonFiniteLossWarning, match="`ipufit check` names"):
        model.fit(X - 1.0, Y, batch_size=8, verbose=0)


def test_what_many_layers_have_is_one_finding():
    layers = [one for _ in range(3) for one in (nn.Linear(4, 4), nn.GELU())]
    [one] = [f for f in found(nn.Sequential(*layers)) if f.topic == "numbers"]
    assert one.what.endswith("(the first of 3 places)")
    assert one.module == "1"


def test_padding_by_reflection_can_not_be_trained():
    padded = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    network = nn.Sequential(nn.Conv2d(1, 1, 1), padded)
    [one] = [f for f in found(network, IMAGES, IMAGES) if f.severity == "refused"]
    assert "PadGradOp when mode is not" in one.what
    assert not refused(nn.Sequential(padded), x=IMAGES, y=IMAGES)


def test_hyper_parameters_that_popart_refuses():
    model = IPUModel(nn.Linear(4, 4), IPUConfig(micro_batch_size=4))
    model.compile(ipufit.Optimizer("rmsprop", eps=0.0), "mse")
    [one] = [f for f in model.check(X, Y, 8).findings if f.severity == "refused"]
    assert (one.topic, "Non-positive eps (0)" in one.what) == ("optimizer", True)


class Tied(nn.Module):
    """Uses one weight in its first and in its last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("customize", "words"),
    [
        (lambda options, _: options._Popart.setPatterns({"Foo": True}), "pattern Foo"),
        (
            lambda options, _: options._Popart.set("aliasZeroCopy", True),
            "enableExplicit",
        ),
        (
            lambda options, _: options.setAvailableMemoryProportion({"IPU0": 1.5}),
            "IPU0 is 1.5",
        ),
    ],
)
def test_settings_that_popart_refuses_are_found(customize, words):
    config = IPUConfig(micro_batch_size=4, customize=customize)
    assert [words in one.what for one in refused(Net(), config=config)] == [True]


def test_a_weight_on_two_ipus_of_a_pipeline():
    config = IPUConfig(pipeline=["first", "last"], micro_batch_size=2)
    [one] = [f for f in found(Tied(), config=config) if f.severity == "refused"]
    assert "first.weight" in one.what


def test_numbers_of_64_bits():
    wide = Net(lambda net, y: y + y.double().float())
    [one] = [f for f in found(wide) if f.topic == "dtype"]
    assert one.severity == "other numbers"
    assert "`double` gives float64" in one.what
    assert "lambda" not in one.location
    chain = Net(lambda net, y: (y.double() * 2).exp().mean(1, keepdim=True).sqrt())
    [one] = [f for f in found(chain) if f.topic == "dtype"]
    assert "`double` gives float64" in one.what
    constant = Net(lambda net, y: y + net.table.double().to(y.device))
    [one] = [f for f in found(constant) if f.topic == "dtype"]
    assert "`to` gives float64" in one.what
    ids = torch.zeros(16, dtype=torch.int64)
    [one] = [f for f in found(Net(), y=ids, loss="cross_entropy") if f.topic == "dtype"]
    assert one.severity == "good to know"
    assert one.what == "int64 becomes int32 on an IPU: targets"
    net = Net().double()
    [one] = [f for f in found(net) if f.topic == "dtype"]
    assert "layer.weight, layer.bias, total" in one.what


def test_values_that_are_baked_in_and_comparisons_of_whole_tensors():
    def counts(net, y):
        net.count += 1
        return y * net.count * random.random()

    def compares(net, y):
        return y * 2 if torch.equal(y, y + 1) else y  # here

    topics = severities(found(Net(counts)), "baked in")
    assert topics == ["other numbers"] * 2
    [one] = found(Net(compares))
    assert (one.severity, one.location) == ("other numbers", marked_line(compares))


def test_callbacks_that_hear_each_update_are_slow():
    class Listener(ipufit.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    model = model_of(Net())
    assert not severities(model.check(X, Y, 8).findings, "calls")
    report = model.check(X, Y, 8, callbacks=[Listener()])
    assert severities(report.findings, "calls") == ["slow"]


# Reports ------------------------------------------------------------------------------


def shown(report):
    file = io.StringIO()
    report.print(Console(file=file, width=200))
    return file.getvalue()


def test_a_report_has_the_gravest_first_as_a_table_as_lines_and_as_json():
    report = model_of(nn.Sequential(Net(), Net(reads_a_value))).check(X[:14], Y[:14], 8)
    refusal, other = report.findings
    assert (refusal.severity, other.severity) == ("refused", "good to know")
    assert report.of("refused") == (refusal,)
    place = f"{marked_line(reads_a_value)}, in 1"
    assert str(refusal) == f"refused: {refusal.what[:-1]} ({place}). {refusal.advice}"
    assert str(other) == f"good to know: {other.what} {other.advice}"
    text = shown(report)
    for one in report.findings:
        assert all(words in text for words in (one.severity, one.what, one.advice))
    assert refusal.location in text
    assert "Doesn't run: 1 refused, 1 good to know." in text
    data = json.loads(report.as_json())
    assert [type(refusal)(**one) for one in data["findings"]] == [refusal, other]
    assert data["is_refused"] is report.is_refused is True
    fine = model_of(Net()).check(X, Y, 8)
    assert shown(fine) == "Net, 16 samples per call: Nothing is refused.\n"
    assert json.loads(fine.as_json())["is_refused"] is fine.is_refused is False


# Everything stays as it was -----------------------------------------------------------


def test_nothing_changes():
    model = model_of(nn.Sequential(Net(reassigns), nn.BatchNorm1d(4), nn.Dropout()))
    before = {name: one.clone() for name, one in model.module.state_dict().items()}
    objects = [id(one) for one in model.module.parameters()]
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    method = nn.Module.__setattr__
    model.check(X, Y, 8)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])
    after = model.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [id(one) for one in model.module.parameters()] == objects
    assert nn.Module.__setattr__ is method
    assert not model.module._forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert model.history is None


def test_what_cannot_be_checked():
    with pytest.raises(NotCompiledError):
        IPUModel(Net()).check(X, Y)
    with pytest.raises(DataError, match="would take its first batch away"):
        model_of(Net()).check(iter([(X, Y)]))


def test_on_poptorch_itself_the_command_is_named(monkeypatch):
    from ipufit import _poptorch

    class Real:
        __name__ = "poptorch"

    monkeypatch.setattr(_poptorch, "poptorch", Real())
    with pytest.raises(UnsupportedError, match=r"ipufit check script\.py"):
        model_of(Net()).check(X, Y, 8)


def test_an_eps_that_float16_rounds_to_0():
    model = IPUModel(nn.Linear(4, 4), IPUConfig(micro_batch_size=4))
    narrow = {"second_order_momentum_accum_type": torch.float16}
    model.compile(ipufit.Optimizer("adamw", **narrow), "mse")
    [finding] = [f for f in model.check(X, Y, 8).findings if f.topic == "optimizer"]
    assert finding.severity != "refused"
    assert "eps of 1e-08 is 0 in float16" in finding.what
    model.compile(ipufit.Optimizer("adamw", eps=1e-7, **narrow), "mse")
    assert not [f for f in model.check(X, Y, 8).findings if f.topic == "optimizer"]
