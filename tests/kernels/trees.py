"""Random verify trees, built without the library."""

from __future__ import annotations

import torch


def links(parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of every node, [B, N] each, from parents (root -1)."""
    child = torch.full((len(parents), len(parents[0])), -1)
    sibling = child.clone()
    for b, row in enumerate(parents):
        for node in reversed(range(1, len(row))):
            sibling[b, node] = child[b, row[node]]
            child[b, row[node]] = node
    return child, sibling


def random_parents(batch: int, nodes: int, generator: torch.Generator) -> list[list[int]]:
    """Any shape: node i hangs below any earlier one."""
    return [
        [-1, *(int(torch.randint(i, (1,), generator=generator)) for i in range(1, nodes))]
        for _ in range(batch)
    ]


def tokens_along(
    parents: list[list[int]], target: list[list[int]], generator: torch.Generator
) -> torch.Tensor:
    """Tokens [B, N] of which about half are what the target says after the parent, siblings alike or not."""
    tokens = torch.zeros(len(parents), len(parents[0]), dtype=torch.int64)
    for b, row in enumerate(parents):
        for node, parent in enumerate(row[1:], start=1):
            right = torch.rand(1, generator=generator) < 0.5
            tokens[b, node] = target[b][parent] if right else torch.randint(3, (1,), generator=generator)
    return tokens


def path(parents: list[int], tokens: list[int], target: list[int], width: int) -> list[int]:
    """The accepted nodes of one request."""
    found = [0]
    while len(found) < width:
        here = found[-1]
        hits = [i for i, p in enumerate(parents) if p == here and tokens[i] == target[here]]
        if not hits:
            break
        found.append(hits[0])
    return found
