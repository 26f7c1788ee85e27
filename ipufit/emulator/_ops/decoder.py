# SPDX-License-Identifier: Apache-2.0
"""`ctc_beam_search_decoder`: the likeliest labels of connectionist sequences.

A prefix beam search: labels that differ only in blanks and repetitions are one
prefix, whose probability is the sum over all of them (Graves, "Sequence
Transduction with Recurrent Neural Networks", 2012; Hannun et al., 2014).
"""

from __future__ import annotations

import math
from typing import Dict, Tuple

import torch
from torch import Tensor

from ipufit.emulator._tracing.trace_state import (
    current_trace,
    is_tracing,
    require_tensor,
)
from ipufit.emulator.errors import createPoptorchError

_NEVER = -math.inf

_Beams = Dict[Tuple[int, ...], Tuple[float, float]]
"""Prefix to its log-probabilities: ending in a blank, and in its last label."""


def ctc_beam_search_decoder(
    probs: Tensor,
    lengths: Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the likeliest label sequences.

    On the host it gives zeros, as PopTorch does; the device decodes.

    Args:
        probs: Log-probabilities, `[T, B, C]`.
        lengths: Number of time steps of each sequence, `[B]`.
        blank: Index of the class that is no label.
        beam_width: Number of prefixes kept at each step.
        top_paths: Number of sequences to return.

    Returns:
        Log-probabilities of the sequences `[B, top_paths]`, likeliest first; their
        lengths `[B, top_paths]`; and their labels `[B, top_paths, T]`, padded with
        `blank`.

    Raises:
        Error: `probs` or `lengths` isn't a tensor, or `probs` isn't 3-D.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Decoder(torch.nn.Module):
        ...     def forward(self, probs, lengths):
        ...         return ctc_beam_search_decoder(probs, lengths)
        >>> probs = torch.tensor([[[0.1, 0.8, 0.1]], [[0.3, 0.1, 0.6]]]).log()
        >>> inferenceModel(Decoder())(probs, torch.tensor([2]))[2]
        tensor([[[1, 2]]], dtype=torch.int32)
    """
    require_tensor(probs, "ctc_beam_search_decoder must take a torch.tensor of probs.")
    require_tensor(
        lengths, "ctc_beam_search_decoder must take a torch.tensor of lengths."
    )
    if probs.dim() != 3:
        raise createPoptorchError(
            "Incorrect shape for first input to CTC beam search decoder. "
            f"Got {list(probs.shape)}, expected [T, B, C]."
        )
    trace = current_trace()
    if trace is None:
        steps, batch, _ = probs.shape
        return (
            torch.zeros(batch, top_paths),
            torch.zeros(batch, top_paths),
            torch.zeros(batch, top_paths, steps),
        )
    result: tuple[Tensor, Tensor, Tensor] = trace.record(
        decode_batch, probs, lengths, blank, beam_width, top_paths
    )
    return result


def decode_batch(
    probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `ctc_beam_search_decoder` on the device."""
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), _NEVER)
    sizes = torch.zeros((batch, top_paths), dtype=torch.int64)
    labels = torch.full((batch, top_paths, steps), blank, dtype=torch.int64)
    if is_tracing():
        return scores, sizes, labels
    for sample, length in enumerate(lengths.reshape(-1).tolist()):
        rows = probs[: int(length), sample].detach().double().tolist()
        best = best_paths(rows, blank, beam_width)[:top_paths]
        for rank, (prefix, score) in enumerate(best):
            scores[sample, rank] = score
            sizes[sample, rank] = len(prefix)
            labels[sample, rank, : len(prefix)] = torch.tensor(prefix)
    return scores, sizes, labels


def best_paths(
    log_probs: list[list[float]], blank: int, beam_width: int
) -> list[tuple[tuple[int, ...], float]]:
    """Find at most `beam_width` label sequences, likeliest first.

    Args:
        log_probs: Log-probabilities of the classes, for each time step.
        blank: Index of the class that is no label.
        beam_width: Number of prefixes kept at each step.

    Example:
        >>> import math
        >>> best = best_paths([[math.log(0.4), math.log(0.6)]], blank=0, beam_width=2)
        >>> [(labels, round(math.exp(score), 6)) for labels, score in best]
        [((1,), 0.6), ((), 0.4)]
    """
    beams: _Beams = {(): (0.0, _NEVER)}
    for row in log_probs:
        beams = _likeliest(_extend(beams, row, blank), beam_width)
    ranked = [(prefix, _log_add(*ends)) for prefix, ends in beams.items()]
    return sorted(ranked, key=lambda item: -item[1])


def _extend(beams: _Beams, row: list[float], blank: int) -> _Beams:
    """Extend all prefixes by one time step."""
    after: _Beams = {}

    def add(prefix: tuple[int, ...], in_blank: float, in_label: float) -> None:
        if in_blank == in_label == _NEVER:
            return
        old = after.get(prefix, (_NEVER, _NEVER))
        after[prefix] = (_log_add(old[0], in_blank), _log_add(old[1], in_label))

    for prefix, (in_blank, in_label) in beams.items():
        either = _log_add(in_blank, in_label)
        add(prefix, either + row[blank], _NEVER)
        for label, score in enumerate(row):
            if label == blank:
                continue
            if prefix and label == prefix[-1]:
                # The same label again is a repetition, unless a blank came between.
                add(prefix, _NEVER, in_label + score)
                add((*prefix, label), _NEVER, in_blank + score)
            else:
                add((*prefix, label), _NEVER, either + score)
    return after


def _likeliest(beams: _Beams, beam_width: int) -> _Beams:
    ranked = sorted(beams.items(), key=lambda item: -_log_add(*item[1]))
    return dict(ranked[:beam_width])


def _log_add(first: float, second: float) -> float:
    """`log(exp(first) + exp(second))`."""
    larger, smaller = max(first, second), min(first, second)
    if smaller == _NEVER:
        return larger
    return larger + math.log1p(math.exp(smaller - larger))
