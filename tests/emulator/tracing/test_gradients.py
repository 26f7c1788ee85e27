# SPDX-License-Identifier: Apache-2.0
"""`torch.autograd.grad` in an inference model: as in torch, or refused.

Which functions PopTorch refuses is what a suite written on an IPU found: indexing,
`index_select`, `softplus` and `torch.norm` have no gradient there, `gather`,
`torch.linalg.norm`, `log(1 + exp(x))` and `topk` have one
(Bedledl/SchNet-IPU-Benchmark, `replacement_tests`).
"""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad
from torch.nn import functional

import ipufit.emulator as poptorch
from tests.emulator._models import Function, assert_same
from tests.strategies import examples

X = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) + 0.1
INDEX = torch.tensor([0, 2, 1, 2, 0, 1])


def gradient_of(function):
    """A function that returns the gradient of `function(x).sum()`, and it."""

    def differentiated(module, x):
        x.requires_grad_()
        y = function(module, x)
        return y, grad(y, x, torch.ones_like(y))[0]

    return differentiated


def assert_as_in_torch(module, x=X):
    """Two calls: what was baked in while tracing would show in the second."""
    executor = poptorch.inferenceModel(module)
    for given_x in (x, x.flip(0) * 0.9):
        actual, expected = executor(given_x), module(given_x.clone())
        assert_same(list(actual), list(expected))
    executor.destroy()


def linear():
    return nn.Linear(4, 4)


