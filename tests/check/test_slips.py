# SPDX-License-Identifier: Apache-2.0
"""Misspelt arguments, and calls that belong to a module, say what was meant."""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import (
    CachedDataset,
    Callback,
    ConfigError,
    DataError,
    EarlyStopping,
    FixedSizeBatches,
    IPUConfig,
    IpufitError,
    IPUModel,
    LossScaleRamp,
    Mixing,
    ModelCheckpoint,
    Optimizer,
    PerEpoch,
    ReduceLROnPlateau,
    Schedule,
    UnknownNameError,
)
from tests.reference import compiled, samples

X, Y = samples(32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compiled().compile(optimiser="sgd"), ("compile()", "'optimizer'?")),
        (lambda: compiled().fit(X, Y, epoch=2), ("fit()", "'epochs'?")),
        (lambda: compiled().predict(X, batchsize=2), ("predict()", "'batch_size'?")),
        (lambda: IPUConfig(replica=2), ("IPUConfig()", "'replicas'?")),
        (
            lambda: Schedule("cosine", warm_up_epochs=2),
            ("Schedule()", "'warmup_epochs'?"),
        ),
        (lambda: LossScaleRamp(4, 2, max=8), ("LossScaleRamp()", "'maximum'?")),
        (lambda: Mixing(mix_up=0.2), ("Mixing()", "'mixup'?")),
        (lambda: PerEpoch(schedule=1), ("PerEpoch()", "'scheduler'?")),
        (lambda: FixedSizeBatches([], masks=1), ("FixedSizeBatches()", "'mask'?")),
        (lambda: CachedDataset(data=[1]), ("CachedDataset()", "'dataset'?")),
    ],
)
def test_a_misspelt_argument_gets_the_nearest_name(call, words):
    with pytest.raises(TypeError, match="Did you mean") as caught:
        call()
    assert all(one in str(caught.value) for one in words)


def test_arguments_of_other_libraries_schedules_say_ours():
    other = """T_max total_steps total_iters decay_steps num_training_steps T_0 warmup
        warmup_steps num_warmup_steps milestones step_size eta_min alpha min_lr max_lr
        end_learning_rate decay_rate lr learning_rate initial_learning_rate"""
    for name in other.split():
        with pytest.raises(TypeError, match=f"'{name}'. Write ") as caught:
            Schedule("cosine", **{name: 1})
        words = re.findall(r"(\w+)=", str(caught.value))
        known = {*inspect.signature(Schedule).parameters, "learning_rate"}
        assert words
        assert known.issuperset(words)
    with pytest.raises(TypeError, match=r"'zzz'\. It takes boundaries, boundary"):
        Schedule("cosine", zzz=1)


FIT = """
    lr learning_rate weight_decay max_epochs train_loader val_loader train_dataloaders
    val_data eval_set optimizer loss metrics workers num_workers replicas seed precision
    check_val_every_n_epoch limit_val_batches checkpoint resume_training datamodule
    bs steps ckpt_path early_stopping patience log_dir progress_bar collate_fn sampler
    gradient_clip_val accumulate_grad_batches scheduler X
"""
COMPILE = """
    lr learning_rate ema_momentum clipnorm criterion loss_fn optim scheduler schedule
    lr_scheduler epochs batch_size class_weight auto_scale_loss replicas grad_clip
"""
CONFIG = "replication_factor batch_size deviceIterations fp16 half num_replicas"
INFERENCE = "steps_per_epoch dataloaders test_loader workers"
CHECKPOINT = "dirpath filename save_top_k save_last every_n_epochs period metric"
MODEL = "replicas micro_batch_size options optimizer loss model workers clipnorm"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((compiled().fit, name) for name in FIT.split()),
        *((compiled().compile, name) for name in COMPILE.split()),
        *((IPUConfig, name) for name in CONFIG.split()),
        *((IPUModel, name) for name in MODEL.split()),
        *((compiled().evaluate, name) for name in INFERENCE.split()),
        *((compiled().predict, name) for name in INFERENCE.split()),
        *((partial(ModelCheckpoint, "run"), name) for name in CHECKPOINT.split()),
        (ReduceLROnPlateau, "threshold"),
        (EarlyStopping, "metric"),
    ],
)
def test_a_first_guess_says_which_call_takes_what_it_means(call, name):
    with pytest.raises(TypeError, match=f"'{name}'") as caught:
        call(**{name: 1})
    advice = str(caught.value).partition(f"'{name}'. ")[2]
    loader = DataLoader.__init__
    calls = (IPUModel.fit, IPUModel.compile, IPUConfig, Optimizer, loader)
    calls += (IPUModel.evaluate, ModelCheckpoint, ReduceLROnPlateau)
    known = {name for one in calls for name in inspect.signature(one).parameters}
    assert advice.startswith(("Write ", "Did you mean "))
    words = {*re.findall(r"(\w+)=", advice), *re.findall(r"mean '(\w+)'", advice)}
    assert words <= {*known, "patience"}
    assert words or "(" in advice


