# SPDX-License-Identifier: Apache-2.0
"""A buffer that `forward` reads and writes carries a state, as in a torch loop."""

import itertools

import pytest
import torch

import ipufit.emulator as poptorch

B = 2


def copy(state, new):
    state.copy_(new)


def add(state, new):
    state.add_(new - state)


def decay(state, new):
    state.mul_(0.5).add_(new).sub_(0.5 * state)
    state.copy_(new)


def assign_slice(state, new):
    state[:] = new


def assign_rows(state, new):
    state[0].copy_(new[0])
    state[1:] = new[1:]


def index_copy(state, new):
    state.index_copy_(0, torch.arange(B), new)


def lerp(state, new):
    state.lerp_(new, 1.0)


def zero_and_add(state, new):
    state.zero_()
    state += new


def activate(state, new):
    state.copy_(torch.atanh(new)).tanh_()


def swap(state, new):
    state.masked_fill_(torch.ones(B, 1, dtype=torch.bool), 0.0)
    state.index_add_(0, torch.arange(B), new)


WRITES = [
    *(copy, add, decay, assign_slice, assign_rows, index_copy, lerp),
    *(zero_and_add, activate, swap),
]


class Stateful(torch.nn.Module):
    """Steps twice, and returns a loss of the outputs of both steps."""

    def __init__(self, write=None, *, detaches=False):
        super().__init__()
        torch.manual_seed(1)
        self.into, self.back = torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("state", torch.zeros(B, 4))
        self.write, self.detaches = write, detaches

    def step(self, x, state):
        return torch.tanh(self.into(x) + self.back(state) * state.sigmoid())

    def forward(self, x):
        loss = 0.0
        for _ in range(2):
            new = self.step(x, self.state)
            self.write(self.state, new.detach() if self.detaches else new)
            loss = loss + self.head(new).square().mean()
        return poptorch.identity_loss(loss + self.state.mean(), "none")

    def functional(self, x, state):
        """Return what `forward` does, with a new tensor for each state."""
        loss = 0.0
        for _ in range(2):
            new = self.step(x, state)
            state = new.detach() if self.detaches else new
            loss = loss + self.head(new).square().mean()
        return loss + state.mean(), state.detach()


def train_plainly(module, x, iterations, accumulation, replicas):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    states, losses = [module.state] * replicas, []
    micro_batches = iter(x.split(B))
    for _ in range(iterations):
        for _, replica in itertools.product(range(accumulation), range(replicas)):
            loss, states[replica] = module.functional(
                next(micro_batches), states[replica]
            )
            (loss / (accumulation * replicas)).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    module.state = states[0]
    return torch.stack(losses)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 2), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("detaches", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_state_is_carried_as_in_a_torch_loop(write, detaches, layout):
    iterations, accumulation, replicas = layout
    module = Stateful(write, detaches=detaches)
    plain = Stateful(detaches=detaches)
    options = poptorch.Options().deviceIterations(iterations)
    options.replicationFactor(replicas).broadcastBuffers(False)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    model = poptorch.trainingModel(module, options, optimizer)
    x = torch.randn(2 * B * iterations * accumulation * replicas, 3)
    losses = torch.cat([model(rows).reshape(-1) for rows in x.chunk(2)])
    wanted = train_plainly(plain, x, 2 * iterations, accumulation, replicas)
    torch.testing.assert_close(losses, wanted)
    model.copyWeightsToHost()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight)


@pytest.mark.parametrize("write", [copy, assign_rows], ids=lambda write: write.__name__)
def test_a_module_that_ran_on_the_host_takes_its_state_along(write):
    module, plain = Stateful(), Stateful()
    x = torch.randn(4 * B, 3)
    with torch.no_grad():
        state = module.step(x[:B], module.state)
    module.state.copy_(module.into.weight.sum() * 0 + state)  # has a graph
    plain.state.copy_(state)
    module.write = write
    assert module.state.requires_grad
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    model = poptorch.trainingModel(module, optimizer=optimizer)
    losses = torch.stack([model(rows) for rows in x.split(B)])
    torch.testing.assert_close(losses, train_plainly(plain, x, 4, 1, 1))


def test_an_input_that_is_written_keeps_its_value_for_the_backward_pass():
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([2.0]))

        def forward(self, x):
            loss = (x * self.scale).square().sum()
            x.add_(1.0)
            return poptorch.identity_loss(loss, "none")

    module = Writing()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, optimizer=optimizer)
    x = torch.ones(1, 1)
    model(x)
    assert x.item() == 2.0
    assert module.scale.item() == pytest.approx(2.0 - 0.1 * 4.0)


def test_a_buffer_that_gets_another_tensor_is_refused():
    class Assigning(Stateful):
        def forward(self, x):
            self.state = self.step(x, self.state)
            return poptorch.identity_loss(self.state.mean(), "none")

    model = poptorch.trainingModel(Assigning())
    with pytest.raises(poptorch.Error, match=r"self\.state\.copy_"):
        model(torch.ones(B, 3))
