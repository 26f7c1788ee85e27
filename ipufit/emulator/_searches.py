# SPDX-License-Identifier: Apache-2.0
"""Searches that only the device has: `ctc_beam_search_decoder`, `fps` and `nearest`.

The decoder is a prefix beam search: labels that differ only in blanks and repetitions
are one prefix, whose probability is the sum over all of them (Graves, "Sequence
Transduction with Recurrent Neural Networks", 2012; Hannun et al., 2014).
"""

from __future__ import annotations

import math
from typing import Dict, List, Tuple, Union

import torch
from torch import Tensor

from .core.recording import Recording, current_trace, is_tracing, require_tensor
from .errors import createPoptorchError

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
    """Find the most probable label sequences.

    On the host it returns zeros, as PopTorch does; the device decodes.

    Args:
        probs: Log-probabilities, `[T, B, C]`.
        lengths: Number of time steps of each sequence, `[B]`.
        blank: Index of the blank class.
        beam_width: Number of prefixes kept at each step.
        top_paths: Number of sequences to return.

    Returns:
        Log-probabilities of the sequences `[B, top_paths]`, most probable first; their
        lengths `[B, top_paths]`; and their labels `[B, top_paths, T]`, padded with
        `blank`.

    Raises:
        Error: `probs` or `lengths` isn't a tensor, or `probs` isn't 3-D. In a trace:
            they have another type or shape, or `top_paths` is above `beam_width`.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Decoder(torch.nn.Module):
        ...     def forward(self, probs, lengths):
        ...         return ctc_beam_search_decoder(probs, lengths)
        >>> probs = torch.tensor([[[0.1, 0.8, 0.1]], [[0.3, 0.1, 0.6]]]).log()
        >>> inferenceModel(Decoder())(probs, torch.tensor([2]))[2]
        tensor([[[1, 2]]], dtype=torch.int32)
    """
    for name, tensor in (("probs", probs), ("lengths", lengths)):
        what = f"ctc_beam_search_decoder must take a torch.tensor of {name}."
        require_tensor(tensor, what)
    if probs.dim() != 3:
        raise createPoptorchError(
            "Incorrect shape for first input to CTC beam search decoder. "
            f"Got {list(probs.shape)}, expected [T, B, C]."
        )
    trace = current_trace()
    if trace is None:
        steps, batch, _ = probs.shape
        scores = torch.zeros(batch, top_paths)
        return scores, scores.clone(), torch.zeros(batch, top_paths, steps)
    is_like_probs = probs.is_floating_point() and lengths.shape == probs.shape[1:2]
    if not is_like_probs or top_paths > beam_width:
        raise createPoptorchError(
            "ctc_beam_search_decoder takes floating-point probabilities [T, B, C] and "
            "lengths [B] (PopART, `ctcbeamsearch.cpp`), and returns at most beam_width "
            f"({beam_width}) paths (Poplibs, `CTCInference.cpp`), not {top_paths}. Got "
            f"{probs.dtype} of shape {list(probs.shape)} and {list(lengths.shape)}."
        )
    return trace.record(decode_batch, probs, lengths, blank, beam_width, top_paths)


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
    """Find at most `beam_width` label sequences, most probable first.

    Args:
        log_probs: Log-probabilities of the classes, for each time step.
        blank: Index of the blank class.
        beam_width: Number of prefixes kept at each step.

    Example:
        >>> import math
        >>> best = best_paths([[math.log(0.4), math.log(0.6)]], blank=0, beam_width=2)
        >>> [(labels, round(math.exp(score), 6)) for labels, score in best]
        [((1,), 0.6), ((), 0.4)]
    """
    beams: _Beams = {(): (0.0, _NEVER)}
    for row in log_probs:
        longer = _extend(beams, row, blank).items()
        beams = dict(sorted(longer, key=lambda item: -_log_add(*item[1]))[:beam_width])
    return [(prefix, _log_add(*ends)) for prefix, ends in beams.items()]


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


def _log_add(first: float, second: float) -> float:
    """Compute `log(exp(first) + exp(second))`."""
    larger, smaller = max(first, second), min(first, second)
    if smaller == _NEVER:
        return larger
    return larger + math.log1p(math.exp(smaller - larger))


BatchIndices = Union[List[int], Tensor, None]
"""The index of the batch that each point belongs to, sorted; None if all are in one."""


def fps(
    src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False
) -> Tensor:
    """Sample points of each segment that are far from each other.

    Args:
        src: The points, `[N, F]`.
        ptr: Indices at which the segments begin, then the end of the last.
        ratio: Share of the points to take, rounded up in each segment.
        random_start: Begin with a random point of a segment, not its first.

    Returns:
        Indices of the points in `src`.

    Raises:
        Error: An argument has another type or shape, `ptr` is too short, or `ratio` is
            out of range.
        NotImplementedError: Outside a trace: PopTorch has no code for the host.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Sample(torch.nn.Module):
        ...     def forward(self, points):
        ...         return fps(points, [0, 4], 0.5)
        >>> points = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
        >>> inferenceModel(Sample())(points).tolist()
        [0, 3]
    """
    require_tensor(src, "fps takes a torch.tensor of points.")
    if not isinstance(ptr, list) or len(ptr) < 2:
        raise createPoptorchError(
            "`ptr` of fps must be a list of at least two boundaries of segments. "
            f"Got {ptr!r}."
        )
    if not isinstance(ratio, float):
        raise createPoptorchError(f"`ratio` of fps must be a float. Got {ratio!r}.")
    if not isinstance(random_start, bool):
        raise createPoptorchError(
            f"`random_start` of fps must be a bool. Got {random_start!r}."
        )
    trace = _device("fps")
    if not 0.0 < ratio <= 1.0:
        raise createPoptorchError(
            f"`ratio` ({ratio}) has to be in range (0.0, 1.0> (fps)."
        )
    if src.dim() != 2:
        raise createPoptorchError(
            f"`src` is supposed to be 2d Tensor, while it has {src.dim()} dims (fps)."
        )
    return trace.record(sample_farthest, src, ptr, ratio, random_start)


