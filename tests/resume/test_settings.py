# SPDX-License-Identifier: Apache-2.0
"""Settings in words: the same for the same, others for others, in every process."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from ipufit import (
    Callback,
    ConfigError,
    IPUConfig,
    IPUModel,
    ModelCheckpoint,
    Optimizer,
    Schedule,
)
from ipufit.checkpoint import load_checkpoint, write_checkpoint
from tests.files.samples import same


def scaled_loss(outputs, targets, k=1.0):
    return float(np.sum(k)) * (outputs - targets).abs().mean()


class Weighted(torch.nn.Module):
    def __init__(self, *weights):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, outputs, targets):
        return (self.weights * (outputs - targets).pow(2)).mean()


X, Y = torch.zeros(8, 2), torch.zeros(8, 2)


def fit(path, compiled=None, resume=None, module=None, **fitted):
    torch.manual_seed(1)
    model = IPUModel(module or torch.nn.Linear(2, 2))
    model.compile(
        **{"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], **(compiled or {})}
    )
    arguments = {"batch_size": 2, "epochs": 2, "verbose": 0, **fitted}
    return model.fit(X, Y, callbacks=ModelCheckpoint(path), resume=resume, **arguments)


@pytest.mark.parametrize(
    ("compiled", "fitted", "said"),
    [
        ({"loss": "mae"}, {}, "loss was"),
        ({"loss": torch.nn.HuberLoss(delta=2.0)}, {}, r"HuberLoss\(delta=2\.0"),
        ({"metrics": ["mae", "mse"]}, {}, "metrics was"),
        ({"loss_weights": 0.5}, {}, "loss_weights was"),
        (
            {"lr_schedule": Schedule("cosine", total_updates=9)},
            {},
            "lr_schedule was No",
        ),
        ({"optimizer": Optimizer("sgd", 0.5)}, {}, "lr was"),
        ({"optimizer": Optimizer("sgd", global_clipnorm=1.0)}, {}, "norm was"),
        ({"optimizer": "adam"}, {}, ""),
        ({"loss": functools.partial(scaled_loss, k=2.0)}, {}, "loss was"),
        ({}, {"shuffle": False}, "shuffle was True and is False"),
        ({}, {"drop_last": "pad"}, "drop_last was True and is 'pad'"),
        ({}, {"class_weight": {0: 2.0}}, r"class_weight was None and is \{0: 2\.0\}"),
        ({}, {"steps_per_epoch": 4}, "steps_per_epoch was None and is 4"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on(tmp_path, compiled, fitted, said):
    path = str(tmp_path / "run")
    fit(path)
    with pytest.raises(ConfigError, match=rf"can't be resumed exactly: .*{said}"):
        fit(path, compiled, resume=path, **fitted)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Weighted(1.0, 1.0), Weighted(1.0, 2.0)),
        *(
            [functools.partial(scaled_loss, k=k) for k in pair]
            for pair in [
                (1.0, 2.0),
                (np.float32(0.5), np.float32(0.25)),
                (np.ones(1), np.ones(2)),
                (range(3), range(4)),
            ]
        ),
    ],
)
def test_losses_are_told_apart_by_what_is_in_them(tmp_path, one, other):
    path = str(tmp_path / "run")
    fit(path, {"loss": one})
    assert fit(path, {"loss": one}, resume=path, epochs=3).epoch == [0, 1, 2]
    with pytest.raises(ConfigError, match="loss was"):
        fit(path, {"loss": other}, resume=path, epochs=4)


def test_other_parameters_in_the_groups_are_another_run(tmp_path):
    path = str(tmp_path / "run")
    biases, weights = (
        {"optimizer": Optimizer("adamw", no_decay=names)}
        for names in ("0.bias", ["0.bias", "1.weight"])
    )
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fit(path, biases, module=module)
    with pytest.raises(ConfigError, match=r"per group was \[3, 1\] and is \[2, 2\]"):
        fit(path, weights, resume=path, module=module)


def grouped(sizes):
    """A module, and an optimizer of torch with groups of so many parameters."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    rest, groups = [*module.parameters()], []
    for size in sizes:
        groups.append({"params": rest[:size], "lr": 0.1 / (1 + len(groups))})
        rest = rest[size:]
    return module, torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("sizes", [[4], [1, 1, 2]])
@pytest.mark.parametrize("way", ["resume", "load"])
def test_another_number_of_groups_of_the_optimizer_is_refused(tmp_path, sizes, way):
    path = str(tmp_path / "run")
    module, optimizer = grouped([2, 2])
    fit(path, {"optimizer": optimizer}, module=module)
    other, optimizer = grouped(sizes)
    if way == "resume":
        with pytest.raises(ConfigError, match=r"per group was \[2, 2\] and is \["):
            fit(path, {"optimizer": optimizer}, resume=path, module=other, epochs=3)
        return
    model = IPUModel(other)
    model.compile(optimizer, "mse")
    before = model.checkpoint()
    said = f"has 2 parameter groups, and this one {len(sizes)}.*load the weights alone"
    with pytest.raises(ConfigError, match=said):
        model.load(path)
    assert same(model.checkpoint(), before)


