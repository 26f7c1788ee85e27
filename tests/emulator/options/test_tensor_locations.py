# SPDX-License-Identifier: Apache-2.0
"""`TensorLocationSettings` and `Options.TensorLocations`."""

from __future__ import annotations

import pytest

from ipufit.emulator.options import Options, TensorLocationSettings

KINDS = ["Activation", "Weight", "Optimizer", "Accumulator"]


def _values(settings):
    return dict(settings._values)


def test_settings_start_empty():
    assert _values(TensorLocationSettings()) == {}


def test_settings_store_integers():
    settings = (
        TensorLocationSettings()
        .minElementsForOffChip(10)
        .minElementsForReplicatedTensorSharding(20)
        .useOnChipStorage(False)
        .useReplicatedTensorSharding()
        .useIOTilesToLoad(True)
        .useIOTilesToStore(False)
    )

    assert _values(settings) == {
        "minElementsForOffChip": 10,
        "minElementsForReplicatedTensorSharding": 20,
        "onChip": 0,
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
    }
    assert {type(value) for value in _values(settings).values()} == {int}


def test_none_forgets_on_chip_storage():
    settings = TensorLocationSettings().useOnChipStorage(True)
    assert _values(settings.useOnChipStorage(None)) == {}


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("minElementsForOffChip", 1.0),
        ("minElementsForReplicatedTensorSharding", "1"),
        ("useOnChipStorage", 1),
        ("useReplicatedTensorSharding", None),
        ("useIOTilesToLoad", None),
        ("useIOTilesToStore", 0),
    ],
)
def test_settings_of_another_type_are_refused(setter, value):
    settings = TensorLocationSettings()
    with pytest.raises(AssertionError):
        getattr(settings, setter)(value)
    assert _values(settings) == {}


@pytest.mark.parametrize("tiles", [32, 64, 192])
def test_valid_numbers_of_io_tiles_are_stored(tiles):
    options = Options()
    assert options.TensorLocations.numIOTiles(tiles) is options.TensorLocations
    assert options.TensorLocations._values["numIOTiles"] == tiles


@pytest.mark.parametrize("tiles", [31, 30, 33, 193, 194, 64.0, None])
def test_other_numbers_of_io_tiles_are_refused(tiles):
    with pytest.raises(
        AssertionError, match="numIOTiles must be an even number between 32 and 192"
    ):
        Options().TensorLocations.numIOTiles(tiles)


@pytest.mark.parametrize("kind", KINDS)
def test_a_location_is_a_snapshot(kind):
    locations = Options().TensorLocations
    settings = TensorLocationSettings().useOnChipStorage(False)

    assert getattr(locations, f"set{kind}Location")(settings) is locations
    settings.useOnChipStorage(True)

    assert locations(f"location_{kind.lower()}") == {"onChip": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_location_must_be_settings(kind):
    with pytest.raises(AssertionError, match="TensorLocationSettings"):
        getattr(Options().TensorLocations, f"set{kind}Location")({"onChip": 0})


def test_locations_freeze_with_their_options():
    options = Options()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.TensorLocations.numIOTiles(32)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.TensorLocations.setWeightLocation(TensorLocationSettings())


def test_settings_can_be_made_with_values():
    settings = TensorLocationSettings(onChip=0)
    assert settings.useOnChipStorage(True).toDict() == {"onChip": 1}
