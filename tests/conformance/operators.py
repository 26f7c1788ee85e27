# SPDX-License-Identifier: Apache-2.0
"""Probes of operators: rows of the table of operators that real networks meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own short name
from torch import nn

from tests.conformance.probing import (
    Program,
    apart,
    filled,
    gradients,
    infer,
    loss_of,
    operators,
    probe,
    ramp,
    settings,
    train,
)

NAN, INF = float("nan"), float("inf")
LSTM: Any = nn.LSTM  # torch types neither it nor GRU
GRU: Any = nn.GRU
BatchNorm1d: Any = nn.BatchNorm1d

# Numbers ------------------------------------------------------------------------------


@probe("operators: numbers", tolerance=2e-5)
def activations() -> Any:
    """GELU is its tanh form; others are torch's."""
    return operators(
        ramp(4, 9),
        names="gelu silu mish softplus hardswish "
        "hardsigmoid elu selu leaky_relu logsigmoid softsign",
        gelu_tanh=lambda x: F.gelu(x, approximate="tanh"),
        celu=lambda x: F.celu(x, alpha=0.5),
        glu=lambda x: F.glu(x[:, :8]),
    )


@probe("operators: numbers", tolerance=1e-5)
def functions_of_numbers() -> Any:
    """Functions that are computed by others lose digits far from 0."""
    return operators(
        torch.tensor([-20.0, -10.0, -1.0, 0.5, 5.0, 20.0]),
        names="atan erf erfc logsigmoid tanh",
        sinh=lambda x: torch.sinh(x / 20),
        expm1=lambda x: torch.expm1(x / 20),
        log1p=lambda x: torch.log1p(x.abs()),
        log2=lambda x: torch.log2(x.abs()),
        rsqrt=lambda x: torch.rsqrt(x.abs()),
    )


@probe("operators: numbers")
def divisions() -> Any:
    """The operator // is the floor of the quotient; decimals and alpha aren't read."""
    return operators(
        torch.tensor([7.0, -7.0, 1.0, -0.5]),
        torch.tensor([2.0, 2.0, 0.1, 0.2]),
        names="remainder fmod",
        floor_divide=lambda x, y: x // y,
        rsub=lambda x, y: torch.rsub(x, y, alpha=2),
        round=lambda x, y: torch.round(x * y, decimals=1),
        power=lambda x, y: x.abs() ** y,
    )


@probe("operators: numbers")
def whole_numbers() -> Any:
    """Whole numbers of 32 bits: products, roots, remainders and their types."""
    x = torch.tensor([-7, -2, 3, 10], dtype=torch.int32)
    return operators(
        x,
        torch.tensor([2, 3, 2, 4], dtype=torch.int32),
        names="maximum",
        product=lambda x, y: x * y,
        remainder=lambda x, y: x % y,
        power=lambda x, y: x**2,
        root=lambda x, y: torch.sqrt(x * x),
        sum=lambda x, y: x.sum(),
        cumsum=lambda x, y: x.cumsum(0),
        large_cumsum=lambda x, y: (x * 0 + 2**24 + 1).cumsum(0),
        abs=lambda x, y: x.abs(),
        compare=lambda x, y: (x > y).sum(),
        where=lambda x, y: torch.where(x > y, x, y),
        bits=lambda x, y: (x & y, x | y, x ^ y),
        long=lambda x, y: x.to(torch.int64) * 2,
    )


@probe("operators: numbers")
def reductions() -> Any:
    """Reductions of all elements have shapes of their own; var reads a truth value."""
    return operators(
        ramp(2, 3, 4) + 0.1,
        argmax=lambda x: x.argmax(),
        argmax_dim=lambda x: x.argmax(-1),
        amax=lambda x: x.amax(),
        amax_dim=lambda x: x.amax(1),
        sum_kept=lambda x: x.sum((0, 1, 2), keepdim=True),
        var=lambda x: x.var(1),
        var_correction=lambda x: torch.var(x, 1, correction=2),
        std=lambda x: x.std(-1),
        var_mean=lambda x: torch.var_mean(x, 1, keepdim=True),
        norm=lambda x: x.norm(dim=1),
        norm_0=lambda x: torch.linalg.vector_norm(x, 0, dim=1),
        logsumexp=lambda x: x.logsumexp(-1),
        prod=lambda x: x.prod(1),
        median=lambda x: x.median(1)[0],
        cumsum=lambda x: x.cumsum(1),
        count_nonzero=lambda x: torch.count_nonzero(x > 0, dim=1),
        any=lambda x: (x > 2).any(1),
    )


