"""build_tree and build_chain at every size, against trees made of objects that know their children."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from eagle3_kernels import TreeBuffers, build_chain, build_tree, tree_ref


@dataclass
class Node:
    """A node of the verify tree; ``number`` is its place among the chosen nodes, 0 for the root."""

    number: int
    token: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[int]:
        """Numbers from the root to this node."""
        return [*(self.parent.path() if self.parent else []), self.number]


def grow(rng: random.Random, nodes: int, topk: int, steps: int) -> tuple[list[Node], list[int], list[int]]:
    """A random tree that selection could have chosen: (nodes, candidate numbers, parents table).

    Which candidates a step expands is random, without regard to scores; the chosen set is closed.
    """
    beams = [list(range(topk))]
    for step in range(1, steps):
        first = topk + (step - 1) * topk * topk
        beams.append(rng.sample(range(first, first + topk * topk), topk))
    parents = [-1, *(c for beam in beams[: steps - 1] for c in beam)]
    total = topk + (steps - 1) * topk * topk
    chosen: set[int] = set()
    while len(chosen) < nodes - 1:
        open_now = [c for c in range(total) if c not in chosen and (c < topk or parents[c // topk] in chosen)]
        chosen.add(rng.choice(open_now))
    ids = sorted(chosen)
    root = Node(0, rng.randrange(1000), None)
    by_candidate = {-1: root}
    for number, candidate in enumerate(ids, 1):
        parent = by_candidate[parents[candidate // topk]]
        node = Node(number, rng.randrange(1000), parent)
        parent.children.append(node)
        by_candidate[candidate] = node
    return list(by_candidate.values()), ids, parents


def check(tree: TreeBuffers, b: int, nodes: list[Node], length: int) -> None:
    """Every field of request b against the objects."""
    assert tree.tokens[b].tolist() == [n.token for n in nodes]
    assert tree.positions[b].tolist() == [length + len(n.path()) - 1 for n in nodes]
    child, sibling = tree.next_token[b].tolist(), tree.next_sibling[b].tolist()
    for node in nodes:
        seen = [j for j, visible in enumerate(tree.mask[b, node.number].tolist()) if visible]
        assert seen == node.path()
        visited = []
        at = child[node.number]
        while at != -1:
            visited.append(at)
            at = sibling[at]
        assert visited == [c.number for c in node.children]
    # Each node but the root is linked from exactly one place.
    assert sorted([*child, *sibling]) == sorted([-1] * (len(nodes) + 1) + list(range(1, len(nodes))))


def assert_same(a: TreeBuffers, b: TreeBuffers) -> None:
    for name in ("tokens", "positions", "mask", "next_token", "next_sibling"):
        left, right = getattr(a, name), getattr(b, name)
        assert left.dtype == right.dtype and torch.equal(left, right), name


@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
@pytest.mark.parametrize("nodes", range(2, 65))
def test_every_size(nodes: int, ints: torch.dtype) -> None:
    rng = random.Random(nodes)
    for batch in (1, 3):
        topk = rng.choice([k for k in range(1, 9) if k + 6 * k * k >= nodes - 1])
        steps = next(d for d in range(1, 64) if topk + (d - 1) * topk * topk >= nodes - 1)
        steps = min(steps + rng.randrange(3), 7)
        while True:
            try:
                made = [grow(rng, nodes, topk, steps) for _ in range(batch)]
                break
            except IndexError:  # the random beams left too few candidates that can be reached
                steps += 1
        lens = torch.tensor([rng.choice([0, 1, 17, 131071, 2**31 - 65]) for _ in range(batch)])
        arguments = (
            torch.tensor([m[0][0].token for m in made]),
            torch.tensor([m[1] for m in made]),
            torch.tensor([[n.token for n in m[0][1:]] for m in made]),
            torch.tensor([m[2] for m in made]),
            lens.to(ints),
            topk,
        )
        tree = build_tree(*arguments)
        assert_same(tree, tree_ref.build_tree(*arguments))
        for b, (objects, _, _) in enumerate(made):
            check(tree, b, objects, int(lens[b]))


@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
@pytest.mark.parametrize("steps", [*range(1, 17), 31, 32, 63])
def test_chains(steps: int, ints: torch.dtype) -> None:
    rng = random.Random(steps)
    lens = torch.tensor([0, 5, 2**31 - 100])
    tokens = torch.tensor([[rng.randrange(1000) for _ in range(steps + 1)] for _ in range(3)])
    arguments = tokens[:, 0].contiguous(), tokens[:, 1:].contiguous(), lens.to(ints)
    tree = build_chain(*arguments)
    assert_same(tree, tree_ref.build_chain(*arguments))
    for b in range(3):
        nodes: list[Node] = []
        for number, token in enumerate(tokens[b].tolist()):
            nodes.append(Node(number, token, nodes[-1] if nodes else None))
            if number:
                nodes[-2].children.append(nodes[-1])
        check(tree, b, nodes, int(lens[b]))


def test_all_candidates_of_a_round() -> None:
    """N-1 equal to everything that was drafted, the widest shape: 8 wide, 7 deep."""
    topk, steps = 8, 7
    total = topk + (steps - 1) * topk * topk
    objects, ids, parents = grow(random.Random(0), total + 1, topk, steps)
    assert ids == list(range(total))
    tree = build_tree(
        torch.tensor([objects[0].token]),
        torch.tensor([ids]),
        torch.tensor([[n.token for n in objects[1:]]]),
        torch.tensor([parents]),
        torch.tensor([3]),
        topk,
    )
    check(tree, 0, objects, 3)


def test_a_root_alone_and_no_requests() -> None:
    for batch in (0, 2):
        roots, lens = torch.arange(batch) + 8, torch.arange(batch) + 3
        none = torch.zeros(batch, 0, dtype=torch.int64)
        parents = torch.full((batch, 1), -1)
        for module in (tree_ref, None):
            tree = (module.build_tree if module else build_tree)(roots, none, none, parents, lens, 2)
            chain = (module.build_chain if module else build_chain)(roots, none, lens)
            for made in (tree, chain):
                assert made.tokens.tolist() == [[t] for t in roots.tolist()]
                assert made.positions.tolist() == [[n] for n in lens.tolist()]
                assert made.mask.tolist() == [[[True]]] * batch
                assert made.next_token.tolist() == made.next_sibling.tolist() == [[-1]] * batch


def test_parents_may_be_left_out_where_nothing_was_expanded() -> None:
    """One step: every node hangs from the root, and SGLang hands over a table of width 0."""
    ids = torch.tensor([[0, 2, 3]])
    arguments = torch.tensor([1]), ids, ids + 50
    with_table = build_tree(*arguments, torch.tensor([[-1]]), torch.tensor([4]), 4)
    without = build_tree(*arguments, torch.zeros(1, 0, dtype=torch.int64), torch.tensor([4]), 4)
    assert_same(with_table, without)
    assert without.next_token.tolist() == [[1, -1, -1, -1]]
    assert without.next_sibling.tolist() == [[-1, 2, 3, -1]]
