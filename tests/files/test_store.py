# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints: order, rotation, the best, and falling back."""

from __future__ import annotations

import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ipufit import BackupAndRestore, IPUModel
from ipufit.checkpoint import (
    CheckpointStore,
    load_checkpoint,
    load_newest,
    read_manifest,
    write_checkpoint,
)
from ipufit.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
)
from tests.files.samples import names, number_of, sample
from tests.files.test_hostile import sign

pytestmark = pytest.mark.floor

NAN = float("nan")
FIVE = [9.0, 1.0, NAN, None, 1.0]


def fill(store, metrics):
    return [
        store.save(sample(update), epoch=0, update=update, metric=metric)
        for update, metric in enumerate(metrics)
    ]


def numbers(paths):
    return [number_of(load_checkpoint(path)) for path in paths]


def damage(path, name="model.safetensors"):
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_order_is_that_of_writing_whatever_the_names_say(tmp_path):
    store = CheckpointStore(tmp_path)
    updates = [5, 123456789, 40, 5, 5]  # gone back, and back to the same
    paths = [store.save(sample(n), epoch=0, update=n) for n in updates]
    assert [path.name for path in paths] == [
        "update-00000005",
        "update-123456789",
        "update-00000040",
        "update-00000005-2",
        "update-00000005-3",
    ]
    assert store.all() == paths
    assert store.latest() == paths[-1]
    assert store.load_latest()[0] == paths[-1]
    paths[0].rename(tmp_path / "x")  # names changed places
    paths[-1].rename(paths[0])
    (tmp_path / "x").rename(paths[-1])
    os.utime(paths[-1])
    assert store.latest() == paths[0]


@pytest.mark.parametrize(
    ("metrics", "keep_last", "keep_best", "mode", "left", "best"),
    [
        (FIVE, None, 1, "max", [0, 1, 2, 3, 4], 0),
        (FIVE, 2, None, "min", [3, 4], 4),
        (FIVE, 2, 1, "min", [3, 4], 4),  # the newest is as good
        (FIVE, 2, 1, "max", [0, 3, 4], 0),
        (FIVE, 1, 1, "min", [4], 4),
        ([None, NAN], 1, 1, "min", [1], None),  # neither is a number
        ([float("inf"), NAN, None], 1, 1, "min", [0, 2], 0),
    ],
)
def test_rotation_keeps_the_last_and_the_best(
    tmp_path, metrics, keep_last, keep_best, mode, left, best
):
    store = CheckpointStore(
        tmp_path, keep_last=keep_last, keep_best=keep_best, mode=mode
    )
    fill(store, metrics)
    assert numbers(store.all()) == left
    assert numbers(filter(None, [store.best()])) == ([] if best is None else [best])
    assert len(names(tmp_path)) == len(left)


def test_while_nobody_knows_which_way_is_better_none_with_a_metric_goes(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1, mode=None)
    assert store.best() is None
    fill(store, [5.0])
    assert numbers([store.best()]) == [0]
    fill(store, [9.0, None, float("nan"), 1.0, None])
    assert [read_manifest(path).moment.value for path in store.all()] == [
        5.0,
        9.0,
        1.0,
        None,
    ]
    with pytest.raises(ConfigError, match="whether more or less is better"):
        store.best()
    store.mode = "max"
    assert read_manifest(store.best()).moment.value == 9.0
    fill(store, [None])
    assert [read_manifest(path).moment.value for path in store.all()] == [9.0, None]


@pytest.mark.parametrize(
    "arguments",
    [{"keep_last": 0}, {"keep_last": -1}, {"keep_best": 2}, {"mode": "auto"}],
)
def test_arguments_are_checked(tmp_path, arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        CheckpointStore(tmp_path, **arguments)


def test_what_isnt_the_stores_is_left_alone(tmp_path):
    foreign = ["best", "update-1", "update-00000001.bak", ".update-00000001.x.trash"]
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "update-00000009").write_text("a file")
    write_checkpoint(tmp_path / "update-00000008", sample(8))  # by hand: no record
    (tmp_path / "update-00000007").symlink_to(tmp_path / "update-00000008")
    before = names(tmp_path)
    store = CheckpointStore(tmp_path, keep_last=1)
    path = fill(store, [None, None, None])[-1]
    assert names(tmp_path) == sorted([*before, path.name])
    assert store.all() == [path]


