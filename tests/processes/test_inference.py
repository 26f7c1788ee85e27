# SPDX-License-Identifier: Apache-2.0
"""`evaluate` and `predict` in several processes: each sample once, results in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ipufit
from ipufit import distributed
from tests.processes.runs import CLASSES, FEATURES, model_of, samples
from tests.reference import compiled


def predicted(count, **arguments):
    """Predictions, of a network that each process has initialised differently."""
    model = model_of()
    x, *_ = samples(count)
    outputs = model.predict(x, batch_size=16, verbose=0, **arguments)
    if not torch.is_tensor(outputs):
        outputs = torch.cat(list(outputs))
    return outputs.numpy(), model.module.last.weight.detach().numpy()


class Normalised(torch.nn.Module):
    """Has running statistics, and a loss of its own that it logs parts of."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.last = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x, y):
        outputs = self.last(self.norm(x))
        loss = torch.nn.functional.cross_entropy(outputs, y.long())
        ipufit.log("largest", outputs.abs().max())
        return {"outputs": outputs, "loss": loss}


def own_loss(count):
    torch.manual_seed(0)
    model = compiled(Normalised(), seed=1, loss=None)
    x, y, _ = samples(count)
    figures = model.evaluate((x, y), batch_size=8, verbose=0)
    model.fit((x, y), batch_size=4, epochs=1, verbose=0, drop_last=True)
    state = model.module.state_dict()
    after = model.evaluate((x, y), batch_size=8, verbose=0)
    return figures, {n: t.numpy() for n, t in state.items()}, after


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        *((count, {}) for count in (1, 33, 90)),
        *((count, {"stream": True}) for count in (5, 64)),
        (64, {"steps": 2}),
    ],
)
def test_predictions_are_whole_and_in_order(pool, count, arguments):
    (expected, weights), *_ = pool.run(predicted, count, count=1, **arguments)
    for outputs, own in pool.run(predicted, count, count=2, **arguments):
        np.testing.assert_array_equal(own, weights)  # those of process 0
        np.testing.assert_allclose(outputs, expected, atol=1e-6)


def test_figures_of_own_losses_cover_all_processes(pool):
    (figures, _, _), *_ = pool.run(own_loss, 13, count=1)
    runs = pool.run(own_loss, 13)
    for found, _, _ in runs:
        assert found["loss"] == pytest.approx(figures["loss"], abs=1e-5)
    assert runs[0][0] == runs[1][0]


def test_processes_end_with_one_state_and_evaluate_alike(pool):
    (_, state, after), (_, other, other_after) = pool.run(own_loss, 24)
    for name, tensor in state.items():  # running statistics too
        np.testing.assert_array_equal(tensor, other[name])
    assert after == other_after


def refusal(method):
    """What a run says of the one class that can't be, of one process's samples."""
    x, y, _ = samples(32)
    y[5] = 255
    model = model_of(loss=mean_square)
    try:
        getattr(model, method)(x, y, batch_size=16, verbose=0)
    except ipufit.DataError as error:
        return str(error)


def mean_square(outputs, targets):
    return outputs.square().mean()


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_all_processes_name_a_target_that_can_not_be(pool, method):
    messages = pool.run(refusal, method)
    assert all("accuracy' got the target 255" in message for message in messages)


def asked():
    info = distributed.get_process_info()
    return info.index, info.count, info.launcher


def test_a_group_that_the_script_made_names_the_process(pool):
    assert pool.run(asked) == [(i, 2, "group") for i in range(2)]


def in_batches():
    """A loop of one's own over whole batches, the same in every process."""
    model = model_of()
    x, y, _ = samples(32)
    trained = [model.train_on_batch(x[i : i + 16], y[i : i + 16]) for i in (0, 16)]
    tested = model.test_on_batch(x[:7], y[:7])
    return trained, tested, model.predict_on_batch(x[:7]).numpy(), model.get_weights()


def test_a_loop_of_batches_is_divided_too(pool):
    (trained, tested, outputs, weights), *_ = pool.run(in_batches, count=1)
    for own in pool.run(in_batches):
        for found, expected in zip(own[0], trained):
            assert found == pytest.approx(expected, abs=1e-5)
        assert own[1] == pytest.approx(tested, abs=1e-5)
        np.testing.assert_allclose(own[2], outputs, atol=1e-5)
        for found, expected in zip(own[3], weights):
            np.testing.assert_allclose(found, expected, atol=1e-5)


