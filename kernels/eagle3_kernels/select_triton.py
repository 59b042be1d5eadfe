"""Triton twin of :mod:`.select`: one launch per step, one for the final choice.

A score is not negative, so its bits order as it does; packed above the candidate's number counted down,
one integer maximum is "highest score, lowest number", and no two candidates are equal.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (the parameters of a kernel are Triton values, which have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows_triton import EMPTY, id_of, pack
from .select import Candidates

BLOCK = 1024  # candidates looked at together in the final choice


@triton.jit(do_not_specialize=["topk", "candidates", "slots"])
def _first(
    p_out,  # [B, topk] int64, out
    p_scores,  # [B, candidates] float32, out
    p_tokens,  # [B, candidates] int64, out
    p_beam,  # [B, topk] int64, out
    p_parents,  # [B, slots] int64, out
    p_probs,  # [B, topk] float32
    p_ids,  # [B, topk] int64
    topk,
    candidates,
    slots,
    TOPK: tl.constexpr,
):
    """One request: the first step's tokens are candidates 0 to topk - 1, and the beam."""
    i_request = tl.program_id(0).to(tl.int64)
    o_slot = tl.arange(0, TOPK)
    m_slot = o_slot < topk
    b_prob = tl.load(p_probs + i_request * topk + o_slot, mask=m_slot, other=0.0)
    b_id = tl.load(p_ids + i_request * topk + o_slot, mask=m_slot, other=0)
    tl.store(p_scores + i_request * candidates + o_slot, tl.where(b_prob > 0, b_prob, 0.0), mask=m_slot)
    tl.store(p_tokens + i_request * candidates + o_slot, b_id, mask=m_slot)
    tl.store(p_beam + i_request * topk + o_slot, o_slot.to(tl.int64), mask=m_slot)
    tl.store(
        p_parents + i_request * slots + 1 + o_slot, o_slot.to(tl.int64), mask=m_slot & (o_slot + 1 < slots)
    )
    tl.store(p_out + i_request * topk + o_slot, b_id, mask=m_slot)


