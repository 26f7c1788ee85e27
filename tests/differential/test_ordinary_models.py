# SPDX-License-Identifier: Apache-2.0
"""Models of ordinary programs train and validate as in a plain torch loop.

Each is trained with one and four replicas, in the long run with two, and validated on
rows that don't fill a micro-batch.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import ipufit
from tests.reference import assert_same_weights

ROWS, LEFT_OVER = 4, 3  # rows of a micro-batch; more rows of the validation
UPDATES, EPOCHS, RATE = 3, 2, 0.1
REPLICAS = pytest.mark.parametrize(
    "replicas", [1, 4, pytest.param(2, marks=pytest.mark.slow)]
)


def fitted(module, data, validation, replicas, loss=None, **arguments):
    """The history of a run in order, and the evaluation after it."""
    config = ipufit.IPUConfig(micro_batch_size=ROWS, replicas=replicas)
    model = ipufit.IPUModel(module, config)
    step = arguments.pop("step", None)
    model.compile(ipufit.Optimizer("sgd", RATE), loss, step=step, **arguments)
    history = model.fit(
        *data, epochs=EPOCHS, shuffle=False, validation_data=validation, verbose=0
    )
    x = validation if isinstance(validation, tuple) else (validation,)
    return history.history, model.evaluate(*x, verbose=0)


def plain(module, micro_batches, replicas, loss):
    """Train with plain torch, in updates of one micro-batch for each replica.

    Args:
        micro_batches: Arguments of `loss` after the module.
        loss: Returns the sum over the rows of a micro-batch, and their number.

    Returns:
        The mean loss of each epoch.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    means = []
    for _ in range(EPOCHS):
        total = count = 0
        for first in range(0, len(micro_batches), replicas):
            parts = [loss(module, *m) for m in micro_batches[first : first + replicas]]
            sums, counts = zip(*parts)
            optimizer.zero_grad()
            (sum(sums) / sum(counts)).backward()
            optimizer.step()
            total, count = total + float(sum(sums).detach()), count + sum(counts)
        means.append(total / count)
    return means


def evaluated(module, micro_batches, loss):
    with torch.no_grad():
        sums, counts = zip(*(loss(module.eval(), *m) for m in micro_batches))
    module.train()
    return float(sum(sums)) / sum(counts)


def split(*tensors):
    """Micro-batches of which the last may have fewer rows."""
    return list(zip(*(tensor.split(ROWS) for tensor in tensors)))


def check(fitted_history, evaluation, module, reference, expected, expected_validation):
    """Loss, validation and weights are those of plain torch."""
    assert fitted_history["loss"] == pytest.approx(expected, rel=1e-4)
    assert fitted_history["val_loss"][-1] == pytest.approx(
        expected_validation, rel=1e-4
    )
    assert evaluation["loss"] == pytest.approx(expected_validation, rel=1e-4)
    assert_same_weights(module, reference, rtol=1e-4, atol=1e-5)


class VAE(nn.Module):
    """Reconstruction, mean and log variance; the noise is an input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        return (
            self.decoder(mean + noise * (0.5 * log_variance).exp()),
            mean,
            log_variance,
        )


def vae_rows(outputs, x):
    """The loss of each row."""
    decoded, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (decoded - x).square().mean(1) + divergence


class LossOfVAE(VAE):
    def forward(self, x, noise):
        return {"loss": vae_rows(super().forward(x, noise), x).mean()}


@REPLICAS
@pytest.mark.parametrize("form", ["function", "step", "module"])
def test_a_vae(form, replicas):
    count, held = ROWS * replicas * UPDATES, ROWS * replicas + LEFT_OVER
    x, noise = torch.randn(count + held, 6), torch.randn(count + held, 2)
    module = LossOfVAE() if form == "module" else VAE()
    reference = VAE()
    settings = {
        "function": {"loss": vae_rows},
        "module": {},
        "step": {
            "step": lambda module, batch: vae_rows(
                module(batch["x"], batch["noise"]), batch["x"]
            ).mean()
        },
    }[form]
    inputs = {"x": x, "noise": noise}

    def part(rows):
        of_rows = {name: value[rows] for name, value in inputs.items()}
        return (of_rows, x[rows]) if form == "function" else (of_rows,)

    trained, held_out = part(slice(count)), part(slice(count, None))
    history, evaluation = fitted(
        module,
        trained,
        held_out if form == "function" else held_out[0],
        replicas,
        **settings,
    )

    def loss(module, x, noise):
        return vae_rows(module(x, noise), x).sum(), len(x)

    expected = plain(reference, split(x[:count], noise[:count]), replicas, loss)
    validation = evaluated(reference, split(x[count:], noise[count:]), loss)
    check(history, evaluation, module, reference, expected, validation)


class Encoder(nn.Module):
    """Embeddings of two views."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 4)

    def forward(self, a, b):
        return self.layer(a), self.layer(b)