@probe("operators: numbers")
def order() -> Any:
    """Sorting and its like, of elements that differ."""
    return operators(
        torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.0, 5.0, -2.0, 1.0]]),
        names="msort",
        topk=lambda x: x.topk(2),
        smallest=lambda x: x.topk(2, largest=False),
        sort=lambda x: x.sort(-1, descending=True),
        argsort=lambda x: x.argsort(-1),
        max=lambda x: x.max(1),
        min=lambda x: x.min(0),
    )


@probe("operators: numbers")
def indices() -> Any:
    """Reading and writing by indices; index_put never adds."""
    where = torch.tensor([2, 0, 2])

    def put(x: Any, i: Any) -> Any:
        y = x.clone()
        return y.index_put((i,), x[:3], accumulate=True)

    def assign(x: Any, i: Any) -> Any:
        y = x.clone()
        y[i] = 0.0
        y[:, 1] = 7.0
        return y

    def masked(x: Any, i: Any) -> Any:
        y = x.clone()
        y[y > 0] = -1.0
        return y

    columns = torch.tensor([[1, 0, 2], [0, 2, 1], [2, 1, 0], [0, 0, 0]])
    return operators(
        ramp(4, 3),
        where,
        index=lambda x, i: x[i],
        index_select=lambda x, i: x.index_select(0, i),
        gather=lambda x, i: x.gather(1, columns.to(x.device)),
        embedding=lambda x, i: F.embedding(i, x),
        one_hot=lambda x, i: F.one_hot(i, 4),
        put=put,
        assign=assign,
        masked=masked,
        index_fill=lambda x, i: x.index_fill(1, i[:2], 9.0),
        masked_fill=lambda x, i: x.masked_fill(x > 0, -INF),
        where=lambda x, i: torch.where(x > 0, x, x * 2),
        roll=lambda x, i: x.roll(1, 0),
        flip=lambda x, i: x.flip(0),
        bincount=lambda x, i: torch.bincount(i, minlength=4),
    )


@probe("operators: numbers")
def scatters() -> Any:
    """Scattering adds, multiplies or takes extremes."""
    return operators(
        ramp(4, 3),
        torch.tensor([[0, 1, 0], [1, 1, 2], [3, 0, 0], [0, 2, 1]]),
        add=lambda x, i: x.scatter_add(0, i, x),
        write=lambda x, i: x.scatter(0, i[:1], 5.0),
        amax=lambda x, i: x.scatter_reduce(0, i, x * 2, "amax"),
        amin=lambda x, i: x.scatter_reduce(0, i, x, "amin", include_self=False),
        sum=lambda x, i: x.scatter_reduce(0, i, x, "sum"),
        mean=lambda x, i: x.scatter_reduce(0, i, x, "mean"),
        prod=lambda x, i: x.scatter_reduce(0, i, x, "prod"),
    )


@probe("operators: numbers")
def images() -> Any:
    """Pooling, padding and resizing of images."""
    return operators(
        ramp(1, 2, 4, 4),
        max_pool=lambda x: F.max_pool2d(x, 2, 2),
        padded_pool=lambda x: F.max_pool2d(x, 3, 1, 1),
        average=lambda x: F.avg_pool2d(x, 2, 2),
        padded_average=lambda x: F.avg_pool2d(x, 3, 1, 1),
        divisor=lambda x: F.avg_pool2d(x, 2, 2, divisor_override=3),
        ceiling=lambda x: F.max_pool2d(x, 1, 2, ceil_mode=True),
        adaptive=lambda x: F.adaptive_avg_pool2d(x, 2),
        reflected=lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        replicated=lambda x: F.pad(x, (1, 0, 0, 1), mode="replicate"),
        constant=lambda x: F.pad(x, (1, 0), value=2.0),
        nearest=lambda x: F.interpolate(x, scale_factor=2.0),
        nearest_size=lambda x: F.interpolate(x, size=(7, 7)),
        shuffled=lambda x: F.pixel_unshuffle(x, 2),
    )


