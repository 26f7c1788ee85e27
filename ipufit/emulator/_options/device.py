# SPDX-License-Identifier: Apache-2.0
"""The setters of `Options` about the device: which one, when, and its cache."""

from __future__ import annotations

from typing import TypeVar

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.state import OptionsState
from ipufit.emulator.enums import ConnectionType, SyncPattern

_OptionsT = TypeVar("_OptionsT", bound="DeviceOptions")

# PopART's SyntheticDataMode: numbers made on the device, or none.
_SYNTHETIC_RANDOM = 2
_SYNTHETIC_OFF = 0


class DeviceOptions(OptionsState):
    """Setters for the device a model runs on."""

    def connectionType(self: _OptionsT, connection_type: ConnectionType) -> _OptionsT:
        """Choose when models attach to the device.

        Args:
            connection_type: When.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't a `ConnectionType`.

        Example:
            >>> from ipufit.emulator import ConnectionType, Options
            >>> Options().connectionType(ConnectionType.OnDemand).connection_type
            1
        """
        require(
            isinstance(connection_type, ConnectionType),
            f"{connection_type!r}: use ConnectionType.",
        )
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self: _OptionsT, sync_pattern: SyncPattern) -> _OptionsT:
        """Choose which IPUs wait for each other.

        Args:
            sync_pattern: Which.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't a `SyncPattern`.

        Example:
            >>> from ipufit.emulator import Options, SyncPattern
            >>> Options().syncPattern(SyncPattern.SinglePipeline).sync_pattern
            1
        """
        require(
            isinstance(sync_pattern, SyncPattern), f"{sync_pattern!r}: use SyncPattern."
        )
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self: _OptionsT, ipu_id: int) -> _OptionsT:
        """Run on one particular device.

        Args:
            ipu_id: Its number, as `gc-info` lists it.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't an int.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuId(7).ipu_id
            7
        """
        require(isinstance(ipu_id, int), f"A device number is an int: {ipu_id!r}.")
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useIpuModel(self: _OptionsT, use_model: bool) -> _OptionsT:
        """Run on Graphcore's simulator, whatever the environment says.

        Here it is the same emulation without a pod: no IPUs are reserved or scarce,
        and their number needn't be a power of two, even in strict mode.

        Args:
            use_model: Whether to.

        Returns:
            The options.

        Raises:
            AssertionError: If a later call's type differs from the first's.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuModel(True).use_model
            True
        """
        self.createOrSet(use_model=use_model)
        return self

    def useOfflineIpuTarget(self: _OptionsT, ipu_version: int = 2) -> _OptionsT:
        """Compile for a kind of IPU without having one.

        It implies `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().useOfflineIpuTarget(21)
            >>> options.connection_type, options.ipu_version
            (2, 21)
        """
        self.connectionType(ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self

    def enableExecutableCaching(self: _OptionsT, path: str | None) -> _OptionsT:
        """Keep compiled executables in a directory, on a pod.

        The emulator keeps nothing: compiling here is tracing, which has to run the
        module's Python every time. It says so once, at level INFO.

        Args:
            path: The directory; None stops it.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableExecutableCaching("cache")
            >>> options._Popart.options["cachePath"]
            'cache'
        """
        self._popart.set("enableEngineCaching", path is not None)
        if path is not None:
            self._popart.set("cachePath", path)
        return self

    def enableSyntheticData(self: _OptionsT, enabled: bool) -> _OptionsT:
        """Run without any transfer from or to the host.

        The device makes its inputs itself, and outputs are zeros of the right shape;
        in PopTorch they are whatever was in that memory.

        Args:
            enabled: Whether to.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableSyntheticData(True)
        """
        mode = _SYNTHETIC_RANDOM if enabled else _SYNTHETIC_OFF
        self._popart.set("syntheticDataMode", mode)
        return self
