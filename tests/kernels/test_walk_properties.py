"""verify_walk on every tree of up to six nodes and every target over a small vocabulary."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eagle3_kernels import verify_walk, walk_ref


def all_parents(nodes: int) -> list[list[int]]:
    """Every tree whose nodes come after their parents; -1 is the root's."""
    return [[-1, *rest] for rest in itertools.product(*(range(i) for i in range(1, nodes)))]


def links(parent: list[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of every node."""
    children = [[i for i, p in enumerate(parent) if p == node] for node in range(len(parent))]
    following = {a: b for family in children for a, b in itertools.pairwise(family)}
    return [c[0] if c else -1 for c in children], [following.get(i, -1) for i in range(len(parent))]


def path_of(parent: list[int], tokens: list[int], target: list[int]) -> list[int]:
    """The accepted nodes: from each, its first child that holds the target's token there."""
    path = [0]
    while True:
        here = path[-1]
        right = [i for i, p in enumerate(parent) if p == here and tokens[i] == target[here]]
        if not right:
            return path
        path.append(right[0])


@pytest.mark.parametrize("nodes", range(1, 7))
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct siblings", "equal siblings"])
def test_every_tree_and_target(nodes: int, distinct: bool) -> None:
    rng = random.Random(nodes)
    vocabulary = 3 if nodes < 6 else 2
    targets = torch.tensor(list(itertools.product(range(vocabulary), repeat=nodes)))
    batch = len(targets)
    accepted = set()
    for parent in all_parents(nodes):
        child, sibling = links(parent)
        tokens = [rng.randrange(vocabulary) for _ in range(nodes)]
        if distinct:
            for node in range(nodes):
                for place, c in enumerate(i for i, p in enumerate(parent) if p == node):
                    tokens[c] = place
        repeated = [torch.tensor(row).expand(batch, -1).contiguous() for row in (tokens, child, sibling)]
        got = verify_walk(*repeated, targets, nodes)
        index, lens, predict = (t.tolist() for t in (got.accept_index, got.accept_lens, got.predict))
        for b, target in enumerate(targets.tolist()):
            path = path_of(parent, tokens, target)
            behind = nodes - len(path)
            assert index[b] == [b * nodes + i for i in path] + [-1] * behind
            assert lens[b] == len(path)  # the bonus stands for the root: accepted drafts + 1
            assert predict[b] == [target[i] for i in path] + [0] * behind
            # What was produced are the drafts on the path and one more token.
            assert predict[b][: len(path) - 1] == [tokens[i] for i in path[1:]]
            accepted.add(len(path))
    assert accepted == set(range(1, nodes + 1))


def test_the_reference_agrees() -> None:
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    for nodes in (1, 2, 6, 17, 64):
        parents = [[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(9)]
        both = [links(p) for p in parents]
        child, sibling = torch.tensor([c for c, _ in both]), torch.tensor([s for _, s in both])
        for vocabulary in (1, 2, 5):
            tokens = torch.randint(vocabulary, (9, nodes), generator=generator)
            target = torch.randint(vocabulary, (9, nodes), generator=generator)
            for width in sorted({1, (nodes + 1) // 2, nodes}):
                ours = verify_walk(tokens, child, sibling, target, width)
                theirs = walk_ref.verify_walk(tokens, child, sibling, target, width)
                for name in ("accept_index", "accept_lens", "predict"):
                    a, b = getattr(ours, name), getattr(theirs, name)
                    assert a.dtype == b.dtype == torch.int32 and torch.equal(a, b), name


def test_a_narrow_width_ends_the_path() -> None:
    """A chain that is right throughout: the path has as many nodes as there is room for."""
    nodes = 6
    tokens = torch.arange(nodes).unsqueeze(0)
    child, sibling = (torch.tensor([row]) for row in links([*range(-1, nodes - 1)]))
    for width in range(1, nodes + 1):
        got = verify_walk(tokens, child, sibling, tokens + 1, width)
        assert got.accept_index.tolist() == [list(range(width))]
        assert got.accept_lens.tolist() == [width]
        assert got.predict.tolist() == [[*range(1, width + 1), *[0] * (nodes - width)]]


def test_two_siblings_with_one_token() -> None:
    """The first is followed, also where only the second could have gone on."""
    child, sibling = (torch.tensor([row]) for row in links([-1, 0, 0, 2]))
    got = verify_walk(torch.tensor([[9, 4, 4, 5]]), child, sibling, torch.tensor([[4, 5, 5, 6]]), 4)
    assert got.accept_index.tolist() == [[0, 1, -1, -1]]
    assert got.predict.tolist() == [[4, 5, 0, 0]]


def test_the_root_s_own_token_is_not_compared() -> None:
    child, sibling = (torch.tensor([row]) for row in links([-1, 0]))
    for root in (3, 4):
        got = verify_walk(torch.tensor([[root, 3]]), child, sibling, torch.tensor([[3, 3]]), 2)
        assert got.accept_lens.tolist() == [2]


def test_large_ids_and_batches() -> None:
    batch, nodes = 700, 3
    child, sibling = (torch.tensor([row]).expand(batch, -1).contiguous() for row in links([-1, 0, 1]))
    tokens = torch.tensor([[1, 2**31 - 1, 2**31 - 2]]).expand(batch, -1).contiguous()
    target = torch.tensor([[2**31 - 1, 2**31 - 2, 2**31 - 1]]).expand(batch, -1).contiguous()
    got = verify_walk(tokens, child, sibling, target, nodes)
    assert got.predict[-1].tolist() == target[-1].tolist()
    assert got.accept_index.view(-1).tolist() == list(range(batch * nodes))


def test_no_requests() -> None:
    none = torch.zeros(0, 4, dtype=torch.int64)
    got = verify_walk(none, none, none, none, 3)
    assert [tuple(t.shape) for t in (got.accept_index, got.accept_lens, got.predict)] == [
        (0, 3),
        (0,),
        (0, 4),
    ]
