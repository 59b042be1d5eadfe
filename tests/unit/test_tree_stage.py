"""The tree stage: chains and trees from a proposal, and the same tensors as SGLang's verify input."""

from __future__ import annotations

import pytest
import torch

import eagle3_kernels as kernels
from sglang_eagle3_ext import tree
from sglang_eagle3_ext.records import DraftShape, Proposal

BATCH = 3


def proposal(shape: DraftShape, seed: int = 0) -> Proposal:
    """A drafted round of random probabilities."""
    generator = torch.Generator().manual_seed(seed)
    candidates = kernels.Candidates.allocate(BATCH, shape.topk, shape.steps)
    for step in range(shape.steps):
        rows = BATCH if step == 0 else BATCH * shape.topk
        probs, ids = torch.randn(rows, 30, generator=generator).softmax(1).topk(shape.topk, dim=1)
        if step == 0:
            kernels.select_first(candidates, probs, ids)
        else:
            kernels.select_next(candidates, step, probs, ids)
    node_ids, tokens = kernels.select_nodes(candidates, shape.draft_tokens - 1)
    return Proposal(node_ids, tokens, candidates.parents)


@pytest.mark.parametrize("lens_type", [torch.int64, torch.int32])
@pytest.mark.parametrize("bonus_type", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [DraftShape(5, 1, 6), DraftShape(3, 4, 16), DraftShape(1, 3, 4)], ids=str)
def test_build(shape: DraftShape, bonus_type: torch.dtype, lens_type: torch.dtype) -> None:
    proposed = proposal(shape)
    bonus = torch.tensor([7, 8, 9], dtype=bonus_type)  # the round before hands over int32
    lens = torch.tensor([0, 30, 4], dtype=lens_type)
    made = tree.build(proposed, bonus, lens, shape)
    nodes, verify = made.nodes, made.verify_input
    width = shape.draft_tokens

    assert nodes.tokens[:, 0].tolist() == [7, 8, 9]
    assert torch.equal(nodes.tokens[:, 1:], proposed.tokens)
    assert nodes.positions[:, 0].tolist() == [0, 30, 4]
    depth = nodes.positions - lens.long().unsqueeze(1)
    assert torch.equal(depth, nodes.mask.sum(2) - 1)
    assert int(depth.max()) <= shape.steps
    if shape.topk == 1:
        assert depth.tolist() == [list(range(width))] * BATCH

    # SGLang gets the same memory, flat; its numbers of nodes run through the batch.
    assert torch.equal(verify.draft_token, nodes.tokens.view(-1))
    assert torch.equal(verify.positions, nodes.positions.view(-1))
    assert verify.positions.data_ptr() == nodes.positions.data_ptr()
    assert torch.equal(verify.custom_mask, nodes.mask)
    assert verify.retrieve_index.tolist() == [list(range(b * width, (b + 1) * width)) for b in range(BATCH)]
    assert verify.retrieve_next_token is nodes.next_token
    assert verify.retrieve_next_sibling is nodes.next_sibling
    assert (verify.spec_steps, verify.topk, verify.draft_token_num) == (shape.steps, shape.topk, width)
    assert verify.num_tokens_per_req == width and verify.max_tree_depth == shape.width


def test_a_chain_of_one_shape_is_the_tree_of_the_same_nodes() -> None:
    shape = DraftShape(4, 1, 5)
    proposed = proposal(shape, seed=2)
    roots, lens = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    chain = tree.build(proposed, roots, lens, shape).nodes
    general = kernels.build_tree(roots, proposed.node_ids, proposed.tokens, proposed.parents, lens, 1)
    for name in ("tokens", "positions", "mask", "next_token", "next_sibling"):
        assert torch.equal(getattr(chain, name), getattr(general, name)), name
