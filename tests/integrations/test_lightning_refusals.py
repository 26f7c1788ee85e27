# SPDX-License-Identifier: Apache-2.0
"""What can't be honoured of a LightningModule is refused, with the way out."""

import importlib

import pytest
import torch

import ipufit
from ipufit.integrations.lightning import from_lightning
from tests.integrations.modules import Net, Steps, X, Y, has

REFUSED = [
    *("backward", "clip_gradients", "configure_callbacks"),
    *("configure_gradient_clipping", "configure_sharded_model", "lr_scheduler_step"),
    *("on_after_backward", "on_after_batch_transfer", "on_before_backward"),
    *("on_before_batch_transfer", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_load_checkpoint", "on_predict_model_eval", "on_save_checkpoint"),
    *("on_test_model_eval", "on_validation_model_eval", "on_validation_model_train"),
    *("optimizer_step", "optimizer_zero_grad", "test_epoch_end", "test_step_end"),
    *("training_epoch_end", "training_step_end", "transfer_batch_to_device"),
    *("validation_epoch_end", "validation_step_end"),
]
STAGES = ("train", "validation", "test", "predict")
REFUSED += [f"on_{stage}_batch_{end}" for stage in STAGES for end in ("start", "end")]


def module_with(**members):
    return type("Changed", (Net,), members)()


def train(module):
    return from_lightning(module).fit(X, Y, 16, shuffle=False, verbose=0)


@pytest.mark.parametrize("hook", REFUSED)
def test_methods_that_nothing_would_call_are_refused(hook):
    module = module_with(**{hook: lambda self, *given: None})
    with pytest.raises(ipufit.UnsupportedError, match=f"- {hook}: .+"):
        from_lightning(module)


def test_helpers_with_similar_names_are_no_hooks():
    train(module_with(_backward=lambda self: None, BackWard=lambda self: None))


def test_manual_optimization_is_refused():
    with pytest.raises(ipufit.UnsupportedError, match="manual_backward"):
        from_lightning(module_with(automatic_optimization=False))


@pytest.mark.parametrize(
    "use",
    [
        lambda index: index % 100,
        bool,
    ],
)
def test_the_index_of_a_batch_cant_be_used(use):
    def training_step(self, batch, batch_idx):
        use(batch_idx)
        return self._measured(batch)[0]

    with pytest.raises(ipufit.UnsupportedError, match="batch_idx was used"):
        train(module_with(training_step=training_step))


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        (lambda self: self.current_epoch, "self.current_epoch.*0-d buffer"),
        (lambda self: self.global_step, "self.global_step.*0-d buffer"),
        (lambda self: self.trainer.current_epoch, "self.trainer.current_epoch"),
        (lambda self: self.trainer.max_epochs, r"trainer=\{'max_epochs': \.\.\.\}"),
        (lambda self: self.trainer.logger, "callbacks"),
        (lambda self: self.logger, "callbacks"),
        (lambda self: self.optimizers(), "manual optimization.* return the loss"),
        (lambda self: self.manual_backward(0), "manual optimization"),
        (lambda self: self.all_gather(0), "processes"),
        (lambda self: setattr(self.trainer, "should_stop", True), "Callback"),
        (lambda self: self.global_rank, "one program"),
    ],
)
def test_what_a_trainer_would_know_is_refused_in_a_step(reads, says):
    def training_step(self, batch, batch_idx):
        reads(self)
        return self._measured(batch)[0]

    with pytest.raises(ipufit.UnsupportedError, match=says):
        train(module_with(training_step=training_step))


def test_attributes_of_the_users_own_are_left_alone():
    def training_step(self, batch, batch_idx):
        return self._measured(batch)[0] * self.current_epoch

    module = module_with(training_step=training_step)
    module.current_epoch = 2.0
    doubled = train(module).history["loss"][0]
    assert doubled > train(Net()).history["loss"][0]


def test_a_step_knows_its_stage_and_values_that_were_given():
    def training_step(self, batch, batch_idx):
        assert self.trainer.training
        assert not self.trainer.validating
        assert not self.trainer.sanity_checking
        return self._measured(batch)[0] * self.trainer.factor

    module = module_with(training_step=training_step)
    model = from_lightning(module, trainer={"factor": 2.0})
    doubled = model.fit(X, Y, 16, shuffle=False, verbose=0).history["loss"][0]
    assert doubled > train(Net()).history["loss"][0]


