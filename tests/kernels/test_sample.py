"""verify_sample: its law, exactly, against a definition in plain Python; and every way to ask it wrongly."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import guarded, poisoned_outputs
from trees import links, path, random_parents

from eagle3_kernels import sample_ref, seeded_coins
from eagle3_kernels.walk import Accepted

twin = pytest.mark.twin
ORDERS = ["joint", "sequential"]
LAST_COIN = 1 - 2.0**-53


def settings(count: int, **values: float) -> dict[str, torch.Tensor]:
    """The same for every request; a number or a list of them."""
    given = {"temperature": 1.0, "top_k": 2**30, "top_p": 1.0, "min_p": 0.0, **values}
    dtypes = {"top_k": torch.int32}
    return {
        name: torch.full((count,), value, dtype=dtypes.get(name, torch.float32))
        if isinstance(value, (int, float))
        else torch.tensor(value, dtype=dtypes.get(name, torch.float32))
        for name, value in given.items()
    }


def law(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, order: str
) -> list[float]:
    """Probability of every token, term by term as the module's docstring says."""
    numbers = [x for x in row if not math.isnan(x)]
    top = max(numbers, default=-math.inf)
    if temperature == 0 or top_k == 1 or top == -math.inf:
        where = next((v for v, x in enumerate(row) if x == top), 0)
        return [float(v == where) for v in range(len(row))]
    if top == math.inf:
        weight = [float(x == math.inf) for x in row]
    else:
        weight = [0.0 if math.isnan(x) else math.exp((x - top) / temperature) for x in row]
    rank = sorted(range(len(row)), key=lambda v: (math.inf if math.isnan(row[v]) else -row[v], v))
    mass = math.fsum(weight) if order == "joint" else math.fsum(weight[v] for v in rank[:top_k])
    kept = set()
    for i, v in enumerate(rank):
        before = math.fsum(weight[u] for u in rank[:i])
        if i >= top_k or (top_p < 1 and before >= top_p * mass) or weight[v] < min_p:
            break
        kept.add(v)
    total = math.fsum(weight[v] for v in kept)
    return [w / total if v in kept else 0.0 for v, w in enumerate(weight)]


def single(
    ops: SimpleNamespace, row: torch.Tensor, coins: list[float], order: str, **values: Any
) -> list[int]:
    """Draws of requests with nothing drafted: all of the same row, [1, V], each with its coin."""
    count = len(coins)
    alone = torch.full((count, 1), -1)
    flips = torch.tensor(coins, dtype=torch.float64).view(-1, 1)
    got = ops.verify_sample(
        torch.zeros_like(alone), alone, alone, row.repeat(count, 1), 1,
        **settings(count, **values), coins=flips, order=order,
    )  # fmt: skip
    assert got.accept_lens.tolist() == [1] * count
    assert got.accept_index.tolist() == [[b] for b in range(count)]
    return got.predict[:, 0].tolist()


def intervals(probability: list[float]) -> list[tuple[int, float, float]]:
    """(token, from, to): the coins that fall to each token."""
    edges = list(itertools.accumulate(probability, initial=0.0))
    return [(v, edges[v], edges[v + 1]) for v, p in enumerate(probability) if p > 0]


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 100.0},
    {"temperature": 1e-3},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1},
    {"temperature": 0.0},
]
ROWS = {
    "any": [0.3, -1.2, 2.5, 0.0, 1.1, -3.0, 0.7, 2.4, -0.5, 1.9, 0.1],
    "ties": [1.0, 2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 1.0],
    "all alike": [0.5] * 6,
    "one": [3.0],
    "one of many": [0.0, 0.0, 300.0, 0.0],
    "not numbers": [math.nan, 1.0, math.nan, 0.5, -math.inf],
    "infinities": [0.0, math.inf, 5.0, math.inf, -math.inf, math.nan],
    "impossible ones": [-math.inf, 0.0, -math.inf, 0.2],
    "nothing": [math.nan, -math.inf, -math.inf],
    "nothing at all": [math.nan, math.nan],
}


