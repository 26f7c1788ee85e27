# SPDX-License-Identifier: Apache-2.0
"""A LightningModule trains as in a plain loop, and as with Lightning's own Trainer."""

import copy
import importlib
import pickle

import pytest
import torch

import ipufit
from ipufit.integrations.lightning import LightningModel, from_lightning
from tests.integrations.modules import Net, Steps, X, Y, has

LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(not has(name), reason=f"needs {name}"))
    for name in ("lightning", "pytorch_lightning")
]
BATCHES = list(zip(X.split(16), Y.split(16)))


def lightning(name):
    """The package of that name, whichever of both it is."""
    return importlib.import_module("lightning.pytorch" if name == "lightning" else name)


def plain_loop(module, epochs):
    """Train by hand as the steps say; give the mean loss of each epoch."""
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    losses = []
    for _ in range(epochs):
        total = 0.0
        for batch in BATCHES:
            loss, _ = module._measured(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            configured["lr_scheduler"]["scheduler"].step()
            total += loss.item()
        losses.append(total / len(BATCHES))
    return losses


def fit(module, epochs=3, config=None, **arguments):
    model = from_lightning(module, config)
    given = {"batch_size": 16, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model, model.fit(X, Y, **{**given, **arguments}).history


def assert_same_weights(one, other):
    for mine, its in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_a_module_with_lightnings_methods_trains_as_in_a_plain_loop():
    module, by_hand = Net(), Net()
    expected = plain_loop(by_hand, 3)
    model, history = fit(module)
    assert history["train_loss"] == pytest.approx(expected, abs=1e-5)
    assert history["loss"] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0]
    assert_same_weights(model.module, by_hand)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**4)


@pytest.mark.filterwarnings("ignore")  # of Lightning, about itself and this machine
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_module_of_lightning_trains_as_with_its_trainer(name, tmp_path):
    library = lightning(name)

    class Module(Steps, library.LightningModule):
        """The steps, with Lightning's base class."""

    class Losses(library.Callback):
        """What Lightning knows at the end of each epoch."""

        def __init__(self):
            self.rows = []

        def on_train_epoch_end(self, trainer, pl_module):
            self.rows.append({n: float(v) for n, v in trainer.callback_metrics.items()})

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16)
    heard, theirs, ours = Losses(), Module(), Module()
    trainer = library.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[heard],
        default_root_dir=tmp_path,
    )
    trainer.fit(theirs, data, data)
    model, history = fit(ours, validation_data=(X, Y))
    assert len(heard.rows) == 3
    assert set(heard.rows[0]) == set(history) - {"loss"}
    for figure in heard.rows[0]:
        expected = [row[figure] for row in heard.rows]
        assert history[figure] == pytest.approx(expected, abs=1e-4), figure
    assert_same_weights(model.module, theirs)
    [tested] = trainer.test(theirs, data, verbose=False)
    assert model.test(X, Y, verbose=0) == pytest.approx(tested, abs=1e-4)
    assert ours._trainer is None


@pytest.mark.parametrize("name", ["val/loss", "valid_loss"])
def test_other_names_of_a_validations_loss_are_val_loss(name):
    class Other(Net):
        def validation_step(self, batch, batch_idx):
            self.log(name, self._measured(batch)[0])

    _, history = fit(Other(), 1, validation_data=(X, Y))
    assert set(history) == {"loss", "train_acc", "train_loss", "val_loss"}


def test_evaluate_test_and_predict_use_their_steps():
    model, history = fit(Net(), validation_data=(X, Y))
    evaluated = model.evaluate(X, Y, verbose=0)
    assert set(evaluated) == {"acc", "loss"}
    assert evaluated["loss"] == pytest.approx(history["val_loss"][-1])
    tested = model.test(X, Y, verbose=0)
    assert tested == {
        "test_acc": pytest.approx(evaluated["acc"]),
        "test_loss": pytest.approx(evaluated["loss"]),
    }
    rows = model.predict(X, verbose=0)
    torch.testing.assert_close(rows, model.module(X).softmax(dim=1).detach())
    # The rest of the run goes on as if nothing had been tested.
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(evaluated)


def test_dicts_with_loss_and_steps_without_an_index_are_taken():
    class Dicts(Net):
        def training_step(self, batch):
            return {"loss": self._measured(batch)[0], "extra": "ignored"}

        def validation_step(self, batch):
            return {"loss": self._measured(batch)[0]}

    _, history = fit(Dicts(), 1, validation_data=(X, Y))
    assert set(history) == {"loss", "val_loss"}


