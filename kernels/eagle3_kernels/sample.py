"""Sampled verification: at every node the walk comes by, the target draws its token.

A child is followed exactly when it holds the token that was drawn, so the tokens produced follow the
target's law whatever was drafted: no draft probability enters, and no other rule accepts more of a
fixed set of children.  It is SGLang's target-only tree sampling seen from the other side (there a coin
is compared with the children's summed probabilities, and a second one draws from the rest); drawing
first needs no second coin, has no case for siblings with the same token, and makes the output a
function of (coins, logits) that does not depend on the draft or on the shape of the tree.

The law of one node, logits x, in float64:

    weight   w = exp((x - max x) / temperature); NaN and -inf weigh 0; where x is +inf somewhere, those
             entries weigh 1 and the others 0
    order    x descending, then id ascending
    kept     entry i of this order, i = 0, 1, ..., as long as
                 i < top_k
                 top_p = 1, or w[0] + ... + w[i-1] < top_p * M, where
                     M = all weight ("joint") or the weight of the first top_k entries ("sequential")
                 w[i] >= min_p
    drawn    the first id, in ascending order of ids, at which the kept weight summed up exceeds
             coin * (all kept weight)

"joint" is what SGLang's samplers do without speculation, "sequential" what its verification does.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from .checks import DEVICES, expect, same_device
from .greedy import check as check_tree
from .rows import argmax_float
from .walk import Accepted, check_links

ORDERS = ("joint", "sequential")
MAX_TOP_K = 2**31 - 1


@numba.njit(cache=True, nogil=True)
def keep(
    row: np.ndarray,
    weight: np.ndarray,
    total: float,
    top_k: int,
    top_p: float,
    min_p: float,
    sequential: bool,
) -> None:
    """Set the weight of what the filters drop to 0.

    Sorts only what can matter: entries above a bound that falls until enough of them are above it.
    """
    vocab = row.shape[0]
    bound = 1e-2
    while True:
        count = 0
        mass = 0.0
        for v in range(vocab):
            if weight[v] >= bound and weight[v] > 0.0:
                count += 1
                mass += weight[v]
        # In sequential order top_p refers to the first top_k entries: all of them have to be seen.
        enough = count >= top_k or (
            top_p < 1.0 and mass >= top_p * total and not (sequential and top_k < vocab)
        )
        if enough or bound < min_p or bound == 0.0:
            break
        bound = bound * 1e-3 if bound > 1e-12 else 0.0
    ids = np.empty(count, np.int64)
    minus = np.empty(count, np.float32)
    at = 0
    for v in range(vocab):
        if weight[v] >= bound and weight[v] > 0.0:
            ids[at] = v
            minus[at] = -row[v]
            at += 1
        else:
            weight[v] = 0.0
    order = np.argsort(minus, kind="mergesort")  # stable: equal logits stay in ascending order of ids
    if sequential:
        total = 0.0
        for i in range(min(top_k, count)):
            total += weight[ids[order[i]]]
    before = 0.0
    cut = False
    for i in range(count):
        v = ids[order[i]]
        w = weight[v]
        cut = cut or i >= top_k or (top_p < 1.0 and not before < top_p * total) or w < min_p
        before += w
        if cut:
            weight[v] = 0.0


@numba.njit(cache=True, nogil=True)
def draw(
    row: np.ndarray,
    weight: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    sequential: bool,
    coin: float,
) -> int:
    """One node's token; ``weight`` is scratch of the row's length."""
    best = argmax_float(row)
    top = row[best]
    if temperature == 0.0 or top_k == 1 or not top > -np.inf:
        return best
    vocab = row.shape[0]
    total = 0.0
    for v in range(vocab):
        x = row[v]
        w = 0.0
        if top == np.inf:
            w = 1.0 if x == np.inf else 0.0
        elif x > -np.inf:
            w = math.exp((np.float64(x) - np.float64(top)) / temperature)
        weight[v] = w
        total += w
    if top_k < vocab or top_p < 1.0 or min_p > 0.0:
        keep(row, weight, total, top_k, top_p, min_p, sequential)
    kept = 0.0
    for v in range(vocab):
        kept += weight[v]
    goal = coin * kept
    seen = 0.0
    last = best
    for v in range(vocab):
        if weight[v] > 0.0:
            seen += weight[v]
            last = v
            if seen > goal:
                break
    return last  # by rounding the sum may stay at the goal: then the last kept entry


@numba.njit(cache=True, nogil=True)
def _walk(
    tokens: np.ndarray,
    child: np.ndarray,
    sibling: np.ndarray,
    logits: np.ndarray,
    decode: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    coins: np.ndarray,
    sequential: bool,
    index: np.ndarray,
    lens: np.ndarray,
    predict: np.ndarray,
) -> None:
    nodes = tokens.shape[1]
    width = index.shape[1]
    vocab = logits.shape[1]
    row = np.empty(vocab, np.float32)
    weight = np.empty(vocab, np.float64)
    for b in range(tokens.shape[0]):
        index[b] = -1
        predict[b] = 0
        node = 0
        count = 0
        while node != -1:
            for v in range(vocab):
                raw = logits[b * nodes + node, v]
                row[v] = decode[np.int64(raw) & 0xFFFF] if decode.shape[0] > 0 else raw
            token = draw(
                row, weight, temperature[b], top_k[b], top_p[b], min_p[b], sequential, coins[b, node]
            )
            index[b, count] = b * nodes + node
            predict[b, count] = token
            count += 1
            node = child[b, node] if count < width else -1
            while node != -1 and tokens[b, node] != token:
                node = sibling[b, node]
        lens[b] = count


def check(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    coins: torch.Tensor,
    order: str,
) -> None:
    """Refuse what no implementation can work with; values are looked at on the CPU only."""
    check_tree(tokens, next_token, next_sibling, logits, width)
    batch, nodes = tokens.shape
    per_request = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, values in per_request.items():
        expect(name, values, dtypes=(torch.float32,), shape=(batch,), devices=DEVICES)
    expect("top_k", top_k, dtypes=(torch.int32,), shape=(batch,), devices=DEVICES)
    expect("coins", coins, dtypes=(torch.float64,), shape=(batch, nodes), devices=DEVICES)
    same_device(logits=logits, **per_request, top_k=top_k, coins=coins)
    if order not in ORDERS:
        raise ValueError(f"order: given {order!r}, allowed {' or '.join(map(repr, ORDERS))}")
    if tokens.is_cuda:
        return
    for name, values, right, allowed in (
        ("temperature", temperature, (temperature >= 0) & temperature.isfinite(), "0 and above"),
        ("top_k", top_k, top_k >= 1, "1 and above"),
        ("top_p", top_p, (top_p > 0) & (top_p <= 1), "above 0, to 1"),
        ("min_p", min_p, (min_p >= 0) & (min_p <= 1), "0 to 1"),
        ("coins", coins, (coins >= 0) & (coins < 1), "0 to below 1"),
    ):
        if not bool(right.all()):
            raise ValueError(f"{name}: given {values[~right][0].item()}, allowed {allowed}")


def _decoded(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows as numba reads them, and the float32 value of each 16-bit pattern (none for float32)."""
    if logits.dtype == torch.float32:
        return logits.numpy(), np.empty(0, np.float32)
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return logits.view(torch.int16).numpy(), patterns.view(logits.dtype).float().numpy()


