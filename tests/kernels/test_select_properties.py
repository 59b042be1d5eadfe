"""Selection on the probabilities that break it: an oracle on paths, closed sets, every shape."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_kernels import Candidates, select, select_ref

# Ones that are not quite, zeros that are not quite, what softmax never gives; many equal products.
EDGES = [1.0, 1 - 2**-24, 1 + 2**-23, 0.5, 0.25, 0.0, 1e-30, 1e-45, math.nan, math.inf]
SOFT = [0.5, 0.25, 0.125]


@dataclass(frozen=True)
class Path:
    """A candidate as the paper has it: the tokens from the root on, and how likely the draft calls them."""

    tokens: tuple[int, ...]
    score: np.float32
    parent: Path | None
    number: int


def as_paths(topk: int, data: list[tuple[Any, Any]]) -> tuple[list[Path], list[list[Path]]]:
    """Every candidate in the order in which it is found, and the beam after each step.

    EAGLE-2: expand the topk best paths of the last step by topk tokens each.  A path that is not a number
    is worth nothing and none is worth more than what it continues.
    """

    def worth(score: np.float32, most: np.float32) -> np.float32:
        return np.float32(0) if math.isnan(score) else min(score, most)

    probs, tokens = data[0]
    found = [Path((int(tokens[j]),), worth(probs[j], np.float32(math.inf)), None, j) for j in range(topk)]
    beams = [list(found)]
    for probs, tokens in data[1:]:
        grown = []
        for slot, path in enumerate(beams[-1]):
            for c in range(topk):
                with np.errstate(invalid="ignore", under="ignore", over="ignore"):
                    score = worth(path.score * probs[slot, c], path.score)
                number = len(found) + len(grown)
                grown.append(Path((*path.tokens, int(tokens[slot, c])), score, path, number))
        found += grown
        beams.append(sorted(grown, key=lambda p: (-p.score, p.number))[:topk])
    return found, beams


def steps_of(
    rng: random.Random, batch: int, topk: int, steps: int, values: list[float]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        probs = torch.tensor([[rng.choice(values) for _ in range(topk)] for _ in range(rows)])
        tokens = torch.tensor([[rng.randrange(9) for _ in range(topk)] for _ in range(rows)])
        made.append((probs, tokens))
    return made


@pytest.mark.parametrize("ops", [select, select_ref], ids=["op", "reference"])
@pytest.mark.parametrize("values", [EDGES, SOFT, [1.0], [0.0]], ids=["edges", "soft", "ones", "zeros"])
@pytest.mark.parametrize("topk", range(1, 9))
def test_against_paths(topk: int, values: list[float], ops: Any) -> None:
    rng = random.Random(topk * 100 + len(values))
    for steps in range(1, 8):
        batch = 2
        data = steps_of(rng, batch, topk, steps, values)
        candidates = Candidates.allocate(batch, topk, steps)
        outputs = [(ops.select_first(candidates, *data[0]), None)]
        outputs += [ops.select_next(candidates, step, *data[step]) for step in range(1, steps)]
        total = candidates.scores.shape[1]
        chosen = {
            count: ops.select_nodes(candidates, count)
            for count in {1, topk, min(total, 7), min(total, 63), max(1, total - 1), total}
        }
        for b in range(batch):
            mine = [(data[0][0][b].numpy(), data[0][1][b])]
            mine += [
                (p[b * topk : (b + 1) * topk].numpy(), t[b * topk : (b + 1) * topk]) for p, t in data[1:]
            ]
            found, beams = as_paths(topk, mine)
            assert candidates.scores[b].tolist() == [float(p.score) for p in found]
            assert candidates.tokens[b].tolist() == [p.tokens[-1] for p in found]
            # The slots' parents, and through them each candidate's.
            expanded = [p.number for beam in beams[: steps - 1] for p in beam]
            assert candidates.parents[b].tolist() == [-1, *expanded]
            for path in found:
                parent = int(candidates.parents[b, path.number // topk])
                assert parent == (-1 if path.parent is None else path.parent.number)
            for step, (tokens, rows) in enumerate(outputs):
                own = slice(b * topk, (b + 1) * topk)
                assert tokens[own].tolist() == [p.tokens[-1] for p in beams[step]]
                if rows is not None:
                    before = [p.number for p in beams[step - 1]]
                    came_from = [b * topk + before.index(p.parent.number) for p in beams[step] if p.parent]
                    assert rows[own].tolist() == came_from
            assert candidates.beam[b].tolist() == [p.number for p in beams[-1]]
            for count, (ids, tokens) in chosen.items():
                best = sorted(found, key=lambda p: (-p.score, p.number))[:count]
                assert ids[b].tolist() == sorted(p.number for p in best)
                assert tokens[b].tolist() == [found[i].tokens[-1] for i in ids[b].tolist()]
                held = set(ids[b].tolist())
                assert len(held) == count
                for path in best:
                    assert path.parent is None or path.parent.number in held
                    assert path.parent is None or path.score <= path.parent.score


def test_an_unstable_choice_would_make_orphans() -> None:
    """The inputs above do contain the case that the tie rule is for."""
    rng = random.Random(3)
    orphans = 0
    for _ in range(50):
        candidates = Candidates.allocate(1, 4, 5)
        data = steps_of(rng, 1, 4, 5, EDGES)
        select.select_first(candidates, *data[0])
        for step in range(1, 5):
            select.select_next(candidates, step, *data[step])
        # Equal scores to the higher number instead.
        order = candidates.scores[0].flip(0).sort(descending=True, stable=True).indices[:12]
        held = {candidates.scores.shape[1] - 1 - int(i) for i in order}
        for node in held:
            parent = int(candidates.parents[0, node // 4])
            orphans += parent != -1 and parent not in held
    assert orphans > 0


@pytest.mark.parametrize("topk", [1, 4, 8])
def test_a_request_does_not_depend_on_the_others(topk: int) -> None:
    rng = random.Random(topk)
    batch, steps = 5, 5
    data = steps_of(rng, batch, topk, steps, [rng.random() for _ in range(30)])

    def run(requests: list[int]) -> tuple[Candidates, torch.Tensor]:
        rows = [b * topk + j for b in requests for j in range(topk)]
        candidates = Candidates.allocate(len(requests), topk, steps)
        select.select_first(candidates, *(t[requests].contiguous() for t in data[0]))
        for step in range(1, steps):
            select.select_next(candidates, step, *(t[rows].contiguous() for t in data[step]))
        return candidates, select.select_nodes(candidates, min(20, candidates.scores.shape[1]))[0]

    together, nodes = run(list(range(batch)))
    for b in range(batch):
        alone, own = run([b])
        assert torch.equal(own[0], nodes[b])
        for name in ("tokens", "parents", "beam"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b])
        assert torch.equal(alone.scores[0].view(torch.int32), together.scores[b].view(torch.int32))


def test_no_requests() -> None:
    candidates = Candidates.allocate(0, 3, 2)
    none = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64)
    assert select.select_first(candidates, *none).shape == (0,)
    assert [t.shape[0] for t in select.select_next(candidates, 1, *none)] == [0, 0]
    assert [tuple(t.shape) for t in select.select_nodes(candidates, 5)] == [(0, 5), (0, 5)]
