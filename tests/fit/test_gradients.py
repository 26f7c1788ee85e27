# SPDX-License-Identifier: Apache-2.0
"""Models whose `forward` calls `torch.autograd.grad`: energies and their forces."""

from __future__ import annotations

import pytest
import torch

from ipufit import IPUConfig, IPUModel, UnsupportedError, compare, poptorch

IS_EMULATED = poptorch.__name__ == "ipufit.emulator"
pytestmark = pytest.mark.skipif(not IS_EMULATED, reason="not seen on an IPU yet")


class Potential(torch.nn.Module):
    """Continuous-filter convolutions over given pairs of atoms, like SchNet's."""

    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(5, 8)
        self.filters = torch.nn.Linear(6, 8)
        self.energy = torch.nn.Linear(8, 1)
        self.register_buffer("centers", torch.linspace(0, 2, 6))

    def forward(self, positions, kinds, pairs):
        positions.requires_grad_()
        first, second = (pairs[..., i, None] for i in range(2))
        ends = [positions.gather(1, i.repeat(1, 1, 3)) for i in (first, second)]
        distances = ((ends[0] - ends[1]).pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        filters = softplus(self.filters(torch.exp(-(distances - self.centers).pow(2))))
        atoms = self.kinds(kinds)
        messages = atoms.gather(1, second.repeat(1, 1, 8)) * filters
        sums = torch.zeros_like(atoms).scatter_add(1, first.repeat(1, 1, 8), messages)
        energy = self.energy(softplus(atoms + sums)).sum((1, 2))
        (gradient,) = torch.autograd.grad(
            [energy], [positions], [torch.ones_like(energy)], create_graph=self.training
        )
        return {"energy": energy, "forces": -gradient}


def softplus(x):
    return torch.log(1 + torch.exp(x)) - 0.6931


@pytest.fixture(scope="module")
def molecules():
    random = torch.Generator().manual_seed(2)
    pairs = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return {
        "positions": torch.rand(12, 4, 3, generator=random) * 2,
        "kinds": torch.randint(5, (12, 4), generator=random),
        "pairs": pairs.repeat(12, 1, 1),
    }


def in_torch(module, molecules):
    expected = module.eval()(**{name: t.clone() for name, t in molecules.items()})
    return {name: tensor.detach() for name, tensor in expected.items()}


@pytest.mark.parametrize(("iterations", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_predict_gives_the_forces_of_torch(molecules, iterations, replicas):
    config = IPUConfig(
        micro_batch_size=2, device_iterations=iterations, replicas=replicas
    )
    model = IPUModel(Potential(), config)
    found = model.predict(molecules, verbose=0)
    expected = in_torch(model.module, molecules)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not molecules["positions"].requires_grad


def test_evaluate_compares_forces_with_targets(molecules):
    model = IPUModel(Potential(), IPUConfig(micro_batch_size=2, device_iterations=2))
    targets = in_torch(model.module, molecules)
    targets["forces"] = targets["forces"] + 2
    model.compile(loss={"energy": "mse", "forces": "mse"})
    figures = model.evaluate(molecules, targets, verbose=0)
    assert figures["energy_loss"] == pytest.approx(0, abs=1e-9)
    assert figures["forces_loss"] == pytest.approx(4, rel=1e-5)


def test_a_fit_and_a_check_of_it_refuse_the_call_with_its_line(molecules):
    model = IPUModel(Potential(), IPUConfig(micro_batch_size=2))
    targets = in_torch(model.module, molecules)
    model.compile("sgd", {"energy": "mse", "forces": "mse"})
    line = r"autograd\.grad\(\) was called in training \(test_gradients\.py:\d+"
    with pytest.raises(UnsupportedError, match=line):
        model.fit(molecules, targets, verbose=0)
    found = [str(one.what) for one in model.check(molecules, targets).of("refused")]
    assert any("test_gradients.py" in what and "training" in what for what in found)


class Slope(torch.nn.Module):
    """Returns df / dx for f(x) = w tanh(v x + b), by a way of three."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)
        self.way = way

    def value(self, x):
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x):
        if self.way == "differences":
            return (self.value(x + 0.05) - self.value(x - 0.05)) / 0.1
        if self.way == "by hand":
            hidden = torch.tanh(self.first(x))
            slope = (1 - hidden**2) * self.first.weight[:, 0]
            return slope @ self.last.weight.t()
        if self.way == "jvp":
            return torch.func.jvp(self.value, (x,), (torch.ones_like(x),))[1]
        if self.way == "vjp":
            value, backward = torch.func.vjp(self.value, x)
            return backward(torch.ones_like(value))[0]
        if self.way == "grad":
            return torch.func.grad(lambda x: self.value(x).sum())(x)
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.value(x).sum(), x, create_graph=True)
        return slope


@pytest.mark.parametrize("way", ["autograd", "jvp", "vjp", "grad"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.")  # torch's own
def test_a_derivative_in_training_names_two_ways(way):
    model = IPUModel(Slope(way), IPUConfig(micro_batch_size=4))
    model.compile("sgd", "mse")
    words = r"finite differences, `\(f\(x \+ h\) - f\(x - h\).* along .*by hand"
    with pytest.raises((UnsupportedError, poptorch.Error), match=words):
        model.fit(torch.rand(8, 1), torch.rand(8, 1), verbose=0)


def test_the_two_ways_of_a_derivative_train_as_torch_does():
    torch.manual_seed(7)
    x, start = torch.rand(16, 1), Slope("autograd").state_dict()
    results = {}
    for other in ("differences", "by hand"):
        model = IPUModel(Slope(other), IPUConfig(micro_batch_size=4))
        model.set_weights(start)
        model.compile(torch.optim.SGD(model.module.parameters(), lr=0.1), "mse")
        model.fit(x, x.cos(), epochs=3, shuffle=False, verbose=0)
        results[other] = model.module.first.weight
    twin = Slope("autograd")
    twin.load_state_dict(start)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows in x.split(4) * 3:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(twin(rows.clone()), rows.cos()).backward()
        optimizer.step()
    torch.testing.assert_close(results["by hand"], twin.first.weight)
    torch.testing.assert_close(
        results["differences"], twin.first.weight, atol=1e-3, rtol=1e-2
    )


def test_summaries_and_comparisons_run_forward_with_gradients(molecules):
    model = IPUModel(Potential(), IPUConfig(micro_batch_size=2))
    one = {name: tensor[:2] for name, tensor in molecules.items()}
    assert [layer.name for layer in model.summary(one).layers] == [
        "filters",
        "kinds",
        "energy",
    ]
    found = compare(model, (one,)).differences
    assert len(found) == 2
    assert all(difference.absolute < 1e-5 for difference in found)