@probe("operators: numbers")
def bilinear() -> Any:
    """The factor of the height is taken for both axes."""
    return operators(
        ramp(1, 1, 4, 4),
        even=lambda x: F.interpolate(x, size=(8, 8), mode="bilinear"),
        uneven=lambda x: F.interpolate(x, size=(8, 12), mode="bilinear"),
        corners=lambda x: F.interpolate(
            x, size=(7, 7), mode="bilinear", align_corners=True
        ),
    )


@probe("operators: numbers")
def norms() -> Any:
    """Normalisation in inference, with weights and without."""
    parts = [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    layer, group, batch, linear = map(filled, parts)
    layer.bias.data[:] = 1.0

    def forward(self: Any, x: Any) -> Any:
        return (
            self.layer(x),
            self.group(x),
            self.batch(x),
            F.layer_norm(x, (4,)),
            F.instance_norm(x.unsqueeze(0)),
            F.normalize(self.linear(x)),
        )

    program = Program(forward, layer=layer, group=group, batch=batch, linear=linear)
    return infer(program, ramp(3, 4))


@probe("operators: numbers")
def products() -> Any:
    """Matrix products, convolutions and a recurrent layer."""
    parts = {
        "conv": nn.Conv2d(2, 4, 3, padding=1, groups=2),
        "up": nn.ConvTranspose2d(2, 3, 2, stride=2),
        "lstm": LSTM(4, 3, batch_first=True),
        "gru": GRU(4, 3, batch_first=True),
    }

    def forward(self: Any, x: Any) -> Any:
        rows = x.reshape(2, 4, 4) / 8
        return (
            self.conv(x),
            self.up(x),
            self.lstm(rows)[0],
            self.gru(rows)[0],
            torch.einsum("bij,bkj->bik", rows, rows),
            torch.baddbmm(rows, rows, rows, alpha=2),
            torch.cdist(rows, rows + 1),
        )

    program = Program(forward, **{name: filled(part) for name, part in parts.items()})
    return infer(program, ramp(1, 2, 4, 4))


@probe("operators: numbers")
def dropout_in_inference() -> Any:
    """Dropout drops nothing in an inference model, whatever it is told."""
    return operators(
        ramp(4, 3),
        functional=lambda x: F.dropout(x, 0.5, training=True),
        eval=lambda x: F.dropout(x, 0.5, training=False),
    )


@probe("operators: numbers")
def attention() -> Any:
    """Attention as it is written by hand and by torch."""

    def by_hand(x: Any) -> Any:
        scores = x @ x.transpose(-1, -2) / 2
        mask = torch.ones(3, 3, device=x.device, dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -1e4).softmax(-1) @ x

    return operators(
        ramp(2, 3, 4) / 4,
        by_hand=by_hand,
        by_torch=lambda x: F.scaled_dot_product_attention(x, x, x),
    )


@probe("operators: numbers")
def half_precision() -> Any:
    """float16 has results of its own where sums are beyond its range."""
    return operators(
        (ramp(4, 4) * 100).half(),
        linear=lambda x: x @ x.T / 1000,
        softmax=lambda x: (x / 100).softmax(-1),
        mean=lambda x: (x * 0 + 40000).mean(1),
        norm=lambda x: (x * 0 + 200).norm(dim=1),
        layer_norm=lambda x: F.layer_norm(x, (4,)),
        gelu=lambda x: F.gelu(x / 100),
    )


@probe("operators: numbers")
def not_a_number() -> Any:
    """Operators that make NaN, or keep it, otherwise than torch."""
    return operators(
        torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.25]]),
        cross_entropy=lambda x: F.binary_cross_entropy(x, x.round(), reduction="none"),
        logsumexp=lambda x: torch.logsumexp(x.masked_fill(x < 2, -INF), 1),
        addmm=lambda x: torch.addmm(x[:, :2] * NAN, x, x.T, beta=0),
    )


# Gradients ----------------------------------------------------------------------------


