"""row_argmax and row_topk on every kind of row: an oracle in plain Python, bit-for-bit invariances."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_kernels import row_argmax, row_topk, rows_ref

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf
# Values that sit on an edge, all exact in every dtype but the last three, which round.
EDGES = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0, 30000.0, -30000.0, 6.103515625e-05, 1e-45, 1e30, 3.3]


def best_of(row: list[float]) -> int:
    """Lowest index of the largest number; 0 where there is no number."""
    numbers = [(v, x) for v, x in enumerate(row) if not math.isnan(x)]
    top = max((x for _, x in numbers), default=None)
    return next((v for v, x in numbers if x == top), 0)


def ranked(row: list[float]) -> list[int]:
    """Ids by value, then by id; NaN behind every number."""
    return sorted(range(len(row)), key=lambda v: (math.isnan(row[v]), -row[v] if row[v] == row[v] else 0, v))


def shares(row: list[float]) -> list[float]:
    """Softmax in float64 over what is a number; equal shares among several infinities."""
    numbers = [x for x in row if not math.isnan(x)]
    top = max(numbers, default=-INF)
    if top == -INF:
        return [0.0] * len(row)
    if top == INF:
        return [(x == INF) / numbers.count(INF) for x in row]
    total = math.fsum(math.exp(x - top) for x in numbers)
    return [0.0 if math.isnan(x) else math.exp(x - top) / total for x in row]


rows = st.one_of(
    st.lists(st.sampled_from(EDGES), min_size=1, max_size=12),
    st.lists(st.one_of(st.floats(-50, 50, width=32), st.integers(-3, 3).map(float)), min_size=1, max_size=23),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(row=rows, dtype=st.sampled_from(DTYPES))
def test_any_row(row: list[float], dtype: torch.dtype) -> None:
    logits = torch.tensor([row]).to(dtype)
    seen = logits.float()[0].tolist()
    assert row_argmax(logits).tolist() == rows_ref.row_argmax(logits).tolist() == [best_of(seen)]
    k = min(len(row), 9)
    expected = torch.tensor([shares(seen)], dtype=torch.float64)
    for op in (row_topk, rows_ref.row_topk):
        probs, ids = op(logits, k)
        assert ids[0].tolist() == ranked(seen)[:k]
        assert probs.dtype == torch.float32 and ids.dtype == torch.int64
        # x - top is rounded to float32: by at most 2**-18 up to 128 apart, beyond which nothing is left.
        torch.testing.assert_close(probs.double(), expected.gather(1, ids), rtol=6e-6, atol=2e-38)
        assert all(a >= b for a, b in zip(probs[0].tolist(), probs[0].tolist()[1:], strict=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row", [[NAN, -INF], [NAN, -INF, -INF], [-INF, NAN], [NAN, NAN], [NAN, 0.0], [INF, NAN, INF], [-0.0, 0.0]]
)
def test_the_best_of_one_is_the_argmax(row: list[float], dtype: torch.dtype) -> None:
    logits = torch.tensor([row]).to(dtype)
    for op, best in ((row_topk, row_argmax), (rows_ref.row_topk, rows_ref.row_argmax)):
        assert op(logits, 1)[1][0].tolist() == best(logits).tolist()


def test_every_pair_of_bfloat16_values() -> None:
    """All 65,536 bit patterns against one of every kind: zeros of both signs, subnormals, infinities, NaN."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    for pattern in (0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0):
        other = struct.unpack("<h", struct.pack("<H", pattern))[0]
        one = torch.full((1,), other, dtype=torch.int16).view(torch.bfloat16).expand_as(every)
        for a, b in ((every, one), (one, every)):
            left, right = a.float(), b.float()
            # The second wins where it alone is a number, or is strictly larger.
            expected = (right > left) | (left.isnan() & ~right.isnan())
            assert torch.equal(row_argmax(torch.stack((a, b), dim=1)), expected.long())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32000, 32003, 128256, 151936])
def test_real_vocabularies(width: int, dtype: torch.dtype) -> None:
    """Rows with a clear best at either end, rows of few distinct values, flat rows."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-4, 5, (5, width), generator=generator).to(dtype)
    logits[0, -1], logits[1, 0] = 9.0, 9.0
    logits[2] = 0.25
    logits[3, [7, width // 2, width - 1]] = 6.0
    first_of_the_ties = int((logits[4] == 4).nonzero()[0])
    assert row_argmax(logits).tolist() == [width - 1, 0, 0, 7, first_of_the_ties]
    probs, ids = row_topk(logits, 8)
    order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(ids, order)
    torch.testing.assert_close(probs.double(), logits.double().softmax(1).gather(1, order), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 97, 5003])
def test_a_row_is_the_same_bit_for_bit_in_any_batch(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(7, width, generator=generator) * 9).to(dtype)
    logits[2, ::3], logits[4], logits[5, 0] = NAN, -INF, INF
    order = torch.randperm(7, generator=generator)
    k = min(8, width)
    best, (probs, ids) = row_argmax(logits), row_topk(logits, k)
    shuffled = logits[order].contiguous()
    shuffled_probs, shuffled_ids = row_topk(shuffled, k)
    assert torch.equal(row_argmax(shuffled), best[order])
    assert torch.equal(shuffled_probs.view(torch.int32), probs[order].view(torch.int32))
    assert torch.equal(shuffled_ids, ids[order])
    for i in range(7):
        alone_probs, alone_ids = row_topk(logits[i : i + 1], k)
        assert torch.equal(alone_probs[0].view(torch.int32), probs[i].view(torch.int32))
        assert torch.equal(alone_ids[0], ids[i])
        assert row_argmax(logits[i : i + 1])[0] == best[i]


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    logits = torch.randn(3, 501, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    probs, ids = row_topk(logits, 64)
    for k in range(1, 64):
        fewer_probs, fewer_ids = row_topk(logits, k)
        assert torch.equal(fewer_ids, ids[:, :k]) and torch.equal(fewer_probs, probs[:, :k])


def test_no_rows() -> None:
    empty = torch.zeros(0, 5)
    assert row_argmax(empty).shape == (0,)
    assert [tuple(t.shape) for t in row_topk(empty, 3)] == [(0, 3), (0, 3)]
