# SPDX-License-Identifier: Apache-2.0
"""Tiny runs, by public names only, whose numbers `tests/golden/bits` has.

Each function is a run, and returns the numbers that it gives: histories, figures,
predictions, weights, the tensors of checkpoints. Weights and data come from NumPy's
`RandomState`, whose numbers never change.

Runs that round at random, or draw random numbers on the device, are runs of their own,
so that nothing else is recorded anew when these draw other numbers.
"""

import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
import ipufit.emulator as poptorch
from ipufit import IPUConfig, IPUModel, Optimizer, Schedule

FEATURES, CLASSES, COUNT = 5, 3, 44

RUNS = {}
"""Name -> the function of a run."""
DRAWING = set()
"""Names of runs that draw random numbers: other releases of torch draw others."""
IN_PROCESSES = set()
"""Names of runs in which two processes take part."""
HALF = set()
"""Names of runs that round to float16: a last bit becomes a thousandth."""


def run(function):
    RUNS[function.__name__] = function
    return function


def drawing(function):
    DRAWING.add(function.__name__)
    return run(function)


def half(function):
    HALF.add(function.__name__)
    return run(function)


def in_processes(function):
    IN_PROCESSES.add(function.__name__)
    return run(function)


# Data and modules ----------------------------------------------------------------


def random_floats(*shape, seed=0):
    values = np.random.RandomState(seed).standard_normal(shape)
    return torch.from_numpy(values.astype(np.float32))


def random_classes(*shape, seed=1, classes=CLASSES):
    return torch.from_numpy(np.random.RandomState(seed).randint(0, classes, shape))


def filled(module, seed=7):
    """The module with other weights, which are the same for all releases of torch."""
    generator = np.random.RandomState(seed)
    with torch.no_grad():
        for weight in module.parameters():
            scale = 0.4 / max(1.0, weight[0].numel() ** 0.5 if weight.dim() else 1.0)
            values = scale * generator.standard_normal(tuple(weight.shape))
            weight.copy_(torch.as_tensor(values) + (weight.dim() == 1) * 0.1)
    return module


def mlp(*, dropout=0.0, hidden=7):
    layers = [nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)]
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    return filled(nn.Sequential(*layers))


def normalised():
    """A network with batch norm, and without the bias before it, which does nothing."""
    layers = [nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU()]
    return filled(nn.Sequential(*layers, nn.Linear(6, CLASSES)))


def table():
    return random_floats(COUNT, FEATURES), random_classes(COUNT)


class Outputs(nn.Module):
    """Two inputs by name, and two outputs."""

    def __init__(self, *, by_name):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)
        self.by_name = by_name
        filled(self)

    def forward(self, left, right):
        hidden = torch.relu(self.left(left))
        other = torch.sigmoid(self.right(right))
        outputs = {"kind": hidden - other, "size": (hidden * other).mean(dim=1)}
        return outputs if self.by_name else tuple(outputs.values())


