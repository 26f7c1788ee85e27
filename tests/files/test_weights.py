# SPDX-License-Identifier: Apache-2.0
"""Weights in one file: safetensors, and state dicts that are read."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError, DataError, FileError, IPUModel
from ipufit.checkpoint import load_weights, save_weights
from ipufit.checkpoint.weights import TORCH_SUFFIXES
from tests.interpreters import run_python
from tests.strategies import in_quarters

ROOT = Path(__file__).parents[2]

TYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]
names = st.text("ab.0_é", min_size=1, max_size=5)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(TYPES),
    st.integers(0, 9),
)


@in_quarters
def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path, quarter):
    path = tmp_path / "a.safetensors"
    weights = {"w": torch.arange(9.0), "b": torch.ones(3, dtype=torch.float16)}
    save_weights({**weights, "tied": weights["w"]}, path)
    whole = path.read_bytes()
    refused = 0
    places = range(8 * len(whole))[quarter::4]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        try:
            loaded = load_weights(path)
        except DataError:
            refused += 1
        else:
            assert list(loaded) == ["b", "tied", "w"], place
            assert all(torch.equal(loaded[n], weights[n]) for n in weights), place
    assert refused > 0.93 * len(places)


def test_pipes_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(FileError, match="no regular file"):
        load_weights(tmp_path / "a.safetensors")


def test_saving_takes_no_copy_of_the_weights(tmp_path):
    run = f"""if True:
        import resource, torch
        from ipufit import IPUModel
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
        module = torch.nn.Linear(2**11, 2**11)  # 16 MiB
        model = IPUModel(module)
        model.save_weights({str(tmp_path / "first.safetensors")!r})
        module.weight.data = torch.ones(2**13, 2**11)  # 64 MiB
        before = peak()
        model.save_weights({str(tmp_path / "second.safetensors")!r})
        print((peak() - before) / 2**26)
    """
    done = run_python("-c", run, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5
    assert len(load_weights(tmp_path / "second.safetensors")["weight"]) == 2**13


@pytest.mark.parametrize("suffix", ["", ".pt", ".h5", ".SAFETENSORS"])
def test_other_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    runs = [lambda path: save_weights({}, path)]
    if suffix != ".pt":  # which can be read
        runs.append(load_weights)
    for run in runs:
        with pytest.raises(ConfigError, match=r"name it '.*weights\.safetensors'"):
            run(path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"name it '.*model\.safetensors'"):
        save_weights({}, tmp_path)
    with pytest.raises(ConfigError, match="path='': use a path"):
        save_weights({}, "")


class TestStateDicts:
    """Files of `torch.save`, of which nothing but tensors is made."""

    @given(st.dictionaries(names, tensors, max_size=4), st.sampled_from(TORCH_SUFFIXES))
    def test_what_torch_saves_is_loaded(self, tmp_path_factory, weights, suffix):
        path = tmp_path_factory.mktemp("weights") / f"a{suffix}"
        torch.save(weights, path)
        loaded = load_weights(path)
        assert loaded.keys() == weights.keys()
        for name, tensor in weights.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)

    def test_nothing_is_executed(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "made"),)

        torch.save({"w": Evil()}, tmp_path / "a.pt")
        with pytest.raises(DataError, match="more than tensors, which is never unpick"):
            load_weights(tmp_path / "a.pt")
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (torch.nn.Linear(1, 1), "more than tensors"),
            ([torch.ones(1)], "holds a list, not a state dict"),
            ({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, "'state_dict', 'epoch'"),
            ({1: torch.ones(1)}, "1 is no tensor"),
        ],
    )
    def test_what_is_no_state_dict_is_refused(self, tmp_path, value, said):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(DataError, match=said):
            load_weights(tmp_path / "a.pt")

    def test_formats_that_are_not_safe_are_refused(self, tmp_path):
        weights = {"w": torch.ones(1)}
        torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        with pytest.raises(DataError, match=r"format before torch 1\.6"):
            load_weights(tmp_path / "old.pt")
        with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
            archive.writestr("script/constants.pkl", b"")  # as torch.jit.save makes it
        with pytest.raises(DataError, match="TorchScript, which is a program"):
            load_weights(tmp_path / "script.pt")

    @pytest.mark.parametrize("kind", ["deflated", "overlapping"])
    def test_what_unpacks_to_more_than_the_file_is_not_unpacked(
        self, tmp_path, monkeypatch, kind
    ):
        torch.save({"w": torch.zeros(10_000)}, tmp_path / "a.pt")
        method = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
        with zipfile.ZipFile(tmp_path / "a.pt") as plain, zipfile.ZipFile(
            tmp_path / "b.pt", "w", method
        ) as archive:
            for member in plain.infolist():
                archive.writestr(member.filename, plain.read(member))
            if kind == "overlapping":
                archive.filelist += archive.filelist
        monkeypatch.setattr(zipfile.ZipFile, "testzip", pytest.fail)
        with pytest.raises(DataError, match="damaged, isn't a file of"):
            load_weights(tmp_path / "b.pt")

    @given(st.data())
    def test_a_file_that_is_cut_short_is_refused(self, tmp_path_factory, data):
        path = tmp_path_factory.mktemp("weights") / "a.pt"
        torch.save({"w": torch.arange(100.0)}, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(DataError, match="damaged"):
            load_weights(path)

    @in_quarters
    def test_every_flipped_byte_is_found_or_changes_nothing(self, tmp_path, quarter):
        path = tmp_path / "a.pt"
        weights = {"w": torch.arange(10.0), "b": torch.ones(3)}
        torch.save(weights, path)
        whole = path.read_bytes()
        refused = 0
        places = range(len(whole))[quarter::4]
        for place in places:
            damaged = bytearray(whole)
            damaged[place] ^= 0x55
            path.write_bytes(bytes(damaged))
            try:
                loaded = load_weights(path)
            except DataError:
                refused += 1
            else:
                assert loaded.keys() == weights.keys(), place
                assert all(torch.equal(loaded[n], weights[n]) for n in weights), place
        assert refused > len(places) // 5

    @pytest.mark.parametrize(
        "tensor",
        [torch.eye(2).to_sparse(), torch.empty(2, device="meta")],
        ids=["sparse", "meta"],
    )
    def test_what_is_no_plain_tensor_is_refused(self, tmp_path, tensor):
        torch.save({"w": tensor}, tmp_path / "a.pt")
        with pytest.raises(DataError):
            load_weights(tmp_path / "a.pt")

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.int32])
    def test_weights_of_another_type_are_cast_if_they_fit(self, tmp_path, dtype):
        torch.save({"weight": torch.full((1, 1), 3).to(dtype)}, tmp_path / "a.pt")
        model = IPUModel(torch.nn.Linear(1, 1, bias=False))
        if dtype.is_complex:
            with pytest.raises(DataError, match=r"weight in torch\.complex64"):
                model.load_weights(tmp_path / "a.pt")
        else:
            model.load_weights(tmp_path / "a.pt")
            assert model.module.weight.item() == 3