def verify_sample(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    coins: torch.Tensor,
    order: str = "joint",
) -> Accepted:
    """From the root, draw the target's token and follow the child that carries it, until there is none.

    The module's docstring defines the law.  A request with temperature 0 or top_k 1 takes the argmax,
    exactly as :func:`eagle3_kernels.verify_greedy` does, whatever else is in the batch.  A token of
    weight 0 is never drawn; a row without any finite or infinite weight answers its lowest id that is
    not NaN.

    Args:
        tokens, next_token, next_sibling, logits, width: as in :func:`eagle3_kernels.verify_greedy`.
        temperature: [B] float32, 0 and above.
        top_k: [B] int32, 1 and above; the vocabulary's size and more keep all.
        top_p: [B] float32, above 0, to 1.
        min_p: [B] float32, 0 to 1, relative to the most probable token.
        coins: [B, N] float64 in [0, 1), independent along a path; see
            :func:`eagle3_kernels.seeded_coins`.  float32 would do for no vocabulary in use: its steps
            of 2^-24 are 1/128 of the probability of one of 131,072 equal tokens.
        order: "joint" or "sequential".

    Raises:
        ValueError: naming the argument.  Values, and links, are looked at on the CPU only.

    Example:
        >>> links = torch.tensor([[1, -1]]), torch.tensor([[-1, -1]])
        >>> logits = torch.log(torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
        >>> one = torch.ones(1)
        >>> a = verify_sample(torch.tensor([[7, 1]]), *links, logits, 2, temperature=one,
        ...     top_k=one.int() * 2, top_p=one, min_p=one * 0, coins=torch.tensor([[0.3, 0.4]]).double())
        >>> a.accept_lens.tolist(), a.predict.tolist()  # 0.3 falls to token 1, 0.4 to token 0
        ([2], [[1, 0]])
    """
    check(tokens, next_token, next_sibling, logits, width, temperature, top_k, top_p, min_p, coins, order)
    if tokens.is_cuda:
        from . import sample_triton

        return sample_triton.verify_sample(
            tokens, next_token, next_sibling, logits, width,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, coins=coins, order=order,
        )  # fmt: skip
    check_links(next_token, next_sibling)
    batch, nodes = tokens.shape
    index = torch.empty(batch, width, dtype=torch.int32)
    lens = torch.empty(batch, dtype=torch.int32)
    predict = torch.empty(batch, nodes, dtype=torch.int32)
    _walk(
        tokens.numpy(),
        next_token.numpy(),
        next_sibling.numpy(),
        *_decoded(logits),
        temperature.numpy(),
        top_k.numpy(),
        top_p.numpy(),
        min_p.numpy(),
        coins.numpy(),
        order == "sequential",
        index.numpy(),
        lens.numpy(),
        predict.numpy(),
    )
    return Accepted(index, lens, predict)
