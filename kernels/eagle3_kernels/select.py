"""Which tokens the draft tries: the beam of each step, and the nodes that are worth verifying.

Candidates are numbered as in EAGLE-2 (arXiv 2406.16858) and SGLang: the k first-step tokens are
0..k-1; child c of beam slot r, expanded at step i >= 1, is k + (i-1)k^2 + rk + c.  A candidate's
score is the product of the draft's probabilities along its path.

A child's score is clamped to its parent's and equal scores go to the lower number.  Parents have
lower numbers than their children, so every chosen set contains the ancestors of its members: no
orphan can arise, also where a probability rounds to 1 (torch.topk gives no such guarantee).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch

from .checks import DEVICES, expect, same_device


@dataclass(frozen=True)
class Candidates:
    """Everything drafted in one round, for B requests; C = k + (D-1)k^2.

    Attributes:
        scores: [B, C] float32, path probability; filled by the select functions.
        tokens: [B, C] int64, target vocabulary.
        parents: [B, k(D-1)+1] int64; -1 (root), then for each expanded beam slot the candidate it holds.
        beam: [B, k] int64, candidate held by each beam slot after the last call.
        steps, topk: D and k.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    beam: torch.Tensor
    steps: int
    topk: int

    @staticmethod
    def allocate(batch: int, topk: int, steps: int, device: torch.device | str = "cpu") -> Candidates:
        """Buffers for one round."""
        for name, value in (("topk", topk), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name}: given {value}, allowed 1 and above")
        count = topk + (steps - 1) * topk * topk
        return Candidates(
            torch.empty((batch, count), dtype=torch.float32, device=device),
            torch.empty((batch, count), dtype=torch.int64, device=device),
            torch.full((batch, topk * (steps - 1) + 1), -1, dtype=torch.int64, device=device),
            torch.empty((batch, topk), dtype=torch.int64, device=device),
            steps,
            topk,
        )


@numba.njit(cache=True, nogil=True)
def _best(scores: np.ndarray, first: int, count: int, k: int, out: np.ndarray) -> None:
    """The k best of scores[first:first+count], score descending, number ascending."""
    filled = 0
    for c in range(first, first + count):
        s = scores[c]
        if filled == k and not s > scores[out[k - 1]]:
            continue
        j = filled if filled < k else k - 1
        while j > 0 and s > scores[out[j - 1]]:
            out[j] = out[j - 1]
            j -= 1
        out[j] = c
        if filled < k:
            filled += 1


@numba.njit(cache=True, nogil=True)
def _first(
    probs: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    tokens: np.ndarray,
    beam: np.ndarray,
    parents: np.ndarray,
    out: np.ndarray,
) -> None:
    k = probs.shape[1]
    for b in range(probs.shape[0]):
        for j in range(k):
            scores[b, j] = probs[b, j] if probs[b, j] > 0 else np.float32(0)
            tokens[b, j] = ids[b, j]
            beam[b, j] = j
            out[b * k + j] = ids[b, j]
            if parents.shape[1] > 1:
                parents[b, 1 + j] = j


@numba.njit(cache=True, nogil=True)
def _next(
    step: int,
    probs: np.ndarray,
    ids: np.ndarray,
    scores: np.ndarray,
    tokens: np.ndarray,
    beam: np.ndarray,
    parents: np.ndarray,
    out: np.ndarray,
    row: np.ndarray,
) -> None:
    k = beam.shape[1]
    first = k + (step - 1) * k * k
    chosen = np.empty(k, np.int64)
    for b in range(beam.shape[0]):
        for r in range(k):
            parent = scores[b, beam[b, r]]
            for c in range(k):
                s = parent * probs[b * k + r, c]
                if np.isnan(s):
                    s = np.float32(0)
                # Rounding: a child is never worth more than its parent.
                scores[b, first + r * k + c] = min(s, parent)
                tokens[b, first + r * k + c] = ids[b * k + r, c]
        _best(scores[b], first, k * k, k, chosen)
        for j in range(k):
            c = chosen[j]
            beam[b, j] = c
            out[b * k + j] = tokens[b, c]
            row[b * k + j] = b * k + (c - first) // k
            at = 1 + step * k + j
            if at < parents.shape[1]:
                parents[b, at] = c


