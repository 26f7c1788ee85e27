# SPDX-License-Identifier: Apache-2.0
"""Programs drawn at random train and predict as plain loops of torch do."""

import copy
import functools
import math
import multiprocessing
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_sharer
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ipufit import Callback, DroppedRowsWarning, IPUConfig, IPUModel, Optimizer
from ipufit.errors import EmptyUpdatesWarning
from tests.metrics import peers
from tests.reference import Last
from tests.strategies import examples

# On a machine with one processor.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WIDTH, SIDE, STEPS, WORDS, CLASSES, EPOCHS = 4, 6, 5, 11, 5, 2

# Networks. --------------------------------------------------------------------------

NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "batch without affine": lambda: nn.BatchNorm2d(WIDTH, affine=False, momentum=0.3),
    "batch of now": lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(WIDTH),
    "affine instance": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "layer": lambda: nn.LayerNorm((WIDTH, SIDE, SIDE)),
    "local": lambda: nn.LocalResponseNorm(3),
}
FLAT_NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
}
TANH_GELU = functools.partial(nn.GELU, approximate="tanh")  # the form that PopTorch has
ACTIVATIONS = (nn.Identity, nn.ReLU, TANH_GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU)
ACTIVATIONS += (nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardswish)
POOLINGS = {
    "none": nn.Identity,
    "max": lambda: nn.MaxPool2d(2),
    "overlapping": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "mean": lambda: nn.AvgPool2d(2),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive max": lambda: nn.AdaptiveMaxPool2d(2),
}
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU}
INPUTS = {"conv": (3, SIDE, SIDE), "mlp": (3,), "words": (STEPS,)}
INPUTS.update(dict.fromkeys(RECURRENT, (STEPS, 3)))


def encoder_of(drawn):
    layers, bias = [], drawn.has_bias
    for number in range(drawn.depth):
        width = WIDTH if number else 3
        if drawn.body == "conv":
            layer = nn.Conv2d(width, WIDTH, 3, padding=1, bias=bias)
        elif number or drawn.body == "mlp":
            layer = nn.Linear(width, WIDTH, bias=bias)
        elif drawn.body == "words":
            layer = nn.EmbeddingBag(WORDS, WIDTH)
        else:
            layer = Last(RECURRENT[drawn.body](width, WIDTH, batch_first=True))
        norms = NORMS if drawn.body == "conv" else FLAT_NORMS
        layers += [layer, norms[drawn.norm](), drawn.activation()]
    if drawn.body == "conv":
        layers.append(POOLINGS[drawn.pooling]())
    return nn.Sequential(*layers)


def head_of(drawn, encoder):
    size = TARGETS[drawn.target].size
    if drawn.target in MASKS:
        head = nn.Conv2d(WIDTH, size, 1)
        is_flat = drawn.target == "flat mask"
        return nn.Sequential(head, nn.Flatten(1, 2)) if is_flat else head
    features = copy.deepcopy(encoder).eval()(inputs(drawn, 2)).flatten(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(features.shape[1], size))


def networks(drawn):
    """The modules of one model, or of two that have weights in common."""
    torch.manual_seed(drawn.seed)
    encoder = encoder_of(drawn)
    first = nn.Sequential(encoder, head_of(drawn, encoder))
    if drawn.is_closure:
        first.forward = lambda x: first[1](first[0](x)) * 0.5
    second = {
        "same module": lambda: first,
        "common encoder": lambda: nn.Sequential(encoder, head_of(drawn, encoder)),
        "submodule": lambda: encoder,
    }
    return [first] + ([second[drawn.second]()] if drawn.second else [])


# Losses, metrics and targets. -------------------------------------------------------


def quantile(y_true, y_pred):
    """In Keras's order, a value per sample."""
    error = y_true - y_pred
    return torch.maximum(0.9 * error, -0.1 * error).flatten(1).mean(1)


def powers(outputs, targets):
    """One value for all samples."""
    return (outputs - targets).abs().pow(1.5).mean()


def rows(function, **options):
    def each(outputs, targets):
        values = function(outputs, targets, reduction="none", **options)
        return values.reshape(len(outputs), -1).mean(1)

    return each