@triton.jit(do_not_specialize=["step", "topk", "candidates", "slots"])
def _next(
    p_out,  # [B, topk] int64, out
    p_row,  # [B, topk] int64, out
    p_scores,  # [B, candidates] float32, in and out
    p_tokens,  # [B, candidates] int64, out
    p_beam,  # [B, topk] int64, in and out
    p_parents,  # [B, slots] int64, out
    p_probs,  # [B * topk, topk] float32
    p_ids,  # [B * topk, topk] int64
    step,
    topk,
    candidates,
    slots,
    TOPK: tl.constexpr,
):
    """One request: score the children of every beam slot, enter them, keep the topk best as the beam."""
    i_request = tl.program_id(0).to(tl.int64)
    o_child = tl.arange(0, TOPK * TOPK)
    b_slot, b_which = o_child // TOPK, o_child % TOPK
    m_child = (b_slot < topk) & (b_which < topk)
    b_number = b_slot * topk + b_which
    first = topk + (step - 1) * topk * topk
    p_scores += i_request * candidates
    p_probs += i_request * topk * topk
    p_ids += i_request * topk * topk

    b_held = tl.load(p_beam + i_request * topk + b_slot, mask=m_child, other=0)
    b_parent = tl.load(p_scores + b_held, mask=m_child, other=0.0)
    b_score = b_parent * tl.load(p_probs + b_number, mask=m_child, other=0.0)
    b_score = tl.where(b_score > 0, b_score, 0.0)  # NaN is no score
    b_score = tl.minimum(b_score, b_parent)  # rounding: a child is never worth more than its parent
    b_token = tl.load(p_ids + b_number, mask=m_child, other=0)
    tl.store(p_scores + first + b_number, b_score, mask=m_child)
    tl.store(p_tokens + i_request * candidates + first + b_number, b_token, mask=m_child)

    b_packed = pack(b_score.to(tl.int32, bitcast=True), b_number)
    b_packed = tl.where(m_child, b_packed, EMPTY)
    o_slot = tl.arange(0, TOPK)
    m_slot = o_slot < topk
    b_chosen = tl.zeros([TOPK], tl.int32)
    for i in range(topk):
        best = tl.max(b_packed, axis=0)
        b_chosen = tl.where(o_slot == i, id_of(best), b_chosen)
        b_packed = tl.where(b_packed == best, EMPTY, b_packed)
    at = i_request * topk + o_slot
    b_entered = (first + b_chosen).to(tl.int64)
    o_parent = 1 + step * topk + o_slot
    tl.store(p_out + at, tl.load(p_ids + b_chosen, mask=m_slot, other=0), mask=m_slot)
    tl.store(p_row + at, i_request * topk + b_chosen // topk, mask=m_slot)
    tl.store(p_parents + i_request * slots + o_parent, b_entered, mask=m_slot & (o_parent < slots))
    tl.store(p_beam + at, b_entered, mask=m_slot)  # every thread has read the old beam: maxima wait for all


@triton.jit(do_not_specialize=["count", "candidates"])
def _nodes(
    p_numbers,  # [B, count] int64, out
    p_out,  # [B, count] int64, out
    p_scores,  # [B, candidates] float32
    p_tokens,  # [B, candidates] int64
    count,
    candidates,
    BLOCK: tl.constexpr,
):
    """One request: the ``count`` best candidates in ascending order of their numbers.

    The worst of them is found by bisection over the packed entries, whose order is total; who is at
    least as good is written where the candidates before it that are, end.
    """
    i_request = tl.program_id(0).to(tl.int64)
    p_scores += i_request * candidates
    p_tokens += i_request * candidates
    low = tl.full([], 0, tl.int64)  # at least `count` entries reach it: scores are not negative
    high = tl.full([], 0x7FFFFFFF, tl.int64) << 32  # none does
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.full([], 0, tl.int32)
        for start in range(0, candidates, BLOCK):
            o_candidate = start + tl.arange(0, BLOCK)
            m_inside = o_candidate < candidates
            b_score = tl.load(p_scores + o_candidate, mask=m_inside, other=0.0)
            b_packed = pack(b_score.to(tl.int32, bitcast=True), o_candidate)
            reached += tl.sum((m_inside & (b_packed >= middle)).to(tl.int32), axis=0)
        low = tl.where(reached >= count, middle, low)
        high = tl.where(reached >= count, high, middle)
    written = tl.full([], 0, tl.int32)
    for start in range(0, candidates, BLOCK):
        o_candidate = start + tl.arange(0, BLOCK)
        m_inside = o_candidate < candidates
        b_score = tl.load(p_scores + o_candidate, mask=m_inside, other=0.0)
        m_chosen = m_inside & (pack(b_score.to(tl.int32, bitcast=True), o_candidate) >= low)
        b_place = written + tl.cumsum(m_chosen.to(tl.int32), axis=0) - 1
        b_token = tl.load(p_tokens + o_candidate, mask=m_chosen, other=0)
        m_chosen = m_chosen & (b_place < count)
        tl.store(p_numbers + i_request * count + b_place, o_candidate.to(tl.int64), mask=m_chosen)
        tl.store(p_out + i_request * count + b_place, b_token, mask=m_chosen)
        written += tl.sum(m_chosen.to(tl.int32), axis=0)


def select_first(candidates: Candidates, probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See :func:`eagle3_kernels.select_first`; the caller has checked the arguments."""
    batch, topk = probs.shape
    out = torch.empty((batch * topk,), dtype=torch.int64, device=probs.device)
    if batch == 0:
        return out
    _first[(batch,)](
        p_out=out,
        p_scores=candidates.scores,
        p_tokens=candidates.tokens,
        p_beam=candidates.beam,
        p_parents=candidates.parents,
        p_probs=probs,
        p_ids=ids,
        topk=topk,
        candidates=candidates.scores.shape[1],
        slots=candidates.parents.shape[1],
        TOPK=triton.next_power_of_2(topk),
        num_warps=1,
    )
    return out


def select_next(
    candidates: Candidates, step: int, probs: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.select_next`; the caller has checked the arguments."""
    rows, topk = probs.shape
    out = torch.empty((rows,), dtype=torch.int64, device=probs.device)
    row = torch.empty((rows,), dtype=torch.int64, device=probs.device)
    if rows == 0:
        return out, row
    _next[(rows // topk,)](
        p_out=out,
        p_row=row,
        p_scores=candidates.scores,
        p_tokens=candidates.tokens,
        p_beam=candidates.beam,
        p_parents=candidates.parents,
        p_probs=probs,
        p_ids=ids,
        step=step,
        topk=topk,
        candidates=candidates.scores.shape[1],
        slots=candidates.parents.shape[1],
        TOPK=triton.next_power_of_2(topk),
        num_warps=4,
    )
    return out, row


def select_nodes(candidates: Candidates, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`eagle3_kernels.select_nodes`; the caller has checked the arguments."""
    batch, total = candidates.scores.shape
    numbers = torch.empty((batch, count), dtype=torch.int64, device=candidates.scores.device)
    out = torch.empty((batch, count), dtype=torch.int64, device=candidates.scores.device)
    if batch == 0:
        return numbers, out
    _nodes[(batch,)](
        p_numbers=numbers,
        p_out=out,
        p_scores=candidates.scores,
        p_tokens=candidates.tokens,
        count=count,
        candidates=total,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return numbers, out
