# SPDX-License-Identifier: Apache-2.0
"""`IPUConfig(inference=...)` in `evaluate`, `predict` and validation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import IPUConfig, poptorch
from tests import reference
from tests.strategies import slow_but_each_fourth

X, Y = reference.samples(48)


def network():
    torch.manual_seed(0)
    sizes = (3, 6, 6, 6, 4)
    layers = [
        nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:])
    ]
    return nn.Sequential(*layers)


class Named(nn.Module):
    """Begins blocks by names, which have IPUs in a config only."""

    def __init__(self):
        super().__init__()
        self.parts = network()

    def forward(self, x):
        for number, part in enumerate(self.parts):
            with poptorch.Block(f"part {number}"):
                x = part(x)
        return x


FOUR = {"pipeline": ("0", "1", "2", "3")}
OWN = {"pipeline": tuple(f"part {number}" for number in range(4))}
TWO, LAYERS = ("0", "[123]"), {"layers_per_ipu": [1, 1, 1, 1]}
PARTS = {"pipeline": [("part 0", "part 1"), ("part 2", "part 3")]}
MEMORY = {"available_memory_proportion": (0.1, 0.2, 0.3, 0.4)}
LAYOUTS = {
    "one IPU": (network, FOUR, {"pipeline": None}, 1, 1),
    "one stage": (network, FOUR, {"pipeline": [("0", "1", "2", "3")]}, 1, 1),
    "two stages": (network, {**FOUR, "loss_block": "3"}, {"pipeline": TWO}, 2, 2),
    "numbers of layers": (network, FOUR, {"layers_per_ipu": [3, 1]}, 2, 2),
    "from layers to names": (network, LAYERS, {"pipeline": ("0", "3")}, 2, 2),
    "from layers to one": (network, LAYERS, {"pipeline": None}, 1, 1),
    "sharded": (network, FOUR, {"execution": "sharded"}, 4, 1),
    "two replicas": (network, FOUR, {"pipeline": None, "replicas": 2}, 2, 1),
    "own blocks on one": (Named, OWN, {"pipeline": None}, 1, 1),
    "own blocks on two": (Named, OWN, PARTS, 2, 2),
    "other memory": (network, {**FOUR, **MEMORY}, {"partials": "half"}, 4, 4),
}


def trained(make, **config):
    """Figures of a fit with validation, and the weights of another after it."""
    module = make()
    layout = {"micro_batch_size": 3, "inference_iterations": 1, **config}
    model = reference.compiled(module, **layout, optimizer="adam", metrics=["accuracy"])
    fit = {"batch_size": 24, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, validation_data=(X, Y), **fit)
    with torch.no_grad():
        expected = module.eval()(X)
    torch.testing.assert_close(model.predict(X, verbose=0), expected)
    evaluated = model.evaluate(X, Y, verbose=0)
    assert evaluated["loss"] == pytest.approx(history.history["val_loss"][0], rel=1e-6)
    model.fit(X, Y, **fit)  # goes on from what it had
    model.detach()
    return history.history, reference.weights(module)


@pytest.fixture(scope="module")
def on_one_ipu():
    return trained(network, gradient_accumulation=8)


@pytest.mark.parametrize("name", slow_but_each_fourth(LAYOUTS))
def test_a_pipeline_is_evaluated_with_a_layout_of_its_own(
    monkeypatch, on_one_ipu, name
):
    make, training, inference, num_ipus, iterations = LAYOUTS[name]
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")  # the training program takes all
    seen = {}

    def look(options, is_training):
        seen[is_training] = options.toDict()

    config = {**training, "inference": inference}
    figures, weights = trained(make, **config, customize=look)
    plain, plain_weights = on_one_ipu
    assert figures == {name: pytest.approx(plain[name], rel=1e-5) for name in plain}
    for mine, theirs in zip(weights.values(), plain_weights.values()):
        torch.testing.assert_close(mine, theirs)
    assert seen[False]["device_iterations"] == iterations
    assert seen[False]["replication_factor"] == inference.get("replicas", 1)
    is_sharded = seen[False]["execution_mode"] == 1
    assert is_sharded == ("execution" in inference or name == "from layers to one")
    assert seen[True]["execution_mode"] == 0
    assert IPUConfig(**config).inference_config.num_ipus == num_ipus
