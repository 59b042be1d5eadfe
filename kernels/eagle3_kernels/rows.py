"""Best entries of logits rows: argmax for a chain, softmax top-k for a tree.

Ties go to the lowest id, so that a row's answer never depends on the batch around it.  NaN never
wins; a row of NaN alone answers 0.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from .checks import DEVICES, expect

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_TOPK = 64


def _float32(logits: torch.Tensor) -> np.ndarray:
    return logits.to(torch.float32).numpy()


@numba.njit(cache=True, nogil=True)
def argmax_float(row: np.ndarray) -> int:
    """Argmax of one row of float32."""
    best = -np.inf
    where = 0
    found = False
    for v in range(row.shape[0]):
        x = row[v]
        if x > best or (not found and x == best):
            best, where, found = x, v, True
    return where


@numba.njit(cache=True, nogil=True)
def argmax_bits(row: np.ndarray, nan_above: int) -> int:
    """Argmax of one row of 16-bit floats on their raw bits: sign-magnitude to an ordered integer.

    ``nan_above`` is the bit pattern of infinity: a larger magnitude is NaN.
    """
    best = np.int32(-40000)
    where = 0
    for v in range(row.shape[0]):
        b = np.int32(row[v])
        magnitude = b & 0x7FFF
        if magnitude > nan_above:
            continue
        ordered = magnitude if b >= 0 else -magnitude
        if ordered > best:
            best, where = ordered, v
    return where


@numba.njit(cache=True, nogil=True)
def _argmax(logits: np.ndarray, nan_above: int, out: np.ndarray) -> None:
    for r in range(logits.shape[0]):
        out[r] = argmax_bits(logits[r], nan_above) if nan_above > 0 else argmax_float(logits[r])


def raw_rows(logits: torch.Tensor) -> tuple[np.ndarray, int]:
    """What the argmax reads without a conversion: float32, or the bits of a 16-bit float.

    Returns:
        (rows, bit pattern of infinity of a 16-bit float; 0 says that rows are float32)
    """
    if logits.dtype == torch.float32:
        return logits.numpy(), 0
    return logits.view(torch.int16).numpy(), 0x7F80 if logits.dtype == torch.bfloat16 else 0x7C00


@numba.njit(cache=True, nogil=True)
def _topk(logits: np.ndarray, k: int, probs: np.ndarray, ids: np.ndarray) -> None:
    for r in range(logits.shape[0]):
        row = logits[r]
        for j in range(k):
            probs[r, j] = -np.inf
            ids[r, j] = -1
        for v in range(row.shape[0]):
            x = row[v]
            if np.isnan(x):
                continue
            if ids[r, k - 1] >= 0 and not x > probs[r, k - 1]:
                continue
            j = k - 1
            while j > 0 and (ids[r, j - 1] < 0 or x > probs[r, j - 1]):
                probs[r, j] = probs[r, j - 1]
                ids[r, j] = ids[r, j - 1]
                j -= 1
            probs[r, j] = x
            ids[r, j] = v
        if ids[r, k - 1] < 0:  # fewer than k numbers: NaN comes behind them all
            j = 0
            while ids[r, j] >= 0:
                j += 1
            for v in range(row.shape[0]):
                if j < k and np.isnan(row[v]):
                    ids[r, j] = v
                    j += 1
        top = probs[r, 0]
        if top == -np.inf:
            for j in range(k):
                probs[r, j] = 0.0
            continue
        if top == np.inf:
            count = np.float32(0.0)
            for v in range(row.shape[0]):
                count += row[v] == np.inf
            for j in range(k):
                probs[r, j] = np.float32(probs[r, j] == np.inf) / count
            continue
        total = 0.0  # float64: a float32 sum over 128,000 entries is off by 2e-4
        for v in range(row.shape[0]):
            if not np.isnan(row[v]):
                total += np.exp(row[v] - top)
        for j in range(k):
            probs[r, j] = np.float32(np.exp(probs[r, j] - top) / total)


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value.

    Args:
        logits: [R, V] float32, bfloat16 or float16.

    Returns:
        [R] int64.

    Example:
        >>> row_argmax(torch.tensor([[0.0, 2.0, 2.0]])).tolist()
        [1]
    """
    expect("logits", logits, dtypes=FLOATS, shape=(None, None), devices=DEVICES)
    if logits.shape[1] == 0:
        raise ValueError(f"logits: given shape {tuple(logits.shape)}, allowed (any, 1 and above)")
    if logits.is_cuda:
        from . import rows_triton

        return rows_triton.row_argmax(logits)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    _argmax(*raw_rows(logits), out.numpy())
    return out


def row_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable entries of each row under softmax at temperature 1.

    Args:
        logits: [R, V] float32, bfloat16 or float16.
        k: 1 to min(V, 64).

    Returns:
        (probabilities [R, k] float32 descending, ids [R, k] int64)
    """
    expect("logits", logits, dtypes=FLOATS, shape=(None, None), devices=DEVICES)
    if not 1 <= k <= min(logits.shape[1], MAX_TOPK):
        raise ValueError(f"k: given {k}, allowed 1 to {min(logits.shape[1], MAX_TOPK)}")
    if logits.is_cuda:
        from . import rows_triton

        return rows_triton.row_topk(logits, k)
    probs = torch.empty(logits.shape[0], k)
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64)
    _topk(_float32(logits), k, probs.numpy(), ids.numpy())
    return probs, ids