@twin
@pytest.mark.parametrize(
    ("chosen", "order", "dtype"),
    [
        *itertools.product(FILTERS, ORDERS, [torch.bfloat16]),
        *itertools.product([FILTERS[-2]], ORDERS, [torch.float32, torch.float16]),
    ],
    ids=str,
)
def test_the_law_of_a_node(
    ops: SimpleNamespace, chosen: dict[str, Any], order: str, dtype: torch.dtype
) -> None:
    """The coin is integrated out: each token owns one interval of coins, as long as it is probable.

    Coins at both ends of every interval are tried (the draw is monotone in the coin), so what lies
    between them has the right measure, to the margin.
    """
    everything = {"temperature": 1.0, "top_k": 2**30, "top_p": 1.0, "min_p": 0.0, **chosen}
    margin = 1e-6  # of a float32 exponential, in the Triton kernels; the rest is float64
    for name, row in ROWS.items():
        logits = torch.tensor([row], dtype=dtype)
        spans = intervals(law(logits[0].tolist(), **everything, order=order))
        assert math.isclose(math.fsum(to - start for _, start, to in spans), 1.0), name
        wide = [span for span in spans if span[2] - span[1] > 4 * margin]
        coins = [coin for _, start, to in wide for coin in (start + margin, to - margin)]
        tokens = [token for token, *_ in wide for _ in range(2)]
        got = single(ops, logits, [*coins, 0.0, LAST_COIN], order, **chosen)
        assert got[:-2] == tokens, (name, spans, coins)
        # A coin at its end falls to the outermost token; one that is hardly probable may have weight 0.
        for token, end in zip(got[-2:], (0, -1), strict=True):
            assert token in {token for token, *_ in spans}, name
            assert spans[end] != wide[end] or token == spans[end][0], name


@pytest.mark.parametrize("order", ORDERS)
def test_the_reference_has_this_law(order: str) -> None:
    for chosen in FILTERS:
        everything = {"temperature": 1.0, "top_k": 2**30, "top_p": 1.0, "min_p": 0.0, **chosen}
        for name, row in ROWS.items():
            ours = sample_ref.law(torch.tensor([row]), **settings(1, **chosen), order=order)
            expected = torch.tensor([law(row, **everything, order=order)], dtype=torch.float64)
            # settings() holds float32: 0.7 is not 0.7 there
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-9, msg=f"{name} {chosen}")


def test_the_orders_differ_where_the_reference_says_so() -> None:
    """The top 4 weigh 0.91.  top_p 0.9 of everything keeps all 4; of these 0.91 it keeps 3."""
    row = [math.log(p) for p in (0.5, 0.3, 0.06, 0.04, 0.05, 0.05)]
    assert [p > 0 for p in law(row, 1.0, 4, 0.9, 0.0, "joint")] == [True, True, True, False, True, False]
    assert [p > 0 for p in law(row, 1.0, 4, 0.9, 0.0, "sequential")] == [True] * 3 + [False] * 3


