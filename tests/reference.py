# SPDX-License-Identifier: Apache-2.0
"""Plain torch to compare with, tiny models, and doubles that record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import FunctionType

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ipufit import Callback, IPUConfig, IPUModel

NUM_FEATURES, NUM_CLASSES = 3, 4
CONFIG_FIELDS = {field.name for field in fields(IPUConfig)}


def network(seed=0, *, dtype=torch.float32):
    """A tiny classifier, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(NUM_FEATURES, 5),
            torch.nn.Tanh(),
            torch.nn.Linear(5, NUM_CLASSES),
        ).to(dtype)


def compiled(module=None, config=None, **settings):
    """A model of the tiny classifier, or of another module, that can be fitted.

    Settings are arguments of `compile` and, without a config, fields of `IPUConfig`. An
    optimizer may be a function that makes the optimizer of a module.
    """
    layout = {name: settings.pop(name) for name in CONFIG_FIELDS & settings.keys()}
    model = IPUModel(
        network() if module is None else module,
        IPUConfig(**layout) if layout else config,
    )
    settings = {"optimizer": "sgd", "loss": "cross_entropy", **settings}
    if isinstance(settings["optimizer"], FunctionType):
        settings["optimizer"] = settings["optimizer"](model.module)
    model.compile(**settings)
    return model


def samples(count, seed=0):
    """Features and classes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, NUM_FEATURES, generator=generator)
    return x, torch.randint(0, NUM_CLASSES, (count,), generator=generator)


def weights(module):
    """Copies of the weights by name."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_weights(module, other, *, rtol=1e-5, atol=1e-6):
    mine, theirs = weights(module), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=name)


@dataclass
class Trained:
    """What plain torch saw: one value per sample trained on, in order."""

    losses: torch.Tensor
    hits: torch.Tensor

    def figures(self, covered=None):
        """Loss and accuracy over all samples, or over those of a mask."""
        if covered is None:
            covered = torch.ones_like(self.hits, dtype=torch.bool)
        return {
            "accuracy": float(self.hits[covered].mean()),
            "loss": float(self.losses[covered].mean()),
        }


def train(
    module, optimizer, x, y, batch_size, *, is_sum=False, weights=None, has_rest=False
):
    """One epoch over `x` and `y` in order, an update for each whole batch.

    Args:
        is_sum: Whether the loss of a batch is a sum and no mean.
        weights: One for each sample.
        has_rest: Whether a short last batch is trained on, too.
    """
    losses, hits = [], []
    for rows in torch.arange(len(x)).split(batch_size):
        if len(rows) < batch_size and not has_rest:
            break
        outputs = module(x[rows])
        each = torch.nn.functional.cross_entropy(outputs, y[rows], reduction="none")
        each = each if weights is None else each * weights[rows]
        optimizer.zero_grad()
        (each.sum() if is_sum else each.mean()).backward()
        optimizer.step()
        losses.append(each.detach().double())
        hits.append(outputs.argmax(dim=1).eq(y[rows]).double())
    return Trained(torch.cat(losses), torch.cat(hits))


def evaluate(module, x, y):
    """Loss and accuracy over all samples at once."""
    with torch.no_grad():
        outputs = module(x)
        loss = torch.nn.functional.cross_entropy(outputs, y)
    accuracy = outputs.argmax(dim=1).eq(y).double().mean()
    return {"accuracy": float(accuracy), "loss": float(loss)}


def covered_samples(plan, count, mode, period):
    """Which of `count` trained samples an output mode reports: a mask.

    Worked out sample by sample from the layout `[D, G, R, B]`: with `Final` the last
    step of a call reports, with `EveryN` every `period`-th.
    """
    steps = plan.device_iterations * plan.gradient_accumulation
    per_step = plan.replicas * plan.micro_batch_size
    step = torch.arange(count) // per_step % steps
    if mode == "Final":
        return step == steps - 1
    if mode == "EveryN":
        return (step + 1) % period == 0
    return torch.ones(count, dtype=torch.bool)


class Recorded(Dataset):
    """A dataset that remembers which samples were asked for, in order."""

    def __init__(self, *tensors):
        self.tensors = tensors
        self.asked = []

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        self.asked.append(int(index))
        return tuple(tensor[index] for tensor in self.tensors)


class Items(Dataset):
    """A dataset of the items of a list."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


class Stream(IterableDataset):
    """A stream of the items of a list; the first worker gives them all."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        worker = get_worker_info()
        return iter(self._items if worker is None or worker.id == 0 else [])


class Restartable:
    """Batches whose number nobody knows, as often as one likes."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return self._make()


class Recorder(Callback):
    """Remembers every hook with a copy of its arguments."""

    def __init__(self):
        self.calls = []

    def names(self):
        return [name for name, _ in self.calls]


def _recording(name):
    def hook(self, *arguments):
        kept = [dict(a) if isinstance(a, dict) else a for a in arguments]
        self.calls.append((name, kept))

    return hook


HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") and not name.startswith("on_batch_")  # old names
]
for _name in HOOKS:
    setattr(Recorder, _name, _recording(_name))


class AtEpochEnd(Callback):
    """Does something at the end of every epoch, or of one."""

    def __init__(self, action, epoch=None):
        self.action = action
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs):
        if self.epoch in (None, epoch):
            self.action(self, logs)


class Last(torch.nn.Module):
    """The outputs of a recurrent layer at the last step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]
