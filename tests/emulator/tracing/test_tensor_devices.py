# SPDX-License-Identifier: Apache-2.0
"""Tensors of the host and of the device: which is which, and that they don't mix."""

import numpy as np
import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function


def test_a_tensor_that_is_no_buffer_is_not_on_the_ipu():
    module = Function(lambda m, x: torch.index_select(x, 0, torch.LongTensor([1, 0])))
    with pytest.raises(poptorch.Error) as caught:
        poptorch.inferenceModel(module)(torch.ones(4))
    expected = (
        "Expected an IPU tensor but got tensor(device=cpu, shape=[2], dtype=Long)"
    )
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x + torch.from_numpy(np.ones(6, np.float32)),
        lambda m, x: x + torch.ones(6, device="cpu"),
        lambda m, x: x[:, :4] @ torch.eye(4),
        lambda m, x: x + m.constant,
        lambda m, x: x.to(m.constant),
        lambda m, x: m.constant.copy_(x),
    ],
)
def test_tensors_of_host_and_device_do_not_mix(function):
    module = Function(function, constant=torch.ones(6), hidden=[nn.Linear(6, 6)])
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(module)(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (lambda m, x: m.hidden[0](x), "ModuleList"),
        (lambda m, x: torch.func.vmap(m.layer)(x), "whole batches"),
    ],
)
def test_layers_that_are_not_registered_and_vmap_get_the_way_out(function, way):
    hidden = [nn.Linear(6, 6)]
    module = Function(function, hidden=hidden, layer=nn.Linear(6, 6))
    with pytest.raises(poptorch.Error, match=f"Expected an IPU tensor .*{way}"):
        poptorch.inferenceModel(module)(torch.ones(2, 6))


@pytest.mark.parametrize(
    "move",
    [
        lambda constant, x: constant.to(x.device),
        lambda constant, x: constant.to("ipu"),
        lambda constant, x: constant.to(x),
        lambda constant, x: constant.type_as(x),
        lambda constant, x: torch.zeros(6).copy_(constant),
        lambda constant, x: torch.tensor(constant.tolist()),
    ],
)
def test_a_constant_can_be_moved_and_is_frozen(move):
    def forward(m, x):
        constant = move(m.constant, x)
        constant += x  # in a copy
        return constant * 1

    module = Function(forward, constant=torch.arange(6.0))
    executor = poptorch.inferenceModel(module)
    for _ in range(2):
        assert executor(torch.ones(6)).tolist() == [1, 2, 3, 4, 5, 6]
    assert module.constant.tolist() == [0, 1, 2, 3, 4, 5]
    module.constant.zero_()
    assert executor(torch.ones(6)).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_tensor_says_that_it_is_on_the_ipu():
    """PopTorch, `Tensor.cpp`: `DeviceType::IPU`, index 0."""
    seen = []

    def forward(m, x):
        y = m.layer(x)
        for tensor in (x, y, m.layer.weight, torch.ones(2, device=x.device)):
            seen.append((str(tensor.device), tensor.is_ipu, tensor.is_cpu))
        seen.append((str(m.constant.device), m.constant.is_ipu, m.constant.is_cpu))
        return -y if x.device.type == "ipu" else y

    module = Function(forward, layer=nn.Linear(2, 2), constant=torch.ones(2))
    x = torch.randn(3, 2)
    device = poptorch.inferenceModel(module)(x)
    assert seen == [("ipu:0", True, False)] * 4 + [("cpu", False, True)]
    torch.testing.assert_close(device, -module.layer(x))
    assert str(module.layer.weight.device) == "cpu"


@pytest.mark.parametrize("host", ["cpu", torch.device("cpu")])
def test_the_device_cpu_is_the_host(host):
    made = []

    def forward(m, x):
        made.append(torch.arange(2.0, device=host))
        return x + made[-1]

    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.inferenceModel(Function(forward))(torch.ones(2))
    assert str(made[-1].device) == "cpu"


def test_values_of_the_hosts_tensors_can_be_read():
    module = Function(
        lambda m, x: x * 2 if m.flag.item() else x, flag=torch.tensor(True)
    )
    assert poptorch.inferenceModel(module)(torch.ones(1)).item() == 2


# torch.distributions --------------------------------------------------------------

D = torch.distributions
FORMS = {
    "uniform": lambda: D.Uniform(0.0, 1.0),
    "normal": lambda: D.Normal(0.0, 1.0),
    "bernoulli": lambda: D.Bernoulli(0.5),
    "exponential": lambda: D.Exponential(1.0),
}
"""Those of PopTorch's user guide ("Random samplers")."""


@pytest.mark.parametrize("name", [*FORMS, "beta", "categorical"])
def test_a_distribution_of_the_host_is_sampled_there_once(name):
    """`torch.rand(device=low.device)` and the like are calls on the host's tensors."""
    more = {
        "beta": lambda: D.Beta(0.5, 0.5),
        "categorical": lambda: D.Categorical(torch.ones(4)),
    }
    distribution = {**FORMS, **more}[name]()
    drawn = []

    def forward(m, x):
        drawn.append(distribution.sample((3,)))
        return x + drawn[-1].to(x.device)

    executor = poptorch.inferenceModel(Function(forward))
    for _ in range(2):
        assert torch.equal(executor(torch.zeros(3)), drawn[-1].float())


@pytest.mark.parametrize("name", FORMS)
def test_a_sample_of_the_host_is_not_on_the_ipu(name):
    distribution = FORMS[name]()
    module = Function(lambda m, x: x + distribution.sample())
    with pytest.raises(poptorch.Error, match=r"Expected an IPU tensor but got.*`add`"):
        poptorch.inferenceModel(module)(torch.zeros(3))


@pytest.mark.parametrize("name", FORMS)
def test_a_distribution_that_forward_makes_is_sampled_by_the_device(name):
    module = Function(lambda m, x: x + FORMS[name]().sample(x.shape))
    executor = poptorch.inferenceModel(module)
    samples = [executor(torch.zeros(40)) for _ in range(2)]
    assert not torch.equal(*samples)


def test_a_tensor_without_a_device_is_said_once_a_program(caplog):
    """PopTorch says it each time: `_poplar_executor.py` `_SetDefaultDeviceType`."""

    def forward(self, x):
        x = x + torch.zeros(6) + torch.ones(6, device=x.device)
        return x + torch.zeros_like(x) + self.more(torch)

    module = Function(forward, more=lambda torch: 0.0)
    other = Function(forward, more=lambda torch: torch.full((6,), 2.0))
    for program in (module, module, other):
        poptorch.inferenceModel(program)(torch.ones(2, 6))
    assert caplog.text.count("No device set") == 2  # one for each new line
    assert "torch.zeros() (test_tensor_devices.py" in caplog.text


def test_a_tensor_of_torchs_own_code_is_no_matter_of_the_user(caplog):
    module = Function(lambda m, x: x + torch.distributions.Normal(1.0, 2.0).mean)
    result = poptorch.inferenceModel(module)(torch.ones(2))
    assert result.tolist() == [2.0, 2.0]
    assert "No device set" not in caplog.text