class Averaged(torch.nn.Module):
    """Has running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.last = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        return self.last(self.norm(x))


def uploads():
    """How often a training program gets weights, with validations in between."""
    torch.manual_seed(0)
    model = compiled(Averaged(), seed=1)
    x, y, _ = samples(32)
    counts = []

    class Count(ipufit.Callback):
        def on_epoch_begin(self, epoch, logs):
            program = model._executors._trainer
            upload = program.executor.copyWeightsToDevice

            def counted():
                counts.append(epoch)
                upload()

            program.executor.__dict__["copyWeightsToDevice"] = counted

    model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        validation_data=(x, y),
        callbacks=[Count()],
    )
    return counts


def test_all_devices_get_weights_alike(pool):
    one, other = pool.run(uploads)
    assert one == other


def averaged(*, is_swapping):
    """Losses of validations of running averages, those they would be, and the end."""
    torch.manual_seed(0)
    model = ipufit.IPUModel(Averaged(), ipufit.IPUConfig(seed=1))
    optimizer = ipufit.Optimizer("sgd", 0.1, ema_momentum=0.5)
    model.compile(optimizer, "cross_entropy")
    x, y, _ = samples(32)
    calls, expected = [], []

    class Average(ipufit.Callback):
        """Averages what process 0 has after each call, by plain arithmetic."""

        def on_train_batch_end(self, batch, logs):
            with torch.no_grad():
                for name, tensor in model.copied_weights().items():
                    calls.append((name, tensor))

        def on_epoch_end(self, epoch, logs):
            found = {}
            for name, tensor in calls:
                tensor = model.processes.first(tensor)
                if tensor.is_floating_point() and name in found:
                    tensor = (found[name] + tensor) / 2
                found[name] = tensor
            module = Averaged().eval()
            module.load_state_dict(found)
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(module(x), y)
            expected.append(float(loss))

    swapping = [ipufit.SwapEMAWeights()] if is_swapping else []
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        validation_data=(x, y),
        callbacks=[*swapping, Average()],
    ).history
    state = {n: t.numpy() for n, t in model.module.state_dict().items()}
    return history["val_loss"], expected, state


def test_averages_of_buffers_are_those_of_process_0(pool):
    plain = pool.run(averaged, is_swapping=False)
    for own, without in zip(pool.run(averaged, is_swapping=True), plain):
        losses, expected, state = own
        assert losses == pytest.approx(expected, rel=1e-5)
        assert losses != pytest.approx(without[0], rel=1e-5)
        for name, value in state.items():
            np.testing.assert_array_equal(value, without[2][name])
            np.testing.assert_array_equal(value, plain[0][2][name])


def late_group(path):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    model = model_of()
    x, y, _ = samples(32)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size
    )
    model.fit(x, y, 8, verbose=0)


def test_a_group_is_made_before_the_model(pool, tmp_path):
    with pytest.raises(ipufit.ConfigError, match="when the model was made"):
        pool.run(late_group, tmp_path / "group", count=2)


class OwnPart(torch.utils.data.IterableDataset):
    """Samples of this process, which are fewer in the second one."""

    is_divided = True

    def __init__(self, x, y):
        self.parts = (x[:9], y[:9]), (x[9:], y[9:])

    def __iter__(self):
        part = self.parts[distributed.get_process_info().index]
        return ({"x": one, "y": target} for one, target in zip(*part))


def left_over(count, *, is_own_part):
    """Figures of micro-batches of 4, and those of plain torch over the same."""
    torch.manual_seed(0)
    model = compiled(Normalised(), micro_batch_size=4, loss=None)
    x, y, _ = samples(count)
    data = OwnPart(x, y) if is_own_part else (x, y)
    figures = model.evaluate(data, verbose=0)
    expected = {"loss": 0.0, "largest": 0.0}
    parts = ((x[:9], y[:9]), (x[9:], y[9:])) if is_own_part else ((x, y),)
    module = model.module.eval()
    for part in parts:
        for inputs, targets in zip(*(one.split(4) for one in part)):
            with torch.no_grad():
                results = module(inputs, targets)
            largest = float(results["outputs"].abs().max())
            expected["loss"] += float(results["loss"]) * len(inputs) / count
            expected["largest"] += largest * len(inputs) / count
    return figures, expected


@pytest.mark.filterwarnings("ignore::ipufit.errors.WholeStreamWarning")
@pytest.mark.parametrize(
    ("count", "is_own_part"), [(13, False), (24, False), (2, False), (12, True)]
)
def test_rows_left_over_in_a_process_are_a_micro_batch(pool, count, is_own_part):
    for figures, expected in pool.run(left_over, count, is_own_part=is_own_part):
        assert figures == pytest.approx(expected, rel=1e-5)
