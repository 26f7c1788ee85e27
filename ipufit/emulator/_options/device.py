# SPDX-License-Identifier: Apache-2.0
"""Setters of `Options` for the device: which one, when, and its cache."""

from __future__ import annotations

from typing import TypeVar

from ipufit.emulator._ground.checks import require_type
from ipufit.emulator._options.state import OptionsState
from ipufit.emulator.enums import ConnectionType, SyncPattern

_OptionsT = TypeVar("_OptionsT", bound="DeviceOptions")

_OFF, _RANDOM_NORMAL = 0, 2  # members of PopART's `SyntheticDataMode`


class DeviceOptions(OptionsState):
    """Setters for the device a model runs on."""

    def connectionType(self: _OptionsT, connection_type: ConnectionType) -> _OptionsT:
        """Choose when models attach to the device.

        Example:
            >>> from ipufit.emulator import ConnectionType, Options
            >>> Options().connectionType(ConnectionType.OnDemand).connection_type
            1
        """
        require_type("connection_type", connection_type, ConnectionType)
        return self._store(connection_type=connection_type.value)

    def syncPattern(self: _OptionsT, sync_pattern: SyncPattern) -> _OptionsT:
        """Choose which IPUs wait for each other.

        Example:
            >>> from ipufit.emulator import Options, SyncPattern
            >>> Options().syncPattern(SyncPattern.SinglePipeline).sync_pattern
            1
        """
        require_type("sync_pattern", sync_pattern, SyncPattern)
        return self._store(sync_pattern=sync_pattern.value)

    def useIpuId(self: _OptionsT, ipu_id: int) -> _OptionsT:
        """Choose one device by its number, as `gc-info` lists it.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuId(7).ipu_id
            7
        """
        require_type("ipu_id", ipu_id, int)
        return self._store(ipu_id=ipu_id)

    def useIpuModel(self: _OptionsT, use_model: bool) -> _OptionsT:
        """Choose whether to run on Graphcore's simulator.

        The environment has no say then. The emulator emulates no pod: no IPUs are
        reserved or scarce, and their number needn't be a power of two, even in strict
        mode.

        Raises:
            AssertionError: If a second value has another type than the first.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().useIpuModel(True).use_model
            True
        """
        return self._store(use_model=use_model)

    def useOfflineIpuTarget(self: _OptionsT, ipu_version: int = 2) -> _OptionsT:
        """Compile for a kind of IPU without having one.

        It implies `ConnectionType.Never`.

        Args:
            ipu_version: 1, 2 or 21, unchecked.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().useOfflineIpuTarget(21)
            >>> options.connection_type, options.ipu_version
            (2, 21)
        """
        self.connectionType(ConnectionType.Never)
        return self._store(ipu_version=ipu_version)

    def enableExecutableCaching(self: _OptionsT, path: str | None) -> _OptionsT:
        """Keep compiled executables in a directory, on a pod.

        The emulator keeps none and logs that once, at level INFO: it compiles by
        tracing, which has to run the module's Python every time.

        Args:
            path: Directory; None turns caching off.

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
        """Choose whether to run without any transfer from or to the host.

        The device then draws its inputs itself. Outputs are zeros of the right shape;
        in PopTorch their values are undefined.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableSyntheticData(True)
        """
        self._popart.set("syntheticDataMode", _RANDOM_NORMAL if enabled else _OFF)
        return self