@numba.njit(cache=True, nogil=True)
def _nodes(scores: np.ndarray, tokens: np.ndarray, count: int, ids: np.ndarray, out: np.ndarray) -> None:
    for b in range(scores.shape[0]):
        _best(scores[b], 0, scores.shape[1], count, ids[b])
        ids[b].sort()
        for j in range(count):
            out[b, j] = tokens[b, ids[b, j]]


def _check_candidates(candidates: Candidates) -> None:
    batch, k, expanded = candidates.scores.shape[0], candidates.topk, candidates.steps - 1
    ints = (torch.int64,)
    everything = {
        "scores": ((torch.float32,), (batch, k + expanded * k * k)),
        "tokens": (ints, (batch, k + expanded * k * k)),
        "parents": (ints, (batch, k * expanded + 1)),
        "beam": (ints, (batch, k)),
    }
    for name, (dtypes, shape) in everything.items():
        field = getattr(candidates, name)
        expect(f"candidates.{name}", field, dtypes=dtypes, shape=shape, devices=DEVICES)
    same_device(**{f"candidates.{name}": getattr(candidates, name) for name in everything})


def _check_step(candidates: Candidates, rows: int, probs: torch.Tensor, ids: torch.Tensor) -> None:
    _check_candidates(candidates)
    shape = (rows, candidates.topk)
    expect("probs", probs, dtypes=(torch.float32,), shape=shape, devices=DEVICES)
    expect("ids", ids, dtypes=(torch.int64,), shape=shape, devices=DEVICES)
    same_device(**{"candidates.scores": candidates.scores, "probs": probs, "ids": ids})


def select_first(candidates: Candidates, probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Enter the first step.

    Args:
        probs: [B, k] float32 descending; ids: [B, k] int64, target vocabulary.

    Returns:
        Tokens of the beam, [B*k] int64.
    """
    batch = candidates.scores.shape[0]
    _check_step(candidates, batch, probs, ids)
    if probs.is_cuda:
        from . import select_triton

        return select_triton.select_first(candidates, probs, ids)
    out = torch.empty(batch * candidates.topk, dtype=torch.int64)
    _first(
        probs.numpy(),
        ids.numpy(),
        candidates.scores.numpy(),
        candidates.tokens.numpy(),
        candidates.beam.numpy(),
        candidates.parents.numpy(),
        out.numpy(),
    )
    return out


def select_next(
    candidates: Candidates, step: int, probs: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand every beam slot by k children and keep the k best.

    Args:
        step: 1 to D-1, in order.
        probs: [B*k, k] float32; ids: [B*k, k] int64, target vocabulary.

    Returns:
        (tokens of the new beam [B*k] int64, row in the old beam that each continues [B*k] int64)
    """
    if not 1 <= step < candidates.steps:
        raise ValueError(f"step: given {step}, allowed 1 to {candidates.steps - 1}")
    rows = candidates.scores.shape[0] * candidates.topk
    _check_step(candidates, rows, probs, ids)
    if probs.is_cuda:
        from . import select_triton

        return select_triton.select_next(candidates, step, probs, ids)
    out = torch.empty(rows, dtype=torch.int64)
    row = torch.empty(rows, dtype=torch.int64)
    _next(
        step,
        probs.numpy(),
        ids.numpy(),
        candidates.scores.numpy(),
        candidates.tokens.numpy(),
        candidates.beam.numpy(),
        candidates.parents.numpy(),
        out.numpy(),
        row.numpy(),
    )
    return out, row


def select_nodes(candidates: Candidates, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best candidates of the round.

    Returns:
        (numbers [B, count] int64 ascending, their tokens [B, count] int64)
    """
    _check_candidates(candidates)
    batch, total = candidates.scores.shape
    if not 1 <= count <= total:
        raise ValueError(f"count: given {count}, allowed 1 to {total}")
    if candidates.scores.is_cuda:
        from . import select_triton

        return select_triton.select_nodes(candidates, count)
    ids = torch.empty(batch, count, dtype=torch.int64)
    out = torch.empty(batch, count, dtype=torch.int64)
    _nodes(candidates.scores.numpy(), candidates.tokens.numpy(), count, ids.numpy(), out.numpy())
    return ids, out
