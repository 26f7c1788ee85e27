# SPDX-License-Identifier: Apache-2.0
"""Setters of `Options` that shape a call: counts, replicas, outputs, seeds."""

from __future__ import annotations

from typing import TypeVar

import torch

from ipufit.emulator._ground.checks import require, require_type
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._options.state import OptionsState
from ipufit.emulator._options.strategies import ExecutionStrategy
from ipufit.emulator.enums import CommGroupType, OutputMode

_OptionsT = TypeVar("_OptionsT", bound="ExecutionOptions")


class ExecutionOptions(OptionsState):
    """Setters for what one call of a model computes and returns."""

    def deviceIterations(self: _OptionsT, device_iterations: int) -> _OptionsT:
        """Set how many times the device runs its loop in one call.

        In training each iteration is one update of the weights. Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().deviceIterations(16).device_iterations
            16
        """
        return self._store(device_iterations=device_iterations)

    def replicationFactor(self: _OptionsT, replication_factor: int) -> _OptionsT:
        """Set how many replicas of the model this process runs.

        Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().replicationFactor(4).replication_factor
            4
        """
        return self._store(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self: _OptionsT, input_group_size: int, input_group_type: CommGroupType
    ) -> _OptionsT:
        """Feed the same inputs to every replica of a group.

        Call `replicationFactor` first: the sizes are compared here only.

        Args:
            input_group_size: Replicas in a group.
            input_group_type: `Consecutive` or `Orthogonal`. `NoGrouping` means
                groups of one, whatever the size.

        Raises:
            ValueError: If the type is `All`, or the size doesn't divide the
                replication factor.
            ZeroDivisionError: If the size is 0.
            AssertionError: If the type isn't a `CommGroupType`. The size is
                stored nevertheless.

        Example:
            >>> from ipufit.emulator import CommGroupType, Options
            >>> options = Options().replicationFactor(4)
            >>> options.inputReplicaGrouping(2, CommGroupType.Orthogonal).input_cgt.name
            'Orthogonal'
        """
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        if input_group_type == CommGroupType.All:
            raise ValueError(
                "CommGroupType.All isn't supported for inputs: group all "
                f"{self.replication_factor} replicas with CommGroupType.Consecutive."
            )
        replicas = self.replication_factor
        if replicas < input_group_size or replicas % input_group_size != 0:
            raise ValueError(
                f"{replicas} replicas can't be put into groups of {input_group_size}: "
                "the size must divide the replication factor."
            )
        return self._store(
            input_group_size=input_group_size, input_cgt=input_group_type
        )

    def autoRoundNumIPUs(
        self: _OptionsT, auto_round_num_ipus: bool = True
    ) -> _OptionsT:
        """Reserve IPUs up to the next power of two; the added ones stay idle.

        Without it a pod refuses other numbers; the emulator does in strict mode only.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().autoRoundNumIPUs().auto_round_num_ipus
            True
        """
        return self._store(auto_round_num_ipus=auto_round_num_ipus)

    def broadcastBuffers(self: _OptionsT, broadcast_buffers: bool = True) -> _OptionsT:
        """Say whether all replicas share their buffers.

        A model with several replicas that changes a buffer compiles with False only:
        then each replica has its own.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().broadcastBuffers(False).broadcast_buffers
            False
        """
        return self._store(broadcast_buffers=broadcast_buffers)

    def setExecutionStrategy(self: _OptionsT, strategy: ExecutionStrategy) -> _OptionsT:
        """Choose how blocks are spread over IPUs and time.

        The options keep the strategy itself; models work on a copy.

        Example:
            >>> from ipufit.emulator import Options, ShardedExecution
            >>> options = Options().setExecutionStrategy(ShardedExecution())
        """
        require(
            isinstance(strategy, ExecutionStrategy),
            "An execution strategy is a PipelinedExecution, ShardedExecution, "
            f"SerialPhasedExecution or ParallelPhasedExecution, not {strategy!r}.",
        )
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(
        self: _OptionsT, available_memory_proportion: dict[str, float]
    ) -> _OptionsT:
        """Limit the memory for temporary data of convolutions and matrix products.

        Args:
            available_memory_proportion: Proportion of each IPU's memory, from 0 to
                1: `{"IPU0": 0.5}`. It replaces earlier proportions.

        Raises:
            AssertionError: If a key doesn't start with "IPU".
            ValueError: If no integer follows "IPU".
            AttributeError: If a key isn't a string.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().setAvailableMemoryProportion({"IPU1": 0.2})
            >>> options.available_memory_proportion
            {1: 0.2}
        """
        proportions = {}
        for name, proportion in available_memory_proportion.items():
            require(name.startswith("IPU"), f"Key {name!r}: use 'IPU0', 'IPU1', ...")
            proportions[int(name[len("IPU") :])] = proportion
        return self._store(available_memory_proportion=proportions)

    def outputMode(
        self: _OptionsT,
        output_mode: OutputMode,
        output_return_period: int | None = None,
    ) -> _OptionsT:
        """Choose the micro-batches whose outputs a call returns.

        Args:
            output_mode: Any member; `Default` leaves the choice to the model.
            output_return_period: N of `OutputMode.EveryN`. With other modes it
                is stored, but has no effect.

        Raises:
            AssertionError: If `EveryN` comes without a positive period.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> Options().outputMode(OutputMode.EveryN, 4).output_return_period
            4
        """
        require_type("output_mode", output_mode, OutputMode)
        if output_mode is OutputMode.EveryN:
            require(
                output_return_period and output_return_period > 0,
                "OutputMode.EveryN anchor must have a positive period, not "
                f"{output_return_period!r}: outputMode(OutputMode.EveryN, 2).",
            )
        elif output_return_period is not None:
            logger.info(
                "The output period %s is ignored: only OutputMode.EveryN has one.",
                output_return_period,
            )
        return self._store(
            output_mode=output_mode.value,
            output_return_period=output_return_period or 1,
        )

    def defaultOutputMode(self) -> bool:
        """Tell whether the output mode is `Default`, so that the model decides.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().defaultOutputMode()
            True
        """
        return self.output_mode == OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int = 1,
    ) -> None:
        """Have calls return a tensor from inside the model too.

        As in PopTorch, this works on frozen options and checks nothing; compiling
        refuses names that the model doesn't have. Neither mode nor period has an
        effect: anchored tensors come back as the outputs do.

        Args:
            short_name: Name for `PoplarExecutor.getAnchoredTensor`.
            long_name: Name inside the model, one of `PoplarExecutor.getTensorNames`.
            output_mode: Stored only; None stands for that of the outputs.
            output_return_period: Stored only; 1 without `OutputMode.EveryN`.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> options = Options()
            >>> options.anchorTensor("grad", "Gradient___fc.weight", OutputMode.All, 3)
            >>> options.anchored_tensors["grad"][1:]
            [False, <OutputMode.All: 2>, 1]
        """
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        anchor = [long_name, output_mode is None, output_mode, period]
        self.anchored_tensors[short_name] = anchor

    def randomSeed(self: _OptionsT, random_seed: int) -> _OptionsT:
        """Seed torch at once, and the device and shared shuffling when they start.

        As in PopTorch, torch is seeded even if the options are frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().randomSeed(42).random_seed
            42
        """
        require_type("random_seed", random_seed, int)
        if torch.cuda.is_available() or torch.backends.mps.is_available():
            torch.manual_seed(random_seed)
        else:  # It asks for each kind of device, longer than a small call takes.
            torch.default_generator.manual_seed(random_seed)
        return self._store(random_seed=random_seed)

    def relaxOptimizerAttributesChecks(
        self: _OptionsT, relax: bool = True
    ) -> _OptionsT:
        """Choose whether unused attributes of an optimiser raise no warning.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().relaxOptimizerAttributesChecks()
        """
        self._relax_optimizer_checks = relax
        return self

    def enableStableNorm(self: _OptionsT, enabled: bool) -> _OptionsT:
        """Choose whether normalisations compute variances in two steps, stably.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableStableNorm(True)
        """
        self._popart.set("enableStableNorm", enabled)
        return self

    def updatableNamedBuffers(self: _OptionsT, buffers: list[str]) -> _OptionsT:
        """Name the module's buffers that the host may change after compiling.

        `PoplarExecutor.copyNamedBuffersToDevice` uploads them.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().updatableNamedBuffers(["norm.running_mean"])
        """
        self._popart.set("updatableNamedBuffers", buffers)
        return self