@probe("operators: gradients")
def gradients_of_equal_elements() -> Any:
    """Each of equal extremes gets the whole gradient."""
    return gradients(
        torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
        amax=lambda w: w.amax(1),
        amax_all=lambda w: w.amax(),
        max_all=lambda w: w.max(),
        maximum=lambda w: torch.maximum(w[0], w[0].flip(0)),
        norm_infinity=lambda w: torch.linalg.vector_norm(w + 1, INF, dim=1),
        clamp=lambda w: w.clamp(0.0, 2.0),
    )


@probe("operators: gradients")
def gradients_of_activations() -> Any:
    """Gradients of activations, away from their corners."""
    return gradients(
        ramp(2, 5) + 0.1,
        names="gelu silu hardswish elu softplus frac abs",
        celu=lambda w: F.celu(w, alpha=0.5),
        softmax=lambda w: w.softmax(-1) ** 2,
        rounded=lambda w: w + w.round(),
    )


@probe("operators: gradients")
def gradients_through_indices() -> Any:
    """Gradients of indices, gathers and scatters are added up."""
    i = torch.tensor([2, 0, 2])
    rows = torch.tensor([[0, 1], [1, 1], [3, 0], [0, 2]])
    return gradients(
        ramp(4, 2),
        index=lambda w: w[i.to(w.device)] ** 2,
        index_select=lambda w: w.index_select(0, i.to(w.device)) ** 2,
        gather=lambda w: w.gather(0, rows.to(w.device)) ** 2,
        embedding=lambda w: F.embedding(i.to(w.device), w) ** 2,
        scatter_add=lambda w: w.scatter_add(0, rows.to(w.device), w * 2) ** 2,
        slice=lambda w: w[1:3] ** 2,
        cumsum=lambda w: w.cumsum(0) ** 2,
        topk=lambda w: w.topk(2, 0)[0] ** 2,
        sort=lambda w: w.sort(0)[0] ** 3,
    )


@probe("operators: gradients")
def gradients_that_are_nan() -> Any:
    """Gradients at points where a device divides 0 by 0."""
    return gradients(
        torch.zeros(2, 3),
        norm=lambda w: w.norm(dim=1),
        std=lambda w: w.std(1),
        cdist=lambda w: torch.cdist(w, w),
        normalize=lambda w: F.normalize(w) + w,
    )


@probe("operators: gradients")
def gradients_that_get_lost() -> Any:
    """Nothing before a PReLU trains, nor through trunc; fmod has none of a divisor."""
    return gradients(
        ramp(2, 3) + 0.1,
        prelu=lambda w: F.prelu(w, w[0, :1]) + w,
        trunc=lambda w: torch.trunc(w) * 2 + w,
        fmod=lambda w: torch.fmod(w * 0 + 7, w),
        remainder=lambda w: torch.remainder(w * 0 + 7, w),
    )


def normed(norm: nn.Module, x: Any, **settings_of: Any) -> Any:
    """Return what one update makes of a normalization and of a layer before it."""

    def forward(self: Any, x: Any) -> Any:
        weights = torch.arange(4.0, device=x.device)
        return loss_of(self.norm(self.layer(x)) ** 2 * weights)

    layer = filled(nn.Linear(4, 4))
    return train(Program(forward, layer=layer, norm=filled(norm)), x, **settings_of)


@probe("normalization in training")
def statistics_of_norms() -> Any:
    """Running statistics of two micro-batches; those of instance norm stay."""

    def forward(self: Any, x: Any) -> Any:
        seen = self.batch(x), self.instance(x)
        return loss_of((seen[0] + seen[1]) * self.scale)

    parts = {
        "batch": filled(nn.BatchNorm1d(2)),
        "instance": nn.InstanceNorm1d(2, track_running_stats=True),
        "scale": nn.Parameter(torch.ones(1)),
    }
    after = train(Program(forward, **parts), ramp(6, 2, 4), options=settings(2))
    return {name: one for name, one in after.items() if "running" in name}


@probe("normalization in training")
def layer_and_group_norm() -> Any:
    """Gradients of layer norm and of group norm."""
    return {
        "layer": normed(nn.LayerNorm(4), ramp(3, 4)),
        "group": normed(nn.GroupNorm(2, 4), ramp(3, 4)),
    }


# Refusals -----------------------------------------------------------------------------


