"""Greedy verification: the walk of :mod:`.walk` with the argmax computed where the walk comes by.

The argmax of a row is needed only for nodes on the accepted path, so on the CPU the other rows are
never read.  Equal logits go to the lowest id and every row is read by itself: the answer of a request
does not depend on the batch around it.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from .checks import DEVICES, expect, same_device
from .rows import FLOATS, argmax_bits, argmax_float, raw_rows
from .walk import Accepted, check_links


@numba.njit(cache=True, nogil=True)
def _walk(
    tokens: np.ndarray,
    child: np.ndarray,
    sibling: np.ndarray,
    logits: np.ndarray,
    nan_above: int,
    index: np.ndarray,
    lens: np.ndarray,
    predict: np.ndarray,
) -> None:
    nodes = tokens.shape[1]
    width = index.shape[1]
    for b in range(tokens.shape[0]):
        index[b] = -1
        predict[b] = 0
        node = 0
        count = 0
        while node != -1:
            row = logits[b * nodes + node]
            best = argmax_bits(row, nan_above) if nan_above > 0 else argmax_float(row)
            index[b, count] = b * nodes + node
            predict[b, count] = best
            count += 1
            node = child[b, node] if count < width else -1
            while node != -1 and tokens[b, node] != best:
                node = sibling[b, node]
        lens[b] = count


def check(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
) -> None:
    """Refuse what no implementation can work with; shapes as in :func:`verify_greedy`."""
    ints = (torch.int64,)
    expect("tokens", tokens, dtypes=ints, shape=(None, None), devices=DEVICES)
    batch, nodes = tokens.shape
    expect("next_token", next_token, dtypes=ints, shape=(batch, nodes), devices=DEVICES)
    expect("next_sibling", next_sibling, dtypes=ints, shape=(batch, nodes), devices=DEVICES)
    expect("logits", logits, dtypes=FLOATS, shape=(batch * nodes, None), devices=DEVICES, strided_rows=True)
    if not 1 <= logits.shape[1] < 2**31:
        raise ValueError(f"logits: given shape {tuple(logits.shape)}, allowed (any, 1 to 2147483647)")
    if not 1 <= width <= nodes:
        raise ValueError(f"width: given {width}, allowed 1 to {nodes}")
    same_device(tokens=tokens, next_token=next_token, next_sibling=next_sibling, logits=logits)


def verify_greedy(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
) -> Accepted:
    """Follow, from the root, the child that carries the argmax, until there is none.

    Equal to :func:`eagle3_kernels.verify_walk` on :func:`eagle3_kernels.row_argmax`, in one pass over
    the logits.  NaN never wins; a row of NaN alone answers 0.

    Args:
        tokens, next_token, next_sibling: [B, N] int64, as in :class:`eagle3_kernels.TreeBuffers`; links
            ascend (a child and a next sibling have larger numbers) and end with -1.
        logits: [B*N, V] float32, bfloat16 or float16; rows may be strided, entries of a row not.
        width: S, 1 to N; the path is never longer.

    Raises:
        ValueError: naming the argument.  Links are looked at on the CPU only: on a GPU that would wait
            for the device; there a link that does not ascend ends the list.

    Example:
        A chain 1 -> 2 over a vocabulary of 3, whose target says 2 after 1, and 0 after 2:

        >>> links = torch.tensor([[1, -1]]), torch.tensor([[-1, -1]])
        >>> logits = torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
        >>> a = verify_greedy(torch.tensor([[1, 2]]), *links, logits, 2)
        >>> a.accept_lens.tolist(), a.predict.tolist()
        ([2], [[2, 0]])
    """
    check(tokens, next_token, next_sibling, logits, width)
    if tokens.is_cuda:
        from . import greedy_triton

        return greedy_triton.verify_greedy(tokens, next_token, next_sibling, logits, width)
    check_links(next_token, next_sibling)
    batch, nodes = tokens.shape
    index = torch.empty(batch, width, dtype=torch.int32)
    lens = torch.empty(batch, dtype=torch.int32)
    predict = torch.empty(batch, nodes, dtype=torch.int32)
    _walk(
        tokens.numpy(),
        next_token.numpy(),
        next_sibling.numpy(),
        *raw_rows(logits),
        index.numpy(),
        lens.numpy(),
        predict.numpy(),
    )
    return Accepted(index, lens, predict)