BITS = F.binary_cross_entropy_with_logits
LOSSES = {  # what `compile` gets, and its value per sample
    "cross_entropy": ("cross_entropy", rows(F.cross_entropy)),
    "smooth": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        rows(F.cross_entropy, label_smoothing=0.2),
    ),
    "shares": ("categorical_crossentropy", rows(F.cross_entropy)),
    "bce": ("bce", rows(BITS)),
    "bce of torch": (nn.BCEWithLogitsLoss(), rows(BITS)),
    "mse": ("mse", rows(F.mse_loss)),
    "l1": (nn.L1Loss(), rows(F.l1_loss)),
    "huber": ("huber", rows(F.huber_loss)),
    "quantile": (quantile, lambda o, t: quantile(t, o)),
    "powers": (powers, lambda o, t: (o - t).abs().pow(1.5).flatten(1).mean(1)),
}


def of_bits(peer):
    """Of a column for each channel or label; of all bits where there is none."""

    def metric(outputs, targets, weights):
        targets = targets.reshape(outputs.shape)
        if outputs.dim() == 4:
            outputs, targets = outputs.movedim(1, -1), targets.movedim(1, -1)
        width = 1 if outputs.dim() in (1, 3) else None
        return peers.of_columns(peer, width=width)(outputs, targets, weights)

    return metric


CALLED = {"cross_entropy": "crossentropy", "bce": "binary_crossentropy"}
METRICS = {
    "classes": {
        name: peers.of_classes(peers.CLASSES[CALLED.get(name, name)], axis=1)
        for name in ("accuracy", "balanced_accuracy", "f1", "iou", "cross_entropy")
    },
    "bits": {
        name: of_bits(peers.BITS[CALLED.get(name, name)])
        for name in ("accuracy", "f1", "iou", "mean_iou", "bce", "exact_auc")
    },
    "numbers": {
        name: peers.of_columns(peers.NUMBERS[name]) for name in ("mse", "mae", "r2")
    },
}


def whole(*shape, below=2):
    return lambda count: torch.randint(0, below, (count, *shape))


def bits(*shape):
    return lambda count: whole(*shape)(count).float()


def numbers(*shape):
    return lambda count: torch.randn(count, *shape)


def target(metrics, size, make, *losses):
    return SimpleNamespace(metrics=metrics, size=size, make=make, losses=losses)


PIXELS = (SIDE, SIDE)
OF_CLASSES, OF_BITS = ("cross_entropy", "smooth"), ("bce", "bce of torch")
OF_NUMBERS = ("mse", "l1", "huber", "quantile", "powers")
CLASS = whole(below=CLASSES)
TARGETS = {
    "class": target("classes", CLASSES, CLASS, *OF_CLASSES),
    "one-hot": target(
        "classes", CLASSES, lambda n: torch.eye(CLASSES)[CLASS(n)], "shares"
    ),
    "bit": target("bits", 1, bits(), "bce"),
    "column of bits": target("bits", 1, bits(1), *OF_BITS),
    "labels": target("bits", 3, bits(3), *OF_BITS),
    "number": target("numbers", 1, numbers(), "mse", "huber"),
    "pair": target("numbers", 2, numbers(2), *OF_NUMBERS),
    "segments": target("classes", 3, whole(*PIXELS, below=3), *OF_CLASSES),
    "mask": target("bits", 1, bits(1, *PIXELS), *OF_BITS),
    "mask without channel": target("bits", 1, bits(*PIXELS), "bce"),
    "flat mask": target("bits", 1, bits(*PIXELS), *OF_BITS),
    "masks": target("bits", 3, bits(3, *PIXELS), *OF_BITS),
}
MASKS = ("segments", "mask", "mask without channel", "flat mask", "masks")

# Data and optimizers. ---------------------------------------------------------------


def inputs(drawn, count):
    if drawn.body == "words":
        return whole(STEPS, below=WORDS)(count)
    return numbers(*INPUTS[drawn.body])(count)


class Items(Dataset):
    """Samples that the epoch shifts, which a callback sets."""

    shift = 0.0

    def __init__(self, x, *others):
        self.x, self.others = x, [tensor for tensor in others if tensor is not None]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return (self.shifted()[index], *(tensor[index] for tensor in self.others))

    def shifted(self):
        return self.x + self.shift if self.x.is_floating_point() else self.x


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (self.items[index] for index in range(len(self.items)))


