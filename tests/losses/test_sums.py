# SPDX-License-Identifier: Apache-2.0
"""Sums over the samples of a micro-batch, alone or beside a mean, and what is none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ipufit
from ipufit import ConfigError, IPUConfig, IPUModel, Metric, Optimizer, poptorch
from tests import reference

X = torch.rand(16, 6, generator=torch.Generator().manual_seed(0))


def of_mean(outputs, targets):
    return (outputs - targets).square().mean()


def plus_sum(outputs, targets):
    return of_mean(outputs, targets) + outputs.exp().sum()


def plus_small_sum(outputs, targets):
    return F.mse_loss(outputs, targets) + 1e-3 * outputs.abs().sum()


def plus_sum_in_each(outputs, targets):
    return (outputs - targets).abs().mean(1) + outputs.square().sum()


def over_a_number(outputs, targets):
    return F.l1_loss(outputs, targets, reduction="sum") / 8


def masked_plus_sum(outputs, targets):
    mask = (targets > 0.5).float()
    return ((outputs - targets).square() * mask).sum() / mask.sum() + outputs.sum()


def of_norm(outputs, targets):
    return torch.linalg.norm(outputs - targets)


def root_of_sum(outputs, targets):
    return ((outputs - targets) ** 2).sum().sqrt()


def plus_negative_part(outputs, targets):
    return of_mean(outputs, targets) + F.relu(-outputs - 1).sum()


def fit(loss, data=(X, X[:, :3]), **settings):
    model = IPUModel(nn.Linear(6, 3))
    model.compile(Optimizer("sgd", 0.01), loss, **settings)
    return model.fit(*data, batch_size=8, verbose=0)


SUMS = [
    *(masked_plus_sum, of_norm, over_a_number, plus_negative_part, plus_small_sum),
    *(plus_sum, plus_sum_in_each, root_of_sum),
]


@pytest.mark.parametrize("function", SUMS)
def test_a_sum_is_refused_in_losses_and_metrics(function):
    is_all = function in (of_norm, over_a_number, root_of_sum)
    part = "is" if is_all else "has a part that is"
    name = function.__name__
    message = (
        rf"The loss '{name}' {part} a sum over the 8 samples .*flatten\(1\).*'mean'"
    )
    with pytest.raises(ConfigError, match=message):
        fit(function)
    model = IPUModel(nn.Linear(6, 3))
    model.compile("sgd", function)
    for batch_size in (8, 8):  # again, too
        with pytest.raises(ConfigError, match=f"The loss '{name}' {part} a sum"):
            model.evaluate(X, X[:, :3], batch_size=batch_size, verbose=0)
    if function is plus_sum_in_each:  # one value for each sample is none for the batch
        return
    with pytest.raises(ConfigError, match=f"The metric '{name}' {part} a sum"):
        fit("mse", metrics=["mae", function])
    model.compile("sgd", "mse", metrics=[function])
    with pytest.raises(ConfigError, match=f"The metric '{name}' {part} a sum"):
        model.evaluate(X, X[:, :3], batch_size=8, verbose=0)


def test_a_sum_is_refused_though_poptorch_replaces_torch_functions(monkeypatch):
    def zeros(*size, device="ipu", **settings):
        return torch.full(*size, 0, device=device, **settings)

    def trace():
        replaced.setattr(torch, "zeros", zeros)

    with monkeypatch.context() as replaced:
        handles = [
            poptorch.registerPreCompileHook(trace),
            poptorch.registerPostCompileHook(replaced.undo),
        ]
        try:
            with pytest.raises(ConfigError, match="The loss 'plus_sum' has a part"):
                fit(plus_sum)
        finally:
            [handle.remove() for handle in handles]


@given(
    st.floats(0, 2),
    st.sampled_from([0.0, 0.01, 0.5, 3.0, -1.0]),
    st.sampled_from([1, 3, 7]),
    st.integers(0, 2),
)
def test_any_mean_plus_any_sum_is_known(mean, total, width, form):
    def loss(outputs, targets):
        each = (outputs - targets).square()
        parts = [outputs.abs(), outputs.exp() - 1, (outputs * targets).cos()]
        return 5 + mean * each.mean() + total * parts[form].sum()

    data = X, X[:, :1].expand(16, width)
    model = IPUModel(nn.Linear(6, width))
    model.compile(Optimizer("sgd", 0.01), loss)
    if total:
        with pytest.raises(ConfigError, match="a sum over the 8 samples"):
            model.fit(*data, batch_size=8, verbose=0)
    else:
        model.fit(*data, batch_size=8, verbose=0)


class TwoHeads(nn.Linear):
    def forward(self, x):
        return super().forward(x), super().forward(x)


def test_a_sum_is_found_among_functions_of_one_name():
    model = IPUModel(TwoHeads(6, 3))
    losses = [lambda o, t: (o - t).abs().sum(), lambda o, t: (o - t).abs().mean()]
    for in_turn in (losses, losses[::-1]):
        model.compile("sgd", in_turn)
        with pytest.raises(ConfigError, match="The loss '<lambda>' is a sum"):
            model.fit(X, [X[:, :3], X[:, :3]], batch_size=8, verbose=0)


def info_nce(outputs, targets):
    return F.cross_entropy(outputs @ targets.t(), torch.arange(len(outputs)))


def of_hardest(outputs, targets):
    apart = torch.cdist(outputs, targets)
    return F.relu(apart.diagonal() - apart.amin(1) + 0.2).mean()


def over_all_others(outputs, targets):
    scores = outputs @ targets.t()
    return F.relu(0.2 + scores - scores.diagonal()).sum(1).mean()


def correlation(outputs, targets):
    outputs, targets = outputs - outputs.mean(0), targets - targets.mean(0)
    return 1 - F.cosine_similarity(outputs, targets, dim=0).mean()


def variance_and_covariance(outputs, targets):
    centred = outputs - outputs.mean(0)
    products = centred.t() @ centred / (len(outputs) - 1)
    spread = F.relu(1 - (outputs.var(0) + 1e-4).sqrt()).mean()
    return F.mse_loss(outputs, targets) + spread + products.square().sum()


def overlap(outputs, targets):
    return 1 - 2 * (outputs * targets).sum() / (outputs.sum() + targets.sum() + 1e-6)


def discrepancy(outputs, targets):
    def kernel(one, other):
        return torch.exp(-torch.cdist(one, other).square()).mean()

    cross = kernel(outputs, targets)
    return kernel(outputs, outputs) + kernel(targets, targets) - 2 * cross


def partial_likelihood(outputs, targets):
    return (outputs.exp().cumsum(0).log() - outputs).mean()


def with_queue(outputs, targets):
    logits = torch.cat([torch.zeros(len(outputs), 512), outputs @ targets.t()], dim=1)
    return logits.logsumexp(1).mean()


def noisy(outputs, targets):
    return F.mse_loss(F.dropout(outputs), targets) + torch.rand_like(outputs).mean()


OTHERS = [
    *(info_nce, of_hardest, over_all_others, correlation, variance_and_covariance),
    *(overlap, discrepancy, partial_likelihood, with_queue, noisy, of_mean),
    lambda outputs, targets: (outputs - targets).square().flatten(1).sum(1),
    lambda outputs, targets: (outputs - targets).sum() / len(outputs),
    lambda outputs, targets: outputs.sub(targets).square().mean(1).log(),
    lambda outputs, targets: of_mean(outputs, targets) + 100 + targets.std(0).sum(),
    lambda outputs, targets: of_mean(outputs, targets) / 0.0 * outputs.sum(),
    nn.L1Loss(reduction="sum"),
    nn.KLDivLoss(reduction="batchmean"),
]


@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.filterwarnings("ignore::ipufit.IpufitWarning")
def test_other_losses_and_metrics_are_taken(loss):
    settings = {} if isinstance(loss, nn.L1Loss) else {"metrics": [loss]}
    with torch.random.fork_rng():
        model = IPUModel(nn.Linear(6, 3))
        model.compile(Optimizer("sgd", 0.001), loss, **settings)
        model.fit(X, X[:, :3], batch_size=8, verbose=0)
        model.evaluate(X, X[:, :3], batch_size=8, verbose=0)


def right(outputs, targets):
    return outputs.argmax(1).eq(targets).float().sum()


def wrong(outputs, targets):
    return outputs.argmax(1).ne(targets).float().sum()


def right_signs(outputs, targets):
    return outputs.gt(0).eq(targets.gt(0.5)).float().sum()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("metric", [right, wrong, nn.CrossEntropyLoss(reduction="sum")])
def test_counts_of_right_classes_are_sums(metric, classes):
    model = IPUModel(nn.Linear(6, classes))
    model.compile("sgd", "cross_entropy", metrics=[metric])
    data = X, torch.zeros(16, dtype=torch.int64)
    for run in (model.evaluate, model.fit):
        with pytest.raises(ConfigError, match=r"The metric '.*' is a sum over the 8"):
            run(*data, batch_size=8, verbose=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_counts_of_right_bits_are_sums(dtype):
    model = IPUModel(nn.Linear(6, 1))
    model.compile("sgd", "bce", metrics=[right_signs])
    with pytest.raises(ConfigError, match="The metric 'right_signs' is a sum"):
        model.evaluate(X, torch.zeros(16, dtype=dtype), batch_size=8, verbose=0)


# Metrics of sums ----------------------------------------------------------------------


class Errors(Metric):
    """Absolute errors, reduced as it is told."""

    def __init__(self, reduce):
        super().__init__("errors")
        self.reduce = reduce

    def sums(self, outputs, targets, weights=None):
        errors = (outputs - targets).abs()
        rows = torch.ones_like(errors[:, 0], device=errors.device).sum()
        count = torch.ones_like(errors, device=errors.device).sum()
        one = rows / rows
        return torch.stack(
            {
                "sum": [errors.sum(), count],
                "count": [errors.gt(0.5).float().sum(), one * 0],
                "mean of batches": [errors.mean(), one],
                "correlation": [correlation(outputs, targets) * rows, rows],
                "with a constant": [errors.sum(), count + 1e-7],
                "mean": [errors.mean()],
                "mean and rows": [errors.mean(), rows],
                "sum times rows": [errors.sum() * rows, rows],
                "mean among sums": [errors.sum() + errors.mean(), count],
            }[self.reduce]
        )

    def result(self, sums):
        is_alone = self.reduce in ("mean", "count")
        return float(sums[0] if is_alone else sums[0] / sums[1])


REDUCED = ["sum", "count", "mean of batches", "correlation", "with a constant"]


@pytest.mark.parametrize("reduce", REDUCED)
def test_sums_of_a_metric_are_taken(reduce):
    fit("mse", metrics=[Errors(reduce)])
    model = IPUModel(nn.Linear(6, 3))
    model.compile("sgd", "mse", metrics=[Errors(reduce)])
    model.evaluate(X, X[:, :3], batch_size=8, verbose=0)


MEANS = ["mean", "mean and rows", "sum times rows", "mean among sums"]


@pytest.mark.parametrize("reduce", MEANS)
def test_means_in_the_place_of_sums_are_refused(reduce):
    message = r"sums\(\) of the metric 'errors' must return sums .* result\(\)"
    with pytest.raises(ConfigError, match=message):
        fit("mse", metrics=[Errors(reduce)])
    model = IPUModel(nn.Linear(6, 3))
    model.compile("sgd", "mse", metrics=[Errors(reduce)])
    with pytest.raises(ConfigError, match=message):
        model.evaluate(X, X[:, :3], batch_size=8, verbose=0)


# Steps, own losses, scalars -----------------------------------------------------------


class VAE(nn.Module):
    """A variational autoencoder with all that is random, or of a batch, in layers."""

    def __init__(self, mode=None):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)
        )
        self.head, self.decoder = nn.Linear(8, 4), nn.Linear(2, 6)
        nn.init.zeros_(self.head.weight)  # so that the divergence begins as 0
        nn.init.zeros_(self.head.bias)
        self.mode = mode

    def forward(self, x):
        mean, log_variance = self.head(self.encoder(x)).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        outputs = torch.sigmoid(self.decoder(code)), mean, log_variance
        return outputs if self.mode is None else {"loss": LOSSES[self.mode](outputs, x)}


def divergence(outputs):
    _, mean, log_variance = outputs
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp())


def half_sum(outputs, x):
    return F.binary_cross_entropy(outputs[0], x) + divergence(outputs).sum()


def both_sums(outputs, x):
    error = F.binary_cross_entropy(outputs[0], x, reduction="sum")
    return error + divergence(outputs).sum()


def right_mean(outputs, x):
    error = F.binary_cross_entropy(outputs[0], x, reduction="none").flatten(1).sum(1)
    return (error + divergence(outputs).sum(1)).mean()


LOSSES = {"half": half_sum, "both": both_sums, "right": right_mean}


def compiled(where, mode, module=None, replicas=1):
    kinds = {
        "loss": {"loss": LOSSES[mode]},
        "step": {"step": lambda m, batch: LOSSES[mode](m(batch[0]), batch[1])},
        "forward": {},
    }
    module = module or VAE(mode if where == "forward" else None)
    model = IPUModel(module, IPUConfig(replicas=replicas, seed=0))
    model.compile(Optimizer("sgd", 0.05), **kinds[where])
    return model


@pytest.mark.parametrize("where", ["loss", "step", "forward"])
@pytest.mark.parametrize("mode", ["half", "both"])
def test_the_sum_in_a_variational_loss_is_refused_wherever_it_is(where, mode):
    data = (X,) if where == "forward" else (X, X)
    model = compiled(where, mode)
    before = reference.weights(model.module)
    state = torch.get_rng_state()
    part = "has a part that is" if mode == "half" else "is"
    for run in (model.fit, model.evaluate):
        with pytest.raises(ConfigError, match=f"{part} a sum over the 8 samples of"):
            run(*data, batch_size=8, verbose=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.module.training
    assert all(map(torch.equal, before.values(), model.module.state_dict().values()))
    assert "a sum over the 8 samples" in str(model.check(*data, batch_size=8))


class Plain(VAE):
    """Without noise, so that replicas can't differ from torch."""

    def forward(self, x):
        mean, log_variance = self.head(torch.tanh(self.encoder[0](x))).chunk(2, dim=1)
        outputs = torch.sigmoid(self.decoder(mean)), mean, log_variance
        return outputs if self.mode is None else {"loss": right_mean(outputs, x)}


