"""Triton twin of :mod:`.greedy`: two launches, the logits are read once, no [B*N, V] intermediate.

1. ``_tile_best``, grid (rows, tiles): the largest entry of each 4096-wide tile and its lowest id,
   8 bytes per tile.  Tiles are fixed, so a row's answer depends on nothing but the row.
2. ``_walk``, one program per request: combine the tiles of the current node, go to the child that
   holds the winner, repeat; then write every output element once.

What is compiled depends on the logits' dtype, on whether the row stride is a multiple of 16, and on N
and S rounded up to powers of two; never on the batch or the vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (the parameters of a kernel are Triton values, which have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .walk import Accepted

TILE = 4096  # 8 KB of bfloat16: enough loads in flight per program, few tiles to combine
CHUNK = 64  # tiles combined at once; 64 * 4096 covers every vocabulary in use in one step

# Below every float's key; Triton reads globals that are constexpr only.
NOTHING = tl.constexpr(-(2**31))
NAN_KEY = tl.constexpr(-0x7F800001)  # directly below -inf: NaN never wins against a number
INFINITY_BITS = tl.constexpr(0x7F800000)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(x):
    """int32 key with the order of the float: sign-magnitude to two's complement, +0 equal to -0."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > INFINITY_BITS, NAN_KEY, key)


@triton.jit(do_not_specialize=["vocab", "tiles"])
def _tile_best(
    p_key,  # [rows, tiles] int32, out
    p_id,  # [rows, tiles] int32, out
    p_logits,  # [rows, vocab], rows `stride` apart
    stride,
    vocab,
    tiles,
    TILE: tl.constexpr,
):
    """One tile of one row: its largest key and the lowest id that has it."""
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    o_inside = tl.arange(0, TILE)
    start = i_tile * TILE
    p_tile = p_logits + i_row * stride + start
    # Whole tiles are loaded without a mask: a mask of unknown alignment would split the 16-byte loads.
    if start + TILE <= vocab:
        b_key = ordered(tl.load(p_tile + o_inside))
    else:
        m_inside = o_inside < vocab - start
        b_key = tl.where(m_inside, ordered(tl.load(p_tile + o_inside, mask=m_inside, other=0.0)), NOTHING)
    best = tl.max(b_key, axis=0)
    first = tl.min(tl.where(b_key == best, o_inside, NO_ID), axis=0)
    tl.store(p_key + i_row * tiles + i_tile, best)
    tl.store(p_id + i_row * tiles + i_tile, start + first)


@triton.jit
def best_of_row(p_key, p_id, at, tiles, CHUNK: tl.constexpr):
    """Key and id of a row's largest entry, from its tiles at element ``at``; ties to the lowest id."""
    best = tl.full([], NOTHING, tl.int32)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, tiles, CHUNK):
        o_tile = start + tl.arange(0, CHUNK)
        b_key = tl.load(p_key + at + o_tile, mask=o_tile < tiles, other=NOTHING)
        b_id = tl.load(p_id + at + o_tile, mask=o_tile < tiles, other=NO_ID)
        top = tl.max(b_key, axis=0)
        first = tl.min(tl.where(b_key == top, b_id, NO_ID), axis=0)
        # Strictly: of equal tiles the earlier chunk has the lower ids.
        winner = tl.where(top > best, first, winner)
        best = tl.maximum(best, top)
    return best, winner


@triton.jit
def follow(p_tokens, p_sibling, base, first, after, wanted):
    """The child with token ``wanted`` among ``first`` and its siblings, or -1.

    ``after`` is the parent's number; a link that does not ascend ends the list, so that no input makes
    the loop run for ever.
    """
    node = tl.where(first > after, first, -1)
    searching = node >= 0
    while searching:
        token = tl.load(p_tokens + base + node)
        sibling = tl.load(p_sibling + base + node)
        hit = token == wanted
        later = tl.where(sibling > node, sibling, -1)
        node = tl.where(hit, node, later)
        searching = (node >= 0) & (token != wanted)
    return node


@triton.jit(do_not_specialize=["tiles", "nodes", "width"])
def _walk(
    p_index,  # [B, width] int32, out
    p_lens,  # [B] int32, out
    p_predict,  # [B, nodes] int32, out
    p_tokens,  # [B, nodes] int64
    p_child,  # [B, nodes] int64
    p_sibling,  # [B, nodes] int64
    p_key,  # [B*nodes, tiles] int32
    p_id,  # [B*nodes, tiles] int32
    tiles,
    nodes,
    width,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One request.  Outputs are kept in registers and stored once: no prefill, no store over a store."""
    i_request = tl.program_id(0).to(tl.int64)
    base = i_request * nodes
    o_node = tl.arange(0, NODES)
    o_step = tl.arange(0, WIDTH)
    b_index = tl.full([WIDTH], -1, tl.int32)
    b_predict = tl.zeros([NODES], tl.int32)
    node = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    while node >= 0:
        _, winner = best_of_row(p_key, p_id, (base + node) * tiles, tiles, CHUNK)
        b_index = tl.where(o_step == count, (base + node).to(tl.int32), b_index)
        b_predict = tl.where(o_node == count, winner, b_predict)
        count += 1
        child = tl.load(p_child + base + node)
        node = follow(p_tokens, p_sibling, base, tl.where(count < width, child, -1), node, winner)
    tl.store(p_index + i_request * width + o_step, b_index, mask=o_step < width)
    tl.store(p_predict + base + o_node, b_predict, mask=o_node < nodes)
    tl.store(p_lens + i_request, count)


def verify_greedy(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
) -> Accepted:
    """See :func:`eagle3_kernels.verify_greedy`; the caller has checked the arguments."""
    batch, nodes = tokens.shape
    vocab, device = logits.shape[1], logits.device
    tiles = triton.cdiv(vocab, TILE)
    index = torch.empty((batch, width), dtype=torch.int32, device=device)
    lens = torch.empty((batch,), dtype=torch.int32, device=device)
    predict = torch.empty((batch, nodes), dtype=torch.int32, device=device)
    if batch == 0:
        return Accepted(index, lens, predict)
    key = torch.empty((batch * nodes, tiles), dtype=torch.int32, device=device)
    ids = torch.empty((batch * nodes, tiles), dtype=torch.int32, device=device)
    _tile_best[(batch * nodes, tiles)](
        p_key=key,
        p_id=ids,
        p_logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        TILE=TILE,
        num_warps=8,
    )
    _walk[(batch,)](
        p_index=index,
        p_lens=lens,
        p_predict=predict,
        p_tokens=tokens,
        p_child=next_token,
        p_sibling=next_sibling,
        p_key=key,
        p_id=ids,
        tiles=tiles,
        nodes=nodes,
        width=width,
        NODES=triton.next_power_of_2(nodes),
        WIDTH=triton.next_power_of_2(width),
        CHUNK=CHUNK,
        num_warps=1,
    )
    return Accepted(index, lens, predict)