@pytest.mark.parametrize(
    ("logged", "says"),
    [
        (lambda self, loss: self.log("size", 1.0), "log.'size'. got 1.0"),
        (lambda self, loss: self.log("all", torch.zeros(2)), "shape .2,."),
        (lambda self, loss: [self.log("a", loss) for _ in "ab"], "called twice"),
        (lambda self, loss: self.log("a", loss, reduce_fx="sum"), "reduce_fx='sum'"),
        (lambda self, loss: self.log("loss", loss * 2), "another name"),
        (lambda self, loss: self.log("a", loss, prog_bars=True), "mean 'prog_bar'"),
        (lambda self, loss: self.log_dict({"a": loss}, mode="max"), "self.log 'mode'"),
    ],
)
def test_what_cant_be_averaged_isnt_logged(logged, says):
    def training_step(self, batch, batch_idx):
        loss, _ = self._measured(batch)
        logged(self, loss)
        return loss

    errors = ipufit.ConfigError, ipufit.UnsupportedError, ipufit.UnknownNameError
    with pytest.raises(errors, match=says):
        train(module_with(training_step=training_step))


def test_nothing_is_logged_outside_of_steps():
    def on_train_epoch_end(self):
        self.log("late", torch.tensor(1.0))

    with pytest.raises(ipufit.UnsupportedError, match="on_train_epoch_end"):
        train(module_with(on_train_epoch_end=on_train_epoch_end))


def test_lists_that_a_step_fills_are_refused():
    def validation_step(self, batch, batch_idx):
        self.seen.append(self._measured(batch)[0])

    module = module_with(validation_step=validation_step)
    module.seen = []
    with pytest.raises(ipufit.UnsupportedError, match=r"self\.seen"):
        from_lightning(module).evaluate(X, Y, verbose=0)


def test_steps_without_a_result_are_refused():
    nothing = module_with(training_step=lambda self, batch, batch_idx: None)
    with pytest.raises(ipufit.ConfigError, match="returned None"):
        train(nothing)
    nothing = module_with(validation_step=lambda self, batch, batch_idx: None)
    with pytest.raises(ipufit.ConfigError, match="nothing to report"):
        from_lightning(nothing).evaluate(X, Y, verbose=0)
    iterated = module_with(training_step=lambda self, dataloader_iter: None)
    with pytest.raises(ipufit.UnsupportedError, match="dataloader_iter"):
        train(iterated)


def test_modules_that_are_none_are_refused():
    with pytest.raises(ipufit.ConfigError, match="no training_step"):
        from_lightning(torch.nn.Linear(2, 1))
    with pytest.raises(ipufit.ConfigError, match="not a LightningModule"):
        from_lightning("net")
    with pytest.raises(ipufit.ConfigError, match="must be a dict"):
        from_lightning(Net(), trainer="gpu")

    class Untrained(torch.nn.Linear):
        def training_step(self, batch):
            return self(batch).mean()

    with pytest.raises(ipufit.ConfigError, match="no configure_optimizers"):
        from_lightning(Untrained(2, 1))
    model = from_lightning(Untrained(2, 1), optimizer="sgd")
    with pytest.raises(ipufit.UnsupportedError, match="no test_step"):
        model.test(X, Y)


@pytest.mark.parametrize(
    ("hook", "precision"), [("setup", "32.32"), ("configure_model", "16.16")]
)
def test_layers_are_made_by_hooks(hook, precision):
    def made(self, stage="fit"):
        assert stage == "fit"
        self.layers = torch.nn.Linear(6, 3)

    module = module_with(**{hook: made})
    module.layers = None
    model = from_lightning(module, ipufit.IPUConfig(precision=precision))
    model.fit(X, Y, 16, verbose=0)
    dtypes = {parameter.dtype for parameter in model.module.parameters()}
    assert dtypes == {torch.float16 if precision == "16.16" else torch.float32}


@pytest.mark.skipif(not has("lightning"), reason="needs lightning")
def test_lightnings_own_methods_are_no_overrides():
    library = importlib.import_module("lightning.pytorch")

    class Module(Steps, library.LightningModule):
        """The steps, with Lightning's base class."""

        def training_step(self, batch, batch_idx):
            return self._measured(batch)[0] * (self.current_epoch + 1)

    model = from_lightning(Module())
    assert model.evaluate(X, Y, verbose=0).keys() == {"acc", "loss"}
    with pytest.raises(ipufit.UnsupportedError, match=r"self\.current_epoch"):
        model.fit(X, Y, 16, verbose=0)


@pytest.mark.parametrize(
    ("method", "loader"),
    [
        ("fit", "train_dataloader"),
        ("evaluate", "val_dataloader"),
        ("test", "test_dataloader"),
        ("predict", "predict_dataloader"),
    ],
)
def test_a_loader_of_the_module_is_to_be_given(method, loader):
    members = {loader: lambda self: [(X, Y)], "test_step": Net.training_step}
    model = from_lightning(module_with(**members))
    with pytest.raises(ipufit.DataError, match=rf"\(model\.module\.{loader}\(\)\)"):
        getattr(model, method)()
    with pytest.raises(ipufit.DataError, match="is a NoneType"):
        from_lightning(module_with(test_step=Net.training_step)).fit()
