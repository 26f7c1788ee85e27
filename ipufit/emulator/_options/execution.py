# SPDX-License-Identifier: Apache-2.0
"""The setters of `Options` that shape a call: counts, replicas, outputs, seeds."""

from __future__ import annotations

import logging
from typing import TypeVar

import torch

from ipufit.emulator._ground.checks import require
from ipufit.emulator._options.state import OptionsState
from ipufit.emulator._options.strategies import ExecutionStrategy
from ipufit.emulator.enums import CommGroupType, OutputMode

logger = logging.getLogger("poptorch::python")

_OptionsT = TypeVar("_OptionsT", bound="ExecutionOptions")


class ExecutionOptions(OptionsState):
    """Setters for what one call of a model computes and returns."""

    def deviceIterations(self: _OptionsT, device_iterations: int) -> _OptionsT:
        """Set how many times the device runs its loop in one call.

        Args:
            device_iterations: Iterations; when training, weight updates.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't an int. Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().deviceIterations(16).device_iterations
            16
        """
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self: _OptionsT, replication_factor: int) -> _OptionsT:
        """Set how many copies of the model this process runs.

        Args:
            replication_factor: Replicas of one process.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't an int. Any int is stored.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().replicationFactor(4).replication_factor
            4
        """
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(
        self: _OptionsT, input_group_size: int, input_group_type: CommGroupType
    ) -> _OptionsT:
        """Feed the same inputs to every replica of a group.

        Call `replicationFactor` first: the sizes are compared now, not later.

        Args:
            input_group_size: Replicas in a group.
            input_group_type: How groups are formed. `NoGrouping` means groups
                of one, whatever the size.

        Returns:
            The options.

        Raises:
            ValueError: If the type is `All`, or the size doesn't divide the
                replication factor.
            ZeroDivisionError: If the size is 0.
            AssertionError: If the type isn't a `CommGroupType`; the size is
                stored all the same.

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
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def autoRoundNumIPUs(
        self: _OptionsT, auto_round_num_ipus: bool = True
    ) -> _OptionsT:
        """Reserve IPUs up to the next power of two; the added ones stay idle.

        Without it a pod refuses other numbers, the emulator only in strict mode.

        Args:
            auto_round_num_ipus: Whether to.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't a bool.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().autoRoundNumIPUs().auto_round_num_ipus
            True
        """
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def broadcastBuffers(self: _OptionsT, broadcast_buffers: bool = True) -> _OptionsT:
        """Say that buffers are the same on all replicas.

        A model that changes a buffer and has several replicas compiles with
        False only; then each replica has its own.

        Args:
            broadcast_buffers: Whether they are the same.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't a bool.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().broadcastBuffers(False).broadcast_buffers
            False
        """
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def setExecutionStrategy(self: _OptionsT, strategy: ExecutionStrategy) -> _OptionsT:
        """Choose how blocks are spread over IPUs and time.

        Args:
            strategy: Kept by reference; models work on a copy.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't an execution strategy.

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
        """Limit the memory convolutions and products may use for temporary data.

        Args:
            available_memory_proportion: Proportions by IPU: `{"IPU0": 0.5}`.
                They replace earlier ones.

        Returns:
            The options.

        Raises:
            AssertionError: If a key doesn't start with "IPU".
            ValueError: If no integer follows.
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
        self.set(available_memory_proportion=proportions)
        return self

    def outputMode(
        self: _OptionsT,
        output_mode: OutputMode,
        output_return_period: int | None = None,
    ) -> _OptionsT:
        """Choose the micro-batches whose outputs a call returns.

        Args:
            output_mode: Which ones.
            output_return_period: N of `OutputMode.EveryN`. With other modes it
                is stored, but has no effect.

        Returns:
            The options.

        Raises:
            AssertionError: If the mode isn't an `OutputMode`, or `EveryN` comes
                without a positive period.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> Options().outputMode(OutputMode.EveryN, 4).output_return_period
            4
        """
        require(
            isinstance(output_mode, OutputMode), f"{output_mode!r}: use OutputMode."
        )
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
        self.set(
            output_mode=output_mode.value,
            output_return_period=output_return_period or 1,
        )
        return self

    def defaultOutputMode(self) -> bool:
        """Tell whether the output mode is left to the kind of model.

        Returns:
            Whether it is `OutputMode.Default`.

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
        """Ask for a tensor inside the model to come back too.

        As in PopTorch, this works on frozen options and checks nothing; compiling
        refuses names that the model doesn't have.

        Args:
            short_name: The name to read it by, with
                `PoplarExecutor.getAnchoredTensor`.
            long_name: Its name inside the model, one of
                `PoplarExecutor.getTensorNames`.
            output_mode: Without effect, as in PopTorch: anchored tensors come back as
                the outputs do.
            output_return_period: Likewise.

        Example:
            >>> from ipufit.emulator import Options, OutputMode
            >>> options = Options()
            >>> options.anchorTensor("grad", "Gradient___fc.weight", OutputMode.All, 3)
            >>> options.anchored_tensors["grad"][1:]
            [False, <OutputMode.All: 2>, 1]
        """
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        self.anchored_tensors[short_name] = [
            long_name,
            output_mode is None,
            output_mode,
            period,
        ]

    def randomSeed(self: _OptionsT, random_seed: int) -> _OptionsT:
        """Seed torch now, the device and shuffling across processes later.

        As in PopTorch, torch is seeded even if the options are frozen.

        Args:
            random_seed: The seed.

        Returns:
            The options.

        Raises:
            AssertionError: If it isn't an int.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().randomSeed(42).random_seed
            42
        """
        require(isinstance(random_seed, int), f"The seed is an int: {random_seed!r}.")
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def relaxOptimizerAttributesChecks(
        self: _OptionsT, relax: bool = True
    ) -> _OptionsT:
        """Don't warn about optimiser attributes that have no effect.

        Args:
            relax: Whether not to.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().relaxOptimizerAttributesChecks()
        """
        self._relax_optimizer_checks = relax
        return self

    def enableStableNorm(self: _OptionsT, enabled: bool) -> _OptionsT:
        """Compute variances in two passes.

        Args:
            enabled: Whether to.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().enableStableNorm(True)
        """
        self._popart.set("enableStableNorm", enabled)
        return self

    def updatableNamedBuffers(self: _OptionsT, buffers: list[str]) -> _OptionsT:
        """Name the buffers that the host may change while the model is loaded.

        `PoplarExecutor.copyNamedBuffersToDevice` uploads them.

        Args:
            buffers: Their names in the module.

        Returns:
            The options.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().updatableNamedBuffers(["norm.running_mean"])
        """
        self._popart.set("updatableNamedBuffers", buffers)
        return self
