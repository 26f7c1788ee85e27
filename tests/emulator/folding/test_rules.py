# SPDX-License-Identifier: Apache-2.0
"""Each rule of folding against the micro-batches one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._folding.elementwise import elementwise
from ipufit.emulator._folding.rules import RULES
from ipufit.emulator._tracing.nodes import function_name
from tests.emulator._models import Function
from tests.modes import folding_of

F = nn.functional

B, T, C, K = 3, 4, 6, 3  # rows, steps, channels, micro-batches


@pytest.fixture(autouse=True)
def _fold_wherever_possible(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "1")


def floats(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.rand(K * B, *sizes, generator=generator) * 0.8 + 0.1


def numbers(*sizes, high=C, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randint(0, high, (K * B, *sizes), generator=generator)


def weight(*sizes):
    return nn.Parameter(torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes))


seen: set[str] = set()


def run(function, inputs, *, training, **attributes):
    """Outputs of two calls and gradients, folded; and the executor's folding."""
    module = Function(function, **attributes)
    if training:
        options = poptorch.Options().outputMode(poptorch.OutputMode.All)
        options.Training.gradientAccumulation(K)
        sgd = poptorch.optim.SGD(module.parameters(), lr=0.1)
        executor = poptorch.trainingModel(module, options, sgd)
    else:
        options = poptorch.Options().deviceIterations(K)
        executor = poptorch.inferenceModel(module, options)
    try:
        outputs = [executor(*inputs)]
        turned = [tensor.flip(0).clone() for tensor in inputs]
        outputs.append(executor(*turned))
        folding = folding_of(executor)
        nodes = executor._executable.program.graph.graph.nodes
        seen.update(function_name(n) for n in nodes if n.op.startswith("call"))
        return outputs, dict(module.named_parameters()), folding
    finally:
        executor.destroy()


def rest_of(folding):
    split = folding._split
    return [function_name(node) for node in split.records if node not in split.folded]


