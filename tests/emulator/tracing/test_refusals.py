# SPDX-License-Identifier: Apache-2.0
"""What a model cannot do while it is traced."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipufit.emulator as poptorch
from tests.emulator._models import Function, Marked, X, assert_device_equals_host

READERS = {
    "item": lambda x: x.item(),
    "bool": lambda x: 1 if x else 2,
    "int": int,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "index": lambda x: [1, 2][x],
    "allclose": lambda x: torch.allclose(x, x),
    "contains": lambda x: 1 in x,
    "format": lambda x: f"{x:.2f}",
}
GRADIENTS = {
    "backward": lambda x: x.sum().backward(),
    "torch.autograd.backward": lambda x: torch.autograd.backward(x.sum()),
}
# Older versions don't hand it to those that replace functions of torch.
IS_HEARD = "torch_function" in inspect.getsource(torch.autograd.backward)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["input", "computed", "parameter"])
@pytest.mark.filterwarnings("ignore:.*__array.*:DeprecationWarning")
def test_a_value_cannot_be_read_while_tracing(name, kind):
    def forward(self, x):
        READERS[name]({"input": x, "computed": x + 1, "parameter": self.weight}[kind])
        return x

    executor = poptorch.inferenceModel(
        Function(forward, weight=nn.Parameter(torch.tensor(1.0)))
    )
    with pytest.raises(poptorch.Error, match="needs the value of a tensor"):
        executor(torch.tensor(1.0))
    assert not poptorch.isRunningOnIpu()
    assert not executor.isCompiled()


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_cannot_be_computed_while_tracing(name):
    executor = poptorch.inferenceModel(Function(lambda m, x: GRADIENTS[name](x) or x))
    error, message = poptorch.Error, "compiler makes the backward pass"
    if name == "torch.autograd.backward" and not IS_HEARD:
        error, message = RuntimeError, "does not require grad"  # torch's own
    with pytest.raises(error, match=message):
        executor(torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x[x > 0],
        lambda m, x: x[x.sum() > 0],
        lambda m, x: torch.masked_select(x, x > 0),
        lambda m, x: x.nonzero(),
        lambda m, x: torch.unique(x),
        lambda m, x: torch.where(x > 0),
    ],
)
def test_results_without_a_fixed_shape_are_refused(function):
    with pytest.raises(poptorch.Error, match="determined by the tensor values"):
        poptorch.inferenceModel(Function(function))(X)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(
    "pack",
    [
        lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths, True),
        lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), True),
        lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths.tolist(), True),
        lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, [4, 3, 2], True),
    ],
)
def test_a_packed_sequence_names_the_way_to_the_last_valid_step(kind, pack):
    def forward(self, x, lengths):
        return self.rnn(pack(x, lengths))[0].data

    def as_advised(self, x, lengths):
        outputs = self.rnn(x)[0]
        index = (lengths - 1)[:, None, None].expand(-1, 1, outputs.shape[2])
        return outputs.gather(1, index)[:, 0]

    rnn = kind(2, 5, batch_first=True)
    x, lengths = torch.randn(3, 4, 2), torch.tensor([4, 3, 2])
    with pytest.raises(poptorch.Error, match=r"Packed seq.*`pack_padded.*gather\(1"):
        poptorch.inferenceModel(Function(forward, rnn=rnn))(x, lengths)
    last = poptorch.inferenceModel(Function(as_advised, rnn=rnn))(x, lengths)
    hidden = rnn(pack(x, lengths))[1]
    expected = (hidden[0] if kind is nn.LSTM else hidden)[-1]
    torch.testing.assert_close(last, expected, check_device=False)


@pytest.mark.parametrize("compare", [torch.equal, torch.Tensor.equal])
def test_whole_tensors_are_never_equal_while_tracing(compare, caplog):
    module = Function(lambda m, x: x + 1 if compare(x, x) else x - 1)
    assert torch.equal(poptorch.inferenceModel(module)(X), X - 1)
    assert "torch.equal() is False" in caplog.text


# Gradients of ones own ---------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100


@pytest.mark.parametrize(
    "transform",
    [
        lambda layer, x: Square.apply(layer(x)),
        lambda layer, x: checkpoint(layer, layer(x), use_reentrant=True),
    ],
)
def test_a_backward_of_ones_own_is_refused_where_it_would_matter(transform):
    executor = poptorch.trainingModel(Marked(transform))
    with pytest.raises(poptorch.Error, match=r"torch\.autograd\.Function"):
        executor(X)


class Held(torch.autograd.Function):
    """Holds tensors, as checkpoints of torch 2.8 do."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("it is there to be held")