class EpochSampler(Sampler):
    """An order for each epoch, which a callback sets."""

    epoch = -1

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.count, generator=generator).tolist())


def loader(drawn, items, sampler, **options):
    options["generator"] = torch.Generator().manual_seed(drawn.seed)
    if drawn.sets_epoch and drawn.is_shuffled:
        return DataLoader(items, drawn.loader_batch, sampler=sampler, **options)
    return DataLoader(items, drawn.loader_batch, drawn.is_shuffled, **options)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.02}),
    "l2": (torch.optim.Adam, {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9}),
    "centered": (
        torch.optim.RMSprop,
        {"lr": 0.01, "centered": True, "momentum": 0.5, "eps": 1e-3},
    ),
}


def optimizer_of(drawn, module):
    kind, options = OPTIMIZERS[drawn.optimizer]
    first, *others = module.parameters()
    if drawn.has_groups and others:
        return kind([{"params": [first]}, {"params": others, "lr": 0.03}], **options)
    return kind([first, *others], **options)


# A program. -------------------------------------------------------------------------


def draw(random):
    """What a program is made of, by a `random.Random`."""
    one = random.choice

    def rarely(share=0.2):
        return random.random() < share

    body = one(["conv"] * 5 + list(INPUTS))
    targets = [name for name in TARGETS if body == "conv" or name not in MASKS]
    drawn = SimpleNamespace(
        seed=random.randrange(2**16),
        body=body,
        depth=one([1, 2, 3]),
        norm=one(list(NORMS if body == "conv" else FLAT_NORMS)),
        activation=one(ACTIVATIONS),
        pooling=one(list(POOLINGS)),
        has_bias=rarely(0.7),
        is_closure=rarely(),
        second=one([None, None, "same module", "common encoder", "submodule"]),
        target=one(targets),
        has_weights=rarely(),
        form=one(["arrays", "arrays", "numpy", "dataset", "loader", "stream"]),
        loader_batch=one([1, 3, 5, 8]),
        is_shuffled=rarely(0.5),
        sets_epoch=rarely(0.3),
        micro_batch=one([1, 1, 2, 3, 4]),
        accumulation=one([1, 1, 2, 3]),
        replicas=one([1, 1, 1, 2, 3]),
        iterations=one([None, None, 1, 2]),
        passes=one([None, None, 1, 2]),
        looks=one([1, 2, 3, 16]),
        drop_last=one([True, True, "pad"]),
        validates=rarely(0.3),
        optimizer=one(list(OPTIMIZERS)),
        has_groups=rarely(),
        max_norm=0.3 if rarely() else None,
        rate_factor=one([1.0, 1.0, 1.0, 0.5]),
        trains_other=rarely(0.3),
    )
    if random.randrange(10) == 7:
        drawn.form = one(["loader with workers", "workers", "async"])
    if body != "conv" and drawn.micro_batch == 1 and drawn.norm == "batch":
        drawn.norm = "layer"  # a batch norm of one value can't train
    if drawn.target in MASKS:
        drawn.pooling = "none"
    drawn.loss = one(TARGETS[drawn.target].losses)
    if drawn.loss == "powers":  # one value for all samples
        drawn.has_weights, drawn.drop_last = False, True
    if "batch" in drawn.norm or "tracking" in drawn.norm:
        drawn.drop_last = True  # they would see the padding
    if drawn.max_norm:
        drawn.optimizer, drawn.has_groups = one(["sgd", "adamw"]), False
    is_shift_lost = "batch" in drawn.norm or "instance" in drawn.norm
    if is_shift_lost and drawn.optimizer in ("adam", "rmsprop"):
        # The bias has a gradient of rounding errors, which these divide by themselves.
        drawn.has_bias = False
    if drawn.form in ("arrays", "numpy"):
        drawn.sets_epoch = False
    drawn.is_shuffled &= drawn.form.startswith("loader")
    drawn.trains_other &= drawn.second is not None
    drawn.per_update = drawn.micro_batch * drawn.accumulation * drawn.replicas
    drawn.per_call = drawn.per_update * (drawn.iterations or 1)
    rest = one([0, 0, random.randrange(drawn.per_call)])
    drawn.count = drawn.per_call * one([1, 2, 3]) + rest
    left_out = ["exact_auc"] * drawn.has_weights + ["r2"] * (drawn.per_call < 6)
    metrics = set(METRICS[TARGETS[drawn.target].metrics]) - set(left_out)
    drawn.metrics = random.sample(sorted(metrics), one([0, 1, 2]))
    models = [0, 1] if drawn.second else [0]
    drawn.actions = [("fit", 0)]
    for _ in range(random.randrange(4)):
        verb = one(["fit", "fit", "batch", "evaluate", "predict"])
        drawn.actions.append((verb, one(models)))
    if not drawn.is_closure:
        if rarely():
            drawn.actions.insert(1, (one(["deepcopy", "pickle"]), 0))
        if random.randrange(100) == 57:  # it takes seconds
            drawn.actions.append(("fit elsewhere", 0))
    return drawn