def assert_folds(function, *inputs, training=False, monkeypatch, **attributes):
    """A program folds as a whole, and gives what it gives in a loop."""
    copies = {
        name: nn.Parameter(value.detach().clone())
        for name, value in attributes.items()
        if isinstance(value, nn.Parameter)
    }
    folded, weights, folding = run(function, inputs, training=training, **attributes)
    assert folding.failure is None
    assert rest_of(folding) == []
    assert folding.is_on
    assert folding.is_verified([K])
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    looped, expected, off = run(
        function, inputs, training=training, **{**attributes, **copies}
    )
    assert off is None
    torch.testing.assert_close(folded, looped, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


# Elementwise, found by themselves -------------------------------------------------

X, Y, Z = floats(T, C), floats(T, C, seed=1), floats(T, C, seed=2)
INDICES, OTHERS = numbers(T, C, high=3), numbers(T, C, high=3, seed=1) + 1
MASK, OTHER = X > 0.5, Y > 0.5

ARGUMENTS = [
    (X,),
    (X, Y),
    (X, 0.5),
    (X, Y, 0.5),
    (X, Y, Z),
    (X, MASK, 0.5),
    (MASK, X, Y),
    (X, 0.1, 0.5),
    (INDICES,),
    (INDICES, OTHERS),
    (MASK,),
    (MASK, OTHER),
]


def caller(name):
    """The function of a rule: torch's, of `torch.nn.functional`, or a method."""
    if name == "snapshot":
        from ipufit.emulator._program.anchors import snapshot

        return snapshot
    if name in ("nop", "set_available_memory"):
        return (lambda x: poptorch.nop(x)) if name == "nop" else None
    for home in (torch.Tensor, torch, F):
        found = getattr(home, name, None)
        if found is not None:
            return found
    return None


def first_that_fits(function, *, in_place):
    for given in ARGUMENTS:
        try:
            copies = [g.clone() if isinstance(g, torch.Tensor) else g for g in given]
            result = function(*copies)
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        is_kept = isinstance(result, torch.Tensor) and result.shape == X.shape
        if is_kept and (not in_place or result is copies[0]):
            return given
    return None


ELEMENTWISE = sorted(name for name, rule in RULES.items() if rule is elementwise)
RARE = {"tril", "triu", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
RARE |= {"unflatten", "__matmul__", "upsample", "rms_norm", "nanmean", "new_tensor"}
"""Rules whose functions the tests don't call: aliases, and what devices refuse."""


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_fold(name, monkeypatch):
    function = caller(name)
    is_dunder = name.endswith("__")
    in_place = name.startswith("__i") if is_dunder else name.endswith("_")
    in_place = in_place and name != "__invert__"
    if function is None:
        pytest.skip("this torch has no such function")
    given = first_that_fits(function, in_place=in_place)
    if given is None:
        pytest.skip("not for real tensors")
    tensors = [g for g in given if isinstance(g, torch.Tensor)]

    def program(module, *rows):
        rows = iter(rows)
        args = [next(rows) if isinstance(g, torch.Tensor) else g for g in given]
        if in_place:
            args[0] = args[0].clone()
        return function(*args).clone()

    try:
        assert_folds(program, *tensors, monkeypatch=monkeypatch)
    except poptorch.Error as error:
        pytest.skip(f"no device has it: {str(error)[:60]}")


# All others, by hand --------------------------------------------------------------

IMAGES = floats(4, 8, 8)
ROWS = floats(C)
WORDS = numbers(T)
LABELS = numbers()
VOLUMES = floats(2, 4, 4, 4)


def in_place(m, x, y):
    z = x * 2
    z[:, 0].mul_(3)
    z += y
    z.clamp_(max=1.5).relu_()
    return z, F.relu(z - 1, inplace=True), x.mean().mul_(2).reshape(1)


def without_gradients(m, x):
    with torch.enable_grad():
        y = x * m.W[0, 0]
    return y + x


CASES = {
    "fills": (
        lambda m, x: (
            torch.fill(x, 2.0)
            + (x * 1).fill_(m.V[0])
            + x.masked_fill(x > 0.5, m.V[1])
            + (x * 1).masked_fill_(x > 0.3, 0.5)
        ),
        X,
    ),
    "broadcast with weights": (lambda m, x: (x * m.W[:T] + m.V - m.W[0]) / 2, X),
    "weights of as many rows": (
        lambda m, x: x * torch.arange(B * 1.0).reshape(B, 1, 1) + torch.ones(B, 1, C),
        X,
    ),
    "rows in another dimension": (
        lambda m, x, y: x.transpose(0, 1) + y.transpose(0, 1) + m.V,
        X,
        Y,
    ),
    "rows from the right": (lambda m, x: x[:, 0, 0] * torch.ones(T, B), X),
    "per micro-batch and per row": (lambda m, x: x - x.mean(), X),
    "statistics of a micro-batch": (
        lambda m, x: (x - x.mean(0)) / (x.std(0) + 1) + x.var(),
        X,
    ),
    "sums": (
        lambda m, x: (
            x.sum((1, 2)),
            x.sum().reshape(1),
            x.sum(-1, keepdim=True),
            x.mean(0, keepdim=True),
            x.mean((0, 1)),
            x.prod(1),
            x.amax((0, 2)).reshape(1, -1),
            x.amin(2),
            x.nansum(1),
        ),
        X,
    ),
    "of all elements": (
        lambda m, x: (
            [
                v.reshape(1)
                for v in (x.max(), x.min(), x.argmax(), x.argmin(), x.norm(), x.prod())
            ]
            + [
                v.reshape(1)
                for v in ((x > 0.2).all(), (x > 0.8).any(), x.std(), x.var())
            ]
        ),
        X,
    ),
    "along a dimension": (
        lambda m, x: (
            *x.max(1),
            *x.min(2),
            x.argmax(-1),
            x.argmin(1),
            x.logsumexp(2),
            torch.norm(x, dim=1),
            torch.linalg.vector_norm(x, 2, 2),
            x.std(1),
            x.var(-1, keepdim=True),
            (x > 0.5).any(1),
            (x > 0.5).all(2),
            torch.count_nonzero(x > 0.5, dim=1),
        ),
        X,
    ),
    "along the rows": (
        lambda m, x: (
            x.softmax(0),
            x.cumsum(0),
            x.flip(0),
            x.argmax(0).reshape(1, T, C),
            x.sort(0)[0],
            x.select(0, 1),
            x.logsumexp(0),
            x.roll(1, 0),
            *x.unbind(0),
            *x.split(1, 0),
            *x.max(0),
        ),
        X,
    ),
    "softmax and scans": (
        lambda m, x: (
            x.softmax(-1),
            F.log_softmax(x, 1),
            F.softmin(x, dim=2),
            x.cumsum(1),
            x.cumprod(2),
            x.logcumsumexp(1),
            *x.cummax(1),
            *x.cummin(1),
            *x.topk(2),
            *x.sort(1),
            x.argsort(-1),
            F.glu(x),
            F.normalize(x, dim=2),
            x.flip((1, 2)),
            x.roll(1, 1),
            x.narrow(1, 1, 2),
            x.select(1, 2),
            *x.unbind(1),
            *x.split(2, 1),
            *x.chunk(2, 2),
            x.repeat_interleave(2, 1),
        ),
        X,
    ),
    "other sizes": (
        lambda m, x: (
            x.reshape(B, -1),
            x.view(B * T, C),
            x.flatten(1).view(B, T, C),
            x.flatten(),
            x.view(1, B, T, C)[0],
            x.reshape(B, T, 2, C // 2).permute(0, 2, 1, 3),
            x.transpose(0, 1).reshape(T, B * C).transpose(0, 1),
            x.ravel(),
            x.view_as(x),
            x.reshape_as(x),
            x[:, 0].T.T,
            x.mT.contiguous(),
            x.swapaxes(1, 2),
            x.swapdims(0, 1).movedim(1, 0),
            x.moveaxis(2, 1),
            x[:, 0].t().t(),
            x.unsqueeze(1).squeeze(1),
            x[:, :1].squeeze(),
            x.sum((0, 2), keepdim=True).squeeze(),
        ),
        X,
    ),
    "sizes of a micro-batch": (
        lambda m, x: (x.sum(0).reshape(2, -1), x.sum(0).t(), x.sum(0).unsqueeze(0)),
        X,
    ),
    "copies": (
        lambda m, x: (
            x[:, :1].expand(B, T, C),
            x[:, :1].expand_as(x),
            x[:, :1].broadcast_to(B, T, C),
            x.sum(0, keepdim=True).expand(2, T, C),
            x.repeat(1, 2, 1),
            x.repeat(2, 1, 1),
            x.tile((2,)),
            m.V.expand(B, C) + x[:, 0],
        ),
        X,
    ),
    "joined": (
        lambda m, x, y: (
            torch.cat([x, y], 1),
            torch.cat([x, torch.ones(B, 1, C)], 1),
            torch.cat([x, y], 0),
            torch.concat([x, y], -1),
            torch.stack([x, y], 1),
            torch.stack([x, y]).transpose(0, 1),
            torch.stack([x.mean(), y.mean()]),
            torch.cat([x.sum(0), y.sum(0)]),
            torch.concatenate([x, y], 2),
        ),
        X,
        Y,
    ),
    "pieces": (
        lambda m, x: (
            x[:, 1:3],
            x[..., 0],
            x[:, None, :, ::2],
            x[:, -1],
            x[:B],
            x[0],
            x[1:, 0],
            x[..., None].squeeze(-1),
            x.sum(0)[1:],
            F.pad(x, (1, 2)),
            F.pad(x, (1, 1), mode="circular"),
            F.pad(x, (0, 0, 0, 0, 1, 0)),
        ),
        X,
    ),
    "chosen pieces": (
        lambda m, x, i: (
            x.index_select(1, torch.tensor([2, 0])),
            x.index_select(0, torch.tensor([1, 0])),
            x.gather(1, i),
            x.gather(0, i.clamp(max=B - 1)),
            torch.gather(x.sum(0), 0, i[0]),
        ),
        X,
        INDICES,
    ),
    "types and likes": (
        lambda m, x, i: (
            x.to(torch.int32),
            i.to(x),
            i.type_as(x),
            torch.zeros_like(x),
            torch.ones_like(x) + x.new_zeros(B, T, C) + x.new_ones(C),
            torch.full_like(x, 2.0) + x.new_full((1,), 3.0),
            x + torch.zeros(C) + torch.ones(1) + torch.full((C,), 2.0),
            x + torch.arange(C) + torch.linspace(0, 1, C) + torch.tensor(1.0),
            x + torch.logspace(0, 1, C),
        ),
        X,
        INDICES,
    ),
    "triangles": (
        lambda m, x: x.matmul(torch.ones(C, C).tril() + torch.ones(C, C).triu()),
        X,
    ),
    "products": (
        lambda m, x, y: (
            F.linear(x, m.W, m.V),
            F.linear(x.sum(0), m.W),
            x @ m.W,
            m.W @ x.transpose(1, 2),
            x[:, 0] @ m.W,
            (m.W @ x[:, 0].t()).t(),
            x @ y.transpose(1, 2),
            torch.bmm(x, y.transpose(1, 2)),
            torch.mm(x[:, 0], m.W),
            torch.mm(x[:, 0].t(), y[:, 0]),
            torch.addmm(m.V, x[:, 0], m.W),
            x @ torch.ones(B, C, 2),
            torch.einsum("btc,cd->btd", x, m.W),
            torch.einsum("btc,bsc->bts", [x, y]),
            torch.einsum("btc,bsc->ts", x, y),
            x[:, None] @ y[:, None].transpose(2, 3),
            x.__matmul__(m.W),
        ),
        X,
        Y,
    ),
    "convolutions": (
        lambda m, x: (
            F.conv2d(x, m.kernel, m.bias, padding=1),
            F.conv2d(x, m.kernel, padding="same"),
            F.conv_transpose2d(x, m.kernel, stride=2),
            F.conv1d(x[:, :, 0], m.kernel[:, :, 0]),
            F.conv_transpose1d(x[:, :, 0], m.kernel[:, :, 0]),
        ),
        IMAGES,
    ),
    "convolutions of volumes": (
        lambda m, x: (F.conv3d(x, m.cube), F.conv_transpose3d(x, m.cube)),
        VOLUMES,
    ),
    "pooling": (
        lambda m, x: (
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 2),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_max_pool2d(x, 2),
            F.lp_pool2d(x, 2.0, 2),
            F.max_pool1d(x[:, 0], 2),
            F.avg_pool1d(x[:, 0], 2),
            F.adaptive_avg_pool1d(x[:, 0], 1),
            F.adaptive_max_pool1d(x[:, 0], 2),
            F.lp_pool1d(x[:, 0], 2.0, 2),
            F.max_pool2d(x.sum(0), 2),
        ),
        IMAGES,
    ),
    "pooling of volumes": (
        lambda m, x: (
            F.max_pool3d(x, 2),
            F.avg_pool3d(x, 2),
            F.adaptive_avg_pool3d(x, 1),
            F.adaptive_max_pool3d(x, 2),
        ),
        VOLUMES,
    ),
    "norms": (
        lambda m, x: (
            F.layer_norm(x, (8,), m.scale, m.scale),
            F.layer_norm(x.sum(0), (8, 8)),
            F.group_norm(x, 2, m.bias, m.bias),
            F.instance_norm(x),
            F.batch_norm(x, m.bias * 0, m.bias.abs() + 1, m.bias, m.bias),
            F.local_response_norm(x, 2),
            F.prelu(x - 0.5, m.bias),
            F.prelu(x[:, 0, 0] - 0.5, m.bias[:1]),
            F.dropout(x, 0.5, training=False),
        ),
        IMAGES,
    ),
    "images of other sizes": (
        lambda m, x: (
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(4, 4)),
            F.pixel_shuffle(x, 2),
            F.pixel_unshuffle(x, 2),
        ),
        IMAGES,
    ),
    "words": (
        lambda m, i: (
            F.embedding(i, m.W),
            F.embedding(i, m.W, padding_idx=0).sum(1),
            F.one_hot(i, C).sum(1),
        ),
        WORDS,
    ),
    "attention": (
        lambda m, x, y: (
            F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]),
            F.scaled_dot_product_attention(x, y, y, is_causal=True),
            F.scaled_dot_product_attention(x, y, y, torch.ones(T, T).tril().bool()),
            F.scaled_dot_product_attention(
                x[:, None], y[:, None], value=y[:, None], attn_mask=(x @ x.mT)[:, None]
            ),
            F.scaled_dot_product_attention(x, y, y, torch.ones(B, T, T)),
            F.scaled_dot_product_attention(x.sum(0), y[0], y.sum(0)),
        ),
        X,
        Y,
    ),
    "marks": (
        lambda m, x: (
            poptorch.identity_loss(x, reduction="none"),
            poptorch.identity_loss(x, reduction="sum").reshape(1),
            poptorch.identity_loss(x, reduction="mean").reshape(1),
        ),
        X,
    ),
    "losses of classes": (
        lambda m, x, y: [
            loss.reshape(-1)
            for reduction in ("none", "sum", "mean")
            for loss in (
                F.cross_entropy(x, y, reduction=reduction),
                F.cross_entropy(x, y, ignore_index=1, reduction=reduction),
                F.cross_entropy(
                    x,
                    y,
                    label_smoothing=0.0 if reduction == "mean" else 0.1,
                    reduction=reduction,
                ),
                F.cross_entropy(x, x.softmax(1), reduction=reduction),
                F.nll_loss(x, y, reduction=reduction),
            )
        ],
        ROWS,
        LABELS,
    ),
    "losses of many classes": (
        lambda m, x, y: [
            F.cross_entropy(x.transpose(1, 2), y % C, ignore_index=2).reshape(1),
            F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum").reshape(1),
        ],
        X,
        WORDS,
    ),
    "losses of elements": (
        lambda m, x, y: (
            [
                loss.reshape(-1)
                for reduction in ("none", "sum", "mean")
                for loss in (
                    F.mse_loss(x, y, reduction=reduction),
                    F.l1_loss(x, y, reduction=reduction),
                    F.smooth_l1_loss(x, y, reduction=reduction),
                    F.huber_loss(x, y, reduction=reduction),
                    F.binary_cross_entropy(x, y, reduction=reduction),
                    F.binary_cross_entropy_with_logits(x, y, reduction=reduction),
                    F.poisson_nll_loss(x, y, reduction=reduction),
                )
            ]
            + [
                F.kl_div(x.log(), y, reduction=reduction).reshape(-1)
                for reduction in ("none", "sum", "batchmean")
            ]
        ),
        X,
        Y,
    ),
    "losses of signs": (
        lambda m, x, y: [
            loss.reshape(-1)
            for reduction in ("none", "sum", "mean")
            for loss in (
                F.hinge_embedding_loss(x, (y > 0.5) * 2.0 - 1.0, reduction=reduction),
                F.soft_margin_loss(x, (y > 0.5) * 2.0 - 1.0, reduction=reduction),
            )
        ],
        X,
        Y,
    ),
    "in place": (in_place, X, Y),
    "without gradients": (without_gradients, X),
    "without tensors": (lambda m, x: x + torch.zeros(1).add_(2), X),
}
ATTRIBUTES = {
    "W": weight(C, C),
    "V": weight(C),
    "kernel": weight(4, 4, 3, 3),
    "bias": weight(4),
    "cube": weight(2, 2, 2, 2, 2),
    "scale": weight(8),
}


