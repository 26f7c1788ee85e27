# SPDX-License-Identifier: Apache-2.0
"""`LambdaCallback`: each function in the place of its hook."""

from __future__ import annotations

import pytest

from ipufit import ConfigError
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


def test_unknown_hooks_are_refused():
    with pytest.raises(
        ConfigError, match=r"no hook on_epoch_finish\. Hooks are: on_tr"
    ):
        LambdaCallback(on_epoch_finish=print)
    with pytest.raises(ConfigError, match="no hook close"):
        LambdaCallback(close=print)
    with pytest.raises(ConfigError, match="on_epoch_end=3 is no function"):
        LambdaCallback(on_epoch_end=3)
