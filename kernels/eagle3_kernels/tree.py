"""The verify tree: mask, positions and sibling links of the chosen nodes.

Node 0 is the root (the last verified token); node i >= 1 is the candidate ``node_ids[i-1]``.
Children are linked in ascending node order, which is descending probability among siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch

from .checks import DEVICES, expect, same_device


@dataclass(frozen=True)
class TreeBuffers:
    """One tree per request: B requests, N nodes.

    Attributes:
        tokens: [B, N] int64.
        positions: [B, N] int64, sequence position of each node.
        mask: [B, N, N] bool; mask[b, i, j]: node i sees node j (itself, its ancestors, the root).
        next_token: [B, N] int64, first child; -1 where there is none.
        next_sibling: [B, N] int64, next child of the same parent; -1 where there is none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor

    @staticmethod
    def allocate(batch: int, nodes: int, device: torch.device | str = "cpu") -> TreeBuffers:
        """Uninitialised; every element is written by the build functions."""
        ints = torch.empty((4, batch, nodes), dtype=torch.int64, device=device)
        mask = torch.empty((batch, nodes, nodes), dtype=torch.bool, device=device)
        return TreeBuffers(ints[0], ints[1], mask, ints[2], ints[3])


@numba.njit(cache=True, nogil=True)
def _tree(
    bonus: np.ndarray,
    ids: np.ndarray,
    node_tokens: np.ndarray,
    parents: np.ndarray,
    lens: np.ndarray,
    k: int,
    tokens: np.ndarray,
    positions: np.ndarray,
    mask: np.ndarray,
    child: np.ndarray,
    sibling: np.ndarray,
) -> int:
    """Fill the tree; returns the position of the first node whose parent is not among them, or -1."""
    nodes = tokens.shape[1]
    parent = np.empty(nodes, np.int64)
    for b in range(tokens.shape[0]):
        mask[b] = False
        for i in range(nodes):
            child[b, i] = -1
            sibling[b, i] = -1
            mask[b, i, 0] = True
            mask[b, i, i] = True
        tokens[b, 0] = bonus[b]
        positions[b, 0] = lens[b]
        for i in range(1, nodes):
            slot = ids[b, i - 1] // k
            p = 0
            if (
                ids[b, i - 1] < 0
                or 0 < slot >= parents.shape[1]
                or (i > 1 and ids[b, i - 1] <= ids[b, i - 2])
            ):
                return b * (nodes - 1) + i - 1
            if slot > 0:
                p = np.searchsorted(ids[b, : i - 1], parents[b, slot]) + 1
                if p == i or ids[b, p - 1] != parents[b, slot]:
                    return b * (nodes - 1) + i - 1
            parent[i] = p
            tokens[b, i] = node_tokens[b, i - 1]
            positions[b, i] = positions[b, p] + 1
            for j in range(1, p + 1):
                mask[b, i, j] = mask[b, p, j]
            mask[b, i, i] = True
        for i in range(nodes - 1, 0, -1):
            p = parent[i]
            sibling[b, i] = child[b, p]
            child[b, p] = i
    return -1


@numba.njit(cache=True, nogil=True)
def _chain(
    bonus: np.ndarray,
    drafted: np.ndarray,
    lens: np.ndarray,
    tokens: np.ndarray,
    positions: np.ndarray,
    mask: np.ndarray,
    child: np.ndarray,
    sibling: np.ndarray,
) -> None:
    nodes = tokens.shape[1]
    for b in range(tokens.shape[0]):
        for i in range(nodes):
            tokens[b, i] = bonus[b] if i == 0 else drafted[b, i - 1]
            positions[b, i] = lens[b] + i
            child[b, i] = i + 1 if i + 1 < nodes else -1
            sibling[b, i] = -1
            for j in range(nodes):
                mask[b, i, j] = j <= i


