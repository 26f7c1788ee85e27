# SPDX-License-Identifier: Apache-2.0
"""Parameters whose values differ between groups of replicas."""

# ruff: noqa: N803, N806 - D, G and R are the letters of the user guide
import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import CommGroupType, VariableRetrievalMode
from tests.emulator import _models

pytestmark = pytest.mark.looped

ONE_PER_GROUP = VariableRetrievalMode.OnePerGroup
ALL_REPLICAS = VariableRetrievalMode.AllReplicas
B, IN, OUT = 3, 4, 2


def group(kind, shards, replicas):
    """How many groups there are, and the number of each replica's."""
    size = {CommGroupType.All: replicas, CommGroupType.NoGrouping: 1}.get(kind, shards)
    count = replicas // size
    is_orthogonal = kind is CommGroupType.Orthogonal
    members = [r % count if is_orthogonal else r // size for r in range(replicas)]
    return SimpleNamespace(count=count, members=members)


# Training -----------------------------------------------------------------------


class Model(nn.Module):
    """A grouped parameter and a common one."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, IN, OUT))
        self.bias = nn.Parameter(torch.randn(OUT))

    def forward(self, x, y):
        out = x @ self.weight + self.bias
        return out, nn.functional.mse_loss(out, y)


def make_options(R, D=1, G=1):
    return _models.make_options(D, G, R, poptorch.OutputMode.All)


def wrap(model, kind, shards, mode=ONE_PER_GROUP, R=4, optimizer=None, options=None):
    options = make_options(R) if options is None else options
    executor = poptorch.trainingModel(model, options, optimizer)
    executor.weight.replicaGrouping(kind, shards, mode)
    return executor


def train_apart(model, x, y, groups, make_optimizer, divisors, D, G):
    """The same by hand: a model for each group, with the bias in common."""
    R = len(groups.members)
    elements = [
        nn.Parameter(model.weight.detach()[number].clone())
        for number in range(groups.count)
    ]
    bias = nn.Parameter(model.bias.detach().clone())
    optimizer = make_optimizer([*elements, bias])
    blocks = zip(x.split(B), y.split(B))
    losses = []
    for _ in range(D):
        optimizer.zero_grad()
        for _ in range(G):
            for replica in range(R):
                rows, targets = next(blocks)
                out = rows @ elements[groups.members[replica]] + bias
                loss = nn.functional.mse_loss(out, targets)
                loss.backward()
                losses.append(loss.detach())
        for element in elements:
            element.grad /= divisors[0]
        bias.grad /= divisors[1]
        optimizer.step()
    return torch.stack(losses), torch.stack(elements).detach(), bias.detach()


R, G, D = 4, 2, 3
MEAN, SUM = poptorch.ReductionType.Mean, poptorch.ReductionType.Sum
POST = poptorch.MeanReductionStrategy.Post
RUNNING = poptorch.MeanReductionStrategy.Running
GROUPINGS = [
    (CommGroupType.All, 0, 4),
    (CommGroupType.Consecutive, 2, 2),
    (CommGroupType.Orthogonal, 2, 2),
    (CommGroupType.NoGrouping, 0, 1),
]


@pytest.mark.parametrize(("kind", "shards", "size"), GROUPINGS)
@pytest.mark.parametrize(
    ("reduction", "strategy"), [(MEAN, POST), (MEAN, RUNNING), (SUM, POST)]
)
def test_each_group_trains_by_itself(kind, shards, size, reduction, strategy):
    options = make_options(R, D, G)
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    groups = group(kind, shards, R)
    model = Model(groups.count)
    x, y = torch.randn(2, D * G * R * B, IN).split(1)
    x, y = x[0], y[0][:, :OUT]
    divisors = (G * R, G * R)
    if reduction == SUM:
        divisors = (1, 1)
    elif strategy == RUNNING:
        divisors = (G * size, G * R)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    expected = train_apart(model, x, y, groups, sgd, divisors, D, G)
    optimizer = sgd(model.parameters())
    executor = wrap(model, kind, shards, optimizer=optimizer, options=options)
    _, losses = executor(x, y)
    for actual, wanted in zip((losses, model.weight, model.bias), expected):
        torch.testing.assert_close(actual.detach(), wanted)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: poptorch.optim.SGD(parameters, lr=0.05, weight_decay=0.1),
        lambda parameters: poptorch.optim.AdamW(parameters, lr=0.05),
        lambda parameters: poptorch.optim.RMSprop(parameters, lr=0.05),
        lambda parameters: poptorch.optim.LAMB(parameters, lr=0.05),
    ],
)
def test_every_optimizer_treats_each_element_as_a_weight(make_optimizer):
    groups = group(CommGroupType.Orthogonal, 2, R)
    model = Model(groups.count)
    with torch.no_grad():
        model.weight[1] *= 10  # elements of norms that LAMB tells apart
    x, y = torch.randn(D * R * B, IN), torch.randn(D * R * B, OUT)
    expected = train_apart(model, x, y, groups, make_optimizer, (R, R), D, 1)
    options = make_options(R, D)
    optimizer = make_optimizer(model.parameters())
    executor = wrap(
        model, CommGroupType.Orthogonal, 2, optimizer=optimizer, options=options
    )
    _, losses = executor(x, y)
    for actual, wanted in zip((losses, model.weight, model.bias), expected):
        torch.testing.assert_close(actual.detach(), wanted)


def test_clipping_counts_the_gradients_of_all_groups():
    x, y = torch.randn(R * B, IN), torch.randn(R * B, OUT)
    model = Model(2)
    twin, start = copy.deepcopy(model), copy.deepcopy(model)

    def step(model, largest_norm):
        optimizer = poptorch.optim.SGD(
            model.parameters(), lr=0.5, max_grad_norm=largest_norm
        )
        wrap(model, CommGroupType.Consecutive, 2, optimizer=optimizer)(x, y)
        return [
            (before - after.detach()).flatten() / 0.5
            for before, after in zip(start.parameters(), model.parameters())
        ]

    gradient = torch.cat(step(twin, None)).detach()
    clipped = torch.cat(step(model, gradient.norm().item() / 2)).detach()
    torch.testing.assert_close(clipped, gradient / 2, rtol=1e-4, atol=1e-6)


def test_groups_of_weights_and_of_inputs_are_independent():
    """As tensor parallelism needs it: each part of the weights sees all rows."""
    options = make_options(R).inputReplicaGrouping(2, CommGroupType.Consecutive)
    model = Model(2)
    before = copy.deepcopy(model)
    x, y = torch.randn(2 * B, IN), torch.randn(2 * B, OUT)
    executor = wrap(model, CommGroupType.Orthogonal, 2, options=options)
    out, _ = executor(x, y)
    expected = [
        rows @ before.weight[number] + before.bias
        for rows in x.split(B)
        for number in range(2)
    ]
    torch.testing.assert_close(out, torch.cat(expected).detach())


# Transfers ----------------------------------------------------------------------


class Scale(nn.Module):
    """Each update of plain SGD with rate 1 subtracts the input from the factor."""

    def __init__(self, values):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(values))

    def forward(self, x):
        product = self.factor * x
        return product, poptorch.identity_loss(product, reduction="sum")


def scale(values, kind, shards, mode=ONE_PER_GROUP, replicas=4, make=None):
    options = make_options(replicas)
    options.Training.accumulationAndReplicationReductionType(SUM)
    module = Scale(values)
    make = make or (lambda parameters: poptorch.optim.SGD(parameters, lr=1.0))
    optimizer = make(module.parameters())
    executor = poptorch.trainingModel(module, options, optimizer)
    executor.factor.replicaGrouping(kind, shards, mode)
    return module, executor, optimizer


X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_all_replicas_come_back_and_start_from_their_groups_first():
    module, executor, _ = scale(
        [10.0, -1.0, 20.0, -1.0], CommGroupType.Consecutive, 2, ALL_REPLICAS
    )
    out, _ = executor(X)
    assert out.tolist() == [10, 20, 60, 80]
    assert module.factor.tolist() == [7, 7, 13, 13]
    assert executor(X)[0].tolist() == [7, 14, 39, 52]


def test_values_are_uploaded_to_their_groups():
    module, executor, _ = scale([10.0, 20.0], CommGroupType.Orthogonal, 2)
    executor(X)
    with torch.no_grad():
        module.factor.copy_(torch.tensor([100.0, 200.0]))
    executor.copyWeightsToDevice()
    assert executor(X)[0].tolist() == [100, 400, 300, 800]
    executor.detachFromDevice()
    assert module.factor.tolist() == [100 - (1 + 3), 200 - (2 + 4)]
    assert executor(X)[0].tolist() == [96, 388, 288, 776]


# State of optimisers --------------------------------------------------------------


def adam(parameters):
    return poptorch.optim.AdamW(parameters, lr=0.5, loss_scaling=2.0)


@pytest.mark.parametrize(
    ("values", "mode"),
    [([10.0, 20.0], ONE_PER_GROUP), ([10.0, 10.0, 20.0, 20.0], ALL_REPLICAS)],
)
def test_states_have_the_leading_dimension(values, mode):
    _, executor, optimizer = scale(
        values, CommGroupType.Consecutive, 2, mode, make=adam
    )
    executor(X)
    state = optimizer.state_dict()
    assert set(state["ipu_state"]) == {
        "Accl1___factor",
        "Accl2___factor",
        "Step___factor",
    }
    assert {tensor.shape for tensor in state["ipu_state"].values()} == {(len(values),)}
    first = state["ipu_state"]["Accl1___factor"]
    assert first[0] != first[-1]
    assert state["ipu_param"]["learningRate___specific___factor"].shape == ()


def test_a_state_without_the_leading_dimension_is_refused():
    _, executor, optimizer = scale([10.0, 20.0], CommGroupType.Orthogonal, 2, make=adam)
    executor(X)
    state = copy.deepcopy(optimizer.state_dict())
    state["ipu_state"]["Accl1___factor"] = torch.zeros(())
    optimizer.load_state_dict(state)
    with pytest.raises(poptorch.Error, match=r"Accl1___factor is .* must be 2"):
        executor(X)


# Tracing --------------------------------------------------------------------------


def test_a_failed_trace_gives_the_parameter_back():
    class Failing(Scale):
        def forward(self, x):
            raise ZeroDivisionError(self.factor * x)

    module = Failing([10.0, 20.0])
    executor = poptorch.inferenceModel(module, make_options(2))
    executor.factor.replicaGrouping(CommGroupType.NoGrouping, 0, ONE_PER_GROUP)
    parameter = module.factor
    with pytest.raises(ZeroDivisionError):
        executor(torch.ones(2))
    assert module.factor is parameter


def test_the_last_grouping_before_compiling_counts(caplog):
    module = Scale([10.0, 20.0])
    executor = poptorch.inferenceModel(module, make_options(2))
    executor.factor.replicaGrouping(CommGroupType.All, 0, ONE_PER_GROUP)
    executor.factor.replicaGrouping(CommGroupType.NoGrouping, 0, ONE_PER_GROUP)
    assert executor(X[:2])[0].tolist() == [10, 40]
    assert "has no effect" not in caplog.text
    module.factor.data = torch.tensor([10.0])
    executor.factor.replicaGrouping(CommGroupType.All, 0, ONE_PER_GROUP)
    assert "replicaGrouping() has no effect" in caplog.text
    assert executor(X[:2])[0].tolist() == [10, 40]
    executor.destroy()
    assert executor(X[:2])[0].tolist() == [10, 20]


# Errors ---------------------------------------------------------------------------


def grouped_inference(parameter, kind, shards, replicas=4):
    module = Scale([1.0])
    module.factor = parameter
    executor = poptorch.inferenceModel(module, make_options(replicas))
    executor.factor.replicaGrouping(kind, shards, ONE_PER_GROUP)
    return executor


@pytest.mark.parametrize(
    ("parameter", "kind", "shards", "message"),
    [
        (torch.ones(()), CommGroupType.All, 1, "Scalars cannot be passed as per-rep"),
        (torch.ones(3), CommGroupType.Consecutive, 2, "first dimension must be 2"),
        (torch.ones(4), CommGroupType.Consecutive, 3, "can't be put into groups of 3"),
        (torch.ones(4), CommGroupType.Orthogonal, 0, "can't be put into groups of 0"),
        (torch.ones(4, 4).t()[:, :2], CommGroupType.NoGrouping, 1, "contiguous"),
    ],
)
def test_what_groups_can_not_share_is_refused(parameter, kind, shards, message):
    executor = grouped_inference(nn.Parameter(parameter), kind, shards)
    with pytest.raises(poptorch.Error, match=message):
        executor(X)
    assert not executor.isCompiled()


def test_integers_are_compiled_in_and_can_not_differ():
    whole = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
    executor = grouped_inference(whole, CommGroupType.NoGrouping, 0)
    with pytest.raises(poptorch.Error, match=r"torch\.int32, which is compiled in"):
        executor(X)


def test_the_groups_of_an_executor_can_be_read_and_set():
    """PopTorch: `per_replica_params`, by the name of the attribute."""
    model = Model(rows=4)
    executor = wrap(model, CommGroupType.Consecutive, 1)
    arguments = (CommGroupType.Consecutive, 1, ONE_PER_GROUP)
    assert executor.per_replica_params == {"weight": arguments}
    factors = _models.Function(
        lambda self, x: self.factor * x,
        factor=nn.Parameter(torch.arange(4.0).reshape(4, 1)),
    )
    other = poptorch.inferenceModel(factors, make_options(4))
    other.per_replica_params["factor"] = arguments
    other.per_replica_params["missing"] = arguments  # PopTorch ignores it
    assert other(torch.ones(4)).tolist() == [0.0, 1.0, 2.0, 3.0]
