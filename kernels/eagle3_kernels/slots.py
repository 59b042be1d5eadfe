"""KV slots on the host: read a window of each request's row, write a ragged one."""

from __future__ import annotations

import numba
import numpy as np
import torch

from .checks import expect

INTS = (torch.int64, torch.int32)


@numba.njit(cache=True, nogil=True)
def _read(table: np.ndarray, rows: np.ndarray, start: np.ndarray, out: np.ndarray) -> None:
    for b in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[b, j] = table[rows[b], start[b] + j]


@numba.njit(cache=True, nogil=True)
def _write(
    table: np.ndarray, rows: np.ndarray, start: np.ndarray, end: np.ndarray, slots: np.ndarray
) -> None:
    at = 0
    for b in range(rows.shape[0]):
        for j in range(start[b], end[b]):
            table[rows[b], j] = slots[at]
            at += 1


def _check(table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor) -> None:
    expect("req_to_token", table, dtypes=(torch.int32,), shape=(None, None))
    expect("requests", rows, dtypes=INTS, shape=(None,))
    expect("start", start, dtypes=INTS, shape=tuple(rows.shape))


def _in_range(table: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> None:
    # numba does not check bounds, and a slot read from another row would corrupt another request.
    if rows.numel() == 0:
        return
    if int(rows.min()) < 0 or int(rows.max()) >= table.shape[0]:
        raise ValueError(f"requests: given {rows.tolist()}, allowed 0 to {table.shape[0] - 1}")
    if int(start.min()) < 0 or int(end.max()) > table.shape[1]:
        raise ValueError(
            f"start: given window {int(start.min())} to {int(end.max())}, allowed 0 to {table.shape[1]}"
        )


def cache_slots(
    req_to_token: torch.Tensor, requests: torch.Tensor, start: torch.Tensor, width: int
) -> torch.Tensor:
    """Slots of ``width`` positions from ``start`` on.

    Args:
        req_to_token: [R, M] int32; requests: [B] int; start: [B] int.

    Returns:
        [B, width] int64.
    """
    _check(req_to_token, requests, start)
    if width < 0:
        raise ValueError(f"width: given {width}, allowed 0 and above")
    _in_range(req_to_token, requests, start, start.long() + width)
    out = torch.empty(requests.shape[0], width, dtype=torch.int64)
    _read(req_to_token.numpy(), requests.numpy(), start.numpy(), out.numpy())
    return out


def write_slots(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write ``slots`` into positions ``start[b]`` to ``end[b]`` of each request's row, in request order.

    Args:
        req_to_token: [R, M] int32, changed in place; requests, start, end: [B] int.
        slots: [sum(end - start)] int.
    """
    _check(req_to_token, requests, start)
    expect("end", end, dtypes=INTS, shape=tuple(requests.shape))
    if bool((end < start).any()):
        raise ValueError(f"end: given {end.tolist()} with start {start.tolist()}, allowed start and above")
    expect("slots", slots, dtypes=INTS, shape=(int((end.long() - start.long()).sum()),))
    _in_range(req_to_token, requests, start, end)
    _write(req_to_token.numpy(), requests.numpy(), start.numpy(), end.numpy(), slots.numpy())