def alone(x: Any, **cases: Any) -> Any:
    """Run each function of a tensor in a program of its own."""
    return apart(
        **{name: lambda case=case: infer(case, x) for name, case in cases.items()}
    )


@probe("refused: operators")
def operators_without_a_handler() -> Any:
    """Operators that PopTorch has nothing for."""
    return alone(
        ramp(3, 3) + 2,
        nan_to_num=torch.nan_to_num,
        lerp=lambda x: torch.lerp(x, 2 * x, 0.5),
        tril=lambda x: x.tril(),
        index_add=lambda x: x.index_add(0, torch.tensor([0]).to(x.device), x[:1]),
        logaddexp=lambda x: torch.logaddexp(x, x),
        xlogy=lambda x: torch.xlogy(x, x),
        huber_loss=lambda x: F.huber_loss(x, 2 * x),
        diagonal=lambda x: x.diagonal(),
        erfinv=lambda x: torch.erfinv(x / 10),
    )


@probe("refused: operators")
def arguments_without_a_handler() -> Any:
    """Arguments that PopTorch's operators don't take."""
    return alone(
        ramp(1, 2, 4, 4),
        pool_without_stride=lambda x: F.max_pool2d(x, 2),
        pool_indices=lambda x: F.max_pool2d(x, 2, 2, return_indices=True),
        pool_dilation=lambda x: F.max_pool2d(x, 2, 1, 0, 2),
        uneven_adaptive=lambda x: F.adaptive_avg_pool2d(x, 3),
        trilinear=lambda x: F.interpolate(x[None], size=(2, 8, 8), mode="trilinear"),
        norm_with_a_weight=lambda x: F.layer_norm(x, (4,), x[0, 0, 0]),
        step=lambda x: x.clone()[:, :, ::2].mul_(2),
        one_hot=lambda x: F.one_hot(x[0, 0].abs().long()),
        repeats=lambda x: x.repeat_interleave(2, 1),
    )


@probe("refused: operators")
def whole_numbers_that_are_refused() -> Any:
    """Functions of whole numbers that Poplar has none for."""
    return alone(
        torch.arange(1, 7, dtype=torch.int32).reshape(2, 3),
        floor_divided=lambda x: x // 2,
        exp=torch.exp,
        floor=torch.floor,
        not_of_number=torch.logical_not,
        bytes=lambda x: x.to(torch.uint8) & x.to(torch.uint8),
        sum_of_bytes=lambda x: x.to(torch.int8) + x.to(torch.int8),
        bfloat16=lambda x: x.to(torch.bfloat16),
    )


@probe("refused: operators")
def layers_that_are_refused() -> Any:
    """Recurrent layers and embeddings beyond what PopTorch has."""

    def layer(module: nn.Module, x: Any) -> Any:
        return lambda: infer(filled(module), x)

    rows = torch.tensor([0, 2, 1])
    return apart(
        two_layers=layer(LSTM(3, 2, 2), ramp(2, 1, 3)),
        both_ways=layer(LSTM(3, 2, bidirectional=True), ramp(2, 1, 3)),
        no_bias=layer(LSTM(3, 2, bias=False), ramp(2, 1, 3)),
        renormed=layer(nn.Embedding(4, 2, max_norm=1.0), rows),
        by_frequency=layer(nn.Embedding(4, 2, scale_grad_by_freq=True), rows),
        dilated=layer(nn.ConvTranspose2d(1, 1, 2, dilation=2), ramp(1, 1, 3, 3)),
    )


@probe("refused: training")
def training_that_is_refused() -> Any:
    """Operators whose gradient is refused, and batch norm in eval mode."""

    def reflected(self: Any, x: Any) -> Any:
        return loss_of(F.pad(self.layer(x), (1, 1), mode="reflect"))

    def frozen(self: Any, x: Any) -> Any:
        return loss_of(self.norm.eval()(self.layer(x)))

    def trained(forward: Any) -> Any:
        parts = {"layer": filled(nn.Linear(3, 4)), "norm": filled(nn.BatchNorm1d(4))}
        return lambda: train(Program(forward, **parts), ramp(2, 3))

    return apart(
        padding=trained(reflected),
        frozen_norm=trained(frozen),
        no_momentum=lambda: normed(BatchNorm1d(4, momentum=None), ramp(3, 4)),
    )


