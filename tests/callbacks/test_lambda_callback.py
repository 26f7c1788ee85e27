# SPDX-License-Identifier: Apache-2.0
"""`LambdaCallback`: each function in the place of its hook."""

from __future__ import annotations

import pytest
import torch

from ipufit import ConfigError, IPUModel
from ipufit.callbacks import CallbackList, LambdaCallback
from tests.reference import HOOKS


@pytest.mark.parametrize("name", [*HOOKS, "on_batch_begin", "on_batch_end"])
def test_every_hook_can_be_a_function(name):
    heard = []
    callback = LambdaCallback(**{name: lambda *arguments: heard.append(arguments)})
    arguments = (3, {}) if "batch" in name or "epoch" in name else ({},)
    for hook in HOOKS:
        given = (3, {}) if "batch" in hook or "epoch" in hook else ({},)
        getattr(CallbackList(callback), hook)(*given)
    assert heard == [arguments]


def test_functions_may_be_given_in_keras_s_order():
    heard = []
    hooks = [lambda *_, name=name: heard.append(name) for name in "abcdef"]
    callback = CallbackList(LambdaCallback(*hooks))
    callback.on_epoch_begin(0, {})
    callback.on_epoch_end(0, {})
    callback.on_train_begin({})
    callback.on_train_end({})
    callback.on_train_batch_begin(0, {})
    callback.on_train_batch_end(0, {})
    assert "".join(heard) == "abcdef"


def test_no_functions_are_fine():
    LambdaCallback(on_test_end=None).on_test_end({})


def test_unknown_hooks_are_refused():
    with pytest.raises(
        ConfigError, match=r"no hook on_epoch_finish\. Hooks are: on_tr"
    ):
        LambdaCallback(on_epoch_finish=print)
    with pytest.raises(ConfigError, match="no hook close"):
        LambdaCallback(close=print)


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="on_epoch_end=3 is no function"):
        LambdaCallback(on_epoch_end=3)


def test_what_it_puts_into_the_logs_reaches_history():
    model = IPUModel(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    doubling = LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(twice=2 * logs["loss"])
    )
    x = torch.ones(4, 1)
    history = model.fit(x, x, batch_size=2, callbacks=doubling, verbose=0).history
    assert history["twice"] == [2 * loss for loss in history["loss"]]
