"""The draft's ops (row_argmax, row_topk, select_*): every implementation against the references."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import guarded, poisoned_outputs

from eagle3_kernels import Candidates, rows_ref, select_ref

pytestmark = pytest.mark.twin
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 60000.0, 1e-7])
PROBABILITY = 2e-6  # relative, of a float32 exponential


def rows(count: int, vocab: int, dtype: torch.dtype, seed: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "special":
        made = SPECIAL[torch.randint(len(SPECIAL), (count, vocab), generator=generator)].to(dtype)
        made[0] = -math.inf
        made[-1] = math.nan
        return made
    if kind == "ties":
        return torch.randint(-2, 3, (count, vocab), generator=generator).to(dtype)
    return (5 * torch.randn(count, vocab, generator=generator)).to(dtype)


def same_topk(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=PROBABILITY, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["any", "ties", "special"])
@pytest.mark.parametrize("vocab", [1, 2, 9, 1023, 1024, 1030, 4099])
def test_rows(ops: SimpleNamespace, vocab: int, kind: str, dtype: torch.dtype) -> None:
    logits = rows(3, vocab, dtype, vocab, kind)
    assert torch.equal(ops.row_argmax(logits), rows_ref.row_argmax(logits))
    for k in sorted({1, min(3, vocab), min(8, vocab)}):
        same_topk(ops.row_topk(logits, k), rows_ref.row_topk(logits, k))


@pytest.mark.parametrize("vocab", [32000, 32003, 151936])
def test_real_vocabularies(ops: SimpleNamespace, vocab: int) -> None:
    logits = rows(2, vocab, torch.bfloat16, 1, "any")
    places = torch.tensor([0, 1023, 1024, vocab // 2, vocab - 1])
    logits[0, places] = 40.0  # ties far apart
    same_topk(ops.row_topk(logits, 8), rows_ref.row_topk(logits, 8))
    assert torch.equal(ops.row_topk(logits, 5)[1][0], places)
    assert torch.equal(ops.row_argmax(logits), rows_ref.row_argmax(logits))


def test_the_widest_choice(ops: SimpleNamespace) -> None:
    """64 of each row, more than one block of the tiles' best."""
    logits = rows(1, 20000, torch.float32, 2, "any")
    same_topk(ops.row_topk(logits, 64), rows_ref.row_topk(logits, 64))


def steps_of(batch: int, topk: int, steps: int, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(topk * 10 + steps)
    made = []
    for step in range(steps):
        scale = {"soft": 1.0, "sharp": 40.0, "ties": 0.0}[kind]
        logits = scale * torch.randn(batch if step == 0 else batch * topk, 70, generator=generator)
        probs, ids = logits.softmax(1).topk(topk, dim=1)
        made.append((probs.contiguous(), ids + 100 * step))
    return made


def round_of(ops: Any, batch: int, topk: int, data: list[Any], counts: list[int]) -> list[torch.Tensor]:
    """Everything a round of selection gives, in order."""
    candidates = Candidates.allocate(batch, topk, len(data))
    given = [ops.select_first(candidates, *data[0])]
    for step in range(1, len(data)):
        given += ops.select_next(candidates, step, *data[step])
    for count in counts:
        given += ops.select_nodes(candidates, count)
    return [*given, candidates.parents, candidates.tokens, candidates.beam, candidates.scores]


@pytest.mark.parametrize("kind", ["soft", "sharp", "ties"])
@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 5), (2, 3), (3, 4), (8, 1), (8, 4), (10, 5)])
def test_rounds(ops: SimpleNamespace, topk: int, steps: int, kind: str) -> None:
    data = steps_of(2, topk, steps, kind)
    total = topk + (steps - 1) * topk * topk
    counts = sorted({1, min(7, total), min(63, total), total})
    ours = round_of(ops, 2, topk, data, counts)
    theirs = round_of(select_ref, 2, topk, data, counts)
    assert len(ours) == len(theirs)
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)


def test_scores_that_are_none(ops: SimpleNamespace) -> None:
    """NaN, zero and 1 in long chains: no score above its parent's, NaN worth nothing."""
    data = steps_of(1, 3, 4, "soft")
    for step, (probs, _) in enumerate(data):
        probs[0] = torch.tensor([1.0, math.nan, 0.0]) if step else torch.tensor([1.0, 1.0, math.nan])
    for got, want in zip(round_of(ops, 1, 3, data, [9]), round_of(select_ref, 1, 3, data, [9]), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fill", [0, 1])
def test_every_output_is_written_and_nothing_else(
    ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fill: int
) -> None:
    data = steps_of(3, 3, 3, "soft")
    logits = guarded(rows(3, 1500, torch.float32, 1, "any"))
    inputs = [logits, *(guarded(t) for step in data for t in step)]
    with poisoned_outputs(monkeypatch, fill) as made:
        guarded_data = [(inputs[1 + 2 * i].tensor, inputs[2 + 2 * i].tensor) for i in range(3)]
        got = round_of(ops, 3, 3, guarded_data, [11])
        best, top = ops.row_argmax(logits.tensor), ops.row_topk(logits.tensor, 4)
    for ours, theirs in zip(got, round_of(select_ref, 3, 3, data, [11]), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(best, rows_ref.row_argmax(logits.tensor))
    same_topk(top, rows_ref.row_topk(logits.tensor, 4))
    assert made and all(g.intact() for g in [*inputs, *made])


def test_no_row(ops: SimpleNamespace) -> None:
    assert ops.row_argmax(torch.zeros(0, 5)).numel() == 0
    assert ops.row_topk(torch.zeros(0, 5), 2)[1].shape == (0, 2)
    candidates = Candidates.allocate(0, 2, 2)
    none = torch.zeros(0, 2)
    assert ops.select_first(candidates, none, none.long()).numel() == 0
    assert ops.select_next(candidates, 1, none, none.long())[0].numel() == 0
    assert ops.select_nodes(candidates, 3)[0].shape == (0, 3)