def info_nce(outputs, targets=None):
    """SimCLR's loss of a micro-batch: its other rows are the negatives."""
    a, b = (F.normalize(view, dim=1) for view in outputs)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a), device=a.device))


class LossOfEncoder(Encoder):
    def forward(self, a, b):
        return {"loss": info_nce(super().forward(a, b))}


@REPLICAS
@pytest.mark.parametrize("form", ["function", "step", "module"])
def test_a_simclr(form, replicas):
    count, held = ROWS * replicas * UPDATES, ROWS * replicas + LEFT_OVER
    a = torch.randn(count + held, 5)
    b = a + 0.3 * torch.randn(count + held, 5)
    module = LossOfEncoder() if form == "module" else Encoder()
    settings = {
        "function": {"loss": info_nce},
        "module": {},
        "step": {"step": lambda module, batch: info_nce(module(*batch))},
    }[form]
    parts = []
    for rows in (slice(count), slice(count, None)):
        if form == "function":
            parts.append(((a[rows], b[rows]), torch.zeros(len(a[rows]))))
        elif form == "module":
            parts.append(({"a": a[rows], "b": b[rows]},))
        else:
            parts.append(((a[rows], b[rows]),))
    held_out = parts[1] if form == "function" else parts[1][0]
    if form == "step":
        held_out = torch.utils.data.TensorDataset(a[count:], b[count:])
    history, evaluation = fitted(module, parts[0], held_out, replicas, **settings)

    def loss(module, a, b):
        return info_nce(module(a, b)) * len(a), len(a)

    reference = Encoder()
    expected = plain(reference, split(a[:count], b[:count]), replicas, loss)
    validation = evaluated(reference, split(a[count:], b[count:]), loss)
    check(history, evaluation, module, reference, expected, validation)


class Tagger(nn.Module):
    """Scores `[N, tags, L]` of tokens `[N, L]`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens)).transpose(1, 2)


@REPLICAS
@pytest.mark.parametrize(
    "loss",
    [
        "cross_entropy",
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        lambda outputs, targets: F.cross_entropy(outputs, targets),
    ],
    ids=["name", "module", "function", "wrapper"],
)
def test_a_tagger_with_ignored_targets(loss, replicas):
    count, held = ROWS * replicas * UPDATES, ROWS * replicas + LEFT_OVER
    tokens = torch.randint(9, (count + held, 5))
    tags = torch.randint(3, (count + held, 5))
    tags[torch.rand(tags.shape) < 0.5] = -100
    tags[:ROWS] = -100  # a micro-batch without targets
    tags[1, 0] = 2 if replicas == 1 else -100  # but no update without them
    module, reference = Tagger(), Tagger()
    history, evaluation = fitted(
        module,
        (tokens[:count], tags[:count]),
        (tokens[count:], tags[count:]),
        replicas,
        loss,
        metrics=["accuracy"],
    )

    def sums(module, tokens, tags):
        total = F.cross_entropy(module(tokens), tags, reduction="sum")
        return total, int(tags.ne(-100).sum())

    expected = plain(reference, split(tokens[:count], tags[:count]), replicas, sums)
    validation = evaluated(reference, split(tokens[count:], tags[count:]), sums)
    check(history, evaluation, module, reference, expected, validation)
    with torch.no_grad():
        hits = reference(tokens[count:]).argmax(1).eq(tags[count:])
    accuracy = hits[tags[count:].ne(-100)].double().mean()
    assert evaluation["accuracy"] == pytest.approx(float(accuracy))


class NodeClassifier(nn.Module):
    """Scores `[nodes, classes]`: of each node and its neighbor in a ring."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x, neighbor):
        return self.head(torch.relu(self.layer(x + x.index_select(0, neighbor))))


