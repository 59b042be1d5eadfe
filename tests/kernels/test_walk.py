"""verify_walk against the reference and, on small trees, against every possible target."""

from __future__ import annotations

import itertools

import pytest
import torch

from eagle3_kernels import verify_walk, walk_ref


def links(parent: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every node, [1, N] each, from parents (root -1)."""
    n = len(parent)
    child, sibling = [-1] * n, [-1] * n
    for node in reversed(range(1, n)):
        sibling[node] = child[parent[node]]
        child[parent[node]] = node
    return torch.tensor([child]), torch.tensor([sibling])


def by_hand(parent: list[int], tokens: list[int], target: list[int], width: int) -> list[int]:
    """Nodes of the accepted path."""
    path = [0]
    while len(path) < width:
        here = path[-1]
        following = [i for i, p in enumerate(parent) if p == here and tokens[i] == target[here]]
        if not following:
            break
        path.append(following[0])
    return path


TREES = [
    [-1],
    [-1, 0],
    [-1, 0, 0],
    [-1, 0, 1, 2],
    [-1, 0, 0, 1, 1, 2],
    [-1, 0, 0, 0, 3],
    [-1, 0, 1, 1, 0],
]


@pytest.mark.parametrize("parent", TREES, ids=str)
def test_every_target(parent: list[int]) -> None:
    n = len(parent)
    child, sibling = links(parent)
    # Distinct siblings, and two with the same token: the first one is followed.
    for tokens in ([i % 3 for i in range(n)], [0] * n):
        for target in itertools.product(range(3), repeat=n):
            for width in {1, n}:
                path = by_hand(parent, tokens, list(target), width)
                got = verify_walk(torch.tensor([tokens]), child, sibling, torch.tensor([target]), width)
                assert got.accept_lens.tolist() == [len(path)]
                assert got.accept_index.tolist() == [[*path, *[-1] * (width - len(path))]]
                produced = [target[i] for i in path]
                assert got.predict.tolist() == [[*produced, *[0] * (n - len(path))]]


def test_batches_against_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    parents = [
        [-1, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, 24))] for _ in range(6)
    ]
    child, sibling = (torch.cat(p) for p in zip(*map(links, parents), strict=True))
    tokens = torch.randint(4, (6, 24), generator=generator)
    target = torch.randint(4, (6, 24), generator=generator)
    for width in (1, 3, 24):
        ours = verify_walk(tokens, child, sibling, target, width)
        theirs = walk_ref.verify_walk(tokens, child, sibling, target, width)
        for name in ("accept_index", "accept_lens", "predict"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for b in range(6):
            path = by_hand(parents[b], tokens[b].tolist(), target[b].tolist(), width)
            assert ours.accept_index[b, : len(path)].tolist() == [b * 24 + i for i in path]


def test_bad_input() -> None:
    child, sibling = links([-1, 0])
    tokens = torch.tensor([[1, 2]])
    good = {
        "tokens": tokens,
        "next_token": child,
        "next_sibling": sibling,
        "target_predict": tokens,
        "width": 2,
    }
    for name, wrong in (
        ("tokens", tokens.int()),
        ("tokens", tokens[0]),
        ("next_token", child[:, :1].contiguous()),
        ("next_sibling", sibling.float()),
        ("target_predict", torch.zeros(2, 2, dtype=torch.int64)),
        ("width", 0),
        ("width", 3),
    ):
        with pytest.raises(ValueError, match=f"^{name}: given"):
            verify_walk(**{**good, name: wrong})