def nearest(
    x: Tensor, y: Tensor, batch_x: BatchIndices = None, batch_y: BatchIndices = None
) -> Tensor:
    """Find the nearest point of `y` for each point of `x`, in the same batch.

    Args:
        x: Points, `[N, F]` or `[N]`.
        y: Points, `[M, F]` or `[M]`.
        batch_x: Batch index of each point of `x`, sorted; None: all are in batch 0.
        batch_y: The same for `y`.

    Returns:
        For each point of `x` an index of `y`.

    Raises:
        Error: An argument has another type, or shapes and batches don't go together.
        NotImplementedError: Outside a trace: PopTorch has no code for the host.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Nearest(torch.nn.Module):
        ...     def forward(self, x, y):
        ...         return nearest(x, y)
        >>> x, y = torch.tensor([0.0, 5.0]), torch.tensor([4.0, 1.0])
        >>> inferenceModel(Nearest())(x, y).tolist()
        [1, 0]
    """
    for points, batch in ((x, batch_x), (y, batch_y)):
        require_tensor(points, "nearest takes torch.tensors of points.")
        if batch is not None and not isinstance(batch, (list, Tensor)):
            raise createPoptorchError(
                "A batch of nearest must be a list or a tensor. "
                f"Got {type(batch).__name__}"
            )
    trace = _device("nearest")
    shapes = f"Got {list(x.shape)} and {list(y.shape)}."
    if max(x.dim(), y.dim()) > 2:
        raise createPoptorchError(
            f"nearest takes points of at most 2 dimensions. {shapes}"
        )
    if x.shape[1:].numel() != y.shape[1:].numel():
        raise createPoptorchError(
            f"nearest takes points with the same number of features. {shapes}"
        )
    for batch, rows in ((batch_x, len(x)), (batch_y, len(y))):
        if batch is not None and len(batch) not in (0, rows):
            raise createPoptorchError(
                f"A batch of nearest must have one element per point: {rows}, "
                f"not {len(batch)}."
            )
        if isinstance(batch, list) and batch != sorted(batch):
            raise createPoptorchError(f"A batch of nearest must be sorted: {batch}.")
    # The values of tensors aren't known while tracing.
    if not isinstance(batch_x, Tensor) and not isinstance(batch_y, Tensor):
        ids_x, ids_y = sorted(set(batch_x or [0])), sorted(set(batch_y or [0]))
        if ids_x != ids_y:
            raise createPoptorchError(
                f"Both batches of nearest must have the same ids: {ids_x} and {ids_y}."
            )
    return trace.record(find_nearest, x, y, batch_x, batch_y)


def sample_farthest(
    src: Tensor, ptr: list[int], ratio: float, random_start: bool
) -> Tensor:
    """Run `fps` on the device."""
    chosen: list[Tensor] = []
    for begin, end in zip(ptr, ptr[1:]):
        points = src[begin:end].reshape(end - begin, -1)
        current = torch.zeros((), dtype=torch.int64)
        if random_start:
            current = torch.randint(end - begin, ())
        distance = torch.full((end - begin,), math.inf, dtype=points.dtype)
        for _ in range(math.ceil((end - begin) * ratio)):
            chosen.append(torch.add(current, begin))
            gap = (points - points[current]).square().sum(dim=1)
            distance = torch.minimum(distance, gap)
            current = distance.argmax()
    return torch.stack(chosen) if chosen else torch.zeros(0, dtype=torch.int64)


def find_nearest(
    x: Tensor, y: Tensor, batch_x: BatchIndices, batch_y: BatchIndices
) -> Tensor:
    """Run `nearest` on the device."""
    rows = [points.reshape(len(points), -1) for points in (x, y)]
    distance = (rows[0][:, None] - rows[1][None, :]).square().sum(dim=2)
    ids = [
        torch.zeros(len(points), dtype=torch.int64)
        if batch is None or len(batch) == 0
        else torch.as_tensor(batch)
        for points, batch in ((x, batch_x), (y, batch_y))
    ]
    is_other = ids[0][:, None] != ids[1][None, :]
    return torch.argmin(distance.masked_fill(is_other, math.inf), dim=1)


def _device(name: str) -> Recording:
    trace = current_trace()
    if trace is None:
        raise NotImplementedError(
            f"Could not run 'poptorch::{name}' with arguments from the 'CPU' backend: "
            "only a model that runs on the device may use it."
        )
    return trace
