# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on Python's own documentation, and let it write.

Shows generation: shapes of a program are fixed, so `predict` gets 48 letters every
time, and no letter sees the padding behind it. Two layers are a pipeline of two IPUs.

    python examples/gpt.py

It takes half a minute. The last line is the share of letters foretold in unseen text:
about 57%, where the most frequent follower of each letter is right in 31%.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import ipufit

WINDOW, SIZE, HEADS = 48, 64, 4  # letters, numbers for each of them, heads of attention
ALPHABET = "".join(map(chr, range(32, 127)))


class Layer(nn.Module):
    """Causal attention, and two linear layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.to_heads = nn.Linear(SIZE, 3 * SIZE)
        self.from_heads = nn.Linear(SIZE, SIZE)
        wide, narrow = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.mlp = nn.Sequential(wide, nn.GELU(approximate="tanh"), narrow)
        self.register_buffer("later", -1e4 * torch.ones(WINDOW, WINDOW).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return new numbers [N, 48, 64] for those of each letter."""
        heads = self.to_heads(self.attention_norm(x)).unflatten(2, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()  # [N, 4, 48, 16] each
        scores = query @ key.transpose(2, 3) / (SIZE // HEADS) ** 0.5 + self.later
        attended = (scores.softmax(dim=3) @ value).transpose(1, 2).flatten(2)
        x = x + self.from_heads(attended)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Embeddings of letters and places, two layers, and scores of the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), SIZE)
        self.places = nn.Parameter(torch.randn(WINDOW, SIZE))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, len(ALPHABET)))

    def forward(self, letters: Tensor) -> Tensor:
        """Return scores [N, 48, 95] of the letters that follow letters [N, 48]."""
        x = self.letters(letters) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def encode(text: str) -> Tensor:
    """Return the numbers of letters."""
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def read_topics() -> Tensor:
    """Return 360,000 letters of the texts that Python's `help()` shows, as numbers."""
    text = " ".join(" ".join(topics.values()).split())
    return encode("".join(letter for letter in text if letter in ALPHABET)[:360_000])


def write(model: ipufit.IPUModel, text: str, count: int, warmth: float = 0.6) -> str:
    """Add letters to a text, each drawn by the scores of the model."""
    for _ in range(count):
        last = min(len(text), WINDOW) - 1
        window = encode(text[-WINDOW:].ljust(WINDOW))
        scores = model.predict(window[None], batch_size=1, verbose=0)[0, last]
        text += ALPHABET[torch.multinomial((scores / warmth).softmax(dim=0), 1)]
    return text


def main(arguments: list[str] | None = None) -> float:
    """Train and write; returns the share of unseen letters that are foretold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    parser.add_argument("--plot", metavar="PATH", help="draw accuracies into this file")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    letters = read_topics()
    now, following = (t.unfold(0, WINDOW, WINDOW) for t in (letters[:-1], letters[1:]))
    (x, unseen_x), (y, unseen_y) = (t.tensor_split([-750]) for t in (now, following))
    pairs = torch.bincount((95 * x + y).flatten(), minlength=95 * 95).view(95, 95)
    baseline = (pairs.argmax(dim=1)[unseen_x] == unseen_y).float().mean().item()

    stages = {"layers_per_ipu": {"layers": [1, 1]}, "inference": {"pipeline": None}}
    model = ipufit.IPUModel(GPT(), ipufit.IPUConfig(seed=0, **stages))
    adamw, loss = ipufit.Optimizer("adamw", 5e-3), "sparse_categorical_crossentropy"
    model.compile(adamw, loss, metrics=["accuracy"], lr_schedule="cosine")
    print(f"untrained it writes: {write(model, 'A function ', count=60)}")
    options = {"validation_data": (unseen_x, unseen_y), "drop_last": "pad"}
    history = model.fit(x, y, batch_size=16, epochs=args.epochs, **options)
    print(f"trained it writes: {write(model, 'A function ', count=200)}")
    print(f"foretold by the most frequent follower: {baseline:.2%}")
    if args.plot:
        history.plot("accuracy").savefig(args.plot)
    accuracy = history.history["val_accuracy"][-1]
    print(f"letters foretold: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
