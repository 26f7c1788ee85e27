# SPDX-License-Identifier: Apache-2.0
"""`ipufit.compare`: a batch on the device beside the same batch on the host."""

from __future__ import annotations

import copy
import os
import re

import pytest
import torch

import ipufit
from ipufit import ConfigError, IPUConfig, IPUModel, Optimizer, compare, poptorch
from tests import reference
from tests.processes import runs

X, Y = reference.samples(32)
HAS_HALF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 1)


def network(dropout=0.0):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 6),
        torch.nn.LayerNorm(6),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(6, 4),
    )


def make(optimizer="adam", loss="cross_entropy", module=None, **config):
    model = IPUModel(module or network(), IPUConfig(**config))
    model.compile(optimizer, loss)
    return model


class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x, labels):
        out = self.layer(x)
        return out, torch.nn.functional.cross_entropy(out, labels)


class OnDevice(torch.nn.Module):
    """Computes something else on the device."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if poptorch.isRunningOnIpu():
            x = x * 1.5
        return self.second(x)


class Large(torch.nn.Module):
    """Has values that float16 doesn't."""

    def __init__(self):
        super().__init__()
        self.small = torch.nn.Linear(3, 8)
        self.large = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 4)
        with torch.no_grad():
            self.small.weight.fill_(200.0)
            self.large.weight.fill_(200.0)

    def forward(self, x):
        return self.head(self.large(self.small(x)))


def parts(found):
    return {one.part for one in found.differences}


