# SPDX-License-Identifier: Apache-2.0
"""`TensorLocationSettings` and `Options.TensorLocations`: where tensors are kept.

The emulator checks and stores them; they change no number.
"""

from __future__ import annotations

from typing import TypeVar

from ipufit.emulator._ground.checks import require, require_type
from ipufit.emulator._options.storage import OptionsDict

_SettingsT = TypeVar("_SettingsT", bound="TensorLocationSettings")
_LocationsT = TypeVar("_LocationsT", bound="_TensorLocationOptions")

_MIN_IO_TILES = 32
_MAX_IO_TILES = 192


class TensorLocationSettings(OptionsDict):
    """Settings for where one kind of tensor is kept; a new object has none.

    Args:
        **default_values: First values, by the names in `repr`.

    Example:
        >>> from ipufit.emulator import Options, TensorLocationSettings
        >>> off_chip = TensorLocationSettings().useOnChipStorage(False)
        >>> options = Options()
        >>> _ = options.TensorLocations.setOptimizerLocation(off_chip)
        >>> options.TensorLocations.location_optimizer
        {'onChip': 0}
    """

    def __init__(self, **default_values: int) -> None:
        super().__init__(**default_values)

    def minElementsForOffChip(self: _SettingsT, min_elements: int) -> _SettingsT:
        """Keep tensors of fewer elements on the chip.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForOffChip(4)
            TensorLocationSettings(minElementsForOffChip=4)
        """
        require_type("min_elements", min_elements, int)
        return self._store(minElementsForOffChip=min_elements)

    def minElementsForReplicatedTensorSharding(
        self: _SettingsT, min_elements: int
    ) -> _SettingsT:
        """Keep tensors of fewer elements whole, on every replica.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForReplicatedTensorSharding(8)
            TensorLocationSettings(minElementsForReplicatedTensorSharding=8)
        """
        require_type("min_elements", min_elements, int)
        return self._store(minElementsForReplicatedTensorSharding=min_elements)

    def useOnChipStorage(self: _SettingsT, use: bool | None = True) -> _SettingsT:
        """Choose whether the tensors stay on the chip; None leaves it to PopART.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useOnChipStorage().useOnChipStorage(None)
            TensorLocationSettings()
        """
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._store_flag("onChip", use)

    def useReplicatedTensorSharding(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Choose whether the tensors are spread over the replicas.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useReplicatedTensorSharding()
            TensorLocationSettings(useReplicatedTensorSharding=1)
        """
        return self._store_flag("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Choose whether the tensors are loaded through the IO tiles.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToLoad(False)
            TensorLocationSettings(useIOTilesToLoad=0)
        """
        return self._store_flag("useIOTilesToLoad", use)

    def useIOTilesToStore(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Choose whether the tensors are stored through the IO tiles.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToStore()
            TensorLocationSettings(useIOTilesToStore=1)
        """
        return self._store_flag("useIOTilesToStore", use)

    def _store_flag(self: _SettingsT, name: str, use: bool) -> _SettingsT:
        require_type(name, use, bool)
        return self._store(**{name: int(use)})


class _TensorLocationOptions(OptionsDict):
    """`Options.TensorLocations`: settings for each kind of tensor."""

    def __init__(self) -> None:
        self.location_activation: dict[str, int] = {}
        self.location_weight: dict[str, int] = {}
        self.location_optimizer: dict[str, int] = {}
        self.location_accumulator: dict[str, int] = {}
        super().__init__()

    def numIOTiles(self: _LocationsT, num_tiles: int) -> _LocationsT:
        """Reserve tiles of each IPU for transfers.

        Raises:
            AssertionError: If `num_tiles` isn't an even number from 32 to 192.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> _ = options.TensorLocations.numIOTiles(64)
        """
        require(
            isinstance(num_tiles, int)
            and _MIN_IO_TILES <= num_tiles <= _MAX_IO_TILES
            and num_tiles % 2 == 0,
            f"numIOTiles must be an even number between {_MIN_IO_TILES} and "
            f"{_MAX_IO_TILES}. Got {num_tiles!r}.",
        )
        return self._store(numIOTiles=num_tiles)

    def setActivationLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the activations where `location` says at this moment."""
        return self._set_location("activation", location)

    def setWeightLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the weights where `location` says at this moment."""
        return self._set_location("weight", location)

    def setOptimizerLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the optimiser's state where `location` says at this moment."""
        return self._set_location("optimizer", location)

    def setAccumulatorLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the gradient accumulators where `location` says at this moment."""
        return self._set_location("accumulator", location)

    def _set_location(
        self: _LocationsT, kind: str, location: TensorLocationSettings
    ) -> _LocationsT:
        name = f"location_{kind}"
        require_type(name, location, TensorLocationSettings)
        return self._store(**{name: location.toDict()})
