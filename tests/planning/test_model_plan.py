# SPDX-License-Identifier: Apache-2.0
"""`model.plan`: the published figures of the pipelining tutorial, and whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import IPUConfig, IPUModel, poptorch
from ipufit.errors import ConfigError, DataError, NotCompiledError, UnknownNameError
from tests.reference import compiled


def unbroken(plan):
    """The text of a plan, without its line ends."""
    return " ".join(str(plan).split())


def convolution(given, made):
    return nn.Sequential(nn.Conv2d(given, made, 5), nn.MaxPool2d(2), nn.ReLU())


def digits(**config):
    """The network of the pipelining tutorial, four stages of it, and MNIST's shapes."""
    dense = nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU())
    network = nn.Sequential(
        convolution(1, 10), convolution(10, 20), dense, nn.Linear(256, 10)
    )
    settings = {"micro_batch_size": 40, "gradient_accumulation": 10, **config}
    model = IPUModel(network, IPUConfig(**{"device_iterations": 10, **settings}))
    model.compile("adamw", "cross_entropy")
    x = torch.zeros(1, 1, 28, 28).expand(60_000, 1, 28, 28)
    return model, x, torch.zeros(60_000, dtype=torch.int64)


def tutorial(**config):
    model, x, y = digits(pipeline=["0", "1", "2", "3"], **config)
    return model.plan(x, y)


def test_the_tutorials_pipeline_comes_out():
    plan = tutorial()
    assert plan.num_parameters == 90_026
    assert [stage.num_parameters for stage in plan.stages] == [260, 5020, 82176, 2570]
    assert [f / 40 for f in plan.flops] == [288_000, 640_000, 163_840, 5_120]
    shares = [0.263, 0.583, 0.149, 0.005]
    assert plan.flop_shares == pytest.approx(shares, abs=0.0005)
    assert plan.bubble == 0.375
    assert 1 / plan.imbalance == pytest.approx(0.429, abs=0.001)
    assert plan.ideal_speedup == pytest.approx(1.07, abs=0.005)
    # Weights, sums and AdamW's state in float32, and a counter for each weight.
    counts = zip(plan.stages, plan.memory)
    assert all(m.exact == 16 * s.num_parameters + 8 for s, m in counts)
    batch = plan.epoch.batch
    assert (batch.batch_size, batch.samples_per_call) == (400, 4000)
    assert (plan.epoch.calls, plan.epoch.updates) == (15, 150)
    assert plan.epoch.dropped_samples == 0
    assert (plan.num_ipus, plan.slowest_stage) == (4, 1)
    assert (plan.schedule.num_cycles, plan.schedule.num_full_cycles) == (16, 4)
    assert plan.bubble_at(7) == pytest.approx(6 / 13)
    inference = plan.inference_schedule
    assert (inference.stages, inference.micro_batches) == (4, 10)
    assert inference.idle_share == pytest.approx(3 / 13)
    assert plan == tutorial()
    text = str(plan)
    for words in (
        "Plan of Sequential with AdamW, on 4 IPUs: Mk2 (GC200)",
        "37.5%",
        "82,176",
        "1.07 times as fast as one IPU",
        "Only a compilation shows",
        "Code isn't counted",
        "recompute='off'",
        "gradient_accumulation=20",
    ):
        assert words in unbroken(plan)
    assert len(text.splitlines()) <= 40  # two screens
    assert "offload_optimizer" not in text  # an IPU is nearly empty
    assert " fits" not in text


def test_recomputation_is_pytorchs_default_in_pipelines_only():
    pipelined, whole = tutorial(), digits()
    assert pipelined.settings.recomputes
    alone = whole[0].plan(*whole[1:])
    assert not alone.settings.recomputes
    kept = tutorial(recompute="off")
    saved = [7, 5, 3, 1]
    for held, memory, stage in zip(saved, kept.memory, kept.stages):
        assert memory.activations.value == held * stage.saved_bytes
    for held, memory, stage in zip(saved, pipelined.memory, pipelined.stages):
        inputs = (held - 1) * stage.input_bytes
        assert memory.activations.value == inputs + stage.saved_bytes


