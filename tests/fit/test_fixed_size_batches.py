# SPDX-License-Identifier: Apache-2.0
"""Batches that are whole micro-batches: figures and updates are plain torch's.

A batch has nodes, edges and graphs, of which some are padding.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import ipufit
from ipufit import (
    ConfigError,
    DataError,
    FixedSizeBatches,
    IPUConfig,
    IPUModel,
    Optimizer,
    UnsupportedError,
    poptorch,
)
from tests.reference import assert_same_weights
from tests.strategies import examples

NODES, EDGES, GRAPHS, FEATURES, CLASSES = 12, 20, 4, 3, 3
COUNTS = [3, 1, 2, 3, 2, 1, 3, 3]  # graphs of each batch


def batch(count, seed=0):
    """Inputs and targets of a batch of `count` graphs and padding."""
    generator = torch.Generator().manual_seed(1000 * seed + count)

    def whole(high, *shape):
        return torch.randint(high, shape, generator=generator)

    sizes = (whole(2, count) + 2).tolist()
    graph = torch.full((NODES,), GRAPHS - 1)
    edges = torch.full((2, EDGES), NODES - 1)
    first = 0
    for index, size in enumerate(sizes):
        graph[first : first + size] = index
        edges[:, 4 * index : 4 * index + 4] = first + whole(size, 2, 4)
        first += size
    inputs = {
        "x": torch.randn(NODES, FEATURES, generator=generator),
        "edges": edges,
        "graph": graph,
        "mask": torch.arange(GRAPHS) < count,
    }
    return inputs, whole(CLASSES, GRAPHS)


def summed(values, index, count):
    """Add rows by index: [rows, features] to [count, features]."""
    shape = count, values.shape[1]
    zeros = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return zeros.scatter_add(0, index.unsqueeze(1).expand_as(values), values)


class GIN(torch.nn.Module):
    """A graph isomorphism network; one row of outputs for each graph."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(
                    torch.nn.Linear(size, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6)
                )
                for size in (FEATURES, 6)
            )
            self.last = torch.nn.Linear(6, CLASSES)

    def forward(self, x, edges, graph):
        for layer in self.layers:
            neighbours = x.index_select(0, edges[0])
            x = layer(x + summed(neighbours, edges[1], NODES))
        return self.last(summed(x, graph, GRAPHS))


def real_rows(module, inputs, targets):
    """Outputs and targets of the graphs of a batch."""
    mask = inputs["mask"]
    arguments = {name: value for name, value in inputs.items() if name != "mask"}
    return module(**arguments)[mask], targets[mask]


