# SPDX-License-Identifier: Apache-2.0
"""Options that one run adds to those of the config: synthetic data, and a profile."""

from __future__ import annotations

from dataclasses import dataclass

from ipufit._poptorch import poptorch
from ipufit.batching import check_positive
from ipufit.errors import ConfigError

from .ipu_config import IPUConfig
from .own_options import settings_of

PROFILE_DIR = "profile"
"""Directory of profiles, where the config names none."""

_PROFILED_RUNS = "autoReport.executionProfileProgramRunCount"


@dataclass(frozen=True)
class Instruments:
    """Settings of the programs of one run, besides those of the config.

    Attributes:
        is_synthetic: Whether devices make their inputs themselves, and nothing comes
            back from them.
        profiled_calls: Number of training calls that a PopVision report shows; None for
            what the config says.

    Raises:
        ConfigError: `is_synthetic` is no bool, or `profiled_calls` isn't 1 or more.

    Example:
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.Sum)
        >>> Instruments(profiled_calls=3).set_training(options, IPUConfig())
        >>> options.toDict()["engineOptions"]["autoReport.directory"]
        'profile'
    """

    is_synthetic: bool = False
    profiled_calls: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.is_synthetic, bool):
            raise ConfigError(
                f"synthetic={self.is_synthetic!r} is neither True nor False."
            )
        if self.profiled_calls is not None:
            check_positive("profile_steps", self.profiled_calls)

    def set_training(self, options: poptorch.Options, config: IPUConfig) -> None:
        """Set options of training; engine options are added to those there are.

        Args:
            options: Options that the config has made.
            config: Says where to write profiles, and which process this is: only
                process 0 writes them.
        """
        self.set_inference(options)
        if self.profiled_calls is None or not config.process.is_first:
            return
        engine_options = settings_of(options).get("engineOptions", {})
        if "autoReport.directory" not in engine_options:
            options.enableProfiling(str(config.profile_dir or PROFILE_DIR))
            engine_options = settings_of(options)["engineOptions"]
        counted = {_PROFILED_RUNS: str(self.profiled_calls)}
        options._Popart.setEngineOptions({**engine_options, **counted})

    def set_inference(self, options: poptorch.Options) -> None:
        """Set options of inference, which is never profiled."""
        if self.is_synthetic:
            options.enableSyntheticData(True)


NO_INSTRUMENTS = Instruments()
