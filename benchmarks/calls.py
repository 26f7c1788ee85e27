# SPDX-License-Identifier: Apache-2.0
"""Calls of an epoch, and other trips between host and devices, counted on MNIST's size.

    python -m benchmarks.calls

trains the network of `examples/mnist_pipeline.py` on random images: with one update per
call, with nothing set, with the example's iterations. What is counted depends on
configs and data alone, so one turn is enough, on the emulator as on PopTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor

from . import networks, page
from .tables import table

COUNTED = {
    "__call__": "calls",
    "setOptimizer": "optimizer",
    "copyWeightsToDevice": "weights",
    "copyWeightsToHost": "weights",
}
"""Methods of an executor that go to the devices, and what they count as."""

SETTINGS: dict[str, dict[str, int]] = {
    "nothing set": {},
    "one update per call": {"device_iterations": 1, "inference_iterations": 1},
    "10 updates per call": {"device_iterations": 10},
}
"""Fields of `IPUConfig` beside those that make the example's pipeline."""

_TEST_BATCH = 8  # the example's
_TRAIN_IMAGES, _TEST_IMAGES = 60_000, 10_000  # MNIST's


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what executors are asked for, by the words of `COUNTED`.

    Yields:
        The counts so far. A call of a program is one trip there and back.
    """
    from ipufit import poptorch

    counts: Counter[str] = Counter()
    owner = poptorch.PoplarExecutor
    originals = {name: getattr(owner, name) for name in COUNTED}

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            counts[COUNTED[name]] += 1
            return original(executor, *args, **kwargs)

        return counted

    for name, original in originals.items():
        setattr(owner, name, spy(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def count(
    setting: Mapping[str, Any], train: Tensor, test: Tensor, micro_batch: int = 40
) -> dict[str, dict[str, int]]:
    """What an epoch, an evaluation and a prediction take, all after a first one.

    Args:
        setting: Fields of `IPUConfig`.
        train: Images to train on, `[N, 1, 28, 28]`.
        test: Images to evaluate and predict.
        micro_batch: Images of a micro-batch, ten of which make an update.

    Returns:
        For `"train"`, `"evaluate"` and `"predict"`: counts by the words of `COUNTED`.
    """
    from ipufit import IPUConfig, IPUModel

    config = IPUConfig(
        gradient_accumulation=10,
        pipeline=("layer1", "layer2", "layer3", "layer4"),
        seed=0,
        **setting,
    )
    torch.manual_seed(0)
    model = IPUModel(networks.TutorialNetwork(), config)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"])
    labels, test_labels = (torch.arange(len(each)) % 10 for each in (train, test))
    size = 10 * micro_batch

    def epoch() -> None:
        model.fit(train, labels, batch_size=size, epochs=1, verbose=0)

    def evaluate() -> None:
        model.evaluate(test, test_labels, batch_size=_TEST_BATCH, verbose=0)

    def predict() -> None:
        model.predict(test, batch_size=_TEST_BATCH, verbose=0)

    found = {}
    for name, action in (
        ("train", epoch),
        ("evaluate", evaluate),
        ("predict", predict),
    ):
        action()
        with counting() as counts:
            action()
        found[name] = {word: counts[word] for word in dict.fromkeys(COUNTED.values())}
    return found


def report(rows: list[dict[str, Any]]) -> str:
    """A table with a line for each setting."""
    heading = ["MNIST example", "calls of an epoch", "of `evaluate`", "of `predict`"]
    heading += ["optimizer set", "weights copied"]
    return table(
        heading,
        [
            [
                row["setting"],
                *(str(row[name]["calls"]) for name in ("train", "evaluate", "predict")),
                str(row["train"]["optimizer"]),
                str(row["train"]["weights"]),
            ]
            for row in rows
        ],
    )


def main(arguments: list[str] | None = None) -> int:
    """Count; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--images", type=int, default=_TRAIN_IMAGES, help="to train on")
    add("--test-images", type=int, default=_TEST_IMAGES, help="to evaluate and predict")
    add("--micro-batch", type=int, default=40, help="images of a micro-batch")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train = torch.randn(args.images, 1, 28, 28)
    test = torch.randn(args.test_images, 1, 28, 28)
    rows = [
        {"setting": name, **count(setting, train, test, args.micro_batch)}
        for name, setting in SETTINGS.items()
    ]
    text = report(rows)
    print(text)
    if args.write:
        sizes = f"{args.images} images to train on, {args.test_images} to test."
        page.write("calls", sizes, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
