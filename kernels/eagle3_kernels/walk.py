"""Walk the verify tree along the target's tokens: which drafts were right, and the bonus token."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch

from .checks import expect


@dataclass(frozen=True)
class Accepted:
    """The surviving path of each request: B requests, N nodes, S = longest path.

    Attributes:
        accept_index: [B, S] int32, node numbers b*N + i along the path, root first; -1 behind it.
        accept_lens: [B] int32, nodes on the path = accepted drafts + 1 = tokens produced this round.
        predict: [B, N] int32, the tokens produced: accepted drafts, then the bonus; 0 behind them.
    """

    accept_index: torch.Tensor
    accept_lens: torch.Tensor
    predict: torch.Tensor


@numba.njit(cache=True, nogil=True)
def _walk(
    tokens: np.ndarray,
    child: np.ndarray,
    sibling: np.ndarray,
    target: np.ndarray,
    index: np.ndarray,
    lens: np.ndarray,
    predict: np.ndarray,
) -> None:
    nodes = tokens.shape[1]
    width = index.shape[1]
    for b in range(tokens.shape[0]):
        for j in range(width):
            index[b, j] = -1
        for j in range(nodes):
            predict[b, j] = 0
        node = 0
        count = 0
        while True:
            index[b, count] = b * nodes + node
            predict[b, count] = target[b, node]
            count += 1
            if count == width:
                break
            following = child[b, node]
            while following != -1 and tokens[b, following] != target[b, node]:
                following = sibling[b, following]
            if following == -1:
                break
            node = following
        lens[b] = count


@numba.njit(cache=True, nogil=True)
def _first_bad_link(links: np.ndarray) -> int:
    """Position of the first link that neither ascends nor is -1; -1 where all are right."""
    nodes = links.shape[1]
    for b in range(links.shape[0]):
        for i in range(nodes):
            if links[b, i] != -1 and not i < links[b, i] < nodes:
                return b * nodes + i
    return -1


def check_links(next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    """Refuse links that leave the tree or could make a walk run for ever; [B, N] int64, on the CPU."""
    for name, links in (("next_token", next_token), ("next_sibling", next_sibling)):
        at = _first_bad_link(links.numpy())
        if at >= 0:
            b, i = divmod(at, links.shape[1])
            allowed = f"-1 or {i + 1} to {links.shape[1] - 1}" if i + 1 < links.shape[1] else "-1"
            raise ValueError(f"{name}: given {int(links[b, i])} at [{b}, {i}], allowed {allowed}")


def verify_walk(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    width: int,
) -> Accepted:
    """Follow, from the root, the child that carries the target's token, until there is none.

    Args:
        tokens, next_token, next_sibling: [B, N] int64, as in :class:`eagle3_kernels.TreeBuffers`; links
            ascend (a child and a next sibling have larger numbers) and end with -1.
        target_predict: [B, N] int64, the target's token after each node.
        width: S, 1 to N; the path is never longer.

    Example:
        A chain 5 -> 6 whose target says 6 after 5, and 9 after 6:

        >>> links = torch.tensor([[1, -1]]), torch.tensor([[-1, -1]])
        >>> a = verify_walk(torch.tensor([[5, 6]]), *links, torch.tensor([[6, 9]]), 2)
        >>> a.accept_lens.tolist(), a.predict.tolist()
        ([2], [[6, 9]])
    """
    ints = (torch.int64,)
    expect("tokens", tokens, dtypes=ints, shape=(None, None))
    shape = tuple(tokens.shape)
    expect("next_token", next_token, dtypes=ints, shape=shape)
    expect("next_sibling", next_sibling, dtypes=ints, shape=shape)
    expect("target_predict", target_predict, dtypes=ints, shape=shape)
    if not 1 <= width <= shape[1]:
        raise ValueError(f"width: given {width}, allowed 1 to {shape[1]}")
    check_links(next_token, next_sibling)
    index = torch.empty(shape[0], width, dtype=torch.int32)
    lens = torch.empty(shape[0], dtype=torch.int32)
    predict = torch.empty(shape, dtype=torch.int32)
    _walk(
        tokens.numpy(),
        next_token.numpy(),
        next_sibling.numpy(),
        target_predict.numpy(),
        index.numpy(),
        lens.numpy(),
        predict.numpy(),
    )
    return Accepted(index, lens, predict)