@twin
@pytest.mark.parametrize("order", ORDERS)
def test_two_levels_exactly(ops: SimpleNamespace, order: str) -> None:
    """Root and three drafted children, two of them alike: the pair (first, second) follows the target.

    Both coins are cut into the intervals of their laws; every rectangle is one request, its area the
    probability.  Where the first token was not drafted the round ends, and its law is the root's.
    """
    generator = torch.Generator().manual_seed(4)
    vocab, parents = 5, [-1, 0, 0, 0]
    drafted = [0, 2, 4, 2]
    logits = torch.randn(4, vocab, generator=generator)
    values = {"temperature": 0.9, "top_k": 4, "top_p": 0.95, "min_p": 0.02}
    laws = [law(row, **values, order=order) for row in logits.tolist()]
    first = intervals(laws[0])
    cases = []
    for token, start, to in first:
        node = drafted.index(token, 1) if token in drafted[1:] else None
        for second, start2, to2 in intervals(laws[node]) if node is not None else [(None, 0.0, 1.0)]:
            area = (to - start) * (to2 - start2)
            cases.append((token, second, (start + to) / 2, (start2 + to2) / 2, area))
    count = len(cases)
    child, sibling = links([parents] * count)
    coins = torch.zeros(count, 4, dtype=torch.float64)
    for i, (_, _, coin, coin2, _) in enumerate(cases):
        coins[i, 0], coins[i, 1:] = coin, coin2
    got = ops.verify_sample(
        torch.tensor([drafted] * count), child, sibling, logits.repeat(count, 1), 2,
        **settings(count, **values), coins=coins, order=order,
    )  # fmt: skip
    reached: dict[tuple[int, int | None], float] = {}
    for i, (*_, area) in enumerate(cases):
        pair = (int(got.predict[i, 0]), int(got.predict[i, 1]) if got.accept_lens[i] == 2 else None)
        reached[pair] = reached.get(pair, 0.0) + area
    for token in range(vocab):
        assert math.isclose(math.fsum(p for pair, p in reached.items() if pair[0] == token), laws[0][token])
        for second in range(vocab):
            if token in drafted[1:]:
                expected = laws[0][token] * laws[drafted.index(token, 1)][second]
                assert math.isclose(reached.get((token, second), 0.0), expected, abs_tol=1e-12)
    assert math.isclose(math.fsum(reached.values()), 1.0)


def chi_square(counts: list[int], probability: list[float]) -> float:
    """How far counts are from a law, in standard deviations of the statistic."""
    total = sum(counts)
    cells = [(c, total * p) for c, p in zip(counts, probability, strict=True) if p > 0]
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@twin
def test_chi_square_with_seeded_coins(ops: SimpleNamespace) -> None:
    """A thousand seeds; and the same counts refuse the law of another temperature."""
    count = 1500
    row = [0.0, 1.0, -1.0, 0.5, 2.0, 1.5, -0.3, 0.8]
    coins = seeded_coins(torch.arange(count), torch.full((count, 1), 17))
    tokens = single(ops, torch.tensor([row]), coins[:, 0].tolist(), "joint", temperature=0.8)
    counts = [tokens.count(v) for v in range(len(row))]
    assert abs(chi_square(counts, law(row, 0.8, 2**30, 1.0, 0.0, "joint"))) < 4
    assert chi_square(counts, law(row, 1.0, 2**30, 1.0, 0.0, "joint")) > 8