OPTIMIZERS = {
    "sgd": "sgd",
    "adam": "adam",
    "clipped": Optimizer("adam", 0.01, global_clipnorm=0.01),
    "clipped sgd": Optimizer("sgd", 0.1, global_clipnorm=0.01, loss_scaling=8.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_that_float32_agrees(optimizer):
    found = compare(make(OPTIMIZERS[optimizer]), (X, Y))
    assert parts(found) == {"output", "loss", "gradient"}
    assert len(found.of("gradient")) == 6
    assert max(one.share for one in found.differences) < 1e-4
    assert found.notes == ("Dropout layers are off: 2.",)


LAYOUTS = {
    "all factors": {"replicas": 2, "gradient_accumulation": 2, "micro_batch_size": 8},
    "iterations": {"device_iterations": 4, "micro_batch_size": 32},
    "own options": {"training_options": poptorch.Options().deviceIterations(2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_that_layouts_agree(layout):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    found = compare(make("sgd", module=module, **LAYOUTS[layout]), (X, Y))
    assert max(one.share for one in found.of("gradient")) < 1e-5
    assert max(one.share for one in found.of("output")) < 1e-5
    assert abs(found.of("loss")[0].absolute) < 1e-5


def test_that_ignored_targets_count_in_whole_updates():
    def loss(outputs, targets):
        entropy = torch.nn.functional.cross_entropy(outputs, targets)
        return entropy + outputs.square().mean()

    marked = Y.clone()
    marked[:13] = -100
    for one in ("cross_entropy", loss):
        found = compare(make("sgd", one, micro_batch_size=8), (X, marked))
        assert max(one.share for one in found.differences) < 1e-5


def test_that_other_batches_agree():
    own = reference.compiled(OwnLoss(), loss=None)
    for model, batch in (
        (own, ({"x": X, "labels": Y},)),
        (own, {"x": X, "labels": Y}),
        (make("sgd", torch.nn.CrossEntropyLoss(reduction="sum")), (X, Y)),
        (make("sgd"), (X, Y, torch.linspace(0, 2, 32))),
    ):
        found = compare(model, batch)
        assert {"output", "loss", "gradient"} <= parts(found)
        assert max(one.share for one in found.differences) < 1e-5


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_that_settings_and_lazy_layers_count():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4))
    model = make(Optimizer("sgd", 0.5), module=lazy)
    given = {"augment": ipufit.Mixing(mixup=0.5), "label_smoothing": 0.2}
    model.compile(Optimizer("sgd", 0.5), "cross_entropy", **given)
    found = compare(model, (X[:8], Y[:8]), layers=True)
    assert max(one.share for one in found.differences) < 1e-4
    assert "Samples aren't mixed, though compile() got augment." in found.notes
    assert isinstance(model.module[0].weight, torch.nn.UninitializedParameter)
    model.fit(X, Y, 8, verbose=0)
    found = compare(model, (X[:8], Y[:8]))
    plain = torch.nn.CrossEntropyLoss(label_smoothing=0.2)(model.module(X[:8]), Y[:8])
    assert found.of("loss")[0].host == pytest.approx(plain.item(), rel=1e-5)


def test_that_a_model_without_settings_or_targets_compares_outputs():
    for model, batch in ((IPUModel(network()), (X, Y)), (make(), X)):
        found = compare(model, batch)
        assert parts(found) == {"output"}
        assert "Only outputs" in found.notes[-1]


def test_that_a_difference_is_found_where_it_is():
    found = compare(make(module=OnDevice()), (X, Y), layers=True)
    (output,) = found.of("output")
    assert output.share > 0.01
    assert output.absolute == pytest.approx(abs(output.host - output.device), rel=1e-3)
    assert len(output.index) == 2
    assert [(one.name, one.share > 0.01) for one in found.layers] == [
        ("first", False),
        ("second", True),
    ]
    assert found.first_broken_layer is None
    shares = [one.share for one in found.differences]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.skipif(not HAS_HALF, reason="torch computes nothing in float16 here")
def test_that_half_precision_shows_where_it_breaks():
    found = compare(
        make("sgd", module=Large(), precision="float16"), (X, Y), layers=True
    )
    assert found.first_broken_layer == "large"
    small = compare(make("sgd", precision="float16"), (X, Y))
    assert 0 < small.of("output")[0].share < 1e-2  # the host computes in float32
    assert [one.num_broken > 0 for one in found.layers] == [False, True, True]
    text = str(found)
    assert "first broken layer: large" in text
    assert re.search(r"inf|nan", text)
    assert "broken" in text
    assert found.differences[0].num_broken


def test_that_the_model_stays_as_it_is():
    def train(*, compares):
        model = make("adam", module=network(dropout=0.3), seed=1)
        model.fit(X, Y, 8, verbose=0)
        before = model.num_updates, copy.deepcopy(model.get_weights())
        modes = [part.training for part in model.module.modules()]
        torch.manual_seed(5)
        if compares:
            compare(model, (X, Y), layers=True)
        assert model.num_updates == before[0]
        assert all((a == b).all() for a, b in zip(model.get_weights(), before[1]))
        assert [part.training for part in model.module.modules()] == modes
        assert not model.module._forward_hooks
        drawn = torch.rand(3).tolist()
        history = model.fit(X, Y, 8, epochs=2, verbose=0)
        return drawn, history.history, [one.tolist() for one in model.get_weights()]

    assert train(compares=True) == train(compares=False)


def test_what_cannot_be_compared():
    with pytest.raises(ConfigError, match=r"is not an ipufit\.IPUModel"):
        compare(network(), (X, Y))
    with pytest.raises(ConfigError, match="offline"):
        compare(make(offline=True), (X, Y))
    with pytest.raises(ConfigError):
        compare(make(micro_batch_size=5), (X, Y))
    scaled = make(Optimizer("adam", loss_scaling="auto"), precision="16.32")
    found = compare(scaled, (X, Y))
    assert "gradient" not in parts(found)
    assert "No gradients" in " ".join(found.notes)


# In processes that train together ----------------------------------------------------


def ahead(folder):
    torch.manual_seed(3)
    model = IPUModel(torch.nn.Linear(3, 4), IPUConfig(micro_batch_size=4))
    model.compile("adam", "cross_entropy")
    built = model.build(X, Y, batch_size=8, verbose=0)
    model.fit(X, Y, batch_size=8, verbose=0)
    found = compare(model, (X[:8], Y[:8]))
    about = model.export(f"{folder}/model.popef", X)
    return (
        [program.name for program in built.programs],
        max(one.share for one in found.differences),
        about["sha256"],
        model.predict(X, verbose=0).tolist(),
    )


def test_that_all_processes_agree_and_one_writes(pool, tmp_path):
    first, second = pool.run(ahead, str(tmp_path))
    assert first == second
    names, share, _, outputs = first
    assert names == ["inference", "training"]
    assert share < 1e-4
    assert sorted(os.listdir(tmp_path)) == ["model.popef", "model.popef.json"]
    loaded = poptorch.load(str(tmp_path / "model.popef"))
    whole = torch.cat([loaded(X[at : at + 4]) for at in range(0, 32, 4)])
    assert whole.tolist() == outputs


def worst_in_a_process():
    """The largest difference of a model that begins with weights of its own."""
    x, y, _ = runs.samples(16)
    return max(one.share for one in compare(runs.model_of(), (x, y)).differences)


def test_that_processes_compare_the_weights_of_the_first(pool):
    assert max(pool.run(worst_in_a_process)) < 1e-4