def test_a_checkpoint_with_somebodys_notes_in_it_isnt_deleted(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    path = store.save(sample(0), epoch=0, update=0)
    (path / "notes.txt").write_text("worth keeping")
    fill(store, [None, None])
    assert path in store.all()
    assert number_of(load_checkpoint(path)) == 0


def test_leftovers_of_killed_processes_are_deleted_at_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    paths = fill(store, [None, None])
    paths[0].rename(tmp_path / ".update-00000000.0123abcd.partial")
    paths[1].rename(tmp_path / ".update-00000001-2.0123abcd.trash")
    assert store.latest() is None
    assert store.load_latest() is None
    path = store.save(sample(3), epoch=0, update=3)
    assert names(tmp_path) == [path.name]


def test_a_damaged_newest_is_passed_over_with_a_warning_that_names_it(tmp_path):
    store = CheckpointStore(tmp_path)
    paths = fill(store, [None, None, None])
    damage(paths[2])
    assert store.latest() == paths[2]  # its manifest is right
    damage(paths[1], "manifest.json")
    with pytest.warns(CheckpointWarning) as caught:
        found, checkpoint = store.load_latest()
    assert (found, number_of(checkpoint)) == (paths[0], 0)
    (warning,) = caught
    text = str(warning.message)
    assert f"'{paths[2]}' is damaged: model.safetensors:" in text
    assert f"'{paths[1]}' is damaged: manifest.json" in text
    assert f"Loaded '{paths[0]}' instead, of epoch 0 and update 0" in text
    assert warning.filename == __file__
    assert store.latest() == paths[0]


def test_damaged_ones_dont_push_good_ones_out(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    paths = fill(store, [None, None])
    damage(paths[1])
    with pytest.warns(CheckpointWarning):
        store.load_latest()
    after = [store.save(sample(n), epoch=0, update=n) for n in (1,)]
    assert store.all() == [paths[0], *after]
    store.save(sample(2), epoch=0, update=2)
    assert paths[0].name not in names(tmp_path)
    assert paths[1].name not in names(tmp_path)  # as old as one that went
    assert numbers(store.all()) == [1, 2]


def test_when_all_are_damaged_training_doesnt_start_anew_unasked(tmp_path):
    store = CheckpointStore(tmp_path)
    for path in fill(store, [None, None]):
        damage(path, "state.json")
    with pytest.raises(DamagedCheckpointError, match="Every checkpoint"):
        store.load_latest()


def stores_of(tmp_path, *updates):
    stores = []
    for name, some in zip("abc", updates):
        stores.append(CheckpointStore(tmp_path / name))
        for update in some:
            stores[-1].save(sample(update), epoch=update // 10, update=update)
    return stores


@pytest.mark.parametrize(
    ("updates", "damaged", "expected"),
    [
        ([[10, 20], [5, 15, 25]], [], 25),
        ([[10, 20], [5, 15]], [], 20),
        ([[], [5]], [], 5),
        ([[30, 20], [25]], [], 25),  # whoever goes back has left 30
        ([[10, 20], [5, 15]], [20], 15),
        ([[10, 20], [5, 15]], [20, 15], 10),
        ([[10], [5]], [10], 5),
        ([[10], [], [5]], [5], 10),
    ],
)
def test_of_several_stores_the_one_that_is_furthest_and_whole(
    tmp_path, updates, damaged, expected
):
    stores = stores_of(tmp_path, *updates)
    for update in damaged:
        (path,) = tmp_path.glob(f"*/update-{update:08d}")
        damage(path)
    passed = [update for update in damaged if update > expected]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path, checkpoint = load_newest(stores)
    assert number_of(checkpoint) == expected == number_of(load_checkpoint(path))
    assert len(caught) == bool(passed)
    for warning in caught:
        assert warning.filename == __file__
        for update in passed:
            assert f"update-{update:08d}' is damaged" in str(warning.message)


def test_of_equals_the_one_that_is_in_a_later_epoch_then_the_first(tmp_path):
    one, other = stores_of(tmp_path, [], [])
    inside = one.save(sample(1), epoch=0, update=8)
    assert load_newest([one, other])[0] == inside
    path = other.save(sample(2), epoch=1, update=8)
    assert load_newest([one, other])[0] == path
    again = one.save(sample(3), epoch=1, update=8)
    assert load_newest([one, other])[0] == again
    assert load_newest([other, one])[0] == path


def test_the_best_that_is_saved_again_is_kept_once(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1, mode="min")
    for update, metric in ((4, 0.5), (8, 0.2), (8, 0.2)):  # it goes on from before 8
        path = store.save(sample(1), epoch=0, update=update, metric=metric)
    assert names(tmp_path) == [path.name]
    store.save(sample(1), epoch=0, update=8, metric=0.3)  # worse, so the best stays
    assert store.best() == path


def test_a_newer_version_isnt_passed_over(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    paths = fill(store, [None])
    sign(paths[0], json.loads((paths[0] / "manifest.json").read_text()), version=2)
    for read in (store.all, store.latest, store.best, store.load_latest):
        with pytest.raises(CheckpointError, match="upgrade ipufit"):
            read()
    path = store.save(sample(1), epoch=0, update=1)  # nor is it in the way, or deleted
    assert names(tmp_path) == [paths[0].name, path.name]


def test_threads_that_save_at_once_take_turns(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)

    def save(number):
        store.save(sample(number), epoch=0, update=number)

    threads = [threading.Thread(target=save, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [read_manifest(path).moment.sequence for path in store.all()]
    assert records == [4, 5, 6]
    assert len(names(tmp_path)) == 3


@pytest.mark.parametrize("keep", [1, 2])
def test_two_stores_that_save_into_one_directory_lose_nothing(tmp_path, keep):
    def save(start):
        store = CheckpointStore(tmp_path, keep_last=keep)
        for number in range(start, start + 20):
            store.save(sample(number), epoch=0, update=number)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(save, start) for start in (0, 100)]
    assert [run.result() for run in runs] == [None, None]
    _, newest = CheckpointStore(tmp_path).load_latest()
    assert number_of(newest) in (19, 119)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_clearing_deletes_checkpoints_and_leaves_what_is_not_the_stores(tmp_path):
    store = CheckpointStore(tmp_path / "runs")
    store.clear()  # nothing is there yet
    paths = fill(store, [0.5, 0.25, 0.1])
    (tmp_path / "runs" / ".update-00000009.0123abcd.partial").mkdir()
    damage(paths[0])
    (paths[1] / "manifest.json").write_text("{")
    (paths[2] / "notes.txt").write_text("mine")
    (tmp_path / "runs" / "notes.txt").write_text("mine too")
    store.clear()
    assert names(tmp_path / "runs") == ["notes.txt", paths[2].name]
    assert (paths[2] / "notes.txt").read_text() == "mine"
    for notes in (paths[2] / "notes.txt", tmp_path / "runs" / "notes.txt"):
        notes.unlink()
    store.clear()
    assert names(tmp_path) == []
    fill(store, [0.5])
    assert numbers(store.all()) == [0]


def test_updates_that_are_saved_again_count_once(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    for update in (10, 20, 30, 20, 30, 20):  # gone back to 10, and to 20
        store.save(sample(update), epoch=0, update=update)
    assert [path.name for path in store.all()] == [
        "update-00000010",
        "update-00000030-2",
        "update-00000020",
    ]


@pytest.mark.parametrize("kind", ["partial", "old", "trash"])
def test_links_that_look_like_leftovers_lead_nowhere(tmp_path, kind):
    write_checkpoint(tmp_path / "theirs", sample(1))
    before = names(tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    links = [tmp_path / f".one.12345678.{kind}"]
    links.append(tmp_path / "run" / f".update-00000001.12345678.{kind}")
    for link in links:
        link.symlink_to(tmp_path / "theirs")
    for number in (2, 3):
        write_checkpoint(tmp_path / "one", sample(number))
        CheckpointStore(tmp_path / "run").save(sample(number), epoch=0, update=1)
    assert names(tmp_path / "theirs") == before
    assert number_of(load_checkpoint(tmp_path / "one")) == 3


def test_a_checkpoint_that_is_a_link_is_refused_and_not_passed_over(tmp_path):
    path = CheckpointStore(tmp_path / "disk").save(sample(1), epoch=0, update=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / path.name).symlink_to(path)
    model = IPUModel(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    backup = BackupAndRestore(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        model.fit(torch.ones(4, 2), torch.ones(4, 1), 2, verbose=0, callbacks=backup)