# Left as in torch ---------------------------------------------------------------------

LEFT = "left as in torch, though a device differs"


@probe(LEFT)
def nan_that_vanishes() -> Any:
    """ReLU, clamp, max and threshold lose a NaN on a device."""
    return operators(
        torch.tensor([NAN, -1.0, 2.0]),
        names="relu hardshrink",
        clamp=lambda x: x.clamp(min=0.5),
        maximum=lambda x: torch.maximum(x, x * 0 + 1),
        threshold=lambda x: F.threshold(x, 0.5, 0.25),
    )


@probe(LEFT)
def gradients_at_corners() -> Any:
    """Gradients of activations exactly at a corner, and of pooling with equal ones."""
    return gradients(
        torch.tensor([[[0.0, 0.0, 3.0, -3.0]]]),
        names="relu leaky_relu hardsigmoid",
        elu=lambda w: F.elu(w, alpha=0.5),
        max_pool=lambda w: F.max_pool1d(w.relu(), 2, 2),
    )


@probe(LEFT)
def targets_that_do_not_count() -> Any:
    """Cross-entropy without a target that counts, and with a masked class."""

    def loss(self: Any, x: Any, y: Any) -> Any:
        out = self.layer(x)
        masked = out.masked_fill(torch.arange(3, device=x.device) == 0, -INF)
        return (
            F.cross_entropy(out, y * 0 - 100, reduction="mean"),
            F.cross_entropy(masked, y, reduction="mean"),
        )

    program = Program(loss, layer=filled(nn.Linear(2, 3)))
    return infer(program, ramp(3, 2), torch.tensor([1, 2, 1]))


@probe(LEFT)
def indices_that_are_not_there() -> Any:
    """Nothing looks at the values of indices on a device."""
    return apart(
        one_hot=lambda: infer(lambda i: F.one_hot(i, 3), torch.tensor([0, 5])),
        target=lambda: infer(
            lambda x, y: F.cross_entropy(x, y), ramp(2, 3), torch.tensor([1, 7])
        ),
    )


@probe(LEFT)
def gradients_of_batch_norm() -> Any:
    """A device differentiates batch norm with the unbiased deviation."""
    return normed(nn.BatchNorm1d(4), ramp(3, 4))


@probe(LEFT)
def gradients_through_masks() -> Any:
    """A device multiplies a gradient of infinity by 0 where torch selects."""
    return gradients(
        torch.tensor([-1.0, 4.0]),
        relu=lambda w: F.relu(w).sqrt(),
        clamp=lambda w: w.clamp(min=0.0).sqrt(),
        where=lambda w: torch.where(w > 0, w, w * 0).sqrt(),
        elu=lambda w: F.elu(w * 100),
    )


@probe(LEFT)
def divisions_that_are_refused_here() -> Any:
    """A device ignores rounding modes, and truncates quotients of whole numbers."""
    wholes = torch.tensor([[7, -7], [1, 2]], dtype=torch.int32)
    return {
        **alone(
            ramp(2, 3),
            floor=lambda x: torch.div(x, 0.3, rounding_mode="floor"),
            trunc=lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
        ),
        **alone(
            wholes,
            quotient=lambda x: x / 2,
            mean=lambda x: x.mean(1, dtype=torch.float32),
        ),
    }


@probe(LEFT)
def writes_through_views() -> Any:
    """A device leaves a computed tensor as it is when a view of it is written."""

    def written(view: Any) -> Any:
        def forward(x: Any) -> Any:
            y = x + 0
            view(y).add_(1.0)
            return y

        return forward

    return operators(
        ramp(3, 3),
        row=written(lambda y: y[0]),
        transposed=written(lambda y: y.t()),
        slice=written(lambda y: y[:, 1:]),
        flat=written(lambda y: y.view(9)),
    )


@probe(LEFT)
def equal_elements_in_order() -> Any:
    """The order of equal elements in sort, topk and max along a dimension."""
    return operators(
        torch.tensor([[1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]]),
        sort=lambda x: x.sort(1)[1],
        topk=lambda x: x.topk(3, 1)[1],
        max=lambda x: x.max(1)[1],
        argmax=lambda x: x.argmax(1),
        median=lambda x: x.median(1)[1],
    )
