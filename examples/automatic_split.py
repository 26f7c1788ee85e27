# SPDX-License-Identifier: Apache-2.0
"""Cut a network into four stages of even work, and keep their names.

Shows `pipeline="auto"`. The network has eight blocks, and the later ones are wider and
repeat more often. Two blocks for each stage leave more than four fifths of the
operations to the last two stages, and the others wait for them. ipufit counts the
operations and finds the best cut, which may be inside of a block. Then the model's
config names the stages, so it can be kept.

    python examples/automatic_split.py

The last line says how much less the slowest stage has to compute than with two blocks
for each stage: about 40%.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from ipufit import IPUConfig, IPUModel
from ipufit.planning.plan import ModelPlan

REPEATS = [1, 1, 2, 2, 4, 4, 3, 1]


class Block(nn.Module):
    """Convolutions of one size."""

    def __init__(self, given: int, made: int, repeats: int) -> None:
        super().__init__()
        widths = [given] + [made] * repeats
        self.convolutions = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU())
                for before, after in zip(widths, widths[1:])
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the convolutions."""
        return self.convolutions(x)


def network() -> nn.Sequential:
    """Make a network of eight blocks of different cost, and a head."""
    widths = [3, 8, 8, 12, 12, 16, 16, 24, 24]
    blocks = [
        Block(before, after, repeats)
        for before, after, repeats in zip(widths, widths[1:], REPEATS)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4))
    return nn.Sequential(*blocks, head)


def plan_of(config: IPUConfig, x: torch.Tensor, y: torch.Tensor) -> ModelPlan:
    """Return the plan of a training with some stages."""
    model = IPUModel(network(), config)
    model.compile("adamw", "cross_entropy")
    return model.plan(x, y)


def plot(plans: dict[str, ModelPlan], path: str) -> None:
    """Draw the operations of each stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for place, (name, plan) in enumerate(plans.items()):
        stages = [stage + (place - 0.5) * 0.4 for stage in range(len(plan.stages))]
        shares = [100 * share for share in plan.flop_shares]
        axes.bar(stages, shares, width=0.4, label=name)
    axes.axhline(25, color="black", linewidth=1, label="even")
    axes.set(xlabel="stage", ylabel="% of the operations", xticks=range(4))
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Compare both splits, and train with one; returns the share that it saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH", help="draw the stages into this file")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    x, y = torch.randn(112, 3, 16, 16), torch.randint(0, 4, (112,))
    automatic = IPUConfig(micro_batch_size=2, pipeline="auto", ipus=4)
    by_hand = IPUConfig(micro_batch_size=2, pipeline=["0", "2", "4", "6"])
    plans = {
        "two blocks each": plan_of(by_hand, x, y),
        'pipeline="auto"': plan_of(automatic, x, y),
    }
    for name, plan in plans.items():
        shares = ", ".join(f"{share:.0%}" for share in plan.flop_shares)
        print(f"{name}: {shares} of the operations")

    model = IPUModel(network(), automatic)
    model.compile("adamw", "cross_entropy")
    model.fit(x, y, verbose=2)  # says where the stages begin
    print(model.config)
    if args.plot:
        plot(plans, args.plot)
    hand, auto = (max(plan.flops) for plan in plans.values())
    saved = 1 - auto / hand
    print(f"work of the slowest stage that is saved: {saved:.1%}")
    return saved


if __name__ == "__main__":
    main()