@pytest.mark.parametrize("what", CASES)
def test_programs_fold(what, monkeypatch):
    function, *inputs = CASES[what]
    assert_folds(function, *inputs, monkeypatch=monkeypatch, **ATTRIBUTES)


class Net(nn.Module):
    """Layers, then a loss."""

    def __init__(self, *layers, loss=F.mse_loss):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.loss = loss

    def forward(self, x, y):
        out = self.layers(x)
        return out, self.loss(out, y)


class First(nn.Module):
    """The first result of a layer that gives several."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *x):
        return self.layer(*x)[0]


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        mask = (torch.arange(T)[None] > torch.arange(T)[:, None]).to(x.device)
        padding = torch.zeros(B, T, dtype=torch.bool) | (x.sum(-1) > 4)
        plain, weights = super().forward(x, x, x)
        masked, _ = super().forward(
            x, x, x, padding, need_weights=False, attn_mask=mask
        )
        return torch.cat([plain + masked, weights], 2)


LAYERS = {
    "linear": lambda: nn.Sequential(nn.Linear(C, 8), nn.GELU(), nn.Linear(8, C)),
    "lstm": lambda: First(nn.LSTM(C, C, batch_first=True)),
    "lstm, rows in dim 1": lambda: First(nn.LSTM(C, C)),
    "gru": lambda: First(nn.GRU(C, C, batch_first=True)),
    "rnn": lambda: First(nn.RNN(C, C, batch_first=True)),
    "relu rnn": lambda: First(nn.RNN(C, C, nonlinearity="relu", batch_first=True)),
    "attention": lambda: nn.Sequential(SelfAttention(C, 2, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True),
    "decoder": lambda: nn.TransformerEncoderLayer(C, 2, 8, 0.0, norm_first=True),
    "norms": lambda: nn.Sequential(nn.LayerNorm(C), nn.GroupNorm(2, T)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(T, T, 3, padding=1), nn.PReLU()),
    "learnt batch norm": lambda: nn.BatchNorm1d(T).eval(),
}
CROSSING = {"lstm, rows in dim 1", "decoder"}  # they mix rows, taken for steps


@pytest.mark.parametrize("what", sorted(LAYERS))
@pytest.mark.parametrize("kind", ["Mean", "Sum"])
def test_layers_train_alike(what, kind, monkeypatch):
    x, y = floats(T, C), floats(T, C, seed=1)
    if what in CROSSING:
        x, y = x.reshape(-1, C), y.reshape(-1, C)

    def train(fold):
        monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", fold)
        torch.manual_seed(1)
        layer = LAYERS[what]()
        if what in CROSSING:
            inner = layer
            layer = Rearranged(inner)
        net = Net(layer, loss=lambda out, y: F.mse_loss(out[..., :C], y))
        options = poptorch.Options().outputMode(poptorch.OutputMode.All)
        options.Training.gradientAccumulation(K)
        options.Training.accumulationAndReplicationReductionType(
            getattr(poptorch.ReductionType, kind)
        )
        sgd = poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        executor = poptorch.trainingModel(net, options, sgd)
        outputs = [executor(x, y) for _ in range(3)]
        executor.copyWeightsToHost()
        seen.update(
            function_name(node)
            for node in executor._executable.program.graph.graph.nodes
            if node.op.startswith("call")
        )
        folding = folding_of(executor)
        executor.destroy()
        return outputs, net.state_dict(), folding

    folded, weights, folding = train("1")
    assert folding.failure is None
    assert rest_of(folding) == []
    looped, expected, _ = train("0")
    torch.testing.assert_close(folded, looped, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


class Rearranged(nn.Module):
    """Takes rows of samples one below the other, and puts steps first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        steps_first = x.reshape(B, T, C).transpose(0, 1)
        return self.layer(steps_first).transpose(0, 1).reshape(B * T, C)


