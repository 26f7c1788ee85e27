# SPDX-License-Identifier: Apache-2.0
"""The stage of a pipeline that a forward pass has come to."""

from __future__ import annotations

from ipufit.blocks import Begun, Blocks
from ipufit.config import IPUConfig
from ipufit.errors import ConfigError
from ipufit.placement import stage_and_ipu


class Position:
    """The stage that a pass has come to.

    Args:
        config: Names the stages.
        blocks: Blocks that `forward` has begun so far; it grows.

    Raises:
        ConfigError: A pass comes to a block whose place only own options know.
    """

    def __init__(self, config: IPUConfig, blocks: Blocks) -> None:
        self._config = config
        self._blocks = blocks
        self._num_seen = 0
        first = config.first_block
        self._block: Begun | None = None if first is None else (first, None)
        self._place = self._place_of(self._block)

    @property
    def place(self) -> tuple[int, int]:
        """Number of the stage, and of its IPU."""
        if len(self._blocks) > self._num_seen:
            self._num_seen = len(self._blocks)
            self.begin(self._blocks[-1])
        return self._place

    def begin(self, block: Begun | None) -> None:
        """Come to a block, if it is one."""
        if block is not None and block != self._block:
            self._block, self._place = block, self._place_of(block)

    def _place_of(self, block: Begun | None) -> tuple[int, int]:
        if block is None:
            return 0, 0
        stage, ipu = stage_and_ipu(block, self._config)
        if stage is ipu is None and self._config.training_options is not None:
            raise ConfigError(
                f"The module begins the block {block[0]!r}, and training_options have "
                "a strategy of their own, so its stage and its IPU aren't known here. "
                "Name the stages in pipeline= instead, and give what the options "
                "change as customize=, a function of the options that ipufit makes."
            )
        ipu = (stage or 0) if ipu is None else ipu
        return (ipu if stage is None else stage), ipu
