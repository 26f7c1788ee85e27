# SPDX-License-Identifier: Apache-2.0
"""`GradientMonitor`, against the gradients of plain torch."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import (
    ConfigError,
    CoverageWarning,
    GradientMonitor,
    IPUConfig,
    IPUModel,
    NonFiniteLossWarning,
    Optimizer,
    UnknownNameError,
    UnsupportedError,
    poptorch,
)
from ipufit.errors import NonFiniteGradientWarning
from ipufit.state import RunState
from tests.reference import compiled
from tests.strategies import examples

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(3))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(4))


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    )


class Recorder(GradientMonitor):
    """Keeps what the model gives after every call."""

    def on_train_begin(self, logs):
        super().on_train_begin(logs)
        self.seen = []

    def on_train_batch_end(self, batch, logs):
        super().on_train_batch_end(batch, logs)
        gradients = self.model.gradients()
        self.seen.append({n: g.clone() for n, g in gradients.items()})
        self.logs = dict(logs)


def plain(batch_size, updates, reduction="mean"):
    """Gradients of each call of so many updates, by plain torch with SGD."""
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    calls, total = [], None
    for number, (x, y) in enumerate(zip(X.split(batch_size), Y.split(batch_size)), 1):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), y, reduction=reduction).backward()
        found = {n: p.grad.clone() for n, p in module.named_parameters()}
        total = found if total is None else {n: total[n] + g for n, g in found.items()}
        if number % updates == 0:
            calls.append({n: g / updates for n, g in total.items()})
            total = None
        optimizer.step()
    return calls


def norm(gradients):
    return math.sqrt(sum(float(g.pow(2).sum()) for g in gradients.values()))


def fit(monitor, loss="mse", epochs=1, optimizer=None, **config):
    model = IPUModel(network(), IPUConfig(**config))
    model.compile(optimizer or Optimizer("sgd", 0.1), loss)
    history = model.fit(
        X, Y, 12, epochs=epochs, shuffle=False, verbose=0, callbacks=[monitor]
    )
    return model, history.history


@settings(max_examples=examples(15))
@given(
    st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["mse", torch.nn.MSELoss(reduction="sum")]),
    st.sampled_from([1.0, 128.0]),
)
def test_gradients_are_those_of_plain_torch(factors, iterations, loss, scaling):
    accumulation, replicas = factors
    monitor = Recorder()
    rate = 0.1 if loss == "mse" else 1e-3  # a sum is longer
    fit(
        monitor,
        loss,
        optimizer=Optimizer("sgd", rate, loss_scaling=scaling),
        gradient_accumulation=accumulation,
        replicas=replicas,
        device_iterations=iterations,
    )
    assert len(monitor.seen) == 4 // iterations
    if loss == "mse":
        expected = plain(12, iterations)
        for seen, known in zip(monitor.seen, expected):
            assert seen.keys() == known.keys()
            for name, gradient in seen.items():
                torch.testing.assert_close(gradient, known[name], atol=1e-6, rtol=1e-4)
    else:
        first = plain(12, 1, "sum")[0]
        if iterations == 1:
            for name, gradient in monitor.seen[0].items():
                torch.testing.assert_close(gradient, first[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["All", "Final", "EveryN", "Sum"])
def test_own_output_modes(mode):
    options = poptorch.Options()
    options.deviceIterations(2)
    options.Training.gradientAccumulation(2)
    period = {"output_return_period": 2} if mode == "EveryN" else {}
    options.outputMode(getattr(poptorch.OutputMode, mode), **period)
    monitor = Recorder()
    is_part = mode in ("Final", "EveryN")
    with pytest.warns(CoverageWarning) if is_part else contextlib.nullcontext():
        fit(monitor, training_options=options)
    if mode in ("All", "Sum"):
        for seen, known in zip(monitor.seen, plain(12, 2)):
            for name, gradient in seen.items():
                torch.testing.assert_close(gradient, known[name], atol=1e-6, rtol=1e-4)
    else:  # of micro-batches that came back
        for seen in monitor.seen:
            assert {n: g.shape for n, g in seen.items()} == {
                n: p.shape for n, p in network().named_parameters()
            }
            assert norm(seen) > 0


def test_figures_are_norms_and_their_means():
    monitor = Recorder(is_detailed=True)
    _, history = fit(monitor)
    calls = plain(12, 1)
    norms = [norm(call) for call in calls]
    assert history["grad_norm"] == [pytest.approx(sum(norms) / 4, rel=1e-4)]
    assert history["grad_norm_max"] == [pytest.approx(max(norms), rel=1e-4)]
    weights = [float(call["0.weight"].norm()) for call in calls]
    assert history["grad_norm/0.weight"] == [pytest.approx(sum(weights) / 4, rel=1e-4)]
    assert monitor.logs["grad_norm"] == pytest.approx(norms[-1], rel=1e-4)
    assert monitor.norms["0.weight"] == pytest.approx(weights[-1], rel=1e-4)


def test_only_the_parameters_named_come_back():
    monitor = Recorder(["2.*", "0.bias"])
    fit(monitor)
    assert list(monitor.seen[0]) == ["0.bias", "2.weight", "2.bias"]
    monitor = Recorder("0.weight")
    fit(monitor)
    assert list(monitor.seen[0]) == ["0.weight"]


def test_frozen_parameters_have_none():
    module = network()
    module[0].requires_grad_(False)
    model = compiled(module, loss="mse")
    monitor = Recorder()
    model.fit(X, Y, 12, verbose=0, callbacks=monitor)
    assert list(monitor.seen[0]) == ["2.weight", "2.bias"]
    with pytest.raises(UnknownNameError, match=r"trainable parameter.*0\.weight"):
        model.fit(X, Y, 12, verbose=0, callbacks=GradientMonitor("0.weight"))


def test_the_weights_are_the_same_with_it():
    (one, _), (other, _) = fit(GradientMonitor()), fit([])
    for name, tensor in one.module.state_dict().items():
        assert torch.equal(tensor, other.module.state_dict()[name])


def test_the_first_gradient_that_is_not_finite_is_warned_of():
    model = compiled(network(), optimizer=Optimizer("sgd", 1e30), loss="mse")
    monitor = GradientMonitor()
    with pytest.warns() as caught:
        model.fit(X, Y, 12, epochs=2, verbose=0, callbacks=monitor)
    ours = [w for w in caught if w.category is NonFiniteGradientWarning]
    assert len(ours) == 1
    assert "The gradient of 0.weight and 3 more is" in str(ours[0].message)
    assert {w.category for w in caught} == {
        NonFiniteGradientWarning,
        NonFiniteLossWarning,
    }
    assert math.isnan(model.history.history["grad_norm_max"][1])


def test_automatic_loss_scaling_is_refused():
    model = IPUModel(network(), IPUConfig(precision="float16"))
    model.compile(Optimizer("sgd", 0.1, loss_scaling="auto"), "mse")
    with pytest.raises(UnsupportedError, match="only the device knows"):
        model.fit(X, Y, 12, verbose=0, callbacks=GradientMonitor())


def test_gradients_are_for_callbacks():
    model, _ = fit(GradientMonitor())
    with pytest.raises(ConfigError, match="for callbacks while fit"):
        model.gradients()


# The heat map -----------------------------------------------------------------------


@pytest.fixture
def pyplot():
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def heat_map(monitor):
    """The axes, and the norms in its cells: NaN where a cell is white."""
    axes = monitor.plot().axes[0]
    (image,) = axes.get_images()
    return axes, torch.from_numpy(image.get_array().filled(math.nan))


def test_the_norms_of_all_updates_are_one_picture(pyplot):
    monitor = GradientMonitor()
    fit(monitor)
    axes, cells = heat_map(monitor)
    names = [name for name, _ in network().named_parameters()]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    expected = [[float(call[n].norm()) for call in plain(12, 1)] for n in names]
    torch.testing.assert_close(cells, torch.tensor(expected), atol=1e-6, rtol=1e-4)
    assert axes.get_xlim() == (0.5, 4.5)
    assert axes.get_xlabel() == "update"


def test_columns_of_long_runs_have_the_largest_norms_of_several_calls(pyplot):
    monitor, run = GradientMonitor(), RunState()
    monitor.set_run(run)
    gradient = torch.zeros(1)
    monitor.set_model(SimpleNamespace(gradients=lambda: {"w": gradient}))
    monitor.watched_gradients(torch.nn.ParameterDict({"w": torch.zeros(1)}))
    monitor.on_train_begin({})
    norms = torch.rand(5001, generator=torch.Generator().manual_seed(0))
    for norm in norms:
        gradient.fill_(norm)
        run.count_call(1, samples=0)
        monitor.on_train_batch_end(0, {})
    axes, cells = heat_map(monitor)
    expected = [part.max() for part in norms.split(8)]
    assert cells.tolist() == [[float(norm) for norm in expected]]
    assert axes.get_xlim() == (0.5, 5001.5)


def test_norms_that_have_no_logarithm_are_white(pyplot):
    module = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    model = IPUModel(module)
    model.compile("sgd", "mse")
    monitor = GradientMonitor()
    model.fit(torch.ones(4, 2), torch.zeros(4, 1), 4, callbacks=monitor, verbose=0)
    assert heat_map(monitor)[1].isnan().all()


def test_a_history_leaves_norms_of_single_parameters_to_the_heat_map(pyplot):
    model, _ = fit(GradientMonitor(is_detailed=True))
    labels = [axes.get_ylabel() for axes in model.history.plot().axes]
    assert labels == ["loss", "grad_norm", "grad_norm_max"]
    assert model.history.plot("grad_norm/0.bias").axes[0].get_ylabel()


def test_there_is_no_heat_map_before_fit():
    with pytest.raises(ConfigError, match=r"nothing to draw.*after fit"):
        GradientMonitor().plot()