def test_names_of_other_versions_are_passed_over(tmp_path):
    path = str(tmp_path / "run")
    fit(path)
    checkpoint = load_checkpoint(path)
    settings = checkpoint.state["settings"]
    del settings["shuffle"]
    settings["gone"] = "1"
    write_checkpoint(path, checkpoint)
    assert fit(path, resume=path, epochs=3, shuffle=False).epoch == [0, 1, 2]


@pytest.mark.parametrize("schedule", ["cosine", Schedule("linear", warmup_updates=1)])
def test_a_schedule_over_other_updates_is_another_run(tmp_path, schedule):
    path = str(tmp_path / "run")
    compiled = {"lr_schedule": schedule}
    fit(path, compiled)
    with pytest.raises(ConfigError, match="updates of the schedule was 8 and is 16"):
        fit(path, compiled, resume=path, epochs=4)
    for fixed in (
        Schedule("cosine", total_updates=16),
        Schedule("cosine_restarts", every_epochs=1, t_mul=2, warmup_epochs=1),
    ):
        fit(path, {"lr_schedule": fixed})
        history = fit(path, {"lr_schedule": fixed}, resume=path, epochs=4)
        assert history.epoch == [0, 1, 2, 3]


def test_a_schedule_that_another_version_described_is_the_same(tmp_path):
    settings = {"lr_schedule": Schedule("cosine", warmup_updates=2, final=0.1)}
    fit(tmp_path / "run", settings)
    checkpoint = load_checkpoint(tmp_path / "run")
    # As 0.3.0 wrote it, with the settings that weren't set.
    checkpoint.state["settings"]["lr_schedule"] = (
        "Schedule(name='cosine', warmup_updates=2, warmup_fraction=None, "
        "total_updates=None, initial=None, final=0.1, cycles=None, power=None, "
        "gamma=None, every_updates=None, boundaries=None, timescale=None)"
    )
    write_checkpoint(tmp_path / "old", checkpoint)
    fit(tmp_path / "run", settings, resume=tmp_path / "old")
    other = {"lr_schedule": Schedule("cosine", warmup_updates=2, final=0.2)}
    with pytest.raises(ConfigError, match=r"lr_schedule was .*final=0\.1"):
        fit(tmp_path / "run", other, resume=tmp_path / "old")


def test_metrics_that_another_version_described_are_the_same(tmp_path):
    settings = {"metrics": ["f1", "mse", "spearman"], "loss": "bce"}
    fit(tmp_path / "run", settings)
    checkpoint = load_checkpoint(tmp_path / "run")
    del checkpoint.state["settings"]["settings of metrics"]
    checkpoint.state["settings"]["metrics"] = (  # as 0.3.0 wrote it
        "[['f1', F1Score(of=['a', 'b'])], ['mse', FunctionMetric(direction='min', "
        "function=squared_error, name='mse')], ['spearman', "
        "SpearmanCorrelation(batches=[], name='spearman')]]"
    )
    write_checkpoint(tmp_path / "old", checkpoint)
    fit(tmp_path / "run", settings, resume=tmp_path / "old")
    others = {**settings, "metrics": ["f1", "mse", "mae"]}
    with pytest.raises(ConfigError, match=r"metrics was .*and is \['f1', 'mse', 'mae'"):
        fit(tmp_path / "run", others, resume=tmp_path / "old")


def test_a_loss_that_counts_its_calls_is_the_same_loss(tmp_path):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._n = self.n = 0

        def forward(self, outputs, targets):
            self.n += 1
            return (outputs - targets).pow(2).mean()

    path = str(tmp_path / "run")
    fit(path, {"loss": Counting()})
    assert fit(path, {"loss": Counting()}, resume=path, epochs=3).epoch == [0, 1, 2]


def test_rates_that_a_callback_has_set_are_no_other_optimizer(tmp_path):
    path = str(tmp_path / "run")

    class Halve(Callback):
        def on_epoch_end(self, epoch, logs):
            self.model.optimizer.param_groups[0]["lr"] /= 2

    for epochs, resume in ((2, None), (4, path)):
        model = IPUModel(torch.nn.Linear(2, 2))
        model.compile("sgd", "mse")
        callbacks = [Halve(), ModelCheckpoint(path)]
        model.fit(X, Y, 2, epochs=epochs, verbose=0, callbacks=callbacks, resume=resume)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 16)


def test_a_checkpoint_of_another_precision_names_types_and_the_way(tmp_path):
    path = tmp_path / "saved"
    saved, model = (
        IPUModel(torch.nn.Linear(2, 2).to(dtype), IPUConfig(precision=precision))
        for dtype, precision in [(torch.float32, "32.32"), (torch.float16, "16.16")]
    )
    for one in (saved, model):
        one.compile("sgd", "mse")
    saved.save(path)
    said = "bias is torch.float32 in the checkpoint, and torch.float16 in the module"
    with pytest.raises(ConfigError, match=rf"{said}.*model\.load_weights\(path / "):
        model.load(path)
    model.load_weights(path / "model.safetensors")
    assert torch.equal(model.module.weight, saved.module.weight.half())
