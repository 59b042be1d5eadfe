"""Triton twin of :mod:`.rows`: the logits are read once; a row's answer depends on the row alone.

``row_argmax`` is the verification of :mod:`.greedy_triton` with nothing drafted.  ``row_topk``:

1. ``_tile_topk``, grid (rows, tiles): the k best of each 1024-wide tile, and its weight.
2. ``_merge_topk``, one program per row: the k best of those, and their probabilities.

An entry is packed into 64 bits, the float's ordered key above its id counted down: one integer maximum
is "largest value, lowest id".
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (the parameters of a kernel are Triton values, which have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .greedy_triton import CHUNK, best_of_row, ordered
from .greedy_triton import TILE as ARGMAX_TILE
from .greedy_triton import _tile_best as tile_best
from .sample_triton import LOG2E, LOWEST_KEY, load_tile, value_of, weigh

TILE = 1024
MERGED = 1024  # entries looked at together: 128 tiles of topk 8
LARGEST_ID = tl.constexpr(2**31 - 1)
EMPTY = tl.constexpr(-(2**63))  # below every packed entry


@triton.jit
def pack(b_key, o_id):
    """Key and id in one int64 whose order is: key descending, then id ascending."""
    return (b_key.to(tl.int64) << 32) | (-o_id + LARGEST_ID).to(tl.int64)


@triton.jit
def key_of(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def id_of(packed):
    return -(packed & 0xFFFFFFFF).to(tl.int32) + LARGEST_ID


@triton.jit(do_not_specialize=["tiles"])
def _argmax(p_out, p_key, p_id, tiles, CHUNK: tl.constexpr):
    """One row."""
    i_row = tl.program_id(0).to(tl.int64)
    _, winner = best_of_row(p_key, p_id, i_row * tiles, tiles, CHUNK)
    tl.store(p_out + i_row, winner.to(tl.int64))


@triton.jit(do_not_specialize=["vocab", "tiles", "topk"])
def _tile_topk(
    p_best,  # [rows, tiles, topk] int64, out
    p_sum,  # [rows, tiles] float32, out
    p_logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    tiles,
    topk,
    TILE: tl.constexpr,
):
    """One tile of one row: its topk best, packed, and its weight relative to the best."""
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    o_inside = tl.arange(0, TILE)
    start = i_tile * TILE
    p_row = p_logits + i_row * stride
    # Whole tiles are loaded without a mask: a mask of unknown alignment would split the 16-byte loads.
    if start + TILE <= vocab:
        b_x = tl.load(p_row + start + o_inside).to(tl.float32)
        b_packed = pack(ordered(b_x), start + o_inside)
    else:
        b_x, b_key = load_tile(p_row, start, vocab, TILE)
        b_packed = tl.where(o_inside < vocab - start, pack(b_key, start + o_inside), EMPTY)
    at = i_row * tiles + i_tile
    top = value_of(tl.maximum(key_of(tl.max(b_packed, axis=0)), LOWEST_KEY))
    tl.store(p_sum + at, tl.sum(weigh(b_x, top, LOG2E), axis=0))
    for i in range(topk):
        best = tl.max(b_packed, axis=0)
        tl.store(p_best + at * topk + i, best)
        b_packed = tl.where(b_packed == best, EMPTY, b_packed)


@triton.jit(do_not_specialize=["tiles", "topk"])
def _merge_topk(
    p_probs,  # [rows, topk] float32, out
    p_ids,  # [rows, topk] int64, out
    p_best,  # [rows, tiles, topk] int64
    p_sum,  # [rows, tiles] float32
    tiles,
    topk,
    TOPK: tl.constexpr,
    MERGED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: the topk best of its tiles' best."""
    i_row = tl.program_id(0).to(tl.int64)
    p_best += i_row * tiles * topk
    o_out = tl.arange(0, TOPK)
    b_best = tl.full([TOPK], EMPTY, tl.int64)
    for start in range(0, tiles * topk, MERGED):
        o_entry = start + tl.arange(0, MERGED)
        b_more = tl.load(p_best + o_entry, mask=o_entry < tiles * topk, other=EMPTY)
        b_before = b_best
        for i in range(topk):
            best = tl.maximum(tl.max(b_before, axis=0), tl.max(b_more, axis=0))
            b_best = tl.where(o_out == i, best, b_best)
            b_before = tl.where(b_before == best, EMPTY, b_before)
            b_more = tl.where(b_more == best, EMPTY, b_more)
    top = value_of(tl.maximum(key_of(tl.max(b_best, axis=0)), LOWEST_KEY))
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, tiles, CHUNK):
        o_tile = start + tl.arange(0, CHUNK)
        m_tile = o_tile < tiles
        b_first = tl.load(p_best + o_tile * topk, mask=m_tile, other=EMPTY)
        b_sum = tl.load(p_sum + i_row * tiles + o_tile, mask=m_tile, other=0.0)
        b_mass = b_sum * weigh(value_of(tl.maximum(key_of(b_first), LOWEST_KEY)), top, LOG2E)
        total += tl.sum(b_mass.to(tl.float64), axis=0)
    # The key of NaN lies below that of -inf: such an entry weighs 0, as -inf does.
    b_weight = weigh(value_of(tl.maximum(key_of(b_best), LOWEST_KEY)), top, LOG2E).to(tl.float64)
    b_prob = (b_weight / tl.where(total > 0, total, 1.0)).to(tl.float32)
    tl.store(p_probs + i_row * topk + o_out, b_prob, mask=o_out < topk)
    tl.store(p_ids + i_row * topk + o_out, id_of(b_best).to(tl.int64), mask=o_out < topk)


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See :func:`eagle3_kernels.row_argmax`; the caller has checked the arguments."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, ARGMAX_TILE)
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    key = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    tile_best[(rows, tiles)](
        p_key=key,
        p_id=ids,
        p_logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        TILE=ARGMAX_TILE,
        num_warps=8,
    )
    _argmax[(rows,)](p_out=out, p_key=key, p_id=ids, tiles=tiles, CHUNK=CHUNK, num_warps=1)
    return out


def row_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.row_topk`; the caller has checked the arguments."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    probs = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return probs, ids
    best = torch.empty((rows, tiles, k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    _tile_topk[(rows, tiles)](
        p_best=best,
        p_sum=sums,
        p_logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        topk=k,
        TILE=TILE,
        num_warps=4,
    )
    _merge_topk[(rows,)](
        p_probs=probs,
        p_ids=ids,
        p_best=best,
        p_sum=sums,
        tiles=tiles,
        topk=k,
        TOPK=triton.next_power_of_2(k),
        MERGED=MERGED,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return probs, ids