def test_a_result_without_elements_has_no_gradient_to_refuse():
    def transform(layer, x):
        inputs = layer(x)
        held = Held.apply(torch.empty(0, requires_grad=True), inputs)
        return layer(inputs) if held.grad_fn is not None else inputs

    model = Marked(transform)
    before = model.layer.weight.detach().clone()
    poptorch.trainingModel(model)(X)
    assert not torch.equal(model.layer.weight, before)


def test_an_autograd_function_runs_where_it_has_no_gradient():
    class Frozen(Marked):
        def forward(self, x):
            return super().forward(Square.apply(x))

    poptorch.trainingModel(Frozen(lambda layer, x: layer(x)))(X)
    module = Function(lambda m, x: Square.apply(m.layer(x)), layer=nn.Linear(6, 6))
    assert_device_equals_host(module, X)


class Reversed(torch.autograd.Function):
    """Reverses gradients: `forward` returns its argument itself."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.mark.parametrize(
    "hook", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_backward_hook_and_the_like_run_in_inference(hook):
    layer = nn.Linear(6, 6)
    getattr(layer, hook)(lambda *_: pytest.fail("there is no backward pass"))
    module = Function(lambda m, x: Reversed.apply(m.layer(x)) + 1, layer=layer)
    assert_device_equals_host(module, X)


def tied(persistent):
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    module.register_buffer("mean", module[1].running_mean, persistent=persistent)
    return module


def one_norm_twice():
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, norm)


@pytest.mark.parametrize(
    "make", [lambda: tied(True), lambda: tied(False), one_norm_twice]
)
def test_a_buffer_under_two_names_is_refused(make):
    with pytest.raises(poptorch.Error, match=r"'1\.running_mean'"):
        poptorch.inferenceModel(make().eval())(X)
    trained = Marked(lambda layer, x: layer(x))
    trained.layer = make()
    with pytest.raises(poptorch.Error, match=r"'layer\.1\.running_mean'"):
        poptorch.trainingModel(trained)(X)


# Calls that torch hides from a trace ------------------------------------------------


def double(x):
    return x * 2


def script(something):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch calls it deprecated
        return torch.jit.script(something)


def swallowed(function, x):
    try:
        return function(x)
    except Exception:  # noqa: BLE001
        return x


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.scripted(x),
        lambda m, x: m.scripted(m.weight),
        lambda m, x: swallowed(m.scripted, x),
        lambda m, x: torch.vmap(double)(x),
    ],
)
def test_calls_that_the_trace_cannot_see_are_refused(function):
    weight = nn.Parameter(torch.ones(2))
    module = Function(function, weight=weight, scripted=script(double))
    with pytest.raises(poptorch.Error, match="cannot be traced"):
        poptorch.inferenceModel(module)(X)


def test_scripted_modules_are_refused():
    module = nn.Sequential(script(nn.Linear(6, 2)))
    with pytest.raises(poptorch.Error, match="ScriptModule"):
        poptorch.inferenceModel(module)(X)


class Lazy(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer()

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x).sum(), "none")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")  # of torch 2.0
@pytest.mark.parametrize(
    "layer", [lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d], ids=["linear", "norm"]
)
def test_lazy_modules_need_a_sample_on_the_host(layer):
    with pytest.raises(poptorch.Error, match=r"'layer\.weight' has no shape yet"):
        poptorch.trainingModel(Lazy(layer))
    module = Lazy(layer)
    model = poptorch.inferenceModel(module)
    with pytest.raises(poptorch.Error, match=r"'layer\.weight' has no shape yet"):
        model(X)
    module(X)
    model(X)
    poptorch.trainingModel(module)(X)


@pytest.mark.parametrize("is_part", [True, False])
def test_modules_from_torch_compile_are_refused(is_part):
    with warnings.catch_warnings():  # torch's compiler uses what torch deprecates
        warnings.simplefilter("ignore")
        module = torch.compile(nn.Linear(6, 2))
    with pytest.raises(poptorch.Error, match=r"doesn't support torch\.compile"):
        poptorch.inferenceModel(nn.Sequential(module) if is_part else module)(X)


def test_a_trace_leaves_tensors_as_they_were():
    picks = Function(lambda m, x: x[:, 0] + x[0])
    poptorch.inferenceModel(picks)(torch.ones(3, 3))
    zero_dimensional = torch.tensor(1)
    assert torch.tensor([zero_dimensional, zero_dimensional]).tolist() == [1, 1]
    assert "__getitem__" not in vars(torch.Tensor)
