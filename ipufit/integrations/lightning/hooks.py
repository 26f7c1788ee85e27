# SPDX-License-Identifier: Apache-2.0
"""Hooks of a LightningModule: called between epochs, or refused."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from ipufit.callbacks import Callback
from ipufit.errors import UnsupportedError

from .facts import FIT, PREDICT, VALIDATE, TrainerFacts
from .logs import NoLog
from .view import view_of

_LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Packages whose own methods are no overrides."""

_ON_DEVICE = "the backward pass and the optimizer run on the device. "
_CALLS = (
    "a program makes several updates per call. Use an ipufit.Callback: "
    "{hook}(batch, logs) comes with every call."
)
_BATCHES = (
    "batches go from ipufit's loader to the device. Change samples in the dataset, or "
    "tensors in the step."
)
_EPOCH_END = (
    "Lightning 2 doesn't call it any more. Log means in the step, which ipufit "
    "averages over all samples; a callback's on_epoch_end(epoch, logs) gets them."
)

_REFUSED = {
    "optimizer_step": _ON_DEVICE + "Freeze what isn't trained, or give it a group of "
    "its own; compile(lr_schedule=...) changes rates.",
    "optimizer_zero_grad": _ON_DEVICE + "Every update begins with gradients of zero.",
    "backward": _ON_DEVICE + "Change the loss in training_step.",
    "configure_gradient_clipping": _ON_DEVICE + "from_lightning(module, optimizer="
    "ipufit.Optimizer('adamw', 1e-3, global_clipnorm=1.0)) clips there.",
    "clip_gradients": _ON_DEVICE + "from_lightning(module, optimizer=ipufit.Optimizer("
    "'adamw', 1e-3, global_clipnorm=1.0)) clips there.",
    "lr_scheduler_step": "ipufit steps the scheduler of configure_optimizers, with its "
    "interval and frequency.",
    "on_before_zero_grad": _ON_DEVICE + "Every update begins with gradients of zero.",
    "on_before_backward": _ON_DEVICE + "Change the loss in training_step.",
    "on_after_backward": _ON_DEVICE + "ipufit.GradientMonitor() shows gradients.",
    "on_before_optimizer_step": _ON_DEVICE
    + "ipufit.GradientMonitor() shows gradients.",
    "transfer_batch_to_device": _BATCHES,
    "on_before_batch_transfer": _BATCHES,
    "on_after_batch_transfer": _BATCHES,
    "configure_callbacks": "ipufit has callbacks of its own, called as Keras's: "
    "fit(callbacks=[ipufit.EarlyStopping(), ipufit.ModelCheckpoint(...)]).",
    "configure_sharded_model": "call it yourself before, if it makes layers.",
    "on_save_checkpoint": "checkpoints of ipufit are tensors and JSON. State of your "
    "own belongs into a callback with saved_attributes.",
    "on_load_checkpoint": "checkpoints of ipufit are tensors and JSON. State of your "
    "own belongs into a callback with saved_attributes.",
    "on_validation_model_eval": "programs of validations are always in eval mode.",
    "on_validation_model_train": "programs of training are always in train mode.",
    "on_test_model_eval": "programs of tests are always in eval mode.",
    "on_predict_model_eval": "programs of predictions are always in eval mode.",
    "training_epoch_end": _EPOCH_END,
    "validation_epoch_end": _EPOCH_END,
    "test_epoch_end": _EPOCH_END,
    "training_step_end": "a step is the whole of what is computed of a micro-batch.",
    "validation_step_end": "a step is the whole of what is computed of a micro-batch.",
    "test_step_end": "a step is the whole of what is computed of a micro-batch.",
    **{
        f"on_{stage}_batch_{end}": _CALLS.format(hook=f"on_{hook}_batch_{name}")
        for stage, hook in (
            ("train", "train"),
            ("validation", "test"),
            ("test", "test"),
            ("predict", "predict"),
        )
        for end, name in (("start", "begin"), ("end", "end"))
    },
}
"""Methods that nothing would call, and the way out."""