class Run:
    """Results of a program by name. A subclass trains and computes."""

    def __init__(self, drawn):
        self.drawn, self.results = drawn, {}
        self.modules = networks(drawn)
        torch.manual_seed(drawn.seed + 1)
        x, y = inputs(drawn, drawn.count), TARGETS[drawn.target].make(drawn.count)
        weights = torch.rand(drawn.count) * 2 if drawn.has_weights else None
        self.data = [(x, y, weights)] * len(self.modules)
        self.losses = [(drawn.loss, drawn.metrics)] * len(self.modules)
        if drawn.second == "submodule":
            shape = encoder_of(drawn).eval()(x).shape
            self.data[1], self.losses[1] = (
                (x, torch.randn(shape), None),
                ("mse", ["mae"]),
            )
        self.items = [Items(*given) for given in self.data]
        self.sampler = EpochSampler(drawn.count)

    def keep(self, place, figures):
        for name, value in figures.items():
            self.results[f"{place} {name}"] = torch.as_tensor(value).detach().double()

    def begin(self, index, epoch):
        if self.drawn.sets_epoch:
            self.items[index].shift, self.sampler.epoch = 0.25 * epoch, epoch

    def end(self, place, index, epoch, optimizer):
        if self.drawn.trains_other:
            self.batch(f"{place} other {epoch}", 1 - index)
        if self.drawn.rate_factor != 1.0:
            for group in optimizer.param_groups:
                group["lr"] *= self.drawn.rate_factor

    def done(self):
        """The results of all actions, and of what is there at the end."""
        run = self
        for number, (verb, index) in enumerate(self.drawn.actions):
            place = f"{number} {verb} {index}"
            if verb in ("deepcopy", "pickle", "fit elsewhere"):
                run = run.moved(verb, place)
            else:
                getattr(run, verb)(place, index)
        for index, module in enumerate(run.modules):
            run.evaluate(f"at the end {index}", index)
            run.predict(f"at the end {index}", index)
            run.keep(f"state {index}", module.state_dict())
        return run.results


