# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a file of a checkpoint is noticed.

One thing is harmless, as readers open only what the manifest lists: further files.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ipufit.checkpoint import (
    CheckpointStore,
    load_checkpoint,
    write_checkpoint,
)
from ipufit.errors import CheckpointWarning, DamagedCheckpointError
from tests.files.samples import number_of, sample
from tests.strategies import in_quarters

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints, and their bytes to restore them from."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(paths, start=1):
        write_checkpoint(path, sample(number))
    return paths


def cut(data, chance, _):
    return data[: chance.randrange(len(data))]


def flip(data, chance, _):
    place = chance.randrange(len(data))
    return (
        data[:place]
        + bytes([data[place] ^ (1 << chance.randrange(8))])
        + data[place + 1 :]
    )


def flip_several(data, chance, other):
    for _ in range(chance.randrange(2, 9)):
        data = flip(data, chance, other)
    return data


def zero(data, chance, _):
    begin = chance.randrange(len(data))
    end = chance.randrange(begin, len(data)) + 1
    return data[:begin] + bytes(end - begin) + data[end:]


def insert(data, chance, _):
    place = chance.randrange(len(data) + 1)
    more = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
    return data[:place] + more + data[place:]


def leave_out(data, chance, _):
    begin = chance.randrange(len(data))
    return data[:begin] + data[begin + chance.randrange(1, 20) :]


def swap(_, __, other):
    return other


def miss(_, __, ___):
    return None


DAMAGES = [cut, flip, flip_several, zero, insert, leave_out, swap, miss]


def test_random_damages_are_noticed_and_the_file_is_named(pair):
    one, two = pair
    chance = random.Random(11)
    seen = Counter()
    while sum(seen.values()) < 200:
        name, damage = chance.choice(FILES), chance.choice(DAMAGES)
        data = (one / name).read_bytes()
        donor = chance.choice([two / name, *(one / other for other in FILES)])
        damaged = damage(data, chance, donor.read_bytes())
        if damaged == data:
            continue
        if damaged is None:
            (one / name).unlink()
        else:
            (one / name).write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError) as caught:
            load_checkpoint(one)
        # a manifest of another checkpoint is blamed on the files it isn't about
        blamed = FILES if damage is swap and name == "manifest.json" else [name]
        assert any(f"damaged: {file}:" in str(caught.value) for file in blamed)
        (one / name).write_bytes(data)
        seen[damage, name] += 1
    assert len(seen) == len(DAMAGES) * len(FILES)
    assert number_of(load_checkpoint(one)) == 1


@in_quarters
@pytest.mark.parametrize("name", FILES)
def test_a_flip_of_any_byte_is_noticed(pair, name, quarter):
    chance = random.Random(12)
    path = pair[0] / name
    data = path.read_bytes()
    for place in range(len(data))[quarter::4]:
        flipped = bytes([data[place] ^ (1 << chance.randrange(8))])
        path.write_bytes(data[:place] + flipped + data[place + 1 :])
        with pytest.raises(DamagedCheckpointError, match=f"damaged: {name}:"):
            load_checkpoint(pair[0])
    assert len(data) > 100


def test_further_files_are_harmless(pair):
    (pair[0] / "average.safetensors").write_bytes(b"anything")
    (pair[0] / "notes.txt").write_bytes(b"anything")
    assert number_of(load_checkpoint(pair[0])) == 1


@pytest.mark.parametrize(("name", "damage"), list(zip(FILES * 2, DAMAGES)))
def test_a_store_falls_back_to_the_one_before(tmp_path, name, damage):
    store = CheckpointStore(tmp_path)
    paths = [store.save(sample(n), epoch=0, update=n) for n in range(3)]
    path = paths[2] / name
    damaged = damage(
        path.read_bytes(), random.Random(13), (paths[1] / name).read_bytes()
    )
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
    with pytest.warns(CheckpointWarning, match=f"update-00000002.*{name}|state.json"):
        found, checkpoint = store.load_latest()
    assert found == paths[1]
    assert number_of(checkpoint) == 1