def build_tree(
    bonus_tokens: torch.Tensor,
    node_ids: torch.Tensor,
    node_tokens: torch.Tensor,
    parents: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
) -> TreeBuffers:
    """Arrange the nodes chosen by :func:`eagle3_kernels.select_nodes`.

    Args:
        bonus_tokens: [B] int64, roots.
        node_ids, node_tokens: [B, N-1] int64; ids ascending and ancestor-closed.
        parents: [B, P] int64, as in :class:`eagle3_kernels.Candidates`.
        seq_lens: [B] int64 or int32, position of the root.
        topk: k.

    Raises:
        ValueError: naming the argument.  Node numbers are looked at on the CPU only: on a GPU that would
            wait for the device; there a node without a parent sees the root and itself alone.
    """
    ints = (torch.int64,)
    expect("bonus_tokens", bonus_tokens, dtypes=ints, shape=(None,), devices=DEVICES)
    batch = bonus_tokens.shape[0]
    expect("node_ids", node_ids, dtypes=ints, shape=(batch, None), devices=DEVICES)
    expect("node_tokens", node_tokens, dtypes=ints, shape=tuple(node_ids.shape), devices=DEVICES)
    expect("parents", parents, dtypes=ints, shape=(batch, None), devices=DEVICES)
    expect("seq_lens", seq_lens, dtypes=(torch.int64, torch.int32), shape=(batch,), devices=DEVICES)
    same_device(
        bonus_tokens=bonus_tokens,
        node_ids=node_ids,
        node_tokens=node_tokens,
        parents=parents,
        seq_lens=seq_lens,
    )
    if topk < 1:
        raise ValueError(f"topk: given {topk}, allowed 1 and above")
    if bonus_tokens.is_cuda:
        from . import tree_triton

        return tree_triton.build_tree(bonus_tokens, node_ids, node_tokens, parents, seq_lens, topk)
    tree = TreeBuffers.allocate(batch, node_ids.shape[1] + 1)
    bad = _tree(
        bonus_tokens.numpy(),
        node_ids.numpy(),
        node_tokens.numpy(),
        parents.numpy(),
        seq_lens.numpy(),
        topk,
        tree.tokens.numpy(),
        tree.positions.numpy(),
        tree.mask.numpy(),
        tree.next_token.numpy(),
        tree.next_sibling.numpy(),
    )
    if bad >= 0:
        b, i = divmod(bad, node_ids.shape[1])
        raise ValueError(
            f"node_ids: given {int(node_ids[b, i])} at [{b}, {i}], allowed ascending numbers, each with its "
            f"parent among those before it, below {topk * max(parents.shape[1], 1)}"
        )
    return tree


def build_chain(bonus_tokens: torch.Tensor, tokens: torch.Tensor, seq_lens: torch.Tensor) -> TreeBuffers:
    """The tree of topk 1: each token is the only child of the one before.

    Args:
        bonus_tokens: [B] int64; tokens: [B, D] int64; seq_lens: [B] int64 or int32.

    Example:
        >>> t = build_chain(torch.tensor([7]), torch.tensor([[8, 9]]), torch.tensor([4]))
        >>> t.tokens.tolist(), t.positions.tolist(), t.next_token.tolist()
        ([[7, 8, 9]], [[4, 5, 6]], [[1, 2, -1]])
    """
    batch, ints = bonus_tokens.shape[0] if bonus_tokens.dim() else None, (torch.int64,)
    expect("bonus_tokens", bonus_tokens, dtypes=ints, shape=(None,), devices=DEVICES)
    expect("tokens", tokens, dtypes=ints, shape=(batch, None), devices=DEVICES)
    expect("seq_lens", seq_lens, dtypes=(torch.int64, torch.int32), shape=(batch,), devices=DEVICES)
    same_device(bonus_tokens=bonus_tokens, tokens=tokens, seq_lens=seq_lens)
    if bonus_tokens.is_cuda:
        from . import tree_triton

        return tree_triton.build_chain(bonus_tokens, tokens, seq_lens)
    tree = TreeBuffers.allocate(tokens.shape[0], tokens.shape[1] + 1)
    _chain(
        bonus_tokens.numpy(),
        tokens.numpy(),
        seq_lens.numpy(),
        tree.tokens.numpy(),
        tree.positions.numpy(),
        tree.mask.numpy(),
        tree.next_token.numpy(),
        tree.next_sibling.numpy(),
    )
    return tree
