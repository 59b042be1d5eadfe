"""Plain-torch reference of :mod:`.slots`; same signatures."""

from __future__ import annotations

import torch


def cache_slots(
    req_to_token: torch.Tensor, requests: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """See :func:`eagle3_kernels.cache_slots`."""
    columns = start.long().unsqueeze(1) + torch.arange(width)
    return req_to_token[requests.long().unsqueeze(1), columns].long()


def write_slots(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See :func:`eagle3_kernels.write_slots`."""
    at = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = slots[at : at + last - first].to(torch.int32)
        at += last - first