@pytest.mark.parametrize("use", ["fit", "evaluate", "test"])
def test_a_returned_tensor_is_no_loss_outside_training(use):
    class Returning(Net):
        """As Graphcore's examples, whose steps return the accuracy."""

        def validation_step(self, batch, batch_idx):
            hits = self._measured(batch)[1]
            if self.logs:
                self.log("acc", hits)
            return hits

        test_step = validation_step

    def run(logs):
        model = from_lightning(Returning())
        model.module.logs = logs
        if use == "fit":
            return fit(model.module, 1, validation_data=(X, Y))[1]
        return getattr(model, use)(X, Y, verbose=0)

    losses = {"loss", "train_loss"} if use == "fit" else set()
    assert {name for name in run(True) if "loss" in name} == losses
    name = "test" if use == "test" else "val"
    with pytest.raises(ipufit.ConfigError, match=rf"self\.log\('{name}_acc', acc"):
        run(False)


def test_the_trainers_model_is_the_module():
    class Grouped(Net):
        def training_step(self, batch, batch_idx):
            assert self.trainer.model is self.trainer.lightning_module is self
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    model, history = fit(Grouped(), 2)
    assert history["loss"][1] < history["loss"][0]
    assert model.optimizer.param_groups[0]["lr"] == 0.1


def test_outputs_of_a_step_are_for_metrics():
    class Metrics(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            loss = torch.nn.functional.cross_entropy(logits, y)
            return {"loss": loss, "outputs": logits}

        validation_step = training_step

    model = from_lightning(Metrics(), metrics=["accuracy"])
    history = model.fit(X, Y, 16, validation_data=(X, Y), verbose=0).history
    assert set(history) == {"accuracy", "loss", "val_accuracy", "val_loss"}


def test_values_of_the_trainer_are_given():
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            total = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    model = from_lightning(Scheduled(), trainer={"estimated_stepping_batches": 4})
    model.fit(X, Y, 16, verbose=0)
    assert model.num_updates == 4
    with pytest.raises(ipufit.UnsupportedError, match="estimated_stepping_batches"):
        from_lightning(Scheduled())


def test_an_optimizer_may_be_given_in_the_place_of_the_modules():
    optimizer = ipufit.Optimizer("sgd", 0.1, global_clipnorm=1.0)
    model = from_lightning(Net(), optimizer=optimizer, lr_schedule="cosine")
    model.fit(X, Y, 16, verbose=0)
    assert type(model.optimizer).__name__ == "SGD"
    with pytest.raises(ipufit.ConfigError, match="lr_schedule was given"):
        from_lightning(Net(), lr_schedule="cosine")


def test_hooks_between_epochs_are_called_with_what_they_may_read():
    class Hooked(Net):
        def __init__(self):
            super().__init__()
            self.heard = []

        def on_train_start(self):
            self.heard.append("start")

        def on_train_epoch_start(self):
            self.heard.append(self.current_epoch)

        def on_validation_epoch_end(self):
            self.heard.append(sorted(self.trainer.callback_metrics))

        def on_train_epoch_end(self):
            self.heard.append(self.global_step)
            self.trainer.should_stop = self.current_epoch == 1

        def on_train_end(self):
            self.heard.append(sorted(self.trainer.callback_metrics)[-1])

    module = Hooked()
    _, history = fit(module, 5, validation_data=(X, Y))
    assert len(history["loss"]) == 2
    figures = ["val_acc", "val_loss"]
    assert module.heard[:4] == ["start", 0, figures, 4]
    assert module.heard[-2:] == [8, "val_loss"]


def test_hooks_of_a_test_know_their_stage():
    class Hooked(Net):
        def on_test_epoch_end(self):
            assert self.trainer.testing
            assert not self.trainer.validating
            self.heard = sorted(self.trainer.callback_metrics)

    module = Hooked()
    from_lightning(module).test(X, Y, verbose=0)
    assert module.heard == ["test_acc", "test_loss"]


def test_a_model_can_be_copied_and_pickled():
    model, _ = fit(Net(), 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, LightningModel)
        given = {"batch_size": 16, "shuffle": False, "verbose": 0}
        twin = copy.deepcopy(other).fit(X, Y, **given).history
        assert other.fit(X, Y, **given).history == twin
        assert other.test(X, Y, verbose=0).keys() == {"test_acc", "test_loss"}


def test_a_run_goes_on_bit_by_bit(tmp_path):
    whole = fit(Net(), 3, validation_data=(X, Y))[1]
    given = {"validation_data": (X, Y)}
    saving = ipufit.ModelCheckpoint(str(tmp_path / "{epoch}"))
    fit(Net(), 2, callbacks=[saving], **given)
    saving = ipufit.ModelCheckpoint(str(tmp_path / "{epoch}"))
    resumed = fit(Net(), 3, callbacks=[saving], resume=tmp_path / "2", **given)
    assert resumed[1] == whole


@pytest.mark.skipif(not has("torchmetrics"), reason="needs torchmetrics")
def test_objects_of_torchmetrics_are_refused_with_a_way_out():
    from torchmetrics.classification import MulticlassAccuracy

    class Measured(Net):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.accuracy(self(x), y)
            self.log("val_acc", self.accuracy)

    model = from_lightning(Measured())
    update = model.module.accuracy.update
    with pytest.raises(ipufit.UnsupportedError, match="torchmetrics"):
        model.evaluate(X, Y, verbose=0)
    assert model.module.accuracy.update is update