def test_one_ipu_after_the_other_is_no_pipeline():
    plan = tutorial(execution="sharded", gradient_accumulation=1)
    assert not plan.settings.is_pipelined
    assert (plan.bubble, plan.ideal_speedup, plan.num_ipus) == (0.0, 1.0, 4)
    for memory, stage in zip(plan.memory, plan.stages):
        assert memory.activations.value == stage.saved_bytes
        assert memory.accumulators == 0


def test_state_off_the_chip_or_sharded_isnt_there():
    whole, off, sharded = (
        tutorial(replicas=2, **more)
        for more in ({}, {"offload_optimizer": True}, {"shard_optimizer": True})
    )
    assert whole.num_ipus == 8
    states = [
        [memory.optimizer_state for memory in plan.memory]
        for plan in (whole, off, sharded)
    ]
    counters = [8, 8, 8, 8]
    sizes = [8 * stage.num_parameters for stage in whole.stages]
    assert states[0] == [size + 8 for size in sizes]
    assert states[1] == counters
    large = 320 * 256  # the only weight that PopART divides
    assert states[2] == [*states[0][:2], states[0][2] - 8 * large // 2, states[0][3]]


@pytest.mark.parametrize(
    ("least", "on_chip"), [(2, [0, 0, 0, 0]), (5000, [260, 20, 256, 2570])]
)
def test_customize_says_where_the_state_is(least, on_chip):
    def customize(options, is_training):
        location = poptorch.TensorLocationSettings().useOnChipStorage(False)
        location.minElementsForOffChip(least)
        options.TensorLocations.setOptimizerLocation(location)

    plan = tutorial(customize=customize)
    assert plan.settings.is_off_chip
    states = [memory.optimizer_state for memory in plan.memory]
    assert states == [8 + 8 * count for count in on_chip]


def test_choices_are_what_a_plan_with_these_settings_says():
    plan = tutorial(replicas=2)
    choices = {choice.change: choice for choice in plan.choices}
    for change, config in (
        ("", {}),
        ("recompute='off'", {"recompute": "off"}),
        ("offload_optimizer=True", {"offload_optimizer": True}),
        ("shard_optimizer=True", {"shard_optimizer": True}),
        ("gradient_accumulation=20", {"gradient_accumulation": 20}),
    ):
        other = tutorial(replicas=2, **config)
        choice = choices.pop(change)
        assert choice.memory == other.fullest.total, change
        assert choice.share == other.fullest.share
        assert choice.bubble == other.bubble
        assert choice.batch_size == other.epoch.batch.batch_size
    # Activations of half of the samples are taken to be half as large.
    choice = choices.pop("micro_batch_size=20, gradient_accumulation=20")
    other = tutorial(replicas=2, micro_batch_size=20, gradient_accumulation=20)
    assert choice.memory == pytest.approx(other.fullest.total, rel=0.01)
    assert choice.least_share == pytest.approx(choice.memory.least / 940_572_672)
    assert (choice.batch_size, choice.bubble) == (800, other.bubble)
    assert list(choices) == ["gradient_accumulation=40"]


def test_traffic_counts_what_goes_in_and_comes_back():
    traffic = {(t.program, t.output_mode): t for t in tutorial(replicas=2).traffic}
    sample, row = 28 * 28 * 4 + 4, 10 * 4  # labels of 64 bits travel as 32
    training = traffic["training", "All"]
    assert training.input_bytes == 8000 * sample
    assert training.output_bytes == 8000 * row
    assert traffic["training", "Final"].output_bytes == 80 * row
    assert traffic["training", "Sum"].output_bytes == 80 * row
    assert traffic["training", "EveryN(10)"].output_bytes == 800 * row
    inference = traffic["inference", "All"]
    assert inference.input_bytes == 800 * 28 * 28 * 4
    assert inference.output_bytes == 800 * row


def test_what_is_certainly_too_large_is_said():
    model, x, y = digits()
    assert model.plan(x, y, device="mk1").fullest.capacity == 304 * 2**20
    assert model.plan(x, y, device="bow").device.name == "Bow"
    with pytest.raises(UnknownNameError, match="mk3"):
        model.plan(x, y, device="mk3")
    plan = model.plan(x, y)
    exact = plan.memory[0].exact

    def judged(share):
        device = plan.device._replace(num_tiles=1, tile_bytes=int(exact / share))
        return unbroken(plan.on(device))

    assert "run out of memory: IPU 0 has" in judged(0.9)  # with gradients beside it
    assert "uncertain" in judged(0.7)
    assert "in the range of public" in judged(0.4)
    assert "offload_optimizer=True" in judged(0.4)
    assert "in the range of public" in unbroken(plan)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        with poptorch.Block("body", ipu_id=0):
            x = self.body(x)
        with poptorch.Block("head", ipu_id=1):
            return self.head(x)


def own(accumulation, **config):
    layout = {"micro_batch_size": 2, "gradient_accumulation": accumulation, **config}
    model = compiled(Own(), **layout)
    return model.plan(torch.zeros(60, 4), torch.zeros(60, dtype=torch.int64))


def test_blocks_that_forward_begins_are_stages():
    plan = own(3)
    assert (plan.num_ipus, plan.num_stages, plan.bubble) == (2, 2, 0.4)
    assert "The pipeline of 2 stages" in unbroken(plan)
    assert "IPUs in powers of two" not in unbroken(plan)
    told = unbroken(own(3, replicas=3))
    assert "reserves IPUs in powers of two: 8 for these 6." in told
    refused = unbroken(own(2))
    assert "PopTorch will refuse this pipeline" in refused
    assert "gradient_accumulation=3 or more, and it is 2" in refused
    stages = poptorch.ShardedExecution(
        poptorch.Stage("body").ipu(0), poptorch.Stage("head").ipu(1)
    )
    sharded = own(1, pipeline=stages)
    assert (sharded.settings.is_pipelined, sharded.num_ipus) == (False, 2)


def test_data_that_fill_no_call_are_said():
    model = compiled(nn.Linear(4, 3), IPUConfig(64, device_iterations=10))
    x, y = torch.zeros(100, 4), torch.zeros(100).long()
    words = "fit will refuse this data: a call takes 640 samples, and there are 100"
    assert words in unbroken(model.plan(x, y))
    assert words not in unbroken(model.plan(x, y, drop_last=False))
    with pytest.raises(DataError):
        model.fit(x, y)


def test_targets_that_fit_would_miss_are_said():
    model, x, y = digits(micro_batch_size=2, device_iterations=1)
    model.fit(x[:20], y[:20], verbose=0)
    with_targets, without = model.plan(x, y), model.plan(x)
    with pytest.raises(DataError) as refused:
        model.fit(x[:20], verbose=0)
    assert without.refusal == str(refused.value)
    assert f"fit will refuse this data: {without.refusal}" in unbroken(without)
    assert not with_targets.refusal
    assert "refuse" not in str(with_targets)
    assert without.memory == with_targets.memory
    assert without.stages == with_targets.stages
    report = model.check(x[:20])
    assert without.refusal in [finding.what for finding in report.findings]


@pytest.mark.parametrize("metrics", [None, ["mse"]])
def test_a_loss_of_the_modules_own_needs_no_targets(metrics):
    class Scored(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs, outputs.pow(2).mean()

    model = compiled(Scored(4, 3), micro_batch_size=2, metrics=metrics, loss=None)
    plan = model.plan(torch.zeros(8, 4))
    assert bool(plan.refusal) == bool(metrics)
    assert ("no targets to compute metrics" in unbroken(plan)) == bool(metrics)


def test_a_step_of_ones_own_is_measured():
    def step(module, batch):
        x, y = batch
        return nn.functional.mse_loss(module(x) @ module.weight, y)

    model = compiled(nn.Linear(4, 3), micro_batch_size=2, step=step, loss=None)
    plan = model.plan(torch.zeros(8, 4), torch.zeros(8, 4))
    assert plan.flops == (2 * (2 * 2 * 4 * 3),)


def test_data_that_dont_suit_are_refused():
    model, x, y = digits()
    with pytest.raises(DataError):
        model.plan(x[:, :, :20, :], y)
    with pytest.raises(ConfigError, match="batch_size=399"):
        model.plan(x, y, batch_size=399)
    fresh = IPUModel(nn.Linear(2, 2))
    with pytest.raises(NotCompiledError):
        fresh.plan(torch.zeros(4, 2))