@pytest.mark.parametrize("call", [compiled().fit, compiled().compile, IPUConfig])
def test_what_belongs_nowhere_is_to_be_left_out(call):
    with pytest.raises(TypeError, match=r"'device'\. Leave it out: programs run"):
        call(device="ipu")
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        call(zzz=1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("metrics", name) for name in ("roc_auc", "auroc", "ap", "jaccard", "top5")),
        *(("metrics", name) for name in ("BinaryAUROC", "MulticlassF1Score")),
        ("metrics", "MulticlassAccuracy"),
        *(("loss", name) for name in ("l2", "cosine", "logloss", "binary")),
    ],
)
def test_other_names_of_losses_and_metrics_name_ours(kind, name):
    arguments = {"optimizer": "sgd", "loss": "mse"}
    with pytest.raises(UnknownNameError, match=rf"'{name}'\. Write '") as caught:
        compiled().compile(**{**arguments, kind: name})
    names = re.findall(r"'(\w+)'", str(caught.value).partition(". Write")[2])
    for known in names:
        compiled().compile(**{**arguments, kind: known})


def test_the_focal_loss_of_the_message_trains():
    with pytest.raises(UnknownNameError, match="focal") as caught:
        compiled().compile("sgd", "focal")
    (code,) = re.findall(r"(ce = .*); return (.*)\. Known", str(caught.value))
    names = {"torch": torch, "F": torch.nn.functional}
    call = f"def focal(x, y):\n    {code[0]}\n    return {code[1]}"
    exec(call, names)
    model = compiled(torch.nn.Linear(3, 4))
    model.compile("sgd", names["focal"])
    labels = torch.arange(32) % 4
    share = torch.softmax(model.module(X), 1).gather(1, labels[:, None])
    expected = -((1 - share) ** 2 * share.log()).mean().detach()
    figures = model.evaluate(X, labels, verbose=0)
    assert figures["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Adam", 'ipufit.Optimizer("adam", learning_rate='),
        ("SGD", 'ipufit.Optimizer("sgd", learning_rate='),
        ("Model", "ipufit.IPUModel(module)"),
        ("DataLoader", "torch.utils.data.DataLoader"),
        ("Options", "ipufit.poptorch.Options"),
        ("Recall", "ipufit.metrics.Recall"),
        ("IpuConfig", "mean 'IPUConfig'?"),
        ("EarlyStop", "mean 'EarlyStopping'?"),
        ("fit", "model.fit()"),
        ("load_model", "model.load(path)"),
    ],
)
def test_names_of_other_libraries_say_what_is_here(name, words):
    with pytest.raises(AttributeError, match=re.escape(words)):
        getattr(ipufit, name)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (ipufit.optimizers, "Adam", 'ipufit.Optimizer("adam", learning_rate='),
        (ipufit.losses, "MeanSquaredError", 'compile(loss="MeanSquaredError")'),
        (ipufit.losses, "CrossEntropyLoss", 'compile(loss="CrossEntropyLoss")'),
        (ipufit.metrics, "MeanAbsoluteError", 'compile(metrics=["MeanAbsoluteError"])'),
        (ipufit.metrics, "AUROC", "'auc'"),
    ],
)
def test_names_of_keras_s_modules_say_what_to_write(module, name, words):
    with pytest.raises(AttributeError, match=re.escape(f"'{name}'. Write {words}")):
        getattr(module, name)
    if words.startswith("compile("):
        arguments = eval(f"dict{words[len('compile') :]}")
        compiled().compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    assert not hasattr(ipufit, f"_{name}")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("metrics_names", "list(model.evaluate(x, y))"),
        ("count_params", "sum(p.numel() for p in model.module.parameters())"),
        ("layers", "dict(model.module.named_modules())"),
        ("trainable_weights", "model.get_weights()"),
        ("predict_classes", "model.predict(x).argmax(-1)"),
        ("score", "model.evaluate(x, y)"),
        ("learning_rate", "model.optimizer.learning_rate"),
        ("detachFromDevice", "model.detach()"),
    ],
)
def test_what_a_message_says_of_a_models_attribute_runs(name, way):
    model = compiled()
    model.fit(X, Y, 8, verbose=0)
    with pytest.raises(AttributeError, match=re.escape(f"'{name}'. Write {way}")):
        getattr(model, name)
    eval(way, {"model": model, "x": X, "y": Y})


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("trainable", False, "model.module.requires_grad_(False)"),
        ("optimizer", "sgd", "model.compile(optimizer=...)"),
        ("loss", "mae", "model.compile(loss=...)"),
        ("learning_rate", 0.1, "model.optimizer.learning_rate"),
        ("module", torch.nn.Linear(4, 3), "IPUModel(module, config)"),
        ("config", IPUConfig(replicas=2), "IPUModel(module, config)"),
    ],
)
def test_attributes_that_would_change_nothing_cannot_be_set(name, value, way):
    model = compiled()
    with pytest.raises(AttributeError, match=re.escape(f"{name} can't be set. Write ")):
        setattr(model, name, value)
    with pytest.raises(AttributeError, match=re.escape(way)):
        setattr(model, name, value)


