"""Triton twin of :mod:`.sample`: two launches, no [B*N, V] probabilities in memory.

1. ``_tile_sums``, grid (rows, tiles): of each 1024-wide tile the largest entry, its lowest id, and the
   weight relative to it; 12 bytes per tile.  Rows of greedy requests and of sampled ones alike.
2. ``_walk``, one program per request: at the current node combine the tiles; where there are filters,
   search the cut; choose the tile the coin falls into, read it again, choose the token; follow the child
   that holds it.

A filter keeps a prefix of the order "logit descending, id ascending", whatever filters are combined, so
it is one pair (key, id).  The key is found by bisection over the floats' bits, which needs no sort and is
exact: a tile whose maximum is below the bound in question is not read, and of 16-bit logits 16 bits at
most are in question.

Weights are float32, sums of tiles and everything compared with a coin float64: a token's probability is
right to about 1e-6, relatively.  What is compiled depends on the logits' dtype, on whether the row stride
is a multiple of 16, on the order, and on N and S rounded up to powers of two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (the parameters of a kernel are Triton values, which have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .greedy_triton import CHUNK, NO_ID, NOTHING, best_of_row, follow, ordered
from .walk import Accepted

# Left alone, ptxas holds the walk to 72 or 80 registers and spills; there is one program per request, so
# occupancy is nothing to save for.  AMD's compiler has no such option.
MAX_REGISTERS = 128
LIMITS = {} if torch.version.hip else {"maxnreg": MAX_REGISTERS}

TILE = 1024  # small: what a filter skips, and what a draw reads again, is a tile
LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
LOWEST_KEY = tl.constexpr(-0x7F800000)  # of -inf
# Low bits of a float32 that are 0 whenever it was a shorter float.
SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def value_of(key):
    """The float32 whose key this is; the inverse of ``ordered`` but for NaN and -0."""
    bits = tl.where(key < 0, (-key) | -0x80000000, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, top, scale):
    """exp((x - top) / temperature) with ``scale`` = log2(e) / temperature; NaN and -inf weigh 0."""
    at_top = tl.where(tl.abs(top) == INFINITY, 0.0, top)  # inf - inf would be NaN
    finite = tl.exp2((x - at_top) * scale)
    w = tl.where(top == INFINITY, tl.where(x == INFINITY, 1.0, 0.0), finite)
    return tl.where(x > -INFINITY, w, 0.0)  # false for NaN as well


@triton.jit
def load_tile(p_row, start, vocab, TILE: tl.constexpr):
    """(logits [TILE] float32, keys [TILE] int32); behind the vocabulary -inf and NOTHING."""
    o_inside = tl.arange(0, TILE)
    m_inside = o_inside < vocab - start
    b_x = tl.load(p_row + start + o_inside, mask=m_inside, other=-INFINITY).to(tl.float32)
    return b_x, tl.where(m_inside, ordered(b_x), NOTHING)


@triton.jit(do_not_specialize=["vocab", "tiles", "nodes"])
def _tile_sums(
    p_key,  # [rows, tiles] int32, out
    p_id,  # [rows, tiles] int32, out
    p_sum,  # [rows, tiles] float32, out
    p_logits,  # [rows, vocab], rows `stride` apart
    p_temperature,  # [B] float32
    stride,
    vocab,
    tiles,
    nodes,
    TILE: tl.constexpr,
):
    """One tile of one row: its largest key, the lowest id that has it, and the weight relative to it."""
    i_row = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1)
    temperature = tl.load(p_temperature + i_row // nodes)
    scale = LOG2E / tl.where(temperature > 0, temperature, 1.0)
    o_inside = tl.arange(0, TILE)
    start = i_tile * TILE
    p_row = p_logits + i_row * stride
    # Whole tiles are loaded without a mask: a mask of unknown alignment would split the 16-byte loads.
    if start + TILE <= vocab:
        b_x = tl.load(p_row + start + o_inside).to(tl.float32)
        b_key = ordered(b_x)
    else:
        b_x, b_key = load_tile(p_row, start, vocab, TILE)
    best = tl.max(b_key, axis=0)
    first = tl.min(tl.where(b_key == best, o_inside, NO_ID), axis=0)
    at = i_row * tiles + i_tile
    tl.store(p_key + at, best)
    tl.store(p_id + at, start + first)
    # A tile of NaN has the key of NaN, whose value is larger than any: it weighs 0 all the same.
    tl.store(p_sum + at, tl.sum(weigh(b_x, value_of(tl.maximum(best, LOWEST_KEY)), scale), axis=0))


@triton.jit
def above(p_row, p_key, at, bound, top, scale, vocab, tiles, TILE: tl.constexpr):
    """(number, weight in float64) of a row's entries with a key above ``bound``."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for i_tile in range(tiles):
        if tl.load(p_key + at + i_tile) > bound:
            b_x, b_key = load_tile(p_row, i_tile * TILE, vocab, TILE)
            count += tl.sum((b_key > bound).to(tl.int32), axis=0)
            mass += tl.sum(tl.where(b_key > bound, weigh(b_x, top, scale), 0.0), axis=0).to(tl.float64)
    return count, mass