class Convolutions(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = norm
        self.second = nn.Conv2d(4, 4, 3, stride=2, groups=2)
        self.last = nn.Linear(4, CLASSES)
        filled(self)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 2, 2)
        return self.last(nn.functional.gelu(self.second(x)).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(3, 4), layer(4, 4)
        self.last = nn.Linear(4, CLASSES)
        filled(self)

    def forward(self, x):
        hidden, _ = self.first(x.transpose(0, 1))
        return self.last(self.second(hidden)[0][-1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        # Without biases: that of the keys does nothing.
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.last = nn.Linear(8, CLASSES)
        filled(self)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return self.last(x.mean(dim=1))


# Running a model -----------------------------------------------------------------


def fitted(
    module,
    x=None,
    y=None,
    *,
    config=(),
    optimizer="adam",
    loss="cross_entropy",
    metrics=("accuracy",),
    compiled=(),
    **arguments,
):
    """All that `fit`, `evaluate` and `predict` of a module come to."""
    if x is None:
        x, y = table()
    model = IPUModel(module, IPUConfig(**{"seed": 3, **dict(config)}))
    if optimizer == "adam":
        optimizer = Optimizer("adam", 0.02)
    model.compile(optimizer, loss, metrics=list(metrics), **dict(compiled))
    arguments = {"batch_size": 8, "epochs": 2, "verbose": 0, **arguments}
    history = model.fit(x, y, **arguments)
    return {"history": history.history, **finished(model, x, y)}


def finished(model, x, y):
    """What a model comes to that was trained."""
    outcome = {}
    if isinstance(x, (torch.Tensor, np.ndarray, dict)):
        outcome["evaluated"] = model.evaluate(x, y, batch_size=8, verbose=0)
        outcome["predicted"] = model.predict(x, batch_size=6, verbose=0)
    outcome["weights"] = model.module.state_dict()
    tensors = model.checkpoint().tensors
    outcome["checkpoint"] = {
        group: tensors[group] for group in tensors if group != "model"
    }
    model.detach()
    return outcome


# Forms of data -------------------------------------------------------------------


@run
def arrays():
    x, y = (values.numpy() for values in table())
    return fitted(
        mlp(),
        x,
        y,
        validation_split=0.2,
        sample_weight=np.linspace(0.2, 2.0, COUNT, dtype=np.float32),
        drop_last="pad",
        metrics=["accuracy", "f1"],
        compiled={"weighted_metrics": ["accuracy"], "label_smoothing": 0.1},
    )


@run
def map_style():
    data = TensorDataset(*table())
    weights = {0: 2.0, 2: 0.5}
    return fitted(
        mlp(), data, validation_data=data, validation_freq=2, class_weight=weights
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*table()))


@run
def stream():
    return fitted(mlp(), Stream(), steps_per_epoch=4, drop_last="pad")


@run
def loader():
    data = DataLoader(TensorDataset(*table()), 6)
    return fitted(mlp(), data, batch_size=None, drop_last="pad")


@run
def rebatched_generator():
    def batches():
        x, y = table()
        for rows in torch.arange(COUNT).split(7):
            yield x[rows], y[rows]

    return fitted(mlp(), batches(), steps_per_epoch=2, shuffle=False)


def two_inputs():
    return {"left": random_floats(COUNT, 4), "right": random_floats(COUNT, 2, seed=2)}


def two_targets(by_name):
    targets = {"kind": random_classes(COUNT), "size": random_floats(COUNT, seed=3)}
    return targets if by_name else tuple(targets.values())


@run
def dicts():
    return fitted(
        Outputs(by_name=True),
        two_inputs(),
        two_targets(by_name=True),
        loss={"kind": "cross_entropy", "size": "huber"},
        metrics=(),
        compiled={"loss_weights": {"size": 0.3}},
        config={"gradient_accumulation": 2, "device_iterations": 2},
        validation_split=0.25,
    )


@run
def tuples_of_outputs():
    return fitted(
        Outputs(by_name=False),
        two_inputs(),
        two_targets(by_name=False),
        loss=["cross_entropy", "mae"],
        metrics=(),
        config={"replicas": 2},
        drop_last="pad",
    )


@run
def batches_by_hand():
    model = IPUModel(mlp(), IPUConfig(seed=3, gradient_accumulation=2))
    model.compile(Optimizer("sgd", 0.1, momentum=0.9), "cross_entropy")
    x, y = table()
    figures = [
        model.train_on_batch(x[rows], y[rows])
        for rows in torch.arange(40).split(8)
        for _ in range(2)
    ]
    figures.append(model.test_on_batch(x[:8], y[:8]))
    predicted = model.predict_on_batch(x[:8])
    return {"figures": figures, "batch": predicted, **finished(model, x, y)}


@run
def own_step():
    def step(module, batch):
        x, y = batch
        outputs = module(x)
        loss = nn.functional.cross_entropy(outputs, y)
        penalty = sum(weight.square().sum() for weight in module.parameters())
        return {
            "loss": loss + 0.01 * penalty,
            "outputs": outputs,
            "margin": outputs.max(dim=1).values.mean(),
        }

    return fitted(mlp(), loss=None, compiled={"step": step}, shuffle=False)


# Layouts -------------------------------------------------------------------------


@run
def layout_d():
    return fitted(mlp(), config={"device_iterations": 3}, drop_last="pad")


@run
def layout_g():
    return fitted(mlp(), config={"gradient_accumulation": 4}, validation_split=0.2)


@run
def layout_r():
    return fitted(mlp(), config={"replicas": 2}, validation_split=0.2)


@run
def layout_dgr():
    return fitted(
        mlp(),
        config={"replicas": 2, "gradient_accumulation": 2, "device_iterations": 2},
        optimizer=Optimizer("sgd", 0.05, momentum=0.9, weight_decay=0.01),
        drop_last="pad",
        sample_weight=torch.linspace(0.5, 1.5, COUNT),
    )


@run
def layout_dgr_of_sums():
    return fitted(
        mlp(),
        config={"replicas": 2, "gradient_accumulation": 2, "device_iterations": 2},
        loss=nn.CrossEntropyLoss(reduction="sum"),
    )


@run
def layout_of_inference():
    inference = {"replicas": 2}
    return fitted(
        mlp(),
        config={"inference_iterations": 3, "inference": inference},
        validation_split=0.3,
    )


def stages(count=4):
    layers = []
    for index in range(count):
        layers += [nn.Linear(FEATURES if not index else 6, 6), nn.Tanh()]
    return filled(nn.Sequential(*layers, nn.Linear(6, CLASSES)))


@run
def pipelined():
    return fitted(
        stages(),
        config={
            "pipeline": ["0", "4", "8"],
            "gradient_accumulation": 8,
            "micro_batch_size": 1,
        },
        validation_split=0.2,
    )


@run
def pipelined_replicas():
    return fitted(
        stages(),
        config={
            "pipeline": ["0", "4"],
            "gradient_accumulation": 4,
            "replicas": 2,
            "device_iterations": 2,
            "recompute": "auto",
            "inference": {"replicas": 1, "execution": "sharded"},
        },
        drop_last="pad",
        batch_size=16,
    )


@run
def sharded():
    return fitted(
        stages(),
        config={
            "pipeline": ["0", "4"],
            "execution": "sharded",
            "gradient_accumulation": 2,
        },
        validation_split=0.2,
    )


@run
def sharded_optimizer():
    return fitted(
        mlp(),
        config={
            "replicas": 2,
            "shard_optimizer": True,
            "offload_optimizer": True,
            "recompute": ["0"],
        },
        optimizer=Optimizer("lamb", 0.02, no_trust_ratio="bias"),
    )


# Precision -----------------------------------------------------------------------


@half
def float16():
    return fitted(
        mlp(),
        config={"precision": "float16", "stochastic_rounding": False},
        validation_split=0.2,
    )


@half
def float16_layout():
    return fitted(
        mlp(),
        config={
            "precision": "float16",
            "stochastic_rounding": False,
            "replicas": 2,
            "gradient_accumulation": 2,
            "partials": "half",
        },
        optimizer=Optimizer("sgd", 0.1, momentum=0.9),
    )


@drawing
def float16_rounded_at_random():
    return fitted(mlp(), config={"precision": "float16"}, validation_split=0.2)


@drawing
def float16_convolutions_rounded_at_random():
    x, y = random_floats(16, 2, 8, 8), random_classes(16)
    return fitted(
        Convolutions(nn.GroupNorm(2, 4)),
        x,
        y,
        config={"precision": "16.16", "gradient_accumulation": 2},
    )


@half
def mixed_precision():
    module = nn.Sequential(
        nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, CLASSES)
    )
    return fitted(
        filled(module),
        config={"precision": "16.32", "float32_modules": "norm"},
        optimizer=Optimizer("adamw", 0.02, loss_scaling=64.0),
    )


@drawing
def mixed_precision_rounded_at_random():
    return fitted(
        mlp(),
        config={
            "precision": "16.32",
            "stochastic_rounding": True,
            "device_iterations": 2,
        },
    )


@half
def loss_scaling():
    return fitted(
        mlp(),
        config={"precision": "float16", "stochastic_rounding": False},
        optimizer=Optimizer("sgd", 0.1, momentum=0.9, loss_scaling=256.0),
    )


@run
def loss_scaling_ramp():
    ramp = ipufit.LossScaleRamp(4, 2, 3, 64)
    return fitted(mlp(), optimizer=Optimizer("adam", 0.02, loss_scaling=ramp))


@half
def loss_scaling_automatic():
    return fitted(
        mlp(),
        config={
            "precision": "float16",
            "stochastic_rounding": False,
            "gradient_accumulation": 2,
        },
        optimizer=Optimizer("adam", 0.02, loss_scaling="auto"),
        epochs=3,
    )


# Optimisers and callbacks --------------------------------------------------------


@run
def adamw_by_groups():
    return fitted(
        mlp(),
        optimizer=Optimizer(
            "adamw",
            0.03,
            weight_decay=0.1,
            no_decay="bias",
            global_clipnorm=0.5,
            betas=(0.8, 0.95),
        ),
        config={"gradient_accumulation": 2},
    )


@run
def rmsprop_centered():
    return fitted(
        mlp(),
        optimizer=Optimizer("rmsprop", 0.01, centered=True, momentum=0.5, alpha=0.9),
        config={"replicas": 2},
    )


@run
def torch_optimizer():
    module = mlp()
    groups = [
        {"params": module[0].parameters(), "lr": 0.1},
        {"params": module[2].parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return fitted(module, optimizer=optimizer, compiled={"lr_schedule": schedule})


@run
def schedules():
    return fitted(
        mlp(),
        optimizer=Optimizer("adamw", 0.05 * 8 / 4, weight_decay=0.02),
        compiled={
            "lr_schedule": Schedule("cosine", warmup_updates=3, final=0.1),
            "schedules": {
                "weight_decay": Schedule("linear"),
                "beta1": Schedule("cosine", final=0.5),
            },
        },
        epochs=3,
    )


@run
def callbacks():
    return fitted(
        mlp(),
        optimizer=Optimizer("sgd", 0.3),
        epochs=6,
        validation_split=0.3,
        callbacks=[
            ipufit.LearningRateScheduler(lambda epoch, rate: rate * (1 + epoch % 2)),
            ipufit.ReduceLROnPlateau(patience=1, factor=0.5),
            ipufit.EarlyStopping(patience=3, restore_best_weights=True),
            ipufit.GradientMonitor(),
        ],
    )


@run
def running_average():
    return fitted(
        mlp(),
        optimizer=Optimizer("adam", 0.02, ema_momentum=0.8),
        config={"device_iterations": 2},
        validation_split=0.2,
        callbacks=[ipufit.SwapEMAWeights(swap_on_epoch=True)],
    )


@run
def changed_between_runs():
    module = mlp()
    model = IPUModel(module, IPUConfig(seed=3))
    model.compile(Optimizer("adam", 0.02), "cross_entropy")
    x, y = table()
    arguments = {"batch_size": 8, "epochs": 1, "verbose": 0}
    histories = [model.fit(x, y, **arguments).history]
    with torch.no_grad():
        module[2].bias.add_(0.5)
    model.optimizer.param_groups[0]["lr"] = 0.1
    histories.append(model.fit(x, y, **arguments).history)
    ipufit.freeze(module, before="2")
    histories.append(model.fit(x, y, **arguments).history)
    return {"histories": histories, **finished(model, x, y)}


# Kinds of layers -----------------------------------------------------------------


@run
def batch_norm():
    return fitted(
        normalised(),
        config={"replicas": 2, "gradient_accumulation": 2},
        validation_split=0.2,
        batch_size=16,
    )


@run
def batch_norm_of_images():
    x, y = random_floats(24, 2, 8, 8), random_classes(24)
    module = Convolutions(nn.BatchNorm2d(4))
    return fitted(module, x, y, config={"device_iterations": 2})


@run
def convolutions():
    x, y = random_floats(24, 2, 8, 8), random_classes(24)
    module = Convolutions(nn.GroupNorm(2, 4))
    return fitted(module, x, y, config={"gradient_accumulation": 4})


@run
def one_dimensional_convolutions():
    module = nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.LeakyReLU(),
        nn.AvgPool1d(2),
        nn.ConvTranspose1d(4, 2, 2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    x, y = random_floats(24, 2, 8), random_classes(24)
    return fitted(filled(module), x, y, config={"gradient_accumulation": 2})


@run
def lstm():
    x, y = random_floats(24, 6, 3), random_classes(24)
    module = Recurrent(nn.LSTM)
    return fitted(module, x, y, config={"gradient_accumulation": 2})


@run
def gru():
    x, y = random_floats(24, 6, 3), random_classes(24)
    module = Recurrent(nn.GRU)
    return fitted(module, x, y, config={"device_iterations": 2})


@run
def transformer():
    x, y = random_classes(24, 5, classes=11), random_classes(24)
    return fitted(
        Transformer(),
        x,
        y,
        optimizer=Optimizer("lamb", 0.02, no_decay="bias_and_norm"),
        config={"gradient_accumulation": 2},
    )


@run
def embeddings():
    module = nn.Sequential(
        nn.Embedding(13, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, CLASSES)
    )
    x, y = random_classes(24, 3, classes=13), random_classes(24)
    return fitted(filled(module), x, y, optimizer=Optimizer("sgd", 0.5, momentum=0.5))


@drawing
def dropout():
    return fitted(
        mlp(dropout=0.4),
        config={"replicas": 2, "gradient_accumulation": 2, "device_iterations": 2},
    )


@drawing
def mixing():
    x, y = random_floats(24, 2, 8, 8), random_classes(24)
    return fitted(
        Convolutions(nn.GroupNorm(2, 4)),
        x,
        y,
        compiled={"augment": ipufit.Mixing(mixup=0.4, cutmix=1.0)},
    )


# Going on, and several processes -------------------------------------------------


class SaveAt(ipufit.Callback):
    """Saves after some updates, and keeps the tensors of the checkpoint."""

    is_saved = False

    def __init__(self, path, updates):
        self.path, self.updates, self.saved = path, updates, {}

    def on_train_batch_end(self, batch, logs):
        if self.run.updates == self.updates:
            self.run.after_hooks(self.save)

    def save(self):
        self.saved = self.model.checkpoint().tensors
        self.model.save(self.path)


def resumed(module, config=(), **arguments):
    x, y = table()
    outcome = {}

    def model(seed=7):
        made = IPUModel(filled(module(), seed), IPUConfig(seed=3, **dict(config)))
        optimizer = Optimizer("adamw", 0.02, ema_momentum=0.9)
        made.compile(
            optimizer, "cross_entropy", metrics=["accuracy"], lr_schedule="cosine"
        )
        return made

    arguments = {"batch_size": 8, "epochs": 3, "verbose": 0, **arguments}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "middle")
        saver, first = SaveAt(path, 7), model()
        outcome["whole"] = first.fit(x, y, callbacks=[saver], **arguments).history
        first.detach()
        second = model(seed=8)
        history = second.fit(x, y, resume=path, **arguments).history
    outcome.update(resumed=history, saved=saver.saved, **finished(second, x, y))
    return outcome


@run
def resumed_in_mid_epoch():
    return resumed(lambda: mlp(), validation_split=0.2)


@drawing
def resumed_with_dropout():
    config = {"gradient_accumulation": 2, "precision": "float16"}
    return resumed(lambda: mlp(dropout=0.3), config)


@in_processes
def two_processes():
    return fitted(mlp(), drop_last="pad", validation_split=0.2, metrics=["accuracy"])


@in_processes
def two_processes_of_replicas():
    config = {"replicas": 2, "device_iterations": 2}
    data = TensorDataset(*table())
    return fitted(normalised(), data, config=config, batch_size=16, drop_last="pad")


# PopTorch's own interface --------------------------------------------------------


class WithLoss(nn.Module):
    def __init__(self, module, loss=None):
        super().__init__()
        self.module = module
        self.loss = loss or nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        outputs = self.module(x)
        return outputs if y is None else (outputs, self.loss(outputs, y))


def options_of(*, iterations=1, accumulation=1, replicas=1, seed=5):
    options = poptorch.Options()
    options.deviceIterations(iterations).replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    return options.randomSeed(seed)


def pop_trained(make, options=None, module=None, data=None, calls=4, then=None):
    """Outputs, weights and the optimiser's state of a training executor.

    Args:
        make: Makes the optimiser of a module.
        options: Options of the executor.
        module: The module, without a loss.
        data: All inputs and classes; each call gets the same rows.
        calls: Number of calls.
        then: Called with the executor and the optimiser after each call.
    """
    module = WithLoss(module or mlp())
    optimizer = make(module)
    executor = poptorch.trainingModel(module, options or options_of(), optimizer)
    data = data or (random_floats(24, FEATURES), random_classes(24))
    outputs = []
    for _ in range(calls):
        outputs.append(executor(*data))
        if then is not None:
            then(executor, optimizer)
    state = optimizer.state_dict()
    outcome = {
        "outputs": outputs,
        "weights": executor.state_dict(),
        "optimizer": {name: state[name] for name in ("ipu_state", "ipu_param")},
        "random": torch.tensor(executor.rng_state),
    }
    executor.destroy()
    return outcome


def pop_variants(name, *variants, options=None):
    """The same training by an optimiser of PopTorch with other arguments."""
    optimizer = getattr(poptorch.optim, name)
    return {
        str(number): pop_trained(
            lambda module, given=given: optimizer(module.parameters(), **given),
            options and options.clone(),
        )
        for number, given in enumerate(variants)
    }


@run
def poptorch_sgd():
    return pop_variants(
        "SGD",
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {
            "lr": 0.1,
            "momentum": 0.9,
            "use_combined_accum": True,
            "velocity_scaling": 2.0,
            "loss_scaling": 4.0,
        },
        {"lr": 0.1, "max_grad_norm": 0.1},
        options=options_of(accumulation=2),
    )


@half
def poptorch_adam():
    half = {
        "accum_type": torch.float16,
        "first_order_momentum_accum_type": torch.float16,
    }
    return pop_variants(
        "Adam",
        {"lr": 0.02},
        {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3},
        {"lr": 0.02, "max_grad_norm": 0.1, "loss_scaling": 8.0, **half},
        options=options_of(replicas=2, accumulation=2),
    )


@run
def poptorch_adamw():
    return pop_variants(
        "AdamW",
        {"lr": 0.02},
        {"lr": 0.02, "weight_decay": 0.1, "bias_correction": False},
        {"lr": 0.02, "max_grad_norm": 0.1, "weight_decay": 0.0},
        options=options_of(iterations=3),
    )


@run
def poptorch_rmsprop():
    return pop_variants(
        "RMSprop",
        {"lr": 0.02},
        {"lr": 0.02, "centered": True, "momentum": 0.5, "weight_decay": 0.1},
        {"lr": 0.02, "use_tf_variant": True, "alpha": 0.9},
    )


@run
def poptorch_lamb():
    return pop_variants(
        "LAMB",
        {"lr": 0.02},
        {"lr": 0.02, "weight_decay": 0.1, "bias_correction": False},
        {"lr": 0.02, "max_weight_norm": 0.5},
        options=options_of(accumulation=3),
    )


@run
def poptorch_optimizer_that_changes():
    def decay(executor, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        executor.setOptimizer(optimizer)

    def two_groups(module):
        first, last = module.module[0], module.module[2]
        groups = [
            {"params": first.parameters(), "lr": 0.2},
            {"params": last.parameters(), "weight_decay": 0.1},
        ]
        return poptorch.optim.SGD(groups, lr=0.1, momentum=0.5)

    return pop_trained(two_groups, then=decay)


def adam_of(module):
    return poptorch.optim.Adam(module.parameters(), lr=0.02)


@run
def poptorch_output_modes():
    outcome = {}
    for mode in ("Final", "All", "Sum", "EveryN"):
        options = options_of(iterations=4, accumulation=2)
        period = {"output_return_period": 2} if mode == "EveryN" else {}
        options.outputMode(poptorch.OutputMode[mode], **period)
        outcome[mode] = pop_trained(adam_of, options, calls=2)
    return outcome


@run
def poptorch_reductions():
    outcome = {}
    for reduction in ("Mean", "Sum"):
        options = options_of(accumulation=2, replicas=2)
        options.Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType[reduction]
        )
        outcome[reduction] = pop_trained(adam_of, options, calls=2)
    return outcome


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        filled(self)

    def forward(self, x):
        with poptorch.Block("first", ipu_id=0):
            x = torch.relu(self.first(x))
        poptorch.Block.useAutoId()
        with poptorch.Block("last", ipu_id=1):
            return self.last(x)


def pop_blocks(strategy, **layout):
    options = options_of(**layout)
    options.setExecutionStrategy(strategy)
    module = BlocksWithLoss(Blocks())
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.02)
    executor = poptorch.trainingModel(module, options, optimizer)
    data = random_floats(24, FEATURES), random_classes(24)
    outputs = [executor(*data) for _ in range(3)]
    outcome = {"outputs": outputs, "weights": executor.state_dict()}
    executor.destroy()
    return outcome


class BlocksWithLoss(WithLoss):
    def forward(self, x, y=None):
        outputs = self.module(x)
        with poptorch.Block("last", ipu_id=1):
            return outputs, self.loss(outputs, y)


@run
def poptorch_strategies():
    names = ["first", "last"]
    return {
        "pipelined": pop_blocks(
            poptorch.PipelinedExecution(*names), accumulation=4, replicas=2
        ),
        "sharded": pop_blocks(poptorch.ShardedExecution(*names), iterations=2),
        "phased": pop_blocks(
            poptorch.SerialPhasedExecution(*[[name] for name in names])
        ),
    }


class Grouped(nn.Module):
    """A weight that has a value for each of two groups of replicas."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random_floats(2, CLASSES, FEATURES, seed=6))
        self.bias = nn.Parameter(random_floats(CLASSES, seed=7))

    def forward(self, x, y):
        outputs = nn.functional.linear(x, self.weight, self.bias)
        return outputs, nn.functional.cross_entropy(outputs, y)


@run
def poptorch_replica_groups():
    module = Grouped()
    options = options_of(replicas=4)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    executor = poptorch.trainingModel(module, options, optimizer)
    executor.weight.replicaGrouping(
        poptorch.CommGroupType.Consecutive,
        2,
        poptorch.VariableRetrievalMode.OnePerGroup,
    )
    data = random_floats(24, FEATURES), random_classes(24)
    outputs = [executor(*data) for _ in range(3)]
    outcome = {"outputs": outputs, "weights": executor.state_dict()}
    executor.destroy()
    return outcome


class Inference(nn.Module):
    """Ops of PopTorch, buffers, control flow, and outputs that nest."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 3, 3)
        self.register_buffer("offset", torch.linspace(-1, 1, 3)[:, None])
        filled(self)

    def forward(self, x, scale):
        hidden = self.convolution(x) * scale.reshape(-1, 1, 1) + self.offset
        looped = poptorch.for_loop(3, lambda y: [torch.tanh(y + 0.1)], [hidden])[0]
        values, indices = torch.topk(looped.flatten(1), 3)
        return {
            "looped": looped,
            "top": (values, indices),
            "rest": [poptorch.nop(hidden.sum(dim=2)), looped.softmax(dim=1).std()],
        }


@run
def poptorch_inference():
    options = options_of(iterations=3, replicas=2)
    executor = poptorch.inferenceModel(Inference(), options)
    outputs = executor(random_floats(12, 2, 7), random_floats(12, seed=4))
    executor.destroy()
    return {"outputs": outputs}


@run
def poptorch_folded_inference():
    outcome = {}
    modules = {
        "lstm": (Recurrent(nn.LSTM), random_floats(8, 6, 3)),
        "images": (Convolutions(nn.BatchNorm2d(4)), random_floats(8, 2, 8, 8)),
        "tokens": (Transformer(), random_classes(8, 5, classes=11)),
    }
    for name, (module, x) in modules.items():
        executor = poptorch.inferenceModel(module.eval(), options_of(iterations=4))
        outcome[name] = executor(x)
        executor.destroy()
    return outcome


class Drawing(nn.Module):
    def forward(self, x):
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.bernoulli(torch.sigmoid(x)),
            nn.functional.dropout(x, 0.3, training=True),
        )


@drawing
def poptorch_random_numbers():
    options = options_of(iterations=2, replicas=2)
    executor = poptorch.inferenceModel(Drawing(), options)
    outputs = [executor(random_floats(8, 3)) for _ in range(2)]
    state = torch.tensor(executor.rng_state)
    executor.destroy()
    return {"outputs": outputs, "random": state}


@drawing
def poptorch_stochastic_rounding():
    options = options_of(accumulation=2, iterations=2)
    options.Precision.enableStochasticRounding(True)
    return pop_trained(
        lambda module: poptorch.optim.SGD(
            module.parameters(), lr=0.1, momentum=0.9, loss_scaling=16.0
        ),
        options,
        mlp().half(),
        (random_floats(24, FEATURES).half(), random_classes(24)),
    )


class Numbers(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([index, index * 0.5]), index


@drawing
def poptorch_loaders():
    options = options_of(iterations=2, accumulation=2)
    outcome = {}
    for name, given in {
        "in order": {"drop_last": False},
        "shuffled": {"shuffle": True},
        "in workers": {"shuffle": True, "num_workers": 2},
        "ahead": {"shuffle": True, "mode": poptorch.DataLoaderMode.Async},
    }.items():
        torch.manual_seed(0)
        loader = poptorch.DataLoader(options, Numbers(), batch_size=2, **given)
        # Tensors of an asynchronous loader are overwritten by later ones.
        outcome[name] = [[part.clone() for part in batch] for batch in loader]
        if "mode" in given:
            loader.terminate()
    return outcome
