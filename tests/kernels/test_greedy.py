"""verify_greedy: every implementation against a walk in plain Python over Python's own comparisons."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from guards import guarded, poisoned_outputs
from trees import links, path, random_parents, tokens_along
from twins import INTERPRETED

from eagle3_kernels import greedy_ref
from eagle3_kernels.walk import Accepted

pytestmark = pytest.mark.twin
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIALS = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 65000.0, 1e-7]


def argmax(row: list[float]) -> int:
    """Lowest id of the largest number; NaN never wins."""
    best, where = None, 0
    for v, x in enumerate(row):
        if not math.isnan(x) and (best is None or x > best):
            best, where = x, v
    return where


def expected(parents: list[list[int]], tokens: torch.Tensor, logits: torch.Tensor, width: int) -> Accepted:
    """By hand."""
    batch, nodes = tokens.shape
    index = torch.full((batch, width), -1, dtype=torch.int32)
    predict = torch.zeros(batch, nodes, dtype=torch.int32)
    lens = []
    for b in range(batch):
        target = [argmax(row) for row in logits[b * nodes : (b + 1) * nodes].tolist()]
        found = path(parents[b], tokens[b].tolist(), target, width)
        lens.append(len(found))
        for j, node in enumerate(found):
            index[b, j], predict[b, j] = b * nodes + node, target[node]
    return Accepted(index, torch.tensor(lens, dtype=torch.int32), predict)


def same(ours: Accepted, theirs: Accepted) -> None:
    for name in ("accept_index", "accept_lens", "predict"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def drawn(
    batch: int, nodes: int, vocab: int, dtype: torch.dtype, seed: int, special: bool = False
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Parents, tokens and logits; logits of few distinct values, so that ties are everywhere."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-9, 9, (batch * nodes, vocab), generator=generator).to(dtype)
    if special:
        pick = torch.randint(len(SPECIALS), logits.shape, generator=generator)
        logits = torch.tensor(SPECIALS, dtype=dtype)[pick]
        logits[0], logits[-1] = math.nan, -math.inf
        if len(logits) > 2:
            logits[1] = -math.inf
            logits[1, 0] = math.nan  # not a number, where the others are at least -inf
    parents = random_parents(batch, nodes, generator)
    target = [[argmax(row) for row in logits[b * nodes : (b + 1) * nodes].tolist()] for b in range(batch)]
    return parents, tokens_along(parents, target, generator), logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "vocab"),
    [(1, 1, 1), (1, 2, 7), (3, 5, 2), (4, 16, 97), (2, 13, 1024), (1, 3, 4096), (1, 3, 4097), (2, 2, 8195)],
)
def test_by_hand(ops: SimpleNamespace, batch: int, nodes: int, vocab: int, dtype: torch.dtype) -> None:
    for special in (False, True):
        parents, tokens, logits = drawn(batch, nodes, vocab, dtype, batch + nodes + vocab, special)
        for width in sorted({1, min(3, nodes), nodes}):
            got = ops.verify_greedy(tokens, *links(parents), logits, width)
            same(got, expected(parents, tokens, logits, width))
            same(greedy_ref.verify_greedy(tokens, *links(parents), logits, width), got)


@pytest.mark.parametrize("vocab", [32000, 32003, 128256, 151936, 163840, 262145])
def test_real_vocabularies(ops: SimpleNamespace, vocab: int) -> None:
    """The winner is found wherever it stands: first, last, at the edges of tiles and of chunks of tiles."""
    places = [p for p in (0, vocab - 1, 4095, 4096, 64 * 4096 - 1, 64 * 4096, vocab // 2) if p < vocab]
    logits = torch.zeros(len(places), vocab, dtype=torch.bfloat16)
    for row, place in enumerate(places):
        logits[row, place] = 1.0
    parents = [list(range(-1, len(places) - 1))]
    tokens = torch.tensor([[0, *places[:-1]]])
    got = ops.verify_greedy(tokens, *links(parents), logits, len(places))
    assert got.predict.tolist() == [places]
    # All equal: the lowest id, from the first of many tiles.
    assert ops.verify_greedy(tokens, *links(parents), torch.zeros_like(logits), 1).predict[0, 0] == 0


def test_a_chain_accepted_whole_and_not_at_all(ops: SimpleNamespace) -> None:
    nodes = 64
    parents = [list(range(-1, nodes - 1))]
    logits = torch.eye(nodes + 1)[1:]
    whole = torch.arange(nodes).view(1, -1)
    got = ops.verify_greedy(whole, *links(parents), logits, nodes)
    assert got.accept_lens.tolist() == [nodes] and got.predict.tolist() == [list(range(1, nodes + 1))]
    got = ops.verify_greedy(torch.zeros_like(whole), *links(parents), logits, nodes)
    assert got.accept_lens.tolist() == [1] and got.accept_index.tolist() == [[0, *[-1] * (nodes - 1)]]


def test_more_nodes_than_any_block(ops: SimpleNamespace) -> None:
    parents, tokens, logits = drawn(1, 200, 5, torch.float32, 3)
    same(ops.verify_greedy(tokens, *links(parents), logits, 9), expected(parents, tokens, logits, 9))


def test_no_request(ops: SimpleNamespace) -> None:
    none = torch.zeros(0, 4, dtype=torch.int64)
    got = ops.verify_greedy(none, none, none, torch.zeros(0, 9), 3)
    assert [tuple(t.shape) for t in (got.accept_index, got.accept_lens, got.predict)] == [
        (0, 3),
        (0,),
        (0, 4),
    ]


def test_a_request_does_not_see_the_batch(ops: SimpleNamespace) -> None:
    batch, nodes = 6, 7
    parents, tokens, logits = drawn(batch, nodes, 50, torch.bfloat16, 5)
    child, sibling = links(parents)
    together = ops.verify_greedy(tokens, child, sibling, logits, 5)
    order = [3, 0, 5, 5, 1]
    rows = logits.view(batch, nodes, -1)
    mixed = ops.verify_greedy(tokens[order], child[order], sibling[order], rows[order].reshape(-1, 50), 5)
    for place, b in enumerate(order):
        alone = ops.verify_greedy(tokens[b : b + 1], child[b : b + 1], sibling[b : b + 1], rows[b], 5)
        for got, at in ((mixed, place), (alone, 0)):
            assert torch.equal(got.predict[at], together.predict[b])
            assert torch.equal(got.accept_lens[at], together.accept_lens[b])
            shift = torch.where(got.accept_index[at] < 0, 0, (b - at) * nodes)
            assert torch.equal(got.accept_index[at] + shift, together.accept_index[b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_apart(ops: SimpleNamespace, dtype: torch.dtype) -> None:
    """What lies between the rows is larger than every logit, and is never chosen."""
    parents, tokens, logits = drawn(2, 6, 37, dtype, 8)
    padded = torch.full((12, 48), math.inf, dtype=dtype)
    padded[:, :37] = logits
    got = ops.verify_greedy(tokens, *links(parents), padded[:, :37], 4)
    same(got, expected(parents, tokens, logits, 4))


@pytest.mark.parametrize("fill", [0, 1])
def test_every_output_is_written_and_nothing_else(
    ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fill: int
) -> None:
    parents, tokens, logits = drawn(3, 9, 4100, torch.float32, 2)
    child, sibling = links(parents)
    values = (tokens, child, sibling, logits)
    inputs = [guarded(t) for t in values]
    with poisoned_outputs(monkeypatch, fill) as made:
        got = ops.verify_greedy(*(g.tensor for g in inputs), 5)
    same(got, expected(parents, tokens, logits, 5))
    assert made and all(g.intact() for g in [*inputs, *made])
    assert all(
        torch.equal(g.tensor, t) for g, t in zip(inputs, (tokens, child, sibling, logits), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "given", "length"),
    [
        ("next_token", [[0, -1, -1]], 1),
        ("next_token", [[1, 1, -1]], 2),
        ("next_sibling", [[-1, 1, -1]], 1),
        ("next_sibling", [[-1, 0, -1]], 1),
    ],
)
def test_links_that_do_not_ascend(
    ops: SimpleNamespace, name: str, given: list[list[int]], length: int
) -> None:
    """An error on the CPU; on a GPU, which would have to be waited for, the end of the list."""
    links_ = {"next_token": torch.tensor([[1, -1, -1]]), "next_sibling": torch.full((1, 3), -1)}
    links_[name] = torch.tensor(given)
    tokens = torch.tensor([[0, 0 if name == "next_token" else 1, 2]])
    if INTERPRETED:
        got = ops.verify_greedy(tokens, **links_, logits=torch.zeros(3, 4), width=3)
        assert got.accept_lens.tolist() == [length]
        return
    with pytest.raises(ValueError, match=f"^{name}: given"):
        ops.verify_greedy(tokens, **links_, logits=torch.zeros(3, 4), width=3)
