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