def test_keras_s_switches_of_programs_cannot_be_set():
    for name in ("run_eagerly", "jit_compile", "train_function"):
        with pytest.raises(AttributeError, match=f"{name} can't be set. Leave it out"):
            setattr(compiled(), name, None)


def test_other_attributes_can_be_set_and_a_subclass_may_use_all_but_trainable():
    class Mine(IPUModel):
        def __init__(self):
            super().__init__(torch.nn.Linear(4, 3))
            self.loss, self.lr, self.layers = torch.nn.MSELoss(), 0.1, 2

    model = compiled()
    model.stop_training, model.note = True, "best so far"
    assert (model.note, model.stop_training) == ("best so far", True)
    mine = Mine()
    assert (mine.lr, copy.deepcopy(mine).layers) == (0.1, 2)
    with pytest.raises(AttributeError, match=r"requires_grad_\(False\)"):
        mine.trainable = False


def test_two_loaders_are_training_and_validation():
    pairs = TensorDataset(X, Y)
    for data in (pairs, DataLoader(pairs, 8)):
        with pytest.raises(DataError, match=r"fit\(train, validation_data=other\)"):
            compiled().fit(data, data, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mse", "adam"), "Write compile(optimizer='adam', loss="),
        (("adam", "accuracy"), "Write compile(metrics=['accuracy'])"),
        (("adam", "mse", ["mae"]), "names of metrics go to metrics=["),
        ((("adam", 0.1), "mse"), "ipufit.Optimizer('adam', "),
        (({"name": "adam", "lr": 0.1}, "mse"), "ipufit.Optimizer('adam', "),
        ((["adam", "sgd"], "mse"), "several optimizers (2)"),
    ],
)
def test_arguments_of_compile_in_other_places_are_told_theirs(arguments, words):
    with pytest.raises(IpufitError, match=re.escape(words)):
        compiled().compile(*arguments)


def test_functions_of_scikit_learn_and_classes_are_refused_by_compile():
    sklearn = pytest.importorskip("sklearn.metrics")
    for function in (sklearn.f1_score, sklearn.log_loss):
        with pytest.raises(ConfigError, match=f"{function.__name__} of scikit-learn"):
            compiled().compile("sgd", "mse", metrics=[function])
        with pytest.raises(ConfigError, match=f"{function.__name__} of scikit-learn"):
            compiled().compile("sgd", function)
    with pytest.raises(ConfigError, match="the class MSELoss: give an object"):
        compiled().compile("sgd", torch.nn.MSELoss)


@pytest.mark.parametrize("name", ["parameters", "state_dict", "to", "eval", "train"])
def test_methods_of_a_module_are_found_in_it(name):
    with pytest.raises(AttributeError, match=rf"{name}'.*model\.module\.{name}"):
        getattr(compiled(), name)


def test_a_model_that_is_called_names_predict_and_its_module():
    with pytest.raises(TypeError, match=r"model\.predict\(x\).*model\.module\(x\)"):
        compiled()(X)


def test_figures_are_in_the_dict_of_a_history():
    history = compiled().fit(X, Y, verbose=0)
    with pytest.raises(TypeError, match=r"history\.history\['loss'\]"):
        history["loss"]


