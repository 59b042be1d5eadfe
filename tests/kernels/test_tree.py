"""build_tree and build_chain against the reference and against trees made of objects."""

from __future__ import annotations

import random

import pytest
import torch

from eagle3_kernels import (
    Candidates,
    TreeBuffers,
    build_chain,
    build_tree,
    select_first,
    select_next,
    select_nodes,
    tree_ref,
)


def drafted(batch: int, topk: int, steps: int, nodes: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(node ids, node tokens, parents) of a random round."""
    generator = torch.Generator().manual_seed(seed)
    candidates = Candidates.allocate(batch, topk, steps)
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        probs, ids = (torch.randn(rows, 40, generator=generator) * 2).softmax(1).topk(topk, dim=1)
        if step == 0:
            select_first(candidates, probs.contiguous(), ids)
        else:
            select_next(candidates, step, probs.contiguous(), ids)
    return (*select_nodes(candidates, nodes), candidates.parents)


def as_objects(node_ids: list[int], parents: list[int], topk: int) -> list[int]:
    """Parent position of every node of one request, the root's is -1; by looking it up, nothing clever."""
    position = {-1: 0, **{c: i + 1 for i, c in enumerate(node_ids)}}
    return [-1, *(position[parents[c // topk]] for c in node_ids)]


def ancestors(parent: list[int], node: int) -> set[int]:
    found = {node}
    while parent[node] != -1:
        node = parent[node]
        found.add(node)
    return found


def assert_same(a: TreeBuffers, b: TreeBuffers) -> None:
    for name in ("tokens", "positions", "mask", "next_token", "next_sibling"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("topk", "steps", "nodes"),
    [(2, 1, 2), (2, 3, 4), (3, 4, 11), (4, 3, 15), (8, 4, 31), (8, 5, 63), (4, 7, 60), (1, 5, 5)],
)
def test_trees(topk: int, steps: int, nodes: int, ints: torch.dtype) -> None:
    batch = 4
    ids, tokens, parents = drafted(batch, topk, steps, nodes, topk + steps + nodes)
    roots = torch.arange(batch) + 900
    lens = torch.tensor([1, 17, 300, 0], dtype=ints)
    tree = build_tree(roots, ids, tokens, parents, lens, topk)
    assert_same(tree, tree_ref.build_tree(roots, ids, tokens, parents, lens, topk))
    for b in range(batch):
        parent = as_objects(ids[b].tolist(), parents[b].tolist(), topk)
        assert tree.tokens[b].tolist() == [int(roots[b]), *tokens[b].tolist()]
        for node in range(nodes + 1):
            seen = ancestors(parent, node)
            assert {i for i, m in enumerate(tree.mask[b, node].tolist()) if m} == seen
            assert int(tree.positions[b, node]) == int(lens[b]) + len(seen) - 1
            # The links visit exactly the children, in order.
            children, at = [], int(tree.next_token[b, node])
            while at != -1:
                children.append(at)
                at = int(tree.next_sibling[b, at])
            assert children == [i for i, p in enumerate(parent) if p == node]
        assert int(tree.next_sibling[b, 0]) == -1


@pytest.mark.parametrize("steps", [1, 2, 5, 64])
def test_chains(steps: int) -> None:
    generator = random.Random(steps)
    tokens = torch.tensor([[generator.randrange(50) for _ in range(steps)] for _ in range(3)])
    roots, lens = torch.tensor([4, 5, 6]), torch.tensor([0, 9, 200])
    tree = build_chain(roots, tokens, lens)
    assert_same(tree, tree_ref.build_chain(roots, tokens, lens))
    assert torch.equal(tree.mask[1], torch.ones(steps + 1, steps + 1, dtype=torch.bool).tril())
    assert tree.positions[1].tolist() == list(range(9, 10 + steps))
    assert tree.next_token[2].tolist() == [*range(1, steps + 1), -1]


def test_a_chain_is_the_tree_of_topk_1() -> None:
    ids, tokens, parents = drafted(2, 1, 6, 6, 3)
    roots, lens = torch.tensor([1, 2]), torch.tensor([5, 8])
    assert_same(build_tree(roots, ids, tokens, parents, lens, 1), build_chain(roots, tokens, lens))


def test_bad_input() -> None:
    ids, tokens, parents = drafted(2, 2, 3, 4, 1)
    roots, lens = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    good = {
        "bonus_tokens": roots,
        "node_ids": ids,
        "node_tokens": tokens,
        "parents": parents,
        "seq_lens": lens,
        "topk": 2,
    }
    build_tree(**good)
    for name, wrong in (
        ("bonus_tokens", roots.int()),
        ("node_ids", ids.float()),
        ("node_tokens", tokens[:, :2].contiguous()),
        ("parents", parents.int()),
        ("seq_lens", lens.float()),
        ("seq_lens", lens[:1]),
        ("topk", 0),
    ):
        with pytest.raises(ValueError, match=f"^{name}: given"):
            build_tree(**{**good, name: wrong})
    with pytest.raises(ValueError, match="^tokens: given"):
        build_chain(roots, tokens.int(), lens)
    with pytest.raises(ValueError, match="^seq_lens: given"):
        build_chain(roots, tokens, lens[:1])
