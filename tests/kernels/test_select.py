"""Selection of candidates and nodes: the reference, an oracle that lists paths, and no orphans."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from eagle3_kernels import Candidates, select, select_first, select_next, select_nodes, select_ref

SHAPES = list(itertools.product((1, 2, 3, 8), (1, 2, 4, 7)))


def random_steps(
    batch: int, topk: int, steps: int, seed: int, kind: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Probabilities and tokens of every step, as the draft would give them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        logits = torch.randn(rows, 50, generator=generator) * {"soft": 1.0, "sharp": 40.0, "ties": 0.0}[kind]
        probs, ids = logits.softmax(1).topk(topk, dim=1)
        made.append((probs.contiguous(), ids + 100 * step))
    return made


def run(
    ops: Any, batch: int, topk: int, steps: int, data: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Candidates, list[Any]]:
    candidates = Candidates.allocate(batch, topk, steps)
    outputs: list[Any] = [ops.select_first(candidates, *data[0]).tolist()]
    for step in range(1, steps):
        tokens, rows = ops.select_next(candidates, step, *data[step])
        outputs.append((tokens.tolist(), rows.tolist()))
    return candidates, outputs


def parent_of(candidates: Candidates, request: int, node: int) -> int:
    """Candidate that a candidate continues, -1 for the root."""
    slot = node // candidates.topk
    return int(candidates.parents[request, slot])


@pytest.mark.parametrize("kind", ["soft", "sharp", "ties"])
@pytest.mark.parametrize(("topk", "steps"), SHAPES)
def test_against_the_reference_and_without_orphans(topk: int, steps: int, kind: str) -> None:
    batch = 3
    data = random_steps(batch, topk, steps, topk * 10 + steps, kind)
    ours, outputs = run(select, batch, topk, steps, data)
    theirs, expected = run(select_ref, batch, topk, steps, data)
    assert outputs == expected
    assert torch.equal(ours.parents, theirs.parents) and torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-6, atol=0)
    total = topk + (steps - 1) * topk * topk
    for count in {1, min(2, total), min(9, total), total}:
        ids, tokens = select_nodes(ours, count)
        same_ids, same_tokens = select_ref.select_nodes(theirs, count)
        assert torch.equal(ids, same_ids) and torch.equal(tokens, same_tokens)
        for b in range(batch):
            chosen = ids[b].tolist()
            assert chosen == sorted(set(chosen)) and len(chosen) == count
            for node in chosen:
                parent = parent_of(ours, b, node)
                assert parent == -1 or parent in chosen
                assert parent == -1 or ours.scores[b, parent] >= ours.scores[b, node]
            assert tokens[b].tolist() == [int(ours.tokens[b, c]) for c in chosen]


@pytest.mark.parametrize(("topk", "steps"), [(2, 3), (3, 3), (4, 2), (1, 5)])
def test_against_a_list_of_paths(topk: int, steps: int) -> None:
    """EAGLE-2's rule written on paths: expand the k best of each step, then take the best of all."""
    data = random_steps(1, topk, steps, 5, "soft")
    candidates, _ = run(select, 1, topk, steps, data)
    beam = [((int(data[0][1][0, j]),), float(data[0][0][0, j])) for j in range(topk)]
    everything = list(beam)
    for step in range(1, steps):
        grown = [
            ((*path, int(data[step][1][r, c])), score * float(data[step][0][r, c]))
            for r, (path, score) in enumerate(beam)
            for c in range(topk)
        ]
        everything += grown
        beam = sorted(grown, key=lambda g: -g[1])[:topk]
    count = min(6, len(everything))
    best = sorted(everything, key=lambda g: -g[1])[:count]

    ids, _ = select_nodes(candidates, count)
    paths = set()
    for node in ids[0].tolist():
        path, at = [], node
        while at != -1:
            path.append(int(candidates.tokens[0, at]))
            at = parent_of(candidates, 0, at)
        paths.add(tuple(reversed(path)))
    assert paths == {path for path, _ in best}


def test_a_probability_that_rounds_to_one_or_is_none() -> None:
    candidates = Candidates.allocate(1, 2, 2)
    select_first(candidates, torch.tensor([[1.0, math.nan]]), torch.tensor([[5, 6]]))
    probs = torch.tensor([[1.0000001, 0.0], [math.nan, 2.0]])
    select_next(candidates, 1, probs, torch.tensor([[7, 8], [9, 10]]))
    assert candidates.scores.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    # Equal scores: the lower number, which is the parent.
    assert select_nodes(candidates, 1)[0].tolist() == [[0]]
    assert select_nodes(candidates, 3)[0].tolist() == [[0, 1, 2]]


def test_bad_input() -> None:
    candidates = Candidates.allocate(2, 2, 3)
    good, ids = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    for probs, tokens, said in (
        (good.double(), ids, "probs: given dtype"),
        (good[:, :1].contiguous(), ids, "probs: given shape"),
        (good, ids.int(), "ids: given dtype"),
        (good.T, ids, "probs: given strides"),
    ):
        with pytest.raises(ValueError, match=said):
            select_first(candidates, probs, tokens)
    rows = torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int64)
    for step in (0, 3):
        with pytest.raises(ValueError, match=f"step: given {step}, allowed 1 to 2"):
            select_next(candidates, step, *rows)
    with pytest.raises(ValueError, match="probs: given shape"):
        select_next(candidates, 1, good, ids)
    for count in (0, 11):
        with pytest.raises(ValueError, match=f"count: given {count}"):
            select_nodes(candidates, count)