COMPOSED = {
    "arithmetic": lambda m, x: (x * x - 2 * x + 1) / (x + 1) ** 1.5,
    "exp, log": lambda m, x: torch.log(1 + torch.exp(x)),
    "cutoff": lambda m, x: 0.5 * (torch.cos(x * 3) + 1.0) * (x < 0.5).float(),
    "gather": lambda m, x: x.gather(0, m.index[:, None].expand(6, 4)),
    "scatter_add": lambda m, x: (x * 0).scatter_add(0, m.index[:, None] * x.int(), x),
    "linear": lambda m, x: torch.exp(-m.layer(x).pow(2)),
    "matmul": lambda m, x: torch.exp(x[None] @ m.layer.weight @ x.t()),
    "einsum": lambda m, x: torch.einsum("ij,kj->ik", m.layer(x), x),
    "linalg.norm": lambda m, x: torch.linalg.norm(x, dim=1),
    "normalize": lambda m, x: functional.normalize(x) * m.layer(x),
    "reductions": lambda m, x: x.mean(1) * x.std(1) + x.amax(1) * x.logsumexp(1),
    "slices": lambda m, x: torch.cat([x[:, 1:] * x[:, :3], x[:, :1] ** 2], 1) * x[0],
    "shapes": lambda m, x: x.t().reshape(2, 12).flip(0).unsqueeze(1).expand(2, 3, 12),
    "where, clamp": lambda m, x: torch.where(x > 0.5, x.clamp(max=0.8), x * x),
    "topk": lambda m, x: x.topk(2)[0] * x.sort()[0][:, :2],
    "no_grad": lambda m, x: x * x.detach() ** 2,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_gradient_is_that_of_torch(name):
    forward = gradient_of(COMPOSED[name])
    module = Function(forward, layer=linear(), buffers={"index": INDEX})
    assert_as_in_torch(module)


def second_order(module, x):
    x.requires_grad_()
    (first,) = grad(x.pow(3).sum(), x, create_graph=True)
    return grad((first * module.layer(x)).sum(), x)[0]


def twice(module, x):
    x.requires_grad_()
    y = x.pow(3)
    once = grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    return once, grad(y, x, grad_outputs=2 * x)[0]


def several(module, x):
    other = (x * 2).detach().requires_grad_()
    x.requires_grad = True
    unused = module.layer.weight
    found = grad((x * other).sum(), [other, x, unused], allow_unused=True)
    assert found[2] is None
    return found[:2]


def of_weights(module, x):
    loss = module.layer(x).pow(2).sum()
    return [g * 1.0 for g in grad(loss, [module.layer.weight, module.layer.bias])]


class Tenfold(torch.autograd.Function):
    """Has ten times the gradient of the square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 20


@pytest.mark.parametrize(
    "forward",
    [
        second_order,
        twice,
        several,
        of_weights,
        gradient_of(lambda m, x: Tenfold.apply(x * 2)),
    ],
)
def test_all_of_its_arguments_do_what_they_do_in_torch(forward):
    assert_as_in_torch(Function(forward, layer=linear()))


def test_nothing_of_the_trace_is_left_on_the_host():
    module = Function(of_weights, layer=linear())
    poptorch.inferenceModel(module)(X)
    assert all(weight.grad is None for weight in module.parameters())
    given = X.clone()
    poptorch.inferenceModel(Function(gradient_of(COMPOSED["arithmetic"])))(given)
    assert not given.requires_grad


class ForceField(nn.Module):
    """Energies of molecules from pairwise distances, and the forces on their atoms."""

    def __init__(self, num_atoms=3):
        super().__init__()
        pairs = torch.combinations(torch.arange(num_atoms)).flip(0)
        self.register_buffer("first", pairs[:, 0, None].repeat(1, 3))
        self.register_buffer("second", pairs[:, 1, None].repeat(1, 3))
        self.layer = nn.Linear(1, 5)

    def forward(self, positions):
        positions.requires_grad_()
        ends = [
            torch.stack([molecule.gather(0, index) for molecule in positions.unbind()])
            for index in (self.first, self.second)
        ]
        distances = (ends[0] - ends[1]).pow(2).sum(-1, keepdim=True).sqrt()
        energies = torch.log(1 + torch.exp(self.layer(distances))).sum((1, 2))
        (gradient,) = grad(energies, positions, torch.ones_like(energies))
        return energies, -gradient


@given(data=st.data())
@settings(max_examples=examples(8))
def test_forces_are_those_of_torch_in_every_layout(data):
    iterations = data.draw(st.integers(1, 3))
    replicas = data.draw(st.sampled_from([1, 2]))
    rows = data.draw(st.integers(1, 2))
    options = poptorch.Options()
    options.deviceIterations(iterations).replicationFactor(replicas)
    options.Precision.enableFloatingPointExceptions(data.draw(st.booleans()))
    module = ForceField().eval()
    seed = data.draw(st.integers(0, 99))
    positions = torch.rand(
        iterations * replicas * rows,
        3,
        3,
        generator=torch.Generator().manual_seed(seed),
    )
    energies, forces = module(positions.clone())
    executor = poptorch.inferenceModel(module, options)
    for _ in range(2):
        found = executor(positions)
        torch.testing.assert_close(found[0], energies.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], forces.detach(), rtol=1e-5, atol=1e-5)
        positions, forces, energies = (t.flip(0) for t in (positions, forces, energies))
    executor.destroy()


@pytest.mark.parametrize("is_stochastic", [False, True])
def test_forces_in_half_precision_are_rounded(is_stochastic):
    module, positions = ForceField().eval(), torch.rand(6, 3, 3)
    _, forces = module(positions.clone())
    options = poptorch.Options().deviceIterations(3)
    options.Precision.enableStochasticRounding(is_stochastic)
    _, found = poptorch.inferenceModel(module.half(), options)(positions.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), forces.detach(), rtol=0.02, atol=0.02)


def test_a_stage_after_the_energy_may_compute_the_forces():
    class Staged(nn.Module):
        def forward(self, x):
            with poptorch.Block(ipu_id=0):
                x.requires_grad_()
                hidden = torch.exp(x)
            with poptorch.Block(ipu_id=1):
                return grad(torch.exp(-hidden.pow(2)).sum(), x)[0]

    options = poptorch.Options().deviceIterations(3)
    found = poptorch.inferenceModel(Staged(), options)(X)
    torch.testing.assert_close(found, Staged()(X.clone()))


def test_a_saved_executable_computes_forces(tmp_path):
    module, positions = ForceField().eval(), torch.rand(4, 3, 3)
    _, forces = module(positions.clone())
    path = str(tmp_path / "forces.poptorch")
    poptorch.inferenceModel(module).compileAndExport(path, positions)
    executor = poptorch.inferenceModel(module)
    executor.loadExecutable(path)
    torch.testing.assert_close(executor(positions)[1], forces.detach())


WITHOUT = {
    "indexing": (lambda m, x: x[m.index], "_index_put_impl_.*torch.gather"),
    "index_select": (
        lambda m, x: x.index_select(0, m.index),
        "index_add.*torch.gather",
    ),
    "softplus": (
        lambda m, x: functional.softplus(x),
        r"softplus_backward.*torch.log\(",
    ),
    "norm": (lambda m, x: torch.norm(x, dim=1), "doesn't see it.*torch.linalg.norm"),
    "abs": (lambda m, x: x.abs(), "aten::sgn"),
    "tanh": (lambda m, x: torch.tanh(x), "tanh_backward"),
    "relu": (lambda m, x: torch.relu(x), r"threshold_backward.*clamp\(min=0\)"),
    "softmax": (lambda m, x: x.softmax(1), "_softmax_backward_data"),
    "max": (lambda m, x: x.max(), "aten::item.*torch.amax"),
    "prod": (lambda m, x: x.prod(1), "aten::item"),
    "layer_norm": (
        lambda m, x: functional.layer_norm(x, (4,)),
        "native_layer_norm_backward",
    ),
    "dropout": (lambda m, x: functional.dropout(x, 0.5, m.training), "doesn't see it"),
    "l1_loss": (lambda m, x: functional.l1_loss(x, x * x), "doesn't see it"),
    "for_loop": (
        lambda m, x: poptorch.for_loop(1, lambda y: y * 2, [x])[0],
        "no derivative of it",
    ),
    "nop": (lambda m, x: poptorch.nop(x * 2), "no derivative of it"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_function_without_a_backward_on_a_device_is_refused_by_name(name):
    function, message = WITHOUT[name]
    forward = gradient_of(lambda m, x: function(m, x * x))
    module = Function(forward, buffers={"index": INDEX}).eval()
    with pytest.raises(poptorch.Error, match=f"(?s)through .*{name}.*{message}") as e:
        poptorch.inferenceModel(module)(X)
    assert "test_gradients.py:" in str(e.value)
    # It isn't where no gradient passes through.
    bypassed = gradient_of(lambda m, x: function(m, x.detach() * 2).sum() * x)
    module = Function(bypassed, buffers={"index": INDEX}).eval()
    assert_as_in_torch(module)


def test_slices_with_a_step_have_no_gradient():
    module = Function(gradient_of(lambda m, x: x[:, ::2]))
    with pytest.raises(poptorch.Error, match="a slice with a step"):
        poptorch.inferenceModel(module)(X)


def test_an_assignment_to_elements_has_no_gradient():
    def assigned(module, x):
        y = x * 2
        y[:, 0] = x[:, 1]
        return y

    with pytest.raises(poptorch.Error, match=r"assignment to elements.*as_strided"):
        poptorch.inferenceModel(Function(gradient_of(assigned)))(X)


def test_what_requires_no_gradient_is_refused_with_the_way():
    module = Function(lambda m, x: grad((x * 2).sum(), x)[0])
    with pytest.raises(poptorch.Error, match=r"`x.requires_grad_\(\)` in `forward`"):
        poptorch.inferenceModel(module)(X)
    module = Function(gradient_of(COMPOSED["arithmetic"]))
    with torch.no_grad(), pytest.raises(poptorch.Error, match="grad mode"):
        poptorch.inferenceModel(module)(X)


def test_a_tensor_of_the_host_is_no_gradient_of_outputs():
    module = Function(lambda m, x: grad(x.requires_grad_() * 2, x, X)[0])
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(module)(X)


def test_gradients_of_a_batch_of_outputs_are_refused():
    def forward(module, x):
        y = x.requires_grad_() * 2
        return grad(y, x, torch.stack([y, y]), is_grads_batched=True)[0]

    with pytest.raises(poptorch.Error, match="vmap, which isn't traced"):
        poptorch.inferenceModel(Function(forward))(X)


def test_training_refuses_it_and_says_why():
    def forward(module, x):
        loss = module.layer(x).pow(2).sum()
        (gradient,) = grad(loss, module.layer.weight, create_graph=True)
        return poptorch.identity_loss(loss + gradient.pow(2).sum(), "sum")

    module = Function(forward, layer=linear())
    executor = poptorch.trainingModel(
        module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.Error, match=r"training model.*nobody has seen"):
        executor(X)


def test_an_inference_without_gradients_is_traced_as_before():
    def forward(module, x):
        with torch.no_grad():
            hidden = module.layer(x)
        assert not hidden.requires_grad
        assert module.layer(x).requires_grad
        return module.layer(hidden)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = poptorch.inferenceModel(Function(forward, layer=linear()))(X)
    assert not found.requires_grad
