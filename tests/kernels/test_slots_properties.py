"""Slot windows of every length and integer type, and what serving finds compiled."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guards import guarded

from eagle3_kernels import cache_slots, slots_ref, write_slots

INTS = (torch.int64, torch.int32)
REQUESTS, CONTEXT = 7, 33


def table(rng: random.Random) -> torch.Tensor:
    values = [[rng.randrange(2**31) for _ in range(CONTEXT)] for _ in range(REQUESTS)]
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("row_ints", "start_ints"), itertools.product(INTS, INTS))
@pytest.mark.parametrize("width", [0, 1, 2, 16, CONTEXT])
def test_reading(width: int, row_ints: torch.dtype, start_ints: torch.dtype) -> None:
    rng = random.Random(width)
    slots = table(rng)
    before = slots.clone()
    for batch in (0, 1, 5):
        rows = [rng.randrange(REQUESTS) for _ in range(batch)]  # a request may come twice
        starts = [rng.choice([0, CONTEXT - width, rng.randrange(CONTEXT - width + 1)]) for _ in rows]
        given = torch.tensor(rows, dtype=row_ints), torch.tensor(starts, dtype=start_ints)
        got = cache_slots(slots, *given, width)
        assert got.dtype == torch.int64 and got.shape == (batch, width)
        assert got.tolist() == [before[r, s : s + width].tolist() for r, s in zip(rows, starts, strict=True)]
        assert torch.equal(got, slots_ref.cache_slots(slots, *given, width))
    assert torch.equal(slots, before)


@pytest.mark.parametrize(("row_ints", "window_ints", "slot_ints"), itertools.product(INTS, INTS, INTS))
def test_writing(row_ints: torch.dtype, window_ints: torch.dtype, slot_ints: torch.dtype) -> None:
    rng = random.Random(5)
    for batch in (0, 1, 3, REQUESTS):
        before = table(rng)
        expected = before.tolist()
        rows = rng.sample(range(REQUESTS), batch)
        windows = [sorted(rng.choices(range(CONTEXT + 1), k=2)) for _ in rows]
        if batch > 1:
            windows[0] = [CONTEXT, CONTEXT]  # nothing, at the very end
            windows[1] = [0, CONTEXT]
        new = iter(range(1000, 10000))
        written = []
        for r, (first, last) in zip(rows, windows, strict=True):
            for position in range(first, last):
                expected[r][position] = next(new)
                written.append(expected[r][position])
        place = guarded(before)
        arguments = (
            torch.tensor(rows, dtype=row_ints),
            torch.tensor([w[0] for w in windows], dtype=window_ints),
            torch.tensor([w[1] for w in windows], dtype=window_ints),
            torch.tensor(written, dtype=slot_ints),
        )
        write_slots(place.tensor, *arguments)
        assert place.intact() and place.tensor.tolist() == expected
        slots_ref.write_slots(before, *arguments)
        assert before.tolist() == expected


@pytest.mark.parametrize(("start_ints", "end_ints"), [INTS, INTS[::-1]])
def test_start_and_end_of_different_types(start_ints: torch.dtype, end_ints: torch.dtype) -> None:
    slots = torch.zeros(2, 5, dtype=torch.int32)
    rows = torch.tensor([1, 0])
    start, end = torch.tensor([1, 4], dtype=start_ints), torch.tensor([3, 5], dtype=end_ints)
    write_slots(slots, rows, start, end, torch.tensor([7, 8, 9]))
    assert slots.tolist() == [[0, 0, 0, 0, 9], [0, 7, 8, 0, 0]]


WARM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import eagle3_kernels as k
from test_slots import compiled

k.warm_up()
before = compiled()
assert len(before) >= 10 and all(before.values()), before
lens = {t: torch.tensor([3, 0, 9], dtype=t) for t in (torch.int64, torch.int32)}
zeros = torch.zeros(3, dtype=torch.int64)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for width in (9, 1021):
        k.row_argmax(torch.randn(6, width).to(dtype))
        k.row_topk(torch.randn(6, width).to(dtype), 8)
for steps in (1, 4):
    candidates = k.Candidates.allocate(3, 4, steps)
    k.select_first(candidates, *k.row_topk(torch.randn(3, 50), 4))
    for step in range(1, steps):
        k.select_next(candidates, step, *k.row_topk(torch.randn(12, 50), 4))
    ids, tokens = k.select_nodes(candidates, 4)
    for seq_lens in lens.values():
        tree = k.build_tree(zeros, ids, tokens, candidates.parents, seq_lens, 4)
        chain = k.build_chain(zeros, tokens, seq_lens)
        for t in (tree, chain):
            links = (t.tokens, t.next_token, t.next_sibling)
            k.verify_walk(*links, t.tokens, steps + 1)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                k.verify_greedy(*links, torch.randn(t.tokens.numel(), 9).to(dtype), steps + 1)
table = torch.zeros(5, 40, dtype=torch.int32)
for rows in lens:
    for start in lens.values():
        k.cache_slots(table, zeros.to(rows), start, 20)
        for slots in lens:
            k.write_slots(table, zeros.to(rows), start, start + 2, torch.zeros(6, dtype=slots))
assert compiled() == before, (before, compiled())

# The measurement itself: a type that serving does not use does compile.
k.write_slots(table, zeros, zeros, zeros.int() + 1, zeros)
assert compiled() != before
"""


def test_serving_finds_everything_compiled() -> None:
    """Every dtype that SGLang hands over, in a process of its own."""
    command = [sys.executable, "-c", WARM, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
