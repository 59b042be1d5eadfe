"""row_argmax and row_topk against their references, torch, and the awkward rows."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3_kernels import row_argmax, row_topk, rows_ref

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=generator) * 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 7, 127, 128, 1021, 32003, 151936])
def test_argmax(width: int, dtype: torch.dtype) -> None:
    logits = random_rows(3, width, dtype, width)
    # Half precision has ties: the lowest of the largest.
    best = logits.float().max(1, keepdim=True).values
    expected = [int((row == top).nonzero()[0]) for row, top in zip(logits.float(), best, strict=True)]
    assert row_argmax(logits).tolist() == rows_ref.row_argmax(logits).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([2.0, 2.0, 1.0], 0),
        ([-INF, -INF], 0),
        ([-INF, -3.0], 1),
        ([NAN, -5.0, NAN], 1),
        ([NAN, NAN], 0),
        ([NAN, -INF], 1),
        ([1.0, INF, INF], 1),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([-1.0, -2.0], 0),
    ],
)
def test_argmax_of_awkward_rows(row: list[float], expected: int, dtype: torch.dtype) -> None:
    logits = torch.tensor([row]).to(dtype)
    assert row_argmax(logits).tolist() == [expected]
    assert rows_ref.row_argmax(logits).tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k"), [(1, 1), (5, 5), (64, 8), (1021, 4), (32003, 8), (128256, 16)])
def test_topk(width: int, k: int, dtype: torch.dtype) -> None:
    logits = random_rows(4, width, dtype, width + k)
    probs, ids = row_topk(logits, k)
    same_probs, same_ids = rows_ref.row_topk(logits, k)
    assert ids.tolist() == same_ids.tolist()
    torch.testing.assert_close(probs, same_probs, rtol=2e-5, atol=1e-8)
    full = logits.double().softmax(1)
    torch.testing.assert_close(probs.double(), full.gather(1, ids), rtol=1e-4, atol=1e-9)
    order = full.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(probs.double(), order.values[:, :k], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("row", "ids", "probs"),
    [
        ([1.0, 1.0, 1.0], [0, 1], [1 / 3, 1 / 3]),
        ([NAN, 0.0, 0.0], [1, 2], [0.5, 0.5]),
        ([0.0, INF, INF], [1, 2], [0.5, 0.5]),
        ([0.0, INF, 1.0], [1, 2], [1.0, 0.0]),
        ([0.0, 200.0, 100.0], [1, 2], [1.0, 0.0]),
        ([-INF, -INF, -INF], [0, 1], [0.0, 0.0]),
        ([NAN, NAN, NAN], [0, 1], [0.0, 0.0]),
    ],
)
def test_topk_of_awkward_rows(row: list[float], ids: list[int], probs: list[float]) -> None:
    logits = torch.tensor([row])
    for op in (row_topk, rows_ref.row_topk):
        got_probs, got_ids = op(logits, 2)
        assert got_ids.tolist() == [ids]
        torch.testing.assert_close(got_probs, torch.tensor([probs]), rtol=1e-6, atol=1e-30)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = random_rows(9, 5003, torch.float32)
    probs, ids = row_topk(logits, 5)
    best = row_argmax(logits)
    for i in range(9):
        alone_probs, alone_ids = row_topk(logits[i : i + 1], 5)
        assert torch.equal(alone_probs[0], probs[i]) and torch.equal(alone_ids[0], ids[i])
        assert row_argmax(logits[i : i + 1])[0] == best[i]


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "logits: given dtype torch.float64"),
        (torch.zeros(3), r"logits: given shape \(3,\)"),
        (torch.zeros(3, 4).T, "logits: given strides"),
        (torch.zeros(2, 3, device="meta"), "logits: given device meta"),
    ],
)
def test_bad_input(logits: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        row_argmax(logits)
    with pytest.raises(ValueError, match=said):
        row_topk(logits, 1)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_bad_k(k: int) -> None:
    with pytest.raises(ValueError, match=f"k: given {k}, allowed 1 to 3"):
        row_topk(torch.zeros(2, 3), k)
