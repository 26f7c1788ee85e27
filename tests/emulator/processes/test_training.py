# SPDX-License-Identifier: Apache-2.0
"""Several processes train as one does on the same samples."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from tests.strategies import examples

FEATURES = 3


class Squares(nn.Module):
    """A network with a frozen weight, one that no loss reaches, and a shared scale."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.first.bias.requires_grad_(False)
        if dtype == torch.float16:
            self.last.half()

    def forward(self, x):
        hidden = torch.tanh(self.first(x)).to(self.last.weight.dtype)
        outputs = self.last(hidden).float() * self.scale
        return outputs, poptorch.identity_loss((outputs**2).mean(), reduction="mean")


OPTIMIZERS = {
    "sgd": lambda m: poptorch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "scaled sgd": lambda m: poptorch.optim.SGD(
        m.parameters(), lr=0.1, loss_scaling=8.0, use_combined_accum=True
    ),
    "adam": lambda m: poptorch.optim.Adam(m.parameters(), lr=0.05, loss_scaling=4.0),
    "clipped": lambda m: poptorch.optim.AdamW(
        m.parameters(), lr=0.05, max_grad_norm=0.1
    ),
    "half": lambda m: poptorch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, accum_type=torch.float16
    ),
}


def options_of(case, process=0, count=1):
    options = poptorch.Options()
    options.deviceIterations(case["iterations"])
    options.replicationFactor(case["replicas"] // count)
    options.Training.gradientAccumulation(case["accumulation"])
    options.Training.accumulationAndReplicationReductionType(case["reduction"])
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        case["strategy"]
    )
    options.outputMode(poptorch.OutputMode.All)
    options.autoRoundNumIPUs(True)
    options.Precision.enableStochasticRounding(case.get("rounds_at_random", False))
    options.Distributed.configureProcessId(process, count)
    return options


def rows_of(x, case, process, count):
    """The rows of one process: each replica's are those of the same global replica."""
    layout = x.view(
        case["iterations"], case["accumulation"], case["replicas"], -1, FEATURES
    )
    local = case["replicas"] // count
    own = layout[:, :, process * local : (process + 1) * local]
    return own.reshape(-1, FEATURES)


def train(case, count=1):
    """Weights and outputs of this process after a few calls."""
    process = torch.distributed.get_rank() if count > 1 else 0
    torch.manual_seed(case["seed"])
    model = Squares(case["dtype"])
    size = case["iterations"] * case["accumulation"] * case["replicas"] * 2
    data = torch.randn(2, size, FEATURES)
    optimizer = OPTIMIZERS[case["optimizer"]](model)
    executor = poptorch.trainingModel(
        model, options_of(case, process, count), optimizer
    )
    calls = [executor(rows_of(x, case, process, count)) for x in data]
    state = optimizer.state_dict()["ipu_state"]
    executor.destroy()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return {**weights, **state}, [outputs.detach() for outputs, _ in calls]


def folded(case, count=1):
    assert os.environ["IPUFIT_EMULATOR_FOLD"] == str(int(case["folds"]))
    return train(case, count)


CASES = st.fixed_dictionaries(
    {
        "iterations": st.integers(1, 2),
        "accumulation": st.integers(1, 3),
        "replicas": st.sampled_from([2, 4]),
        "reduction": st.sampled_from(list(poptorch.ReductionType)[:2]),
        "strategy": st.sampled_from(list(poptorch.MeanReductionStrategy)[:2]),
        "dtype": st.sampled_from([torch.float32, torch.float16]),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "folds": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


@settings(max_examples=examples(25))
@given(case=CASES)
def test_processes_train_as_one_process_does(pool, case):
    check(pool, case, 2)


def check(pool, case, count):
    """Hold the weights and outputs of several processes against those of one."""
    environment = {"IPUFIT_EMULATOR_FOLD": str(int(case["folds"]))}
    several = pool.run(folded, case, count, count=count, environment=environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPUFIT_EMULATOR_FOLD", environment["IPUFIT_EMULATOR_FOLD"])
        weights, outputs = folded(case)
    near = 2e-2 if case["dtype"] == torch.float16 else 1e-5
    factors = case["iterations"], case["accumulation"], case["replicas"]
    for process, (others, parts) in enumerate(several):
        assert others.keys() == weights.keys()
        for name, value in others.items():
            # The same bits in all processes.
            assert torch.equal(value, several[0][0][name]), name
            torch.testing.assert_close(value, weights[name], rtol=near, atol=near)
        for part, whole in zip(parts, outputs):
            own = whole.view(*factors, -1, 2).chunk(count, dim=2)[process]
            torch.testing.assert_close(part, own.reshape(-1, 2), rtol=near, atol=near)


def train_twice(case):
    return [folded(case, 2)[0] for _ in range(2)]


def test_weights_that_are_rounded_at_random_stay_the_same_in_all(pool):
    case = {
        "iterations": 2,
        "accumulation": 1,
        "replicas": 2,
        "reduction": poptorch.ReductionType.Mean,
        "strategy": poptorch.MeanReductionStrategy.Post,
        "dtype": torch.float16,
        "optimizer": "half",
        "folds": False,
        "seed": 1,
        "rounds_at_random": True,
    }
    environment = {"IPUFIT_EMULATOR_FOLD": "0"}
    (one, repeated), (two, _) = pool.run(train_twice, case, environment=environment)
    assert one["last.weight"].dtype == torch.float16
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(one[name], repeated[name]) for name in one)
    ((nearest, _), _) = pool.run(
        folded, {**case, "rounds_at_random": False}, 2, environment=environment
    )
    assert not torch.equal(one["last.weight"], nearest["last.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
@settings(max_examples=examples(20))
@given(case=CASES)
def test_more_processes_do_so_too(pool, count, case):
    case = {**case, "replicas": count * (case["replicas"] // 2)}
    check(pool, case, count)