@triton.jit
def search(
    p_row,
    p_key,
    at,
    best,
    top,
    scale,
    top_k,
    limit,
    min_p,
    vocab,
    tiles,
    SPARE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The lowest key that is kept, in part or whole.

    An entry is kept as long as fewer than ``top_k`` entries and less than ``limit`` weight come before
    it, and it weighs ``min_p`` or more.  For the first entry of a key, what comes before it are the
    larger keys, so the property is monotone in the key, and the largest key has it.

    Returns:
        (key, number of its entries that are kept, weight of the larger keys, weight of one such entry);
        the last three float64
    """
    low = (LOWEST_KEY >> SPARE) + tl.full([], 0, tl.int64) - 1  # one that is not kept
    high = (best >> SPARE).to(tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        key = (middle << SPARE).to(tl.int32)
        w = weigh(value_of(key), top, scale)
        kept = (w > 0) & (w >= min_p)
        if kept:  # what weighs too little needs no look at the row
            count, mass = above(p_row, p_key, at, key, top, scale, vocab, tiles, TILE)
            kept = (count < top_k) & (mass < limit)
        high = tl.where(kept, middle, high)
        low = tl.where(kept, low, middle)
    key = (high << SPARE).to(tl.int32)
    count, mass = above(p_row, p_key, at, key, top, scale, vocab, tiles, TILE)
    w = weigh(value_of(key), top, scale).to(tl.float64)
    there, _ = above(p_row, p_key, at, key - 1, top, scale, vocab, tiles, TILE)  # with this key as well
    by_count = tl.minimum(top_k, there) - count
    by_mass = tl.ceil((limit - mass) / w)
    return key, tl.minimum(by_count.to(tl.float64), by_mass), mass, w


@triton.jit
def last_id(p_row, p_key, at, key, allowed, vocab, tiles, TILE: tl.constexpr):
    """Id of the last entry with this key that is kept, ``allowed`` (float64) of them being; or vocab."""
    found = vocab + tl.full([], 0, tl.int32)
    seen = tl.full([], 0.0, tl.float64)
    for i_tile in range(tiles):
        if (tl.load(p_key + at + i_tile) >= key) & (seen < allowed):
            _, b_key = load_tile(p_row, i_tile * TILE, vocab, TILE)
            b_hit = (b_key == key).to(tl.int32)
            b_rank = tl.cumsum(b_hit, axis=0).to(tl.float64) + seen
            o_id = i_tile * TILE + tl.arange(0, TILE)
            inside = tl.min(tl.where((b_hit > 0) & (b_rank >= allowed), o_id, NO_ID), axis=0)
            found = tl.minimum(found, inside)
            seen += tl.sum(b_hit, axis=0).to(tl.float64)
    return found


@triton.jit
def kept_weights(p_row, i_tile, key, cut, top, scale, vocab, TILE: tl.constexpr):
    """Weights [TILE] of a tile, 0 where the filters drop an entry."""
    b_x, b_key = load_tile(p_row, i_tile * TILE, vocab, TILE)
    o_id = i_tile * TILE + tl.arange(0, TILE)
    m_kept = (b_key > key) | ((b_key == key) & (o_id <= cut))
    return tl.where(m_kept, weigh(b_x, top, scale), 0.0)


@triton.jit
def tile_mass(p_row, p_key, p_sum, at, i_tile, filtered, key, cut, top, scale, vocab, TILE: tl.constexpr):
    """Kept weight of a tile, float64; from its sum, or where there are filters from its entries."""
    tile_key = tl.load(p_key + at + i_tile)
    mass = tl.full([], 0.0, tl.float32)
    if filtered:
        if tile_key >= key:
            mass = tl.sum(kept_weights(p_row, i_tile, key, cut, top, scale, vocab, TILE), axis=0)
    else:
        mass = tl.load(p_sum + at + i_tile) * weigh(value_of(tl.maximum(tile_key, LOWEST_KEY)), top, scale)
    return mass.to(tl.float64)


@triton.jit(do_not_specialize=["vocab", "tiles", "nodes", "width"])
def _walk(
    p_index,  # [B, width] int32, out
    p_lens,  # [B] int32, out
    p_predict,  # [B, nodes] int32, out
    p_tokens,  # [B, nodes] int64
    p_child,  # [B, nodes] int64
    p_sibling,  # [B, nodes] int64
    p_key,  # [B*nodes, tiles] int32
    p_id,  # [B*nodes, tiles] int32
    p_sum,  # [B*nodes, tiles] float32
    p_logits,  # [B*nodes, vocab], rows `stride` apart
    p_temperature,  # [B] float32
    p_top_k,  # [B] int32
    p_top_p,  # [B] float32
    p_min_p,  # [B] float32
    p_coins,  # [B, nodes] float64
    stride,
    vocab,
    tiles,
    nodes,
    width,
    SEQUENTIAL: tl.constexpr,
    SPARE: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One request.  Outputs are kept in registers and stored once: no prefill, no store over a store."""
    i_request = tl.program_id(0).to(tl.int64)
    base = i_request * nodes
    temperature = tl.load(p_temperature + i_request)
    top_k = tl.load(p_top_k + i_request)
    top_p = tl.load(p_top_p + i_request).to(tl.float64)
    min_p = tl.load(p_min_p + i_request)
    scale = LOG2E / tl.where(temperature > 0, temperature, 1.0)
    filtered = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    o_node = tl.arange(0, NODES)
    o_step = tl.arange(0, WIDTH)
    b_index = tl.full([WIDTH], -1, tl.int32)
    b_predict = tl.zeros([NODES], tl.int32)
    node = tl.full([], 0, tl.int64)
    count = tl.full([], 0, tl.int32)
    while node >= 0:
        at = (base + node) * tiles
        best, token = best_of_row(p_key, p_id, at, tiles, CHUNK)
        if (temperature > 0) & (top_k != 1) & (best > LOWEST_KEY):
            p_row = p_logits + (base + node) * stride
            top = value_of(best)
            key = NOTHING + tl.full([], 0, tl.int32)
            cut = vocab + tl.full([], 0, tl.int32)
            if filtered:
                limit = tl.full([], INFINITY, tl.float64)
                if top_p < 1.0:
                    total = tl.full([], 0.0, tl.float64)
                    if SEQUENTIAL:
                        _, ties, mass, w = search(
                            p_row, p_key, at, best, top, scale, top_k, limit, 0.0, vocab, tiles, SPARE, TILE
                        )
                        total = mass + ties * w
                    else:
                        for i_tile in range(tiles):
                            total += tile_mass(
                                p_row, p_key, p_sum, at, i_tile, False, key, cut, top, scale, vocab, TILE
                            )
                    limit = top_p * total
                key, ties, _, _ = search(
                    p_row, p_key, at, best, top, scale, top_k, limit, min_p, vocab, tiles, SPARE, TILE
                )
                cut = last_id(p_row, p_key, at, key, ties, vocab, tiles, TILE)
            kept = tl.full([], 0.0, tl.float64)
            for i_tile in range(tiles):
                kept += tile_mass(
                    p_row, p_key, p_sum, at, i_tile, filtered, key, cut, top, scale, vocab, TILE
                )
            goal = tl.load(p_coins + base + node) * kept
            # The first tile at which the sum exceeds the goal; the same sums in the same order as above.
            seen = tl.full([], 0.0, tl.float64)
            chosen = tl.full([], 0, tl.int32)
            i_tile = tl.full([], 0, tl.int32)
            while i_tile < tiles:
                mass = tile_mass(p_row, p_key, p_sum, at, i_tile, filtered, key, cut, top, scale, vocab, TILE)
                chosen = tl.where(mass > 0, i_tile, chosen)
                done = (mass > 0) & (seen + mass > goal)
                seen = tl.where(done, seen, seen + mass)
                i_tile = tl.where(done, tiles, i_tile + 1)
            b_w = kept_weights(p_row, chosen, key, cut, top, scale, vocab, TILE)
            b_reached = tl.cumsum(b_w.to(tl.float64), axis=0) + seen
            o_id = chosen * TILE + tl.arange(0, TILE)
            first = tl.min(tl.where((b_w > 0) & (b_reached > goal), o_id, NO_ID), axis=0)
            last = tl.max(tl.where(b_w > 0, o_id, -1), axis=0)
            # By rounding the tile's own sum may end below the goal: then its last entry of any weight.
            token = tl.minimum(first, last)
        b_index = tl.where(o_step == count, (base + node).to(tl.int32), b_index)
        b_predict = tl.where(o_node == count, token, b_predict)
        count += 1
        child = tl.load(p_child + base + node)
        node = follow(p_tokens, p_sibling, base, tl.where(count < width, child, -1), node, token)
    tl.store(p_index + i_request * width + o_step, b_index, mask=o_step < width)
    tl.store(p_predict + base + o_node, b_predict, mask=o_node < nodes)
    tl.store(p_lens + i_request, count)


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
    """See :func:`eagle3_kernels.verify_sample`; the caller has checked the arguments."""
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
    sums = torch.empty((batch * nodes, tiles), dtype=torch.float32, device=device)
    _tile_sums[(batch * nodes, tiles)](
        p_key=key,
        p_id=ids,
        p_sum=sums,
        p_logits=logits,
        p_temperature=temperature,
        stride=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        nodes=nodes,
        TILE=TILE,
        num_warps=4,
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
        p_sum=sums,
        p_logits=logits,
        p_temperature=temperature,
        p_top_k=top_k,
        p_top_p=top_p,
        p_min_p=min_p,
        p_coins=coins,
        stride=logits.stride(0),
        vocab=vocab,
        tiles=tiles,
        nodes=nodes,
        width=width,
        SEQUENTIAL=order == "sequential",
        SPARE=SPARE_BITS[logits.dtype],
        NODES=triton.next_power_of_2(nodes),
        WIDTH=triton.next_power_of_2(width),
        TILE=TILE,
        CHUNK=CHUNK,
        num_warps=4,
        **LIMITS,
    )
    return Accepted(index, lens, predict)