def is_overridden(module: torch.nn.Module, name: str) -> bool:
    """Whether a module has a method that isn't Lightning's own.

    Example:
        >>> class Net(torch.nn.Linear):
        ...     def training_step(self, batch): ...
        >>> net = Net(2, 1)
        >>> [is_overridden(net, f"{stage}_step") for stage in ("training", "test")]
        [True, False]
    """
    if name in vars(module):
        return True
    for kind in type(module).__mro__:
        if name in vars(kind):
            return kind.__module__.partition(".")[0] not in _LIBRARIES
    return False


def refuse_hooks(module: torch.nn.Module) -> None:
    """Refuse a module with methods that can't be honoured, all in one message.

    Raises:
        UnsupportedError: There is one; or the module optimizes by hand.
    """
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            f"{name} has automatic_optimization=False. Gradients and updates are made "
            "on the device, so its training_step can't call manual_backward() or "
            "step(). Return the loss, and leave the rest to the program. Two "
            "optimizers in turn, as of a GAN, are two models, each with a "
            "training_step for its loss, and train_on_batch in turn."
        )
    found = [hook for hook in _REFUSED if is_overridden(module, hook)]
    if found:
        reasons = "\n".join(f"- {hook}: {_REFUSED[hook]}" for hook in found)
        raise UnsupportedError(
            f"{name} has methods that nothing would call:\n{reasons}\nDelete them, or "
            "override them in a subclass for ipufit."
        )


class ModuleHooks(Callback):
    """Calls the hooks of a module that come between epochs.

    In a hook `self.trainer` has `current_epoch`, `global_step`, `callback_metrics` and
    `is_global_zero`, and `should_stop` may be set.

    Args:
        module: The module that is trained.
        given: Values of `self.trainer` that the user has given.
        of_test: Whether evaluations are of `test_step`.
    """

    is_saved = False
    reads_batch_logs = False

    def __init__(
        self,
        module: torch.nn.Module,
        given: Mapping[str, Any],
        *,
        of_test: bool = False,
    ) -> None:
        self._module = module
        self._given = given
        self._epoch = 0
        self._figures: dict[str, Any] = {}
        self._stage_of_tests = "test" if of_test else "validation"

    def _call(self, stage: str, *names: str) -> None:
        overridden = [name for name in names if is_overridden(self._module, name)]
        if not overridden:
            return
        live = {
            "current_epoch": lambda: self._epoch,
            "global_step": lambda: self.model.num_updates,
            "callback_metrics": self._tensors,
            "logged_metrics": self._tensors,
            "is_global_zero": lambda: self.model.processes.is_first,
        }
        facts = TrainerFacts(self._given, stage, live, self._stop)
        for name in overridden:
            getattr(view_of(self._module, NoLog(name), facts), name)()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The newest figures as Lightning has them."""
        return {name: torch.tensor(value) for name, value in self._figures.items()}

    def _stop(self) -> None:
        self.model.stop_training = True

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Call `on_fit_start` and `on_train_start`."""
        self._call(FIT, "on_fit_start", "on_train_start")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Call `on_train_epoch_start`."""
        self._epoch = epoch
        self._call(FIT, "on_train_epoch_start")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Call `on_train_epoch_end`."""
        self._epoch, self._figures = epoch, logs
        self._call(FIT, "on_train_epoch_end")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Call `on_train_end` and `on_fit_end`."""
        self._figures = logs
        self._call(FIT, "on_train_end", "on_fit_end")

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Call `on_validation_start` and `on_validation_epoch_start`, or of tests."""
        stage = self._stage_of_tests
        self._call(VALIDATE, f"on_{stage}_start", f"on_{stage}_epoch_start")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Call `on_validation_epoch_end` and `on_validation_end`, or those of tests."""
        stage = self._stage_of_tests
        prefix = "val_" if stage == "validation" else ""
        named = {f"{prefix}{name}": value for name, value in logs.items()}
        self._figures = {**self._figures, **named}
        self._call(VALIDATE, f"on_{stage}_epoch_end", f"on_{stage}_end")

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Call `on_predict_start` and `on_predict_epoch_start`."""
        self._call(PREDICT, "on_predict_start", "on_predict_epoch_start")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Call `on_predict_epoch_end` and `on_predict_end`."""
        self._call(PREDICT, "on_predict_epoch_end", "on_predict_end")
