"""Plain-torch reference of :mod:`.walk`; same signature."""

from __future__ import annotations

import torch

from .walk import Accepted


def verify_walk(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    width: int,
) -> Accepted:
    """See :func:`eagle3_kernels.verify_walk`."""
    batch, nodes = tokens.shape
    base = torch.arange(batch) * nodes
    index = torch.full((batch, width), -1, dtype=torch.int32)
    predict = torch.zeros(batch, nodes, dtype=torch.int32)
    node = torch.zeros(batch, dtype=torch.int64)
    alive = torch.ones(batch, dtype=torch.bool)
    lens = torch.zeros(batch, dtype=torch.int32)

    def at(table: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return table.gather(1, where.clamp(min=0).unsqueeze(1)).squeeze(1)

    for j in range(width):
        index[:, j] = torch.where(alive, base + node, -1).to(torch.int32)
        predict[:, j] = torch.where(alive, at(target_predict, node), 0).to(torch.int32)
        lens += alive.to(torch.int32)
        wanted = at(target_predict, node)
        following = at(next_token, node)
        for _ in range(nodes):
            wrong = (following >= 0) & (at(tokens, following) != wanted)
            following = torch.where(wrong, at(next_sibling, following), following)
        alive = alive & (following >= 0)
        node = torch.where(alive, following, node)
    return Accepted(index, lens, predict)
