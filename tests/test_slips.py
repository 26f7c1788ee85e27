# SPDX-License-Identifier: Apache-2.0
"""Misspelt arguments, and calls that belong to a module, say what was meant."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from ipufit import (
    Callback,
    ConfigError,
    DataError,
    EarlyStopping,
    IPUConfig,
    IpufitError,
    IPUModel,
    Optimizer,
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
    ],
)
def test_a_misspelt_argument_gets_the_nearest_name(call, words):
    with pytest.raises(TypeError, match="Did you mean") as caught:
        call()
    assert all(one in str(caught.value) for one in words)


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
    with pytest.raises(DataError, match=r"of one sample give x\[:1\], not x\[0\]"):
        model.predict(X[0], verbose=0)


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
    converted = torch.nn.Sequential(Scaled(), layer)
    assert len(compiled(converted).predict(x, verbose=0)) == 8


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
            getattr(compiled(network()), use)(frame, targets)
    assert compiled(network()).fit(nested(frame), targets, 8, verbose=0).epoch == [0]
    if network is OfDict:
        with pytest.raises(DataError, match=r"pass \{'x': x\}"):
            compiled(network()).fit(dict(frame), targets, 8, verbose=0)


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
def test_a_big_value_is_not_printed_whole(call, kind):
    module = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(200)))
    value = {
        dict: module.state_dict(),
        list: [layer.weight.detach().numpy() for layer in module],
        torch.nn.Sequential: [module],
    }[kind]
    with pytest.raises(IpufitError) as caught:
        call(value)
    assert len(str(caught.value)) < 4100
    assert "0.0" not in str(caught.value)


@pytest.mark.parametrize("size", ["x", [], 1.5, 0, True])
def test_batch_sizes_are_checked_before_anything_is_read(size):
    words = f"batch_size={size!r} is not a whole number of 1 or more"
    with pytest.raises(ConfigError) as caught:
        compiled().evaluate(X, Y, batch_size=size, verbose=0)
    assert str(caught.value).startswith(words)
    with pytest.raises(ConfigError) as caught:
        compiled().fit(X, Y, validation_batch_size=size, verbose=0)
    assert str(caught.value).startswith(f"validation_{words}")


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
