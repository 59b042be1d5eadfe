"""Plain-torch reference of :mod:`.greedy`; same signature."""

from __future__ import annotations

import torch

from . import rows_ref, walk_ref
from .walk import Accepted


def verify_greedy(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
) -> Accepted:
    """See :func:`eagle3_kernels.verify_greedy`."""
    target = rows_ref.row_argmax(logits).view(tokens.shape)
    return walk_ref.verify_walk(tokens, next_token, next_sibling, target, width)