def plain_fit(module, batches, per_update, epochs, loss=F.cross_entropy):
    """Train in plain torch; return the mean loss of each epoch's graphs."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    history = []
    for _ in range(epochs):
        total = count = 0
        for first in range(0, len(batches), per_update):
            rows = [
                real_rows(module, *one) for one in batches[first : first + per_update]
            ]
            outputs, targets = (torch.cat(part) for part in zip(*rows))
            optimizer.zero_grad()
            value = loss(outputs, targets)
            value.backward()
            optimizer.step()
            total += value.item() * len(targets)
            count += len(targets)
        history.append(total / count)
    return history


def all_rows(module, batches):
    with torch.no_grad():
        rows = [real_rows(module, *one) for one in batches]
    return tuple(torch.cat(part) for part in zip(*rows))


def compiled(module=None, config=None, loss="cross_entropy", **settings):
    module = GIN() if module is None else module
    model = IPUModel(module, config)
    model.compile(Optimizer("sgd", 0.02, momentum=0.9), loss, **settings)
    return model


@pytest.fixture
def batches():
    return [batch(count, seed) for seed, count in enumerate(COUNTS)]


LAYOUTS = list(itertools.product((1, 2), repeat=3))


@pytest.mark.parametrize(("iterations", "accumulation", "replicas"), LAYOUTS)
def test_fit_evaluate_and_predict_are_those_of_plain_torch(
    batches, iterations, accumulation, replicas
):
    config = IPUConfig(
        device_iterations=iterations,
        gradient_accumulation=accumulation,
        replicas=replicas,
    )
    model, twin = compiled(config=config, metrics=["accuracy"]), GIN()
    data = FixedSizeBatches(batches, "mask")
    throughput = ipufit.Throughput(verbose=0)
    history = model.fit(
        data, validation_data=data, epochs=3, verbose=0, callbacks=throughput
    ).history
    assert throughput.epoch_samples == sum(COUNTS)
    expected = plain_fit(twin, batches, accumulation * replicas, epochs=3)
    assert history["loss"] == pytest.approx(expected, abs=1e-5)
    assert_same_weights(model.module, twin)

    outputs, targets = all_rows(twin, batches)
    figures = model.evaluate(data, verbose=0)
    assert figures["loss"] == pytest.approx(
        F.cross_entropy(outputs, targets).item(), abs=1e-5
    )
    hits = outputs.argmax(dim=1).eq(targets).float().mean().item()
    assert figures["accuracy"] == pytest.approx(hits)
    assert history["val_loss"][-1] == pytest.approx(figures["loss"], abs=1e-6)
    torch.testing.assert_close(model.predict(data, verbose=0), outputs)
    assert len(outputs) == sum(COUNTS)


@settings(max_examples=examples(32))
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=7).filter(any),
    layout=st.sampled_from(LAYOUTS),
)
def test_incomplete_calls_are_padded_with_batches_that_count_nothing(counts, layout):
    iterations, accumulation, replicas = layout
    config = IPUConfig(
        device_iterations=iterations,
        gradient_accumulation=accumulation,
        replicas=replicas,
    )
    batches = [batch(count, seed) for seed, count in enumerate(counts)]
    data = FixedSizeBatches(batches, "mask")
    model, twin = compiled(config=config), GIN()
    per_update = accumulation * replicas
    updates = [counts[at : at + per_update] for at in range(0, len(counts), per_update)]
    outputs, targets = all_rows(twin, batches)
    figures = model.evaluate(data, verbose=0)
    assert figures["loss"] == pytest.approx(
        F.cross_entropy(outputs, targets).item(), abs=1e-5
    )
    torch.testing.assert_close(model.predict(data, verbose=0), outputs)
    if not all(map(any, updates)) or len(updates) % iterations:
        return  # an update without samples moves weights by the momentum
    model.fit(data, drop_last="pad", verbose=0)
    plain_fit(twin, batches, per_update, epochs=1)
    assert_same_weights(model.module, twin)


def test_a_module_s_own_loss_is_the_mean_over_the_samples_of_its_batch(batches):
    class WithLoss(GIN):
        def forward(self, x, edges, graph, mask, y):
            outputs = super().forward(x, edges, graph)
            values = F.cross_entropy(outputs, y, reduction="none")
            return outputs, (values * mask).sum() / mask.sum()

    whole = [({**inputs, "y": y}) for inputs, y in batches]
    data = FixedSizeBatches(whole, lambda one: one["mask"])
    config = IPUConfig(gradient_accumulation=2, replicas=2)
    model, twin = compiled(WithLoss(), config, loss=None), GIN()
    history = model.fit(data, epochs=2, verbose=0).history
    assert history["loss"] == pytest.approx(plain_fit(twin, batches, 4, 2), abs=1e-5)
    assert_same_weights(model.module, twin)
    outputs, targets = all_rows(twin, batches)
    expected = F.cross_entropy(outputs, targets).item()
    assert model.evaluate(data, verbose=0)["loss"] == pytest.approx(expected, abs=1e-5)


def test_weights_steps_and_streamed_metrics_get_the_rows_of_samples(batches):
    weighted = [(*one, torch.arange(4.0) + 1) for one in batches]
    data = FixedSizeBatches(weighted, "mask")
    model, seen = compiled(config=IPUConfig(gradient_accumulation=2)), []
    history = model.fit(data, verbose=0).history
    values = weights = 0.0
    twin = GIN()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.02, momentum=0.9)
    for first in range(0, 8, 2):
        rows = [real_rows(twin, *one) for one in batches[first : first + 2]]
        each = torch.cat([F.cross_entropy(*one, reduction="none") for one in rows])
        scale = torch.cat([torch.arange(len(y)) + 1.0 for _, y in rows])
        optimizer.zero_grad()
        (each * scale).mean().backward()
        optimizer.step()
        values, weights = values + (each * scale).sum().item(), weights + len(each)
    assert history["loss"] == [pytest.approx(values / weights, abs=1e-5)]
    assert_same_weights(model.module, twin)

    class Noted(ipufit.metrics.StreamedMetric):
        def reset(self):
            seen.clear()

        def update(self, outputs, targets, weights=None):
            seen.append(targets)

        def result(self):
            return float(sum(map(len, seen)))

    model = compiled(metrics=[Noted(name="rows")], config=IPUConfig(replicas=2))
    data = FixedSizeBatches(batches, "mask")
    assert model.fit(data, verbose=0).history["rows"] == [sum(COUNTS)]
    assert torch.cat(seen).equal(all_rows(twin, batches)[1])
    assert model.evaluate(data, verbose=0)["rows"] == sum(COUNTS)

    def step(module, batch):
        inputs, targets = batch
        assert targets.shape == (GRAPHS,)
        outputs = module(**inputs)
        return {"loss": F.cross_entropy(outputs, targets), "outputs": outputs}

    whole = [(inputs, y) for inputs, y in batches if inputs["mask"].sum() == 3]
    for inputs, _ in whole:
        inputs["mask"] = torch.ones(GRAPHS)
    model, other = compiled(loss=None, step=step), compiled()
    data = FixedSizeBatches(whole, "mask")
    losses = [one.fit(data, verbose=0).history["loss"] for one in (model, other)]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize(
    ("name", "function", "target"),
    [
        ("cross_entropy", F.cross_entropy, -100),
        ("cross_entropy", F.cross_entropy, -1),
        ("cross_entropy", F.cross_entropy, CLASSES),
        ("mse", F.mse_loss, math.nan),
    ],
)
def test_targets_of_padding_may_be_anything(batches, name, function, target):
    for index, (inputs, y) in enumerate(batches):
        y = F.one_hot(y, CLASSES).float() if name == "mse" else y
        y[inputs["mask"].logical_not()] = target
        batches[index] = inputs, y
    data, config = FixedSizeBatches(batches, "mask"), IPUConfig(replicas=2)
    model, twin = compiled(config=config, loss=name), GIN()
    history = model.fit(data, verbose=0).history
    expected = plain_fit(twin, batches, 2, 1, function)
    assert history["loss"] == pytest.approx(expected, abs=1e-5)
    assert_same_weights(model.module, twin)
    expected = function(*all_rows(twin, batches)).item()
    assert model.evaluate(data, verbose=0)["loss"] == pytest.approx(expected, abs=1e-5)


@settings(max_examples=examples(32))
@given(
    counts=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    layout=st.sampled_from(LAYOUTS),
    bits=st.integers(0, 2 ** (8 * GRAPHS) - 1),
    padding=st.sampled_from([-100, -1, 0]),
    loss=st.sampled_from(["cross_entropy", F.cross_entropy]),
)
def test_ignored_targets_count_neither_beside_padding_nor_alone(
    counts, layout, bits, padding, loss
):
    iterations, accumulation, replicas = layout
    config = IPUConfig(
        device_iterations=iterations,
        gradient_accumulation=accumulation,
        replicas=replicas,
    )
    batches = [batch(count, seed) for seed, count in enumerate(counts)]
    for index, (inputs, targets) in enumerate(batches):
        marks = [bits >> (GRAPHS * index + row) & 1 for row in range(GRAPHS)]
        targets[torch.tensor(marks).bool()] = -100
        targets[inputs["mask"].logical_not()] = padding
    data, twin = FixedSizeBatches(batches, "mask"), GIN()
    outputs, targets = all_rows(twin, batches)
    model = compiled(config=config, loss=loss)
    tested = model.evaluate(data, verbose=0)["loss"]
    expected = F.cross_entropy(outputs, targets).item()
    assert tested == pytest.approx(expected, abs=1e-5, nan_ok=True)

    def sums(outputs, targets):  # 0 where nothing is left
        left = targets.ne(-100).sum().clamp(min=1)
        return F.cross_entropy(outputs, targets, reduction="sum") / left

    model.fit(data, verbose=0)
    plain_fit(twin, batches, accumulation * replicas, 1, sums)
    assert_same_weights(model.module, twin)


class Graphs:
    """A user's type, as PyG's `Batch` is one."""

    def __init__(self, x, edges, graph, mask, y, num_graphs=GRAPHS):
        self.x, self.edges, self.graph, self.mask, self.y = x, edges, graph, mask, y
        self.num_graphs = num_graphs


class GraphsParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield from (struct.x, struct.edges, struct.graph, struct.mask, struct.y)

    def reconstruct(self, original_structure, tensor_iterator):
        tensors = itertools.islice(tensor_iterator, 5)
        return Graphs(*tensors, num_graphs=original_structure.num_graphs)


class OnGraphs(GIN):
    def forward(self, graphs):
        assert graphs.num_graphs == GRAPHS
        assert graphs.edges.shape == (2, EDGES)
        return super().forward(graphs.x, graphs.edges, graphs.graph)


@pytest.fixture
def parser():
    poptorch.registerCustomArgParser(Graphs, GraphsParser())
    yield
    poptorch.registerCustomArgParser(Graphs, None)


@pytest.mark.usefixtures("parser")
def test_types_with_a_parser_reach_the_module_as_they_are(batches):
    own = [Graphs(**inputs, y=y) for inputs, y in batches]
    data, config = FixedSizeBatches(own, "mask"), IPUConfig(replicas=2)
    model, twin = compiled(OnGraphs(), config), GIN()
    history = model.fit(data, y="y", validation_data=data, verbose=0).history
    assert history["loss"] == pytest.approx(plain_fit(twin, batches, 2, 1), abs=1e-5)
    assert_same_weights(model.module, twin)
    outputs, _ = all_rows(twin, batches)
    torch.testing.assert_close(model.predict(data, verbose=0), outputs)

    own[3].edges = own[3].edges[:, :19]
    message = r"has inputs\.edges of torch.int64 and shape \(2, 19\), and the first had"
    with pytest.raises(DataError, match=message):
        model.predict(data, verbose=0)
    own[3] = batches[3][0]
    with pytest.raises(DataError, match="nests differently from the first"):
        model.predict(data, verbose=0)


def test_a_type_without_a_parser_is_refused(batches):
    own = [Graphs(**inputs, y=y) for inputs, y in batches]
    with pytest.raises(DataError, match=r"poptorch.registerCustomArgParser\(Graphs"):
        compiled(OnGraphs()).predict(FixedSizeBatches(own, "mask"), verbose=0)


def test_batches_of_pyg_reach_its_layers():
    """Needs PyG; the parser is one as PopTorch Geometric has."""
    data, nn = (
        pytest.importorskip(f"torch_geometric.{name}") for name in ("data", "nn")
    )

    def named(struct):
        items = sorted(struct.to_dict().items())
        return {name: one for name, one in items if isinstance(one, torch.Tensor)}

    class Parser(poptorch.ICustomArgParser):
        def yieldTensors(self, struct):  # noqa: N802
            yield from named(struct).values()

        def reconstruct(self, original_structure, tensor_iterator):
            names = named(original_structure)
            return data.Data.from_dict({n: next(tensor_iterator) for n in names})

    def padded(count):
        sizes = [3] * count + [NODES - 3 * count]
        graphs = [
            data.Data(
                x=torch.randn(size, FEATURES),
                edge_index=torch.randint(size, (2, 5 if index < count else 17)),
                y=torch.randint(CLASSES, (1,)),
            )
            for index, size in enumerate(sizes)
        ]
        graphs[-1].edge_index = graphs[-1].edge_index[:, : 20 - 5 * count]
        empty = data.Data(
            x=torch.zeros(0, FEATURES),
            edge_index=torch.zeros(2, 0, dtype=torch.int64),
            y=torch.zeros(1, dtype=torch.int64),
        )
        graphs += [empty] * (GRAPHS - len(graphs))
        one = data.Batch.from_data_list(graphs)
        one.mask = torch.arange(GRAPHS) < count
        return one

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GINConv(torch.nn.Linear(FEATURES, CLASSES))

        def forward(self, batch):
            h = self.layer(batch.x, batch.edge_index)
            return nn.global_add_pool(h, batch.batch, size=GRAPHS)

    torch.manual_seed(0)
    batches, network = [padded(count) for count in (3, 1, 2, 3)], Network()
    twin = copy.deepcopy(network)
    poptorch.registerCustomArgParser(data.Batch, Parser())
    try:
        model = compiled(network, IPUConfig(gradient_accumulation=2))
        whole = FixedSizeBatches(batches, "mask")
        model.fit(whole, y="y", verbose=0)
        predicted = model.predict(whole, verbose=0)
    finally:
        poptorch.registerCustomArgParser(data.Batch, None)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.02, momentum=0.9)
    for first in (0, 2):
        some = batches[first : first + 2]
        outputs = torch.cat([twin(one)[one.mask] for one in some])
        optimizer.zero_grad()
        F.cross_entropy(
            outputs, torch.cat([one.y[one.mask] for one in some])
        ).backward()
        optimizer.step()
    assert_same_weights(network, twin)
    expected = torch.cat([twin(one)[one.mask] for one in batches])
    torch.testing.assert_close(predicted, expected.detach())


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_loaders_and_generators_are_streams_of_batches(batches):
    expected = compiled()
    expected.fit(FixedSizeBatches(batches, "mask"), verbose=0)
    alone = {"batch_size": None, "drop_last": False}
    loaders = {
        "torch": DataLoader(Stream(batches), batch_size=None),
        "PopTorch": poptorch.DataLoader(poptorch.Options(), Stream(batches), **alone),
        "generator": iter(batches),
    }
    for name, loader in loaders.items():
        model = compiled()
        model.fit(FixedSizeBatches(loader, "mask"), verbose=0)
        assert_same_weights(model.module, expected.module)
        assert name

    options = poptorch.Options().deviceIterations(2)
    loader = poptorch.DataLoader(options, batches)
    with pytest.raises(DataError, match="its options have 2 device iterations"):
        compiled().fit(FixedSizeBatches(loader, "mask"), verbose=0)


def test_wrong_batches_are_named(batches):
    inputs, y = batches[2]
    model = compiled()

    def refusal(wrong, mask="mask", *, at=0, error=DataError, **arguments):
        given = list(batches)
        given[at] = wrong
        with pytest.raises(error) as info:
            model.fit(FixedSizeBatches(given, mask), verbose=0, **arguments)
        return str(info.value)

    short = {**inputs, "edges": inputs["edges"][:, 1:]}
    assert "has inputs['edges'] of torch.int64 and shape (2, 19), and the first" in (
        refusal((short, y), at=3)
    )
    assert "has targets of torch.int64 and shape (5,), and the first had" in refusal(
        ({**inputs, "mask": torch.ones(5)}, y[[0, 0, 1, 2, 3]]), at=3
    )
    assert "has targets of shape (4,), and a mask of 3 rows" in refusal(
        ({**inputs, "mask": torch.ones(3)}, y)
    )
    assert "a mask of shape ()" in refusal(({**inputs, "mask": 3}, y))
    assert "has no 'masks'. It has: x, edges, graph, mask." in refusal(
        (inputs, y), "masks"
    )
    assert "class_weight needs the samples one by one" in refusal(
        (inputs, y), class_weight={0: 2.0}
    )
    unmasked = [{n: v for n, v in one.items() if n != "mask"} for one, _ in batches]
    data = FixedSizeBatches(unmasked, lambda _: torch.ones(5))
    with pytest.raises(UnsupportedError, match=r"\(32, 3\) for a call of 8 batches, w"):
        model.predict(data, verbose=0)
    with pytest.raises(DataError, match="FixedSizeBatches got a int"):
        FixedSizeBatches(3, "mask")
    with pytest.raises(DataError, match="mask=None is neither"):
        FixedSizeBatches(batches, None)
    with pytest.raises(DataError, match=r"use ipufit\.FixedSizeBatches"):
        model.fit(DataLoader(Stream(batches), batch_size=None), verbose=0)


def test_a_micro_batch_is_one_batch(batches):
    data = FixedSizeBatches(batches, "mask")
    with pytest.raises(ConfigError, match="micro_batch_size=2, and each batch of"):
        compiled(config=IPUConfig(micro_batch_size=2)).fit(data, verbose=0)
    with pytest.raises(ConfigError, match="batch_size=4, and a pass takes 1"):
        compiled().evaluate(data, batch_size=4, verbose=0)
    model, twin = compiled(), GIN()
    model.fit(data, batch_size=4, verbose=0)  # batches of an update
    plain_fit(twin, batches, 4, 1)
    assert_same_weights(model.module, twin)
    steps = model.evaluate(data, steps=3, verbose=0)["loss"]
    outputs, targets = all_rows(twin, batches[:3])
    assert steps == pytest.approx(F.cross_entropy(outputs, targets).item(), abs=1e-5)
    assert not math.isclose(steps, model.evaluate(data, verbose=0)["loss"])


def fitted_in_processes():
    batches = [batch(count, seed) for seed, count in enumerate(COUNTS)]
    model = compiled(config=IPUConfig(gradient_accumulation=2))
    data = FixedSizeBatches(batches, "mask")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ipufit.errors.WholeStreamWarning)
        history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
        predicted = model.predict(data, verbose=0)
        parts = model.predict(data, stream=True, verbose=0)
        torch.testing.assert_close(torch.cat(list(parts)), predicted)
    return history, copy.deepcopy(model.module).state_dict(), predicted


def test_processes_divide_the_batches(pool, batches):
    first, second = pool.run(fitted_in_processes)
    history, weights, predicted = first
    twin = GIN()
    expected = plain_fit(twin, batches, 4, epochs=2)
    assert history["loss"] == pytest.approx(expected, abs=1e-5)
    outputs, targets = all_rows(twin, batches)
    loss = F.cross_entropy(outputs, targets).item()
    assert history["val_loss"][-1] == pytest.approx(loss, abs=1e-5)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert second[1][name].equal(weights[name])
    torch.testing.assert_close(predicted, outputs)
    assert second[2].equal(predicted)
