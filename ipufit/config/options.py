# SPDX-License-Identifier: Apache-2.0
"""Options of PopTorch for a config: what it derives, and what the user adds or has."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import torch

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import ConfigError

from .memory import memory_proportions, set_memory
from .own_options import (
    MADE_FOR_INFERENCE,
    MADE_FOR_TRAINING,
    check_own_options,
    customized,
)
from .pipeline import strategy_of
from .processes import new_options, set_process

Config = Any
"""An `IPUConfig`, whose file has these functions as methods."""


def build_training_options(
    self: Config,
    plan: BatchPlan,
    *,
    own_stages: int = 1,
    sums_gradients: bool = False,
    returns_outputs: bool = False,
    scales_automatically: bool = False,
    divides_early: bool = False,
    anchors: Mapping[str, str] | None = None,
) -> poptorch.Options:
    """Build the options of the training program.

    Args:
        plan: From `training_plan`.
        own_stages: As for `training_plan`.
        sums_gradients: If True, the gradients of an update are added and not
            averaged: for losses that are sums themselves.
        returns_outputs: If True, the outputs of every micro-batch come back
            besides figures.
        scales_automatically: If True, automatic loss scaling is on.
        divides_early: If True, the gradients of an update are divided while they
            are added up, so that their mean is clipped.
        anchors: PopART's names of tensors that every call sends to the host, by
            ours.

    Returns:
        New options. Figures come back under `OutputMode.All`, unless the user's own
        options choose a mode. Anchored tensors follow the mode of the options, so with
        anchors they come back under `Sum`, if no outputs do: a tensor of each
        micro-batch would be large.

    Raises:
        ConfigError: The user's own options ask for sums of outputs, or `customize`
            changes what the plan is made of.
    """
    own = self.training_options
    if own is None:
        options = derived_training(self, plan, own_stages)
    else:
        options = _cloned(self, own)
    if sums_gradients:
        options.Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType.Sum
        )
    if scales_automatically:
        options.Training.setAutomaticLossScaling(True)
    if divides_early:
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    for name, tensor in (anchors or {}).items():
        options.anchorTensor(name, tensor)
    mode = poptorch.OutputMode
    if options.defaultOutputMode():
        is_summed = bool(anchors) and not returns_outputs
        options.outputMode(mode.Sum if is_summed else mode.All)
    options = customized(self.customize, options, is_training=True)
    if returns_outputs and options.output_mode == mode.Sum.value:
        raise ConfigError(
            "training_options or customize ask for OutputMode.Sum, and a streamed "
            "metric needs the outputs themselves. Use OutputMode.All, or leave the "
            "mode at its default."
        )
    return _offline_if_asked(options)


def _offline_if_asked(options: poptorch.Options) -> poptorch.Options:
    """Options that only compile, where programs are only to be compiled."""
    if _env.compile_only() is not None:
        options.useOfflineIpuTarget(_env.compile_for())
    return options


def build_inference_options(self: Config, plan: BatchPlan) -> poptorch.Options:
    """Build the options of the inference program, which returns all outputs.

    The user's own options, or `customize`, may choose another output mode.
    """
    own = self.inference_options
    if own is None:
        # The model's own blocks are a pipeline if there is a micro-batch for each.
        is_short = plan.device_iterations == 1
        options = derived_inference(self, plan, is_short=is_short)
    else:
        options = _cloned(self, own)
    if options.defaultOutputMode():
        options.outputMode(poptorch.OutputMode.All)
    options = customized(self.customize, options, is_training=False)
    return _offline_if_asked(options)


def take_own_options(config: Config) -> None:
    """Keep copies of a config's own options, which nobody changes then.

    Raises:
        ConfigError: They contradict a field.
    """
    defaults = {one.name: one.default for one in dataclasses.fields(config)}
    kinds = {
        "training_options": MADE_FOR_TRAINING,
        "inference_options": MADE_FOR_INFERENCE,
    }
    for name, made in kinds.items():
        own = getattr(config, name)
        if own is None:
            continue
        if config.customize is not None:
            raise ConfigError(
                f"customize and {name} are both given, and own options are taken "
                f"whole: leave {name} out, or change them before you give them."
            )
        object.__setattr__(config, name, own.clone())
        given = {
            one: getattr(config, one)
            for one in made
            if getattr(config, one) != defaults[one]
        }
        is_training = name == "training_options"
        plan = BatchPlan(
            1,
            config.gradient_accumulation or 1,
            config.own_replicas,
            device_iterations=(
                config.device_iterations if is_training else config.inference_iterations
            )
            or 1,
        )
        derive = derived_training if is_training else derived_inference
        check_own_options(name, own, derive(config, plan), given)


def derived_training(
    config: Config, plan: BatchPlan, own_stages: int = 1
) -> poptorch.Options:
    """The options of training that a config stands for, whatever own ones it has."""
    options = derived(config, plan, own_stages=own_stages)
    options.Training.gradientAccumulation(plan.gradient_accumulation)
    if config.rounds_at_random is not None:
        options.Precision.enableStochasticRounding(config.rounds_at_random)
    if config.profile_dir is not None and config.process.is_first:
        options.enableProfiling(config.profile_dir)
    return options


def derived_inference(
    config: Config, plan: BatchPlan, *, is_short: bool = False
) -> poptorch.Options:
    """The options of inference that a config stands for, whatever own ones it has."""
    options = derived(config.inference_config, plan, is_short=is_short)
    is_rounded = (config.inference or {}).get("stochastic_rounding")
    if is_rounded is not None:
        options.Precision.enableStochasticRounding(is_rounded)
    return options


def derived(
    config: Config, plan: BatchPlan, *, is_short: bool = False, own_stages: int = 1
) -> poptorch.Options:
    """The options that training and inference share."""
    options = new_options(config.process, plan.replicas)
    options.deviceIterations(plan.device_iterations)
    options.autoRoundNumIPUs(True)
    options.broadcastBuffers(False)  # each replica keeps its own, as design.md says
    options.showCompilationProgressBar(False)  # we show the phase ourselves
    # Schedulers of torch add attributes to the optimiser; each would be a warning.
    options.relaxOptimizerAttributesChecks(True)
    strategy = strategy_of(
        config.placement,
        is_pipelined=config.is_pipelined,
        is_short=is_short,
    )
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    proportions = memory_proportions(
        config.available_memory_proportion, config.stage_ipus
    )
    if proportions:
        options.setAvailableMemoryProportion(proportions)
    set_memory(options, config, own_stages)
    if config.cache_dir is not None:
        options.enableExecutableCaching(str(config.cache_dir))
    if config.offline:
        options.useOfflineIpuTarget(_env.compile_for())
    if config.seed is not None:
        set_seed(options, config.seed)
    return options


def _cloned(config: Config, own: poptorch.Options) -> poptorch.Options:
    """The user's own options, for this process."""
    options = own.clone()
    set_process(options, config.process)
    options.autoRoundNumIPUs(True)  # a device has a power of two of them
    if config.seed is not None and not options.exists("random_seed"):
        set_seed(options, config.seed)
    return options


def set_seed(options: poptorch.Options, seed: int) -> None:
    """Seed the device; torch's generator, which PopTorch seeds too, stays as it was."""
    with torch.random.fork_rng(devices=[]):
        options.randomSeed(seed)
