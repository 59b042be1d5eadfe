"""Plain-torch reference of :mod:`.rows`; same signatures."""

from __future__ import annotations

import torch


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See :func:`eagle3_kernels.row_argmax`."""
    clean = torch.where(logits.isnan(), float("-inf"), logits.float())
    best = clean.max(dim=1, keepdim=True).values
    hit = (clean == best) & ~logits.isnan()
    return hit.to(torch.int8).argmax(dim=1)


def row_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.row_topk`."""
    clean = torch.where(logits.isnan(), float("-inf"), logits.double())
    order = clean.sort(dim=1, descending=True, stable=True).indices
    behind = logits.isnan().gather(1, order).to(torch.int8).sort(dim=1, stable=True).indices
    order = order.gather(1, behind)
    probs = clean.softmax(dim=1).nan_to_num(0.0)
    ids = order[:, :k]
    infinite = clean == float("inf")
    share = infinite.double() / infinite.sum(dim=1, keepdim=True).clamp(min=1)
    probs = torch.where(infinite.any(dim=1, keepdim=True), share, probs)
    return probs.gather(1, ids).float(), ids