def graphs(count, generator):
    """Batches of 8 nodes: padding at the end, and nodes that no loss counts."""
    batches = []
    for _ in range(count):
        real = int(torch.randint(3, 9, (), generator=generator))
        neighbor = torch.cat([torch.arange(real).roll(1), torch.arange(real, 8)])
        y = torch.randint(3, (8,), generator=generator)
        y[torch.rand(8, generator=generator) < 0.4] = -100
        y[0] = 1
        y[real:] = -1  # of padding
        inputs = {
            "x": torch.randn(8, 3, generator=generator),
            "neighbor": neighbor,
            "mask": torch.arange(8) < real,
        }
        batches.append((inputs, y))
    return batches


@REPLICAS
@pytest.mark.parametrize("loss", ["cross_entropy", F.cross_entropy], ids=["name", "F"])
def test_padded_graphs_with_ignored_nodes(loss, replicas):
    generator = torch.Generator().manual_seed(5)
    training = graphs(replicas * UPDATES, generator)
    held_out = graphs(replicas + 1, generator)
    module, reference = NodeClassifier(), NodeClassifier()
    config = ipufit.IPUConfig(replicas=replicas)
    model = ipufit.IPUModel(module, config)
    model.compile(ipufit.Optimizer("sgd", RATE), loss, metrics=["accuracy"])
    validation = ipufit.FixedSizeBatches(held_out, mask="mask")
    history = model.fit(
        ipufit.FixedSizeBatches(training, mask="mask"),
        validation_data=validation,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    ).history
    evaluation = model.evaluate(validation, verbose=0)

    def sums(module, inputs, y):
        mask = inputs["mask"]
        outputs = module(inputs["x"], inputs["neighbor"])[mask]
        total = F.cross_entropy(outputs, y[mask], reduction="sum")
        return total, int(y[mask].ne(-100).sum())

    expected = plain(reference, training, replicas, sums)
    held_out_loss = evaluated(reference, held_out, sums)
    check(history, evaluation, module, reference, expected, held_out_loss)


class StatefulGRU(nn.Module):
    """A cell whose state goes on from one micro-batch to the next."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(1)
        self.cell, self.head = nn.GRUCell(3, 5), nn.Linear(5, 2)
        self.register_buffer("state", torch.zeros(rows, 5))

    def forward(self, x):
        new = self.cell(x, self.state)
        self.state.copy_(new.detach())
        return self.head(new)


@REPLICAS
def test_a_gru_with_a_state(replicas):
    count = ROWS * replicas * UPDATES
    x, y = torch.randn(count, 3), torch.randint(2, (count,))
    module, reference = StatefulGRU(ROWS), StatefulGRU(ROWS)
    config = ipufit.IPUConfig(micro_batch_size=ROWS, replicas=replicas)
    model = ipufit.IPUModel(module, config)
    model.compile(ipufit.Optimizer("sgd", RATE), "cross_entropy")
    history = model.fit(x, y, epochs=EPOCHS, shuffle=False, verbose=0).history

    states = [torch.zeros(ROWS, 5) for _ in range(replicas)]  # each replica's
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    means = []
    for _ in range(EPOCHS):
        losses = []
        for first in range(0, count, ROWS * replicas):
            optimizer.zero_grad()
            for index in range(replicas):
                rows = slice(first + index * ROWS, first + (index + 1) * ROWS)
                hidden = reference.cell(x[rows], states[index])
                states[index] = hidden.detach()
                loss = F.cross_entropy(reference.head(hidden), y[rows])
                (loss / replicas).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
        means.append(sum(losses) / len(losses))
    reference.state = states[0]
    assert history["loss"] == pytest.approx(means, rel=1e-4)
    assert_same_weights(module, reference, rtol=1e-4, atol=1e-5)
