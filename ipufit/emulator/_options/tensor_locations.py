# SPDX-License-Identifier: Apache-2.0
"""`TensorLocationSettings` and `Options.TensorLocations`: where tensors are kept.

None of this changes a number; the emulator stores and checks it.
"""

from __future__ import annotations

from typing import TypeVar

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.storage import OptionsDict

_SettingsT = TypeVar("_SettingsT", bound="TensorLocationSettings")
_LocationsT = TypeVar("_LocationsT", bound="_TensorLocationOptions")

_MIN_IO_TILES = 32
_MAX_IO_TILES = 192


def _as_flag(name: str, use: bool) -> int:
    require(isinstance(use, bool), f"`{name}` takes a bool, not {use!r}.")
    return int(use)


class TensorLocationSettings(OptionsDict):
    """Where one kind of tensor is kept, empty until told.

    Args:
        **default_values: What the setters would store, by its names.

    Example:
        >>> from ipufit.emulator import Options, TensorLocationSettings
        >>> off_chip = TensorLocationSettings().useOnChipStorage(False)
        >>> options = Options()
        >>> _ = options.TensorLocations.setOptimizerLocation(off_chip)
        >>> options.TensorLocations.location_optimizer
        {'onChip': 0}
    """

    def __init__(self, **default_values: int) -> None:
        super().__init__(default_values)

    def minElementsForOffChip(self: _SettingsT, min_elements: int) -> _SettingsT:
        """Keep smaller tensors on the chip.

        Args:
            min_elements: Elements from which a tensor may leave the chip.

        Returns:
            The settings.

        Raises:
            AssertionError: If `min_elements` isn't an int.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForOffChip(4)
            TensorLocationSettings(minElementsForOffChip=4)
        """
        require(isinstance(min_elements, int), f"An int is needed: {min_elements!r}.")
        self.createOrSet(minElementsForOffChip=min_elements)
        return self

    def minElementsForReplicatedTensorSharding(
        self: _SettingsT, min_elements: int
    ) -> _SettingsT:
        """Don't spread smaller tensors over replicas.

        Args:
            min_elements: Elements from which a tensor may be spread.

        Returns:
            The settings.

        Raises:
            AssertionError: If `min_elements` isn't an int.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().minElementsForReplicatedTensorSharding(8)
            TensorLocationSettings(minElementsForReplicatedTensorSharding=8)
        """
        require(isinstance(min_elements, int), f"An int is needed: {min_elements!r}.")
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self: _SettingsT, use: bool | None = True) -> _SettingsT:
        """Keep the tensors on the chip, or off it.

        Args:
            use: Whether on the chip; None goes back to PopART's choice.

        Returns:
            The settings.

        Raises:
            AssertionError: If `use` is neither a bool nor None.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useOnChipStorage().useOnChipStorage(None)
            TensorLocationSettings()
        """
        if use is None:
            self.deleteIfExists("onChip")
        else:
            self.createOrSet(onChip=_as_flag("useOnChipStorage", use))
        return self

    def useReplicatedTensorSharding(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Spread the tensors over the replicas.

        Args:
            use: Whether to.

        Returns:
            The settings.

        Raises:
            AssertionError: If `use` isn't a bool.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useReplicatedTensorSharding()
            TensorLocationSettings(useReplicatedTensorSharding=1)
        """
        flag = _as_flag("useReplicatedTensorSharding", use)
        self.createOrSet(useReplicatedTensorSharding=flag)
        return self

    def useIOTilesToLoad(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Load the tensors through the IO tiles.

        Args:
            use: Whether to.

        Returns:
            The settings.

        Raises:
            AssertionError: If `use` isn't a bool.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToLoad(False)
            TensorLocationSettings(useIOTilesToLoad=0)
        """
        self.createOrSet(useIOTilesToLoad=_as_flag("useIOTilesToLoad", use))
        return self

    def useIOTilesToStore(self: _SettingsT, use: bool = True) -> _SettingsT:
        """Store the tensors through the IO tiles.

        Args:
            use: Whether to.

        Returns:
            The settings.

        Raises:
            AssertionError: If `use` isn't a bool.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToStore()
            TensorLocationSettings(useIOTilesToStore=1)
        """
        self.createOrSet(useIOTilesToStore=_as_flag("useIOTilesToStore", use))
        return self


class _TensorLocationOptions(OptionsDict):
    """`Options.TensorLocations`: one location for each kind of tensor."""

    location_activation: dict[str, int]
    location_weight: dict[str, int]
    location_optimizer: dict[str, int]
    location_accumulator: dict[str, int]

    def __init__(self) -> None:
        kinds = ("activation", "weight", "optimizer", "accumulator")
        super().__init__({f"location_{kind}": {} for kind in kinds})

    def numIOTiles(self: _LocationsT, num_tiles: int) -> _LocationsT:
        """Reserve tiles of each IPU for transfers.

        Args:
            num_tiles: An even number from 32 to 192.

        Returns:
            The section.

        Raises:
            AssertionError: If `num_tiles` isn't such a number.

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
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the activations.

        Args:
            location: Where; later changes to it have no effect here.

        Returns:
            The section.

        Raises:
            AssertionError: If it isn't a `TensorLocationSettings`.
        """
        return self._set_location("activation", location)

    def setWeightLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the weights; see `setActivationLocation`."""
        return self._set_location("weight", location)

    def setOptimizerLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the optimiser's state; see `setActivationLocation`."""
        return self._set_location("optimizer", location)

    def setAccumulatorLocation(
        self: _LocationsT, location: TensorLocationSettings
    ) -> _LocationsT:
        """Place the gradient accumulators; see `setActivationLocation`."""
        return self._set_location("accumulator", location)

    def _set_location(
        self: _LocationsT, kind: str, location: TensorLocationSettings
    ) -> _LocationsT:
        require(
            isinstance(location, TensorLocationSettings),
            f"The {kind} location must be a TensorLocationSettings: {location!r}.",
        )
        self.set(**{f"location_{kind}": dict(location._values)})
        return self
