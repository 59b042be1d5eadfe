"""Triton twin of :mod:`.tree`: one launch for any number of nodes, and no prefill by the caller.

A program owns 16 nodes of one request and writes every element of theirs.  Ancestors are followed in
candidate numbers, through the list of parents, and compared with the numbers of the nodes: no node has
to know another one's place first, so there is no serial search and nothing to wait for.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (the parameters of a kernel are Triton values, which have no Python type)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tree import TreeBuffers

ROWS = 16
COLUMNS = 64
ROOT = tl.constexpr(-1)  # the root's candidate number, as the list of parents has it
NO_NODE = tl.constexpr(-2)
NO_INDEX = tl.constexpr(2**31 - 1)


@triton.jit
def parent_of(p_parents, b_id, slots, topk):
    """Candidate numbers of the parents; ROOT for first-step tokens, NO_NODE for what has none.

    A parent that is not numbered lower than its child, or lies outside of the list, is none: no input
    makes the caller's loop run for ever.
    """
    b_slot = b_id // topk
    m_inner = (b_id >= topk) & (b_slot < slots)
    b_parent = tl.load(p_parents + b_slot, mask=m_inner, other=NO_NODE)
    b_parent = tl.where(m_inner & (b_parent >= 0) & (b_parent < b_id), b_parent, NO_NODE)
    return tl.where((b_id >= 0) & (b_id < topk), ROOT, b_parent)


@triton.jit(do_not_specialize=["nodes", "slots", "topk"])
def _tree(
    p_tokens,  # [B, nodes] int64, out
    p_positions,  # [B, nodes] int64, out
    p_mask,  # [B, nodes, nodes] uint8, out
    p_child,  # [B, nodes] int64, out
    p_sibling,  # [B, nodes] int64, out
    p_bonus,  # [B] int64
    p_ids,  # [B, nodes - 1] int64
    p_node_tokens,  # [B, nodes - 1] int64
    p_parents,  # [B, slots] int64
    p_lens,  # [B] int64 or int32
    nodes,
    slots,
    topk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS nodes of one request: node i >= 1 is candidate ids[i - 1], node 0 the root."""
    i_request = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < nodes
    m_inner = m_row & (o_row > 0)
    p_ids += i_request * (nodes - 1) - 1
    p_parents += i_request * slots
    b_id = tl.load(p_ids + o_row, mask=m_inner, other=ROOT)  # [ROWS]
    b_id = tl.where(m_row, b_id, NO_NODE)
    b_parent = parent_of(p_parents, b_id, slots, topk)

    b_depth = tl.zeros([ROWS], tl.int64)
    b_above = b_id
    while tl.max(b_above, axis=0) >= 0:
        b_depth += (b_above >= 0).to(tl.int64)
        b_above = parent_of(p_parents, b_above, slots, topk)

    b_child = tl.full([ROWS], NO_INDEX, tl.int32)
    b_sibling = tl.full([ROWS], NO_INDEX, tl.int32)
    for start in range(0, nodes, COLUMNS):
        o_column = start + tl.arange(0, COLUMNS)
        m_column = o_column < nodes
        b_other = tl.load(p_ids + o_column, mask=m_column & (o_column > 0), other=ROOT)  # [COLUMNS]
        b_other = tl.where(m_column, b_other, NO_NODE)
        b_others_parent = parent_of(p_parents, b_other, slots, topk)
        b_number = tl.where(m_column, o_column, NO_INDEX)[None, :]

        # [ROWS, COLUMNS]; ROOT is the parent of first-step tokens and the number of row 0
        m_child = (b_others_parent[None, :] == b_id[:, None]) & (o_column[None, :] > 0)
        m_child = m_child & (b_id[:, None] != NO_NODE)
        b_child = tl.minimum(b_child, tl.min(tl.where(m_child, b_number, NO_INDEX), axis=1))
        m_sibling = (b_others_parent[None, :] == b_parent[:, None]) & (o_column[None, :] > o_row[:, None])
        m_sibling = m_sibling & (b_parent[:, None] != NO_NODE)
        b_sibling = tl.minimum(b_sibling, tl.min(tl.where(m_sibling, b_number, NO_INDEX), axis=1))

        m_seen = (o_column[None, :] == 0) | (o_column[None, :] == o_row[:, None])
        b_above = b_parent
        while tl.max(b_above, axis=0) >= 0:
            m_seen = m_seen | ((b_other[None, :] == b_above[:, None]) & (b_above[:, None] >= 0))
            b_above = parent_of(p_parents, b_above, slots, topk)
        p_rows = p_mask + (i_request * nodes + o_row)[:, None] * nodes + o_column[None, :]
        tl.store(p_rows, m_seen.to(tl.uint8), mask=m_row[:, None] & m_column[None, :])

    at = i_request * nodes + o_row
    b_token = tl.load(p_node_tokens + i_request * (nodes - 1) - 1 + o_row, mask=m_inner, other=0)
    b_token = tl.where(o_row == 0, tl.load(p_bonus + i_request), b_token)
    tl.store(p_tokens + at, b_token, mask=m_row)
    tl.store(p_positions + at, tl.load(p_lens + i_request).to(tl.int64) + b_depth, mask=m_row)
    tl.store(p_child + at, tl.where(b_child == NO_INDEX, -1, b_child).to(tl.int64), mask=m_row)
    tl.store(p_sibling + at, tl.where(b_sibling == NO_INDEX, -1, b_sibling).to(tl.int64), mask=m_row)


def build_tree(
    bonus_tokens: torch.Tensor,
    node_ids: torch.Tensor,
    node_tokens: torch.Tensor,
    parents: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
) -> TreeBuffers:
    """See :func:`eagle3_kernels.build_tree`; the caller has checked the arguments."""
    batch, nodes = bonus_tokens.shape[0], node_ids.shape[1] + 1
    tree = TreeBuffers.allocate(batch, nodes, bonus_tokens.device)
    if batch == 0:
        return tree
    _tree[(batch, triton.cdiv(nodes, ROWS))](
        p_tokens=tree.tokens,
        p_positions=tree.positions,
        p_mask=tree.mask.view(torch.uint8),
        p_child=tree.next_token,
        p_sibling=tree.next_sibling,
        p_bonus=bonus_tokens,
        p_ids=node_ids,
        p_node_tokens=node_tokens,
        p_parents=parents,
        p_lens=seq_lens,
        nodes=nodes,
        slots=parents.shape[1],
        topk=topk,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return tree


def build_chain(bonus_tokens: torch.Tensor, tokens: torch.Tensor, seq_lens: torch.Tensor) -> TreeBuffers:
    """See :func:`eagle3_kernels.build_chain`: the tree of topk 1, whose candidate i is the child of i - 1."""
    batch, steps = tokens.shape
    ids = torch.arange(steps, device=tokens.device).repeat(batch, 1)
    parents = torch.arange(-1, max(steps - 1, 0), device=tokens.device).repeat(batch, 1)
    return build_tree(bonus_tokens, ids, tokens, parents, seq_lens, 1)
