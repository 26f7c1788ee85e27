# SPDX-License-Identifier: Apache-2.0
"""What `help()` and `repr()` say of a model."""

from __future__ import annotations

from ipufit import History, IPUConfig, IPUModel
from tests import reference


def test_a_model_says_its_module_its_layout_and_what_compile_was_told():
    model = IPUModel(reference.network(), IPUConfig(replicas=2, pipeline=("0", "2")))
    place = "<IPUModel: Sequential on IPUConfig(replicas=2, pipeline=('0', '2')), "
    assert repr(model) == f"{place}not compiled>"
    model.compile("adamw", "cross_entropy", metrics=["accuracy", "f1"])
    assert repr(model) == (
        f"{place}compiled with AdamW, loss cross_entropy, metrics accuracy, f1>"
    )
    model.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"b": ["mae"]})
    assert repr(model) == f"{place}compiled with SGD, loss mse, mae, metrics b_mae>"
    model.compile("sgd")
    assert repr(model) == (
        f"{place}compiled with SGD, loss of the module, metrics none>"
    )


def test_a_history_says_its_epochs_and_last_figures():
    history = History()
    assert repr(history) == "<History: 0 epochs>"
    history.on_epoch_end(0, {"loss": 0.5})
    assert repr(history) == "<History: 1 epoch, loss 0.5>"
    history.on_epoch_end(1, {"loss": 0.123456, "accuracy": 1.0, "names": ["a"]})
    assert repr(history) == "<History: 2 epochs, accuracy 1, loss 0.1235>"


def test_a_config_says_what_was_set_and_can_be_read_back():
    assert repr(IPUConfig()) == "IPUConfig()"
    config = IPUConfig(micro_batch_size=4, pipeline=("a", ("b", "c")), seed=0)
    assert eval(repr(config)) == config
    assert "replicas" not in repr(config)
