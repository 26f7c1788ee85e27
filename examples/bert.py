# SPDX-License-Identifier: Apache-2.0
"""Train BERT of Hugging Face's transformers, as it is.

Shows that a model of transformers needs no wrapper: the inputs are a dict by the names
of its arguments, and the loss names the output that it takes. A small BERT with random
weights learns to tell which of two words comes first. Nothing is downloaded; with
weights from the hub it is `BertForSequenceClassification.from_pretrained(...)`.

    pip install transformers
    python examples/bert.py

Without IPUs it runs on ipufit's emulator, in ten seconds or so. The last line is the
accuracy on new texts: about 99%.
"""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

import torch
from torch import Tensor

import ipufit

LENGTH, VOCABULARY = 16, 30
CLS, FIRST_WORD, SECOND_WORD = 0, 1, 2  # tokens of their own


def texts(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make texts [N, 16] with two words in them, and which one comes first [N]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    ids[:, 0] = CLS
    chances = torch.rand(count, LENGTH - 1, generator=generator)
    places, _ = chances.topk(2).indices.sort(dim=1)
    labels = torch.randint(0, 2, (count,), generator=generator)
    words = torch.stack([FIRST_WORD + labels, SECOND_WORD - labels], dim=1)
    ids.scatter_(1, 1 + places, words)
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}, labels


def plot(history: ipufit.History, path: str) -> None:
    """Draw the accuracies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    epochs = range(1, 1 + len(history.epoch))
    axes.plot(epochs, history.history["accuracy"], label="training")
    axes.plot(epochs, history.history["val_accuracy"], "--", label="validation")
    axes.set(xlabel="epoch", ylabel="accuracy", ylim=(0.45, 1.02))
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the accuracy on new texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="times through the texts")
    parser.add_argument("--plot", metavar="FILE", help="draw the accuracies")
    args = parser.parse_args(arguments)
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:
        sys.exit("This example needs transformers: pip install transformers")

    torch.manual_seed(0)
    network = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_labels=2,
            pad_token_id=None,  # older versions look for padding in the values else
            attn_implementation="eager",
        )
    )
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile(
        ipufit.Optimizer("adamw", 2e-3, no_decay="bias_and_norm"),
        loss={"logits": "cross_entropy"},
        metrics={"logits": ["accuracy"]},
        lr_schedule=ipufit.Schedule("linear", warmup_fraction=0.1),
    )
    history = model.fit(
        *texts(3200, seed=1),
        validation_data=texts(640, seed=2),
        batch_size=32,
        epochs=args.epochs,
        verbose=2,
    )
    if args.plot:
        plot(history, args.plot)
    accuracy = model.evaluate(*texts(640, seed=3), verbose=0)["accuracy"]
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
