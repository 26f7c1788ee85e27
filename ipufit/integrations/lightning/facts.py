# SPDX-License-Identifier: Apache-2.0
"""`self.trainer` as a step or a hook of a LightningModule sees it."""

from __future__ import annotations

from typing import Any, Callable, Mapping

from ipufit.errors import UnsupportedError

FIT, VALIDATE, TEST, PREDICT, SETUP = "fit", "validate", "test", "predict", "setup"
"""The kinds of work that a LightningModule is asked for."""

_STAGE_FLAGS = {
    "training": FIT,
    "validating": VALIDATE,
    "testing": TEST,
    "predicting": PREDICT,
}

_CHANGING = {
    "current_epoch": "the number of the epoch",
    "global_step": "the number of updates",
    "callback_metrics": "figures",
    "logged_metrics": "figures",
    "progress_bar_metrics": "figures",
    "should_stop": "a flag of the run",
}

_ELSEWHERE = {
    "logger": "figures reach loggers by callbacks, fit(callbacks=[ipufit.WandbLogger("
    "...)]), and pictures by a callback of yours",
    "optimizers": "the optimizer runs in the program; model.optimizer is for callbacks",
    "callbacks": "ipufit's callbacks are arguments of fit",
    "datamodule": "data are arguments of fit and evaluate",
    "train_dataloader": "data are arguments of fit",
    "val_dataloaders": "data are arguments of fit",
}
_ELSEWHERE["loggers"] = _ELSEWHERE["logger"]


class TrainerFacts:
    """The values of a Trainer that are known, and reasons for those that aren't.

    Args:
        given: Values that the user has given, by name.
        stage: The work that the module is asked for.
        live: Functions that give the present value of what changes; None in a step,
            where such a value would be fixed.
        stop: Ends the run when `should_stop` is set; None where it can't be.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        stage: str,
        live: Mapping[str, Callable[[], Any]] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        vars(self).update(_given=given, _stage=stage, _live=live, _stop=stop)

    def __getattr__(self, name: str) -> Any:
        """A value that is known.

        Raises:
            UnsupportedError: It would be fixed in a program, or ipufit has no such
                value.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        facts = vars(self)
        live, given = facts["_live"], facts["_given"]
        if live is not None and name in live:
            return live[name]()
        if name in given:
            return given[name]
        if name in _STAGE_FLAGS:
            return facts["_stage"] == _STAGE_FLAGS[name]
        if name == "sanity_checking":
            return False
        raise UnsupportedError(_reason(name, facts["_stage"]))

    def __setattr__(self, name: str, value: Any) -> None:
        """Take `should_stop = True` in a hook, and nothing else.

        Raises:
            UnsupportedError: For all others.
        """
        stop = vars(self)["_stop"]
        if name != "should_stop" or stop is None:
            raise UnsupportedError(
                f"self.trainer.{name} was set, and ipufit has no Trainer. A hook "
                "between epochs may set self.trainer.should_stop; for anything else "
                "use an ipufit.Callback."
            )
        if value:
            stop()


def _reason(name: str, stage: str) -> str:
    what = f"self.trainer.{name}"
    if name in _CHANGING:
        return changing(what, _CHANGING[name])
    if name in _ELSEWHERE:
        return f"{what} was read, and ipufit has no Trainer: {_ELSEWHERE[name]}."
    where = "the hook" if stage == SETUP else "the step or hook"
    return (
        f"{what} was read, and ipufit has no Trainer. If {where} needs a number of it, "
        f"give it: from_lightning(module, trainer={{{name!r}: ...}})."
    )


def changing(what: str, meaning: str) -> str:
    """The message for a value that would be fixed in a program.

    Args:
        what: The value, as code.
        meaning: Its meaning, in words.
    """
    return (
        f"{what} was read in a step. A step runs once in Python, when its program is "
        f"compiled, so {meaning} would be fixed. Make what changes a 0-d buffer, "
        "register_buffer('beta', torch.tensor(0.0)), and fill it in a callback, "
        "on_epoch_begin: buffers of one value go to the program with every call."
    )