class Plain(Run):
    """A loop of torch in `dtype`, whose weights begin a little changed."""

    def __init__(self, drawn, dtype, noise=0.0):
        super().__init__(drawn)
        self.dtype = dtype
        nn.ModuleList(self.modules).to(dtype)
        for weight in nn.ModuleList(self.modules).parameters():
            weight.data.mul_(1 + noise * torch.randn(weight.shape).sign())
        self.optimizers = [optimizer_of(drawn, module) for module in self.modules]

    def typed(self, tensors):
        for tensor in tensors:
            is_float = tensor is not None and tensor.is_floating_point()
            yield tensor.to(self.dtype) if is_float else tensor

    def each(self, index, outputs, y):
        name, _ = self.losses[index]
        fitting = y if name in OF_CLASSES else y.reshape(outputs.shape)
        return LOSSES[name][1](outputs, fitting)

    def figures(self, index, outputs, y, weights):
        counts = torch.ones(len(outputs)) if weights is None else weights
        found = {"loss": (self.each(index, outputs, y) * counts).mean()}
        table = {**METRICS["numbers"], **METRICS[TARGETS[self.drawn.target].metrics]}
        for name in self.losses[index][1]:
            found[name] = table[name](outputs, y, counts)
        return found

    def update(self, index, x, y, weights, real):
        """Train on the samples of an update, of which the first `real` count."""
        drawn, module = self.drawn, self.modules[index]
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        outputs = []
        parts = torch.arange(drawn.per_update).split(drawn.micro_batch)
        for number, part in enumerate(parts):
            kept = copy.deepcopy(list(module.buffers()))
            outputs.append(module(x[part]))
            losses = self.each(index, outputs[-1], y[part])
            if weights is not None:
                losses = losses * weights[part]
            (losses[part < real].sum() / max(real, 1)).backward()
            if number % drawn.replicas:  # the first replica's buffers come back
                for buffer, before in zip(module.buffers(), kept):
                    buffer.copy_(before)
        if drawn.max_norm:
            norm = sum(w.grad.square().sum() for w in module.parameters()).sqrt()
            for weight in module.parameters():
                weight.grad *= drawn.max_norm / max(norm, drawn.max_norm)
        self.optimizers[index].step()
        return torch.cat(outputs).detach()

    def train(self, index, tensors, *, is_padded=False):
        tensors, drawn = list(self.typed(tensors)), self.drawn
        count = len(tensors[0])
        calls = -(-count // drawn.per_call) if is_padded else count // drawn.per_call
        self.modules[index].train()
        outputs, order = [], torch.arange(calls * drawn.per_call)
        for start, places in enumerate(
            order.clamp(max=count - 1).split(drawn.per_update)
        ):
            taken = [tensor if tensor is None else tensor[places] for tensor in tensors]
            real = min(max(count - start * drawn.per_update, 0), drawn.per_update)
            outputs.append(self.update(index, *taken, real))
        real = min(count, len(order))
        _, *others = (tensor if tensor is None else tensor[:real] for tensor in tensors)
        return self.figures(index, torch.cat(outputs)[:real], *others)

    def outputs(self, index, size):
        """Those of evaluation; the last micro-batch is filled with its last row."""
        (x,) = self.typed(self.data[index][:1])
        places = torch.arange(-(-len(x) // size) * size).clamp(max=len(x) - 1)
        module = self.modules[index].eval()
        with torch.no_grad():
            return torch.cat([module(x[part]) for part in places.split(size)])[: len(x)]

    def look(self, index, size):
        _, *others = self.typed(self.data[index])
        return self.figures(index, self.outputs(index, size), *others)

    def fit(self, place, index):
        drawn = self.drawn
        loaded = loader(drawn, range(drawn.count), self.sampler)
        for epoch in range(EPOCHS):
            self.begin(index, epoch)
            order = torch.cat(list(loaded)) if drawn.is_shuffled else slice(None)
            tensors = (self.items[index].shifted(), *self.data[index][1:])
            tensors = [
                tensor if tensor is None else tensor[order] for tensor in tensors
            ]
            figures = self.train(index, tensors, is_padded=drawn.drop_last == "pad")
            if drawn.validates:
                seen = self.look(index, drawn.micro_batch)
                figures.update({f"val_{name}": value for name, value in seen.items()})
            self.keep(f"{place} {epoch}", figures)
            self.end(place, index, epoch, self.optimizers[index])

    def batch(self, place, index):
        size = self.drawn.per_call
        self.keep(
            place,
            self.train(index, [t if t is None else t[:size] for t in self.data[index]]),
        )

    def evaluate(self, place, index):
        self.keep(place, self.look(index, self.drawn.looks))

    def predict(self, place, index):
        self.keep(place, {"outputs": self.outputs(index, self.drawn.looks)})

    def moved(self, verb, place):
        if verb == "fit elsewhere":
            self.fit(place, 0)
        return self


class Hooks(Callback):
    def __init__(self, owner, place, index):
        self.owner, self.place, self.index = owner, place, index

    def on_epoch_begin(self, epoch, logs=None):
        self.owner.begin(self.index, epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.owner.end(self.place, self.index, epoch, self.model.optimizer)


class Ours(Run):
    """The same by ipufit."""

    def __init__(self, drawn):
        super().__init__(drawn)
        config = IPUConfig(
            micro_batch_size=drawn.micro_batch,
            gradient_accumulation=drawn.accumulation,
            replicas=drawn.replicas,
            device_iterations=drawn.iterations,
            inference_iterations=drawn.passes,
            num_workers=1 if drawn.form in ("workers", "async") else 0,
            loader_mode="async" if drawn.form == "async" else "sync",
        )
        self.models = [IPUModel(module, config) for module in self.modules]
        for model, (loss, metrics) in zip(self.models, self.losses):
            optimizer = optimizer_of(drawn, model.module)
            if drawn.max_norm:
                options = OPTIMIZERS[drawn.optimizer][1]
                optimizer = Optimizer(
                    drawn.optimizer, global_clipnorm=drawn.max_norm, **options
                )
            kind = "weighted_metrics" if drawn.has_weights else "metrics"
            model.compile(optimizer, LOSSES[loss][0], **{kind: metrics})

    def samples(self, index):
        items, form = self.items[index], self.drawn.form
        given = dict(zip(("x", "y", "sample_weight"), self.data[index]))
        if form == "arrays":
            return given
        if form == "numpy":
            return {k: v if v is None else v.numpy() for k, v in given.items()}
        if form.startswith("loader"):
            workers = 1 if form == "loader with workers" else 0
            loaded = loader(self.drawn, items, self.sampler, num_workers=workers)
            return {"x": loaded}
        return {"x": Stream(items) if form == "stream" else items}

    def fit(self, place, index):
        seen = [tensor for tensor in self.data[index] if tensor is not None]
        history = (
            self.models[index]
            .fit(
                **self.samples(index),
                epochs=EPOCHS,
                shuffle=False,
                drop_last=self.drawn.drop_last,
                validation_data=tuple(seen) if self.drawn.validates else None,
                callbacks=[Hooks(self, place, index)],
                verbose=0,
            )
            .history
        )
        for epoch in range(EPOCHS):
            figures = {name: values[epoch] for name, values in history.items()}
            self.keep(f"{place} {epoch}", figures)

    def batch(self, place, index):
        size = self.drawn.per_call
        given = [t if t is None else t[:size] for t in self.data[index]]
        self.keep(place, self.models[index].train_on_batch(*given))

    def evaluate(self, place, index):
        x, y, weights = self.data[index]
        size = self.drawn.looks * self.drawn.replicas
        self.keep(
            place,
            self.models[index].evaluate(x, y, size, sample_weight=weights, verbose=0),
        )

    def predict(self, place, index):
        size = self.drawn.looks * self.drawn.replicas
        outputs = self.models[index].predict(self.data[index][0], size, verbose=0)
        self.keep(place, {"outputs": outputs})

    def moved(self, verb, place):
        if verb == "deepcopy":
            run = copy.deepcopy(self)
        elif verb == "pickle":
            run = pickle.loads(pickle.dumps(self))
        else:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                run = pool.submit(fitted, self, place).result()
            resource_sharer.stop()  # the thread that gave tensors to the process
        run.modules = [model.module for model in run.models]
        return run


def fitted(run, place):
    run.fit(place, 0)
    return run


def differences(drawn):
    """`name: (difference from exact values, what rounding explains)`, where larger."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedRowsWarning)
        warnings.simplefilter("ignore", EmptyUpdatesWarning)
        found = Ours(drawn).done()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn
        exact = Plain(drawn, torch.float64).done()
        rounded = [Plain(drawn, torch.float32, noise).done() for noise in (0.0, 1e-7)]
    assert found.keys() == exact.keys()

    def off(results, name):
        assert results[name].shape == exact[name].shape, name
        is_nan = results[name].isnan() & exact[name].isnan()
        values = (results[name] - exact[name]).abs().masked_fill(is_nan, 0.0)
        return values.nan_to_num(math.inf).max().item()

    wrong = {}
    for name, value in exact.items():
        noise = max(off(one, name) for one in rounded)
        allowed = 1e-5 * value.abs().nan_to_num().max().item() + 1e-7 + 10 * noise
        if off(found, name) > allowed:
            wrong[name] = off(found, name), allowed
    return wrong


@settings(max_examples=examples(40))
@given(st.randoms(use_true_random=True))
def test_a_random_program_gives_what_a_plain_loop_gives(random):
    drawn = draw(random)
    note(str(drawn))
    assert differences(drawn) == {}