@pytest.mark.parametrize("where", ["loss", "step", "forward"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_way_out_trains_as_plain_torch(where, replicas):
    torch.manual_seed(0)
    module = Plain("right" if where == "forward" else None)
    nn.init.normal_(module.head.weight)
    twin = copy.deepcopy(module)
    twin.mode = None
    data = (X,) if where == "forward" else (X, X)
    rest = tuple(tensor[:13] for tensor in data)
    model = compiled(where, "right", module, replicas)
    history = model.fit(
        *data,
        batch_size=8,
        shuffle=False,
        validation_data=rest if len(rest) > 1 else rest[0],
        verbose=0,
    ).history
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    losses = []
    for rows in X.split(8):
        loss = right_mean(twin(rows), rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert history["loss"] == [pytest.approx(sum(losses) / 2, rel=1e-5)]
    expected = right_mean(twin(X[:13]), X[:13]).item()
    assert history["val_loss"] == [pytest.approx(expected, rel=1e-5)]
    names = dict(twin.named_parameters())
    for name, weight in module.named_parameters():
        torch.testing.assert_close(weight, names[name], rtol=1e-5, atol=1e-6)
    model.detach()


class Penalty(nn.Module):
    """Logs, or adds to its loss, something of its hidden units."""

    def __init__(self, penalty, where):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("strength", torch.zeros(()))  # it is warmed up
        self.penalty, self.where = penalty, where

    def forward(self, x, y=None):
        hidden = torch.relu(self.layer(x))
        outputs = self.head(F.dropout(hidden, training=self.training))
        if self.where == "log":
            ipufit.log("penalty", self.penalty(hidden))
        if y is None:
            return outputs
        added = self.strength * self.penalty(hidden)
        return {"loss": F.mse_loss(outputs, y) + added, "outputs": outputs}


def of_each(hidden):
    return hidden.abs().sum(1).mean()


@pytest.mark.parametrize("penalty", [torch.sum, of_each, lambda h: h.std(0).mean()])
def test_penalties_of_hidden_units_are_means(penalty):
    model = IPUModel(Penalty(penalty, "loss"))
    model.compile("sgd")
    logging = IPUModel(Penalty(penalty, "log"))
    logging.compile("sgd", "mse")
    own = {"x": X, "y": X[:, :3]}
    runs = [
        (model.fit, (own,), "The model's own loss has a part that is"),
        (logging.fit, (X, X[:, :3]), "The scalar 'penalty' is"),
        (logging.evaluate, (X, X[:, :3]), "The scalar 'penalty' is"),
    ]
    for run, data, message in runs:
        if penalty is torch.sum:
            with pytest.raises(ConfigError, match=f"{message} a sum over the 8 sam"):
                run(*data, batch_size=8, verbose=0)
        else:
            run(*data, batch_size=8, verbose=0)


def test_scalars_of_a_step_are_means():
    def step(module, batch):
        outputs = module(batch[0])
        error = (outputs - batch[1]).abs()
        return {"loss": error.mean(), "total": error.sum(), "each": error.sum(1).mean()}

    model = IPUModel(nn.Linear(6, 3))
    model.compile("sgd", step=step)
    with pytest.raises(ConfigError, match="The scalar 'total' is a sum over the 8"):
        model.fit(X, X[:, :3], batch_size=8, verbose=0)
    model.fit(X, X[:, :3], batch_size=1, verbose=0)  # one sample is its own mean


@pytest.mark.parametrize("total", [of_norm, plus_negative_part, root_of_sum])
def test_a_sum_of_few_units_in_a_step_is_found(total):
    def step(module, batch):
        return total(torch.tanh(module(batch[0])) * 2, batch[1])

    model = IPUModel(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
    model.compile("sgd", step=step)
    with pytest.raises(ConfigError, match=r"model's own loss.*sum over the 8"):
        model.fit(X, X[:, :3], batch_size=8, verbose=0)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("count", [right, wrong])
def test_counts_that_a_step_reports_are_sums(count, classes):
    def step(module, batch):
        outputs = module(batch[0])
        return {
            "loss": F.cross_entropy(outputs, batch[1]),
            "count": count(outputs, batch[1]),
        }

    for label in range(classes):
        model = IPUModel(nn.Linear(6, classes))
        model.compile("sgd", step=step)
        with pytest.raises(ConfigError, match="The scalar 'count' is a sum over the 8"):
            model.evaluate(X, torch.full((16,), label), batch_size=8, verbose=0)


class InBatch(nn.Module):
    """SimCLR's loss of two views, beside a penalty on the weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def forward(self, x):
        first, second = F.normalize(self.layer(x)), F.normalize(self.layer(x * 2))
        decay = sum(weight.square().sum() for weight in self.parameters())
        return {"loss": info_nce(first / 0.1, second) + 1e-2 * decay}


def test_in_batch_losses_of_a_model_are_taken():
    model = IPUModel(InBatch())
    model.compile("sgd")
    model.fit(X, batch_size=8, verbose=0)
    model.evaluate(X, batch_size=8, verbose=0)