@pytest.mark.parametrize("after_fit", [False, True])
def test_one_sample_without_its_dimension_says_what_to_give(after_fit):
    model = compiled()
    if after_fit:
        model.fit(X, Y, batch_size=1, verbose=0)
        assert set(model.evaluate(X, Y, verbose=0)) == {"loss"}
    with pytest.raises(DataError, match=r"one sample is x\[None\]; columns"):
        model.predict(X[0], verbose=0)
    model.predict(X[0][None], verbose=0)


class Columns(torch.nn.Module):
    def __init__(self, join):
        super().__init__()
        self.layer, self.join = torch.nn.Linear(2, 4), join

    def forward(self, a, b):
        return self.layer(self.join(a, b))


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.cat([a, b], -1),
        lambda a, b: a[:, :1] + b.expand(-1, 2),
    ],
)
def test_columns_without_an_axis_say_what_to_give(join):
    model = compiled(Columns(join))
    with pytest.raises(DataError) as caught:
        model.fit((X[:, 0], X[:, 1]), Y, 8, verbose=0)
    assert "images without channels, are x[:, None]" in str(caught.value)
    assert "embedding" not in str(caught.value)
    model.fit((X[:, 0][:, None], X[:, 1][:, None]), Y, 8, verbose=0)


class Rows(torch.utils.data.Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return len(Y)

    def __getitem__(self, index):
        return self.kind(X[index].tolist()), int(Y[index])


def test_lists_of_numbers_in_a_dataset_say_how_they_are_one_input():
    with pytest.raises(DataError, match=r"\(3 by place\).*torch\.tensor\(row\) is one"):
        compiled().fit(Rows(list), batch_size=8, verbose=0)
    compiled().fit(Rows(torch.tensor), batch_size=8, verbose=0)


def test_an_index_of_pythons_is_no_class_that_is_missing():
    with pytest.raises(DataError, match=r"list index out of range$"):
        compiled(Columns(lambda a, b: [a, b][2])).fit((X, X), Y, 8, verbose=0)


@pytest.mark.parametrize("nest", [lambda x: x, lambda x: (x, x), lambda x: {"a": x}])
def test_a_packed_sequence_as_data_names_the_padded_one(nest):
    packed = torch.nn.utils.rnn.pack_sequence([X[:3], X[:2]])
    for data in (nest(packed), [(nest(packed), Y[:2])]):
        with pytest.raises(DataError, match=r"PackedSequence.*pad_packed_sequence\("):
            compiled().fit(data, verbose=0)


def test_an_object_of_batches_or_samples_names_the_loader_and_the_dataset():
    class Batches:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return X, Y

    message = (
        r"torch Dataset .*items are batches needs DataLoader\(x, batch_size=None\)"
    )
    with pytest.raises(DataError, match=message):
        compiled().fit(Batches(), verbose=0)
    loader = DataLoader(Batches(), batch_size=None)
    assert compiled().fit(loader, verbose=0).epoch == [0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.float32])
def test_indices_of_an_embedding_say_what_they_are_to_be(dtype):
    model = compiled(torch.nn.Sequential(torch.nn.Embedding(3, 4)))
    with pytest.raises(DataError, match=r'x\.long\(\), or x\.astype\("int64"\)\.$'):
        model.predict(torch.tensor([0, 2]).to(dtype), verbose=0)
    assert model.predict(torch.tensor([0, 2]), verbose=0).shape == (2, 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize(
    "layer", [torch.nn.Linear(4, 2), torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(3)]
)
def test_whole_numbers_for_layers_of_floats_say_how_to_convert(layer, dtype):
    x = torch.ones(8, 3, 4, 4, dtype=dtype)
    with pytest.raises(DataError, match=r"x\.float\(\) / 255 for images of uint8\.$"):
        compiled(torch.nn.Sequential(layer)).predict(x, verbose=0)
    model = IPUModel(torch.nn.Sequential(layer))
    model.compile("sgd", step=lambda module, batch: module(batch[0]).mean())
    with pytest.raises(DataError, match=r"x\.float\(\) / 255 for images of uint8\.$"):
        model.fit(x, torch.zeros(8, dtype=torch.int64), batch_size=8, verbose=0)
    converted = torch.nn.Sequential(Scaled(), layer)
    assert len(compiled(converted).predict(x, verbose=0)) == 8


def test_classes_that_are_no_whole_numbers_say_how_to_convert():
    with pytest.raises(DataError, match=r"y\.long\(\) of a tensor"):
        compiled().fit(X[:8], Y[:8].float(), batch_size=8, verbose=0)


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x.float() / 255


class ByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, a, b):
        return self.layer(torch.stack((a, b), 1))


