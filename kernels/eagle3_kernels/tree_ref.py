"""Plain-torch reference of :mod:`.tree`; same signatures."""

from __future__ import annotations

import torch

from .tree import TreeBuffers


def build_tree(
    bonus_tokens: torch.Tensor,
    node_ids: torch.Tensor,
    node_tokens: torch.Tensor,
    parents: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
) -> TreeBuffers:
    """See :func:`eagle3_kernels.build_tree`."""
    batch, inner = node_ids.shape
    nodes = inner + 1
    slot = node_ids // topk
    parent_id = parents.gather(1, slot) if inner else slot
    # [B, N-1, N-1]: node i's parent is node j
    is_parent = (node_ids.unsqueeze(1) == parent_id.unsqueeze(2)) & (slot > 0).unsqueeze(2)
    edge = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    edge[:, 1:, 1:] = is_parent
    edge[:, 1:, 0] = slot == 0
    mask = torch.eye(nodes, dtype=torch.bool).expand(batch, -1, -1) | edge
    reach = mask
    for _ in range(nodes.bit_length()):
        reach = (reach.float() @ reach.float()) > 0
    depth = reach.sum(dim=2) - 1
    numbers = torch.arange(nodes)
    child = torch.where(edge.transpose(1, 2), numbers, nodes).min(dim=2).values
    same_parent = (edge.float() @ edge.float().transpose(1, 2)) > 0
    later = same_parent & (numbers.unsqueeze(0) > numbers.unsqueeze(1))
    sibling = torch.where(later, numbers, nodes).min(dim=2).values
    return TreeBuffers(
        torch.cat((bonus_tokens.unsqueeze(1), node_tokens), dim=1),
        seq_lens.long().unsqueeze(1) + depth,
        reach,
        torch.where(child < nodes, child, -1),
        torch.where(sibling < nodes, sibling, -1),
    )


def build_chain(bonus_tokens: torch.Tensor, tokens: torch.Tensor, seq_lens: torch.Tensor) -> TreeBuffers:
    """See :func:`eagle3_kernels.build_chain`."""
    batch, steps = tokens.shape
    nodes = torch.arange(steps + 1).expand(batch, -1)
    return TreeBuffers(
        torch.cat((bonus_tokens.unsqueeze(1), tokens), dim=1),
        seq_lens.long().unsqueeze(1) + nodes,
        torch.ones(steps + 1, steps + 1, dtype=torch.bool).tril().expand(batch, -1, -1).contiguous(),
        torch.where(nodes < steps, nodes + 1, -1),
        torch.full_like(nodes, -1),
    )