# What must not fold ---------------------------------------------------------------

APART = {
    "an unknown function": lambda m, x: torch.fft.rfft(x).abs(),
    "random numbers": lambda m, x: F.dropout(x, 0.5),
    "like random numbers": lambda m, x: x + torch.randn_like(x),
    "statistics of the batch": lambda m, x: F.batch_norm(x, None, None, training=True),
    "indices that are tensors": lambda m, x: x[:, torch.tensor([1, 0])],
    "an element of each row": lambda m, x: x[torch.arange(B), 0],
    "a fill with a value of each": lambda m, x: x.masked_fill(x > 1, x.mean()),
}


@pytest.mark.parametrize("what", APART)
def test_what_has_no_rule_runs_for_each_micro_batch(what, monkeypatch):
    _runs_for_each_micro_batch(APART[what], monkeypatch)


def test_a_table_that_is_changed_is_read_for_each_micro_batch(monkeypatch):
    def table(m, x):
        return F.embedding(x.to(torch.int64), m.W, max_norm=0.1)

    _runs_for_each_micro_batch(table, monkeypatch)


def _runs_for_each_micro_batch(step, monkeypatch):
    def program(module, x):
        return step(module, x * 2) + 1, x + 1

    folded, _, folding = run(program, [X], training=False, **ATTRIBUTES)
    assert folding.failure is None
    assert rest_of(folding)
    assert folding.is_on
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    looped, _, _ = run(program, [X], training=False, **ATTRIBUTES)
    if not folding._program.is_random:
        torch.testing.assert_close(folded, looped)


