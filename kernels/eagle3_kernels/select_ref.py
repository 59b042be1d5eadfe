"""Plain-torch reference of :mod:`.select`; same signatures."""

from __future__ import annotations

import torch

from .select import Candidates


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count] positions, score descending, position ascending."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def select_first(candidates: Candidates, probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See :func:`eagle3_kernels.select_first`."""
    k = candidates.topk
    candidates.scores[:, :k] = torch.where(probs > 0, probs, 0.0)
    candidates.tokens[:, :k] = ids
    candidates.beam.copy_(torch.arange(k).expand_as(candidates.beam))
    if candidates.steps > 1:
        candidates.parents[:, 1 : 1 + k] = candidates.beam
    return ids.reshape(-1)


def select_next(
    candidates: Candidates, step: int, probs: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.select_next`."""
    batch, k = candidates.beam.shape
    first = k + (step - 1) * k * k
    parent = candidates.scores.gather(1, candidates.beam).unsqueeze(2)
    grown = (parent * probs.view(batch, k, k)).nan_to_num(0.0, posinf=float("inf"), neginf=float("-inf"))
    grown = torch.minimum(grown, parent).view(batch, k * k)
    candidates.scores[:, first : first + k * k] = grown
    candidates.tokens[:, first : first + k * k] = ids.view(batch, k * k)
    chosen = _best(grown, k)
    candidates.beam.copy_(chosen + first)
    at = 1 + step * k
    if at < candidates.parents.shape[1]:
        candidates.parents[:, at : at + k] = candidates.beam
    tokens = candidates.tokens.gather(1, candidates.beam).reshape(-1)
    rows = (torch.arange(batch).unsqueeze(1) * k + chosen // k).reshape(-1)
    return tokens, rows


def select_nodes(candidates: Candidates, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.select_nodes`."""
    ids = _best(candidates.scores, count).sort(dim=1).values
    return ids, candidates.tokens.gather(1, ids)