def case(seed: int, batch: int, nodes: int, vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """A random batch of random settings, with coins in the middle of what the law gives a token."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch * nodes, vocab, generator=generator)).to(dtype)
    chosen = settings(
        batch,
        temperature=[(0.0, 0.5, 1.0, 1.3)[(seed + b) % 4] for b in range(batch)],
        top_k=[(2**30, 5, 1, 20)[(seed + b // 2) % 4] for b in range(batch)],
        top_p=[(1.0, 0.9, 0.4)[(seed + b) % 3] for b in range(batch)],
        min_p=[(0.0, 0.05)[(seed + b // 3) % 2] for b in range(batch)],
    )
    coins = torch.zeros(batch * nodes, dtype=torch.float64)
    per_node = {k: v.repeat_interleave(nodes) for k, v in chosen.items()}
    laws = sample_ref.law(logits, **per_node, order="joint")
    drawn = laws.clamp(min=1e-12).multinomial(1, generator=generator).squeeze(1)
    drawn = torch.where(laws.gather(1, drawn.unsqueeze(1)).squeeze(1) > 1e-4, drawn, laws.argmax(dim=1))
    ends = laws.cumsum(dim=1).gather(1, drawn.unsqueeze(1)).squeeze(1)
    coins = ends - laws.gather(1, drawn.unsqueeze(1)).squeeze(1) / 2
    parents = random_parents(batch, nodes, generator)
    target = drawn.view(batch, nodes).tolist()
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    for b, row in enumerate(parents):
        for node, parent in enumerate(row[1:], start=1):
            right = torch.rand(1, generator=generator) < 0.6
            tokens[b, node] = target[b][parent] if right else torch.randint(vocab, (1,), generator=generator)
    child, sibling = links(parents)
    found = [path(parents[b], tokens[b].tolist(), target[b], 6) for b in range(batch)]
    return {
        "arguments": (tokens, child, sibling, logits),
        "chosen": chosen,
        "coins": coins.view(batch, nodes),
        "found": found,
        "target": target,
    }


def run(op: Any, made: dict[str, Any], width: int, **other: Any) -> Accepted:
    return op(*made["arguments"], width, **made["chosen"], coins=made["coins"], **other)


@twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_trees(ops: SimpleNamespace, seed: int, dtype: torch.dtype) -> None:
    batch, nodes, vocab = (5, 7, 131) if seed else (2, 12, 1300)
    made = case(seed, batch, nodes, vocab, dtype)
    width = min(6, nodes)
    got = run(ops.verify_sample, made, width)
    for b, nodes_of_path in enumerate(made["found"]):
        assert got.accept_lens[b] == len(nodes_of_path)
        tail = [-1] * (width - len(nodes_of_path))
        assert got.accept_index[b].tolist() == [*(b * nodes + i for i in nodes_of_path), *tail]
        produced = [made["target"][b][i] for i in nodes_of_path]
        assert got.predict[b].tolist() == [*produced, *[0] * (nodes - len(produced))]
    theirs = run(sample_ref.verify_sample, made, width)
    for name in ("accept_index", "accept_lens", "predict"):
        assert torch.equal(getattr(got, name), getattr(theirs, name)), name


@twin
def test_greedy_requests_in_any_company(ops: SimpleNamespace) -> None:
    """temperature 0 or top_k 1, ties and all, beside hot requests: exactly verify_greedy."""
    made = case(3, 8, 6, 40, torch.bfloat16)
    tokens, child, sibling, logits = made["arguments"]
    logits = logits.round()  # ties
    chosen = settings(8, temperature=[0.0, 2.0] * 4, top_k=[9, 2**30, 1, 9] * 2)
    greedy = ops.verify_greedy(tokens, child, sibling, logits, 5)
    for coin in (0.0, 0.5, LAST_COIN):
        coins = torch.full((8, 6), coin, dtype=torch.float64)
        got = ops.verify_sample(tokens, child, sibling, logits, 5, **chosen, coins=coins)
        for b in (0, 2, 4, 6):
            assert torch.equal(got.predict[b], greedy.predict[b])
            assert torch.equal(got.accept_index[b], greedy.accept_index[b])
    # top_k 1 at any temperature
    got = ops.verify_sample(
        tokens, child, sibling, logits, 5, **settings(8, temperature=3.0, top_k=1), coins=made["coins"]
    )
    assert torch.equal(got.predict, greedy.predict)


@twin
def test_a_request_does_not_see_the_batch(ops: SimpleNamespace) -> None:
    made = case(1, 6, 7, 150, torch.float32)
    tokens, child, sibling, logits = made["arguments"]
    made["coins"] = torch.rand(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = run(ops.verify_sample, made, 5)
    rows = logits.view(6, 7, -1)
    for order in ([4, 0, 5, 5, 1], [2], [5, 4, 3, 2, 1, 0]):
        got = ops.verify_sample(
            tokens[order], child[order], sibling[order], rows[order].reshape(len(order) * 7, -1), 5,
            **{k: v[order] for k, v in made["chosen"].items()}, coins=made["coins"][order],
        )  # fmt: skip
        for place, b in enumerate(order):
            assert torch.equal(got.predict[place], together.predict[b])
            assert torch.equal(got.accept_lens[place], together.accept_lens[b])


@twin
def test_the_tree_does_not_change_what_is_said(ops: SimpleNamespace) -> None:
    """One coin per position: a drafted tree, another one, and none give the same text."""
    generator = torch.Generator().manual_seed(9)
    vocab, length = 6, 7
    table = torch.randn(vocab, vocab, generator=generator)  # the target: next token's logits by last token
    seeds = torch.tensor([123])

    def say(drafts: int) -> list[int]:
        """Generate from token 0 with a random tree of ``drafts`` nodes below the root per round."""
        text = [0]
        while len(text) <= length:
            parents = random_parents(1, drafts + 1, generator)
            tokens = torch.randint(vocab, (1, drafts + 1), generator=generator)
            tokens[0, 0] = text[-1]
            depth = [0]
            for node in range(1, drafts + 1):
                depth.append(depth[parents[0][node]] + 1)
            coins = seeded_coins(seeds, torch.tensor([depth]) + len(text))
            got = ops.verify_sample(
                tokens, *links(parents), table[tokens[0]], drafts + 1,
                **settings(1, temperature=0.9, top_p=0.95), coins=coins,
            )  # fmt: skip
            text += got.predict[0, : got.accept_lens[0]].tolist()
        return text[: length + 1]

    assert say(0) == say(1) == say(9) == say(9)


@twin
@pytest.mark.parametrize("vocab", [32000, 32003, 151936])
def test_real_vocabularies(ops: SimpleNamespace, vocab: int) -> None:
    """Filters that keep three far-apart tokens of many; what the coin picks is where it should be."""
    places = [5, vocab // 2, vocab - 1]
    row = torch.full((vocab,), -4.0)
    row[places] = torch.tensor([8.0, 9.0, 8.5])
    weights = torch.tensor([8.0, 9.0, 8.5]).double().exp()
    edges = (weights / weights.sum()).cumsum(0).tolist()
    coins = [0.0, edges[0] - 1e-5, edges[0] + 1e-5, edges[1] - 1e-5, edges[1] + 1e-5, LAST_COIN]
    expected = [places[i] for i in (0, 0, 1, 1, 2, 2)]
    for values in ({"top_k": 3}, {"min_p": 0.1}, {"top_k": 50, "min_p": 0.1, "top_p": 0.999}):
        got = single(ops, row.unsqueeze(0), coins, "joint", **values)
        assert got == expected, values


@twin
def test_rows_apart(ops: SimpleNamespace) -> None:
    made = case(2, 4, 5, 37, torch.float32)
    tokens, child, sibling, logits = made["arguments"]
    expected = run(ops.verify_sample, made, 4)
    padded = torch.full((20, 48), math.inf)
    padded[:, :37] = logits
    got = run(ops.verify_sample, {**made, "arguments": (tokens, child, sibling, padded[:, :37])}, 4)
    assert torch.equal(got.predict, expected.predict)


@twin
@pytest.mark.parametrize("fill", [0, 1])
def test_every_output_is_written_and_nothing_else(
    ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fill: int
) -> None:
    made = case(1, 3, 6, 90, torch.float32)
    inputs = [guarded(t) for t in made["arguments"]]
    with poisoned_outputs(monkeypatch, fill) as outputs:
        got = run(ops.verify_sample, {**made, "arguments": tuple(g.tensor for g in inputs)}, 5)
    expected = run(sample_ref.verify_sample, made, 5)
    assert torch.equal(got.predict, expected.predict) and torch.equal(got.accept_index, expected.accept_index)
    assert outputs and all(g.intact() for g in [*inputs, *outputs])
    assert all(torch.equal(g.tensor, t) for g, t in zip(inputs, made["arguments"], strict=True))


@twin
def test_no_request(ops: SimpleNamespace) -> None:
    none = torch.zeros(0, 4, dtype=torch.int64)
    got = ops.verify_sample(
        none, none, none, torch.zeros(0, 9), 3, **settings(0), coins=torch.zeros(0, 4, dtype=torch.float64)
    )
    assert tuple(got.predict.shape) == (0, 4) and tuple(got.accept_index.shape) == (0, 3)
