# SPDX-License-Identifier: Apache-2.0
"""Networks of the ports and of their originals: plain torch, no word of IPUs.

The public programs take theirs from torchvision, timm and transformers. These are as
small as the examples need, and lay out their layers under the same names.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn


class Normalized(nn.Module):
    """Takes images as bytes, normalises them, and gives them to a network.

    The images travel to the device in 8 bits a pixel; float numbers pass as they are.
    """

    def __init__(self, network: nn.Module, mean: float, std: float) -> None:
        super().__init__()
        self.network = network
        self.scale, self.shift = 1.0 / (255.0 * std), mean / std

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 1, H, W] to scores [N, classes]."""
        weight = next(self.network.parameters())
        return self.network(images.to(weight.dtype) * self.scale - self.shift)


class Residual(nn.Module):
    """Two convolutions around a shortcut, each with batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images, of 1 / stride the size."""
        inside = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (inside + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """A residual network for images of one colour and any size."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = Residual(width, width, 1)
        self.layer2 = Residual(width, 2 * width, 2)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 1, H, W] to scores [N, classes]."""
        x = self.layer1(self.bn1(self.conv1(x)).relu())
        return self.fc(self.layer2(x).mean((2, 3)))


class Attention(nn.Module):
    """Self-attention of several heads, to all tokens or to earlier ones only."""

    def __init__(self, size: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.inputs, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """States [N, T, size]; `hidden` is below 0 where a token isn't seen."""
        batch, length, size = x.shape
        parts = self.inputs(x).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) / math.sqrt(size // self.heads)
        if hidden is not None:
            scores = scores + hidden.to(scores.dtype)
        if self.is_causal:
            later = torch.ones(length, length, device=x.device).triu(1).bool()
            scores = scores.masked_fill(later, -10_000.0)
        mixed = scores.softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, size))


class BertLayer(nn.Module):
    """An encoder layer: normalised after attention and after its two linear layers."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(size, heads, is_causal=False)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """States [N, T, size] to states."""
        x = self.norm1(x + self.dropout(self.attention(x, hidden)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class BertEmbeddings(nn.Module):
    """Tokens, their places and their segments."""

    def __init__(self, vocabulary: int, length: int, size: int) -> None:
        super().__init__()
        self.word, self.place = (
            nn.Embedding(vocabulary, size),
            nn.Embedding(length, size),
        )
        self.segment, self.norm = nn.Embedding(2, size), nn.LayerNorm(size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Tokens and segments [N, T] to states [N, T, size]."""
        places = self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        return self.norm(self.word(input_ids) + places + self.segment(token_type_ids))


class Answerer(nn.Module):
    """BERT that answers by a span of the text; what transformers' class gives."""

    def __init__(
        self, vocabulary: int, length: int, size: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.bert = nn.Module()
        self.bert.embeddings = BertEmbeddings(vocabulary, length, size)
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.ModuleList(
            BertLayer(size, size // 16, dropout) for _ in range(layers)
        )
        self.qa_outputs = nn.Linear(size, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> dict[str, Tensor]:
        """Tokens [N, T] to scores [N, T] of each token as first and as last one."""
        hidden = (attention_mask[:, None, None] - 1) * 10_000.0
        states = self.bert.embeddings(input_ids, token_type_ids)
        for layer in self.bert.encoder.layer:
            states = layer(states, hidden)
        first, last = self.qa_outputs(states).unbind(-1)
        return {"start_logits": first, "end_logits": last}


def answerer(
    kind: str, vocabulary: int, length: int, size: int, layers: int, dropout: float
) -> nn.Module:
    """Make BERT for question answering, with random weights.

    Args:
        kind: "transformers", "own", or "auto" for transformers' where it is installed.
        vocabulary: Number of tokens.
        length: Tokens of a text.
        size: Size of a token's state, a multiple of 16.
        layers: Number of layers.
        dropout: Share of the states that is dropped.
    """
    if kind == "own" or (kind == "auto" and not find_spec("transformers")):
        return Answerer(vocabulary, length, size, layers, dropout)
    transformers = import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_size=size,
        intermediate_size=4 * size,
        num_hidden_layers=layers,
        num_attention_heads=size // 16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )
    return transformers.BertForQuestionAnswering(config)


class GPT2Layer(nn.Module):
    """A decoder layer: normalised before attention and before its linear layers."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = Attention(size, heads, is_causal=True)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """States [N, T, size] to states."""
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class GPT2(nn.Module):
    """A language model; the embedding of words scores the next word, too."""

    def __init__(
        self, vocabulary: int, length: int, size: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, size)
        self.wpe = nn.Embedding(length, size)
        self.h = nn.ModuleList(
            GPT2Layer(size, size // 16, dropout) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Tokens [N, T] to scores [N, T, vocabulary] of what comes next."""
        x = self.wte(input_ids) + self.wpe(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))