class OfDict(ByName):
    def forward(self, x):
        return super().forward(x["a"], x["b"])


@pytest.mark.parametrize(
    ("network", "nested", "words"),
    [
        (ByName, lambda frame: dict(frame), r"such as dict\(frame\)"),
        (OfDict, lambda frame: {"x": dict(frame)}, r"\{'x': dict\(frame\)\}"),
    ],
)
def test_a_frame_whose_columns_have_names_in_forward(network, nested, words):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy()})
    targets = torch.zeros(32, 1)
    for use in ("train_on_batch", "fit"):
        with pytest.raises(DataError, match=words):
            getattr(compiled(network(), loss="mse"), use)(frame, targets)
    model = compiled(network(), loss="mse")
    assert model.fit(nested(frame), targets, 8, verbose=0).epoch == [0]
    if network is OfDict:
        with pytest.raises(DataError, match=r"pass \{'x': x\}"):
            compiled(network(), loss="mse").fit(dict(frame), targets, 8, verbose=0)


@pytest.fixture(scope="module")
def deep():
    return torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(200)))


@pytest.mark.parametrize(
    "call",
    [
        lambda value: IPUModel(value),
        lambda value: IPUModel(torch.nn.Linear(2, 1), value),
        lambda value: IPUConfig(replicas=value),
        lambda value: compiled().compile("sgd", "mse", loss_weights=[value]),
        lambda value: compiled().fit(X, Y, verbose=value),
        lambda value: compiled().fit(X, Y, batch_size=value),
        lambda value: compiled().fit(X, Y, resume=value),
        lambda value: Optimizer("sgd", weight_decay=value),
        lambda value: EarlyStopping(value),
        lambda value: compiled().set_weights({f"layer.{i}": 0 for i in range(5000)}),
    ],
)
@pytest.mark.parametrize("kind", [dict, list, torch.nn.Sequential])
def test_a_big_value_is_not_printed_whole(call, kind, deep):
    value = {
        dict: deep.state_dict(),
        list: [layer.weight.detach().numpy() for layer in deep],
        torch.nn.Sequential: [deep],
    }[kind]
    with pytest.raises(IpufitError) as caught:
        call(value)
    assert len(str(caught.value)) < 4100
    assert "0.0" not in str(caught.value)


@pytest.mark.parametrize("size", ["x", [], 1.5, 0, True])
def test_batch_sizes_are_checked_before_anything_is_read(size):
    words = f"batch_size={size!r}: use a whole number of 1 or more"
    with pytest.raises(ConfigError) as caught:
        compiled().evaluate(X, Y, batch_size=size, verbose=0)
    assert str(caught.value).startswith(words)
    with pytest.raises(ConfigError) as caught:
        compiled().fit(X, Y, validation_batch_size=size, verbose=0)
    assert str(caught.value).startswith(f"validation_{words}")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_told_to_be_python_s(kind):
    words = f"use Python's number, as .item() of {kind.__name__} gives"
    with pytest.raises(ConfigError, match=re.escape(words)):
        compiled().fit(X, Y, batch_size=kind(8), verbose=0)
    compiled().fit(X, Y, batch_size=kind(8).item(), verbose=0)
    with pytest.raises(ConfigError, match=r"learning_rate=.*Python's number"):
        Optimizer("sgd", learning_rate=np.float32(0.1))


def test_the_confusion_matrix_is_an_object():
    with pytest.raises(UnknownNameError, match=r"ipufit\.metrics\.ConfusionMatrix\(\)"):
        compiled().compile("sgd", "mse", metrics=["confusion_matrix"])


def test_a_billion_epochs_take_no_memory_before_they_are_run():
    class Stop(Callback):
        def on_epoch_end(self, epoch, logs):
            self.run.stop("enough")

    # Some 300 GiB if there were an entry for each.
    history = compiled().fit(X, Y, epochs=10**9, verbose=0, callbacks=[Stop()])
    assert history.epoch == [0]


@pytest.mark.parametrize("name", ["w.keras", "w.pt", "w.h5", "w.ckpt", "w.safetensors"])
def test_a_checkpoint_with_the_name_of_a_file_is_refused(name, tmp_path):
    model = compiled()
    with pytest.raises(ConfigError, match=r"save_weights\('.*w\.safetensors'\)"):
        model.save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    model.save(tmp_path / "epoch_0.25")  # a dot is no suffix of a file
