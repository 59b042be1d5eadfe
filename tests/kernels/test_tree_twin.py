"""build_tree and build_chain: every implementation against a tree followed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from guards import guarded, poisoned_outputs
from twins import INTERPRETED

from eagle3_kernels import Candidates, TreeBuffers, select_first, select_next, select_nodes, tree_ref

pytestmark = pytest.mark.twin
FIELDS = ("tokens", "positions", "mask", "next_token", "next_sibling")


def drafted(batch: int, topk: int, steps: int, nodes: int, seed: int) -> dict[str, torch.Tensor | int]:
    """Arguments of build_tree, from a round of selection over random probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def step(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = 4 * torch.randn(rows, 50, generator=generator)
        return logits.softmax(1).topk(topk, dim=1)

    candidates = Candidates.allocate(batch, topk, steps)
    select_first(candidates, *step(batch))
    for i in range(1, steps):
        select_next(candidates, i, *step(batch * topk))
    ids, tokens = select_nodes(candidates, nodes - 1) if nodes > 1 else (torch.zeros(batch, 0).long(),) * 2
    lens = torch.randint(100_000, (batch,), generator=generator)
    bonus = torch.randint(50, (batch,), generator=generator)
    return {
        "bonus_tokens": bonus,
        "node_ids": ids,
        "node_tokens": tokens,
        "parents": candidates.parents,
        "seq_lens": lens.int() if seed % 2 else lens,
        "topk": topk,
    }


def by_hand(given: dict[str, torch.Tensor | int]) -> list[dict[str, list]]:
    """One tree per request, node by node."""
    trees = []
    k = given["topk"]
    for b, ids in enumerate(given["node_ids"].tolist()):
        parents = given["parents"][b].tolist()
        place = {-1: 0, **{c: i for i, c in enumerate(ids, 1)}}
        above = [-1] + [place[parents[c // k]] if c >= k else 0 for c in ids]
        lines = []  # of each node, itself and its ancestors
        for node in range(len(above)):
            line = [node]
            while line[-1] != 0:
                line.append(above[line[-1]])
            lines.append(line)
        children = [[i for i, p in enumerate(above) if p == node] for node in range(len(above))]
        trees.append(
            {
                "tokens": [int(given["bonus_tokens"][b]), *given["node_tokens"][b].tolist()],
                "positions": [int(given["seq_lens"][b]) + len(line) - 1 for line in lines],
                "mask": [[j in line for j in range(len(above))] for line in lines],
                "next_token": [c[0] if c else -1 for c in children],
                "next_sibling": [
                    next((j for j in children[above[i]] if j > i), -1) if i else -1 for i in range(len(above))
                ],
            }
        )
    return trees


def same(ours: TreeBuffers, theirs: TreeBuffers) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


SHAPES = [
    (1, 1, 1, 2),
    (3, 1, 5, 6),
    (2, 4, 1, 5),
    (4, 4, 3, 16),
    (2, 8, 5, 64),
    (3, 3, 4, 30),  # every candidate
    (2, 8, 4, 17),
    (1, 10, 6, 130),  # more nodes than one block of columns
    (2, 2, 7, 12),
]


@pytest.mark.parametrize(("batch", "topk", "steps", "nodes"), SHAPES)
def test_by_hand(ops: SimpleNamespace, batch: int, topk: int, steps: int, nodes: int) -> None:
    for seed in (0, 1):
        given = drafted(batch, topk, steps, nodes, seed)
        got = ops.build_tree(**given)
        for b, tree in enumerate(by_hand(given)):
            for name in FIELDS:
                assert getattr(got, name)[b].tolist() == tree[name], name
        same(tree_ref.build_tree(**given), got)


def test_one_step_needs_no_parents(ops: SimpleNamespace) -> None:
    """As SGLang hands it over: the list is empty where nothing was expanded."""
    given = drafted(2, 4, 1, 5, 0)
    expected = ops.build_tree(**given)
    same(ops.build_tree(**{**given, "parents": torch.zeros(2, 0, dtype=torch.int64)}), expected)


@pytest.mark.parametrize("steps", [0, 1, 5, 40])
def test_chains(ops: SimpleNamespace, steps: int) -> None:
    tokens = torch.arange(3 * steps).view(3, steps)
    bonus, lens = torch.tensor([7, 8, 9]), torch.tensor([0, 5, 2**31 - 1], dtype=torch.int32)
    got = ops.build_chain(bonus, tokens, lens)
    same(got, tree_ref.build_chain(bonus, tokens, lens))
    assert got.positions[2].tolist() == [2**31 - 1 + i for i in range(steps + 1)]


def test_a_request_does_not_see_the_batch(ops: SimpleNamespace) -> None:
    given = drafted(5, 4, 4, 20, 2)
    together = ops.build_tree(**given)
    order = [3, 0, 4, 4]
    got = ops.build_tree(**{n: v if n == "topk" else v[order] for n, v in given.items()})
    for name in FIELDS:
        assert torch.equal(getattr(got, name), getattr(together, name)[order]), name


@pytest.mark.parametrize("fill", [0, 1])
def test_every_output_is_written_and_nothing_else(
    ops: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fill: int
) -> None:
    given = drafted(3, 4, 4, 19, 4)
    inputs = {n: guarded(v) for n, v in given.items() if n != "topk"}
    with poisoned_outputs(monkeypatch, fill) as made:
        got = ops.build_tree(**{n: g.tensor for n, g in inputs.items()}, topk=4)
    same(got, tree_ref.build_tree(**given))
    assert made and all(g.intact() for g in [*inputs.values(), *made])


def test_no_request(ops: SimpleNamespace) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    got = ops.build_tree(none, none.view(0, 3), none.view(0, 3), none.view(0, 5), none, 2)
    assert tuple(got.mask.shape) == (0, 4, 4)


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 16],  # its parent was not chosen
        [0, 9, 10],  # neither was 9's
        [1, 0, 4],  # not ascending
        [0, 0, 1],
        [0, 1, 10**6],  # no such candidate
        [-3, 0, 1],
    ],
)
def test_numbers_that_are_no_tree(ops: SimpleNamespace, ids: list[int]) -> None:
    """An error on the CPU.  A GPU is not waited for: it ends, and writes nothing beside its outputs."""
    given = drafted(1, 4, 3, 4, 0)
    given["parents"] = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6, 7]])
    given["node_ids"] = torch.tensor([ids])
    if INTERPRETED:
        tree = ops.build_tree(**given)
        assert bool(tree.mask[0].diagonal().all()) and bool(tree.mask[0, :, 0].all())
        links = torch.cat((tree.next_token, tree.next_sibling))
        assert bool(((links == -1) | ((links > 0) & (links < 4))).all())
        return
    with pytest.raises(ValueError, match="^node_ids: given "):
        ops.build_tree(**given)