# What first data can't tell -------------------------------------------------------

LATER = {
    "reversed, dimensions one by one": lambda m, x: x.flip(1, 0),
    "reversed rows first": lambda m, x: x.flip(0, 1) + 1,
    "counted, dimensions one by one": lambda m, x: x.count_nonzero(1, 0).repeat(B, 1),
    "a sum over no dimensions": lambda m, x: x.sum([]).repeat(B),
    "weighted errors": lambda m, x: m.weighted(x, reduction="mean").repeat(B),
    "weighted errors, summed": lambda m, x: m.weighted(x, reduction="sum").repeat(B),
}


def weighted_errors(x, reduction):
    try:
        loss = F.mse_loss(x, x * 0.5, reduction=reduction, weight=(x < 2).float())
    except TypeError:
        pytest.skip("this torch has no weights for it")
    return loss


@pytest.mark.parametrize("what", LATER)
def test_rows_that_are_alike_at_first_hide_nothing(what, monkeypatch):
    calls = [torch.ones_like(X), X, X * 4]

    def results(fold):
        monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", fold)
        module = Function(lambda m, x: LATER[what](m, x * 1), weighted=weighted_errors)
        options = poptorch.Options().deviceIterations(K)
        executor = poptorch.inferenceModel(module, options)
        try:
            return [executor(x) for x in calls], folding_of(executor)
        finally:
            executor.destroy()

    folded, folding = results("1")
    looped, _ = results("0")
    assert folding.failure is None
    torch.testing.assert_close(folded, looped)


def test_every_rule_has_run():
    """Of those that this version of torch has a function for."""
    others = {name for name, rule in RULES.items() if rule is not elementwise}
    missing = others - seen
    assert missing <= RARE, sorted(missing - RARE)
