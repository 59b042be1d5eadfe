"""Every output element is written, nothing beside it is, and inputs stay as they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import guarded, poisoned_outputs

import eagle3_kernels as ours
from eagle3_kernels import rows_ref, select_ref, slots_ref, tree_ref, walk_ref

BATCH, TOPK, STEPS, NODES, VOCAB = 3, 3, 4, 14, 37
SEED = torch.Generator().manual_seed(11)
LOGITS = torch.randn(BATCH, VOCAB, generator=SEED)
DATA = [
    torch.randn(BATCH if step == 0 else BATCH * TOPK, VOCAB, generator=SEED).softmax(1).topk(TOPK, dim=1)
    for step in range(STEPS)
]
ROOTS = torch.tensor([5, 6, 7])
LENS = torch.tensor([0, 40, 9])


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [t for part in value for t in tensors(part)] if isinstance(value, (list, tuple)) else []


def drafted(ops: Any) -> list[Any]:
    """One whole round of selection."""
    candidates = ours.Candidates.allocate(BATCH, TOPK, STEPS)
    outputs = [ops.select_first(candidates, *DATA[0])]
    outputs += [ops.select_next(candidates, step, *DATA[step]) for step in range(1, STEPS)]
    return [*outputs, ops.select_nodes(candidates, NODES), candidates]


NODE_IDS, NODE_TOKENS, CANDIDATES = (*drafted(ours)[-2], drafted(ours)[-1])
TREE = ours.build_tree(ROOTS, NODE_IDS, NODE_TOKENS, CANDIDATES.parents, LENS, TOPK)
TARGET = torch.randint(4, TREE.tokens.shape, generator=SEED)
WALKED = (TREE.tokens % 4, TREE.next_token, TREE.next_sibling, TARGET)

CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "row_argmax": (lambda: ours.row_argmax(LOGITS), lambda: rows_ref.row_argmax(LOGITS)),
    "row_argmax bfloat16": (
        lambda: ours.row_argmax(LOGITS.bfloat16()),
        lambda: rows_ref.row_argmax(LOGITS.bfloat16()),
    ),
    "row_topk": (lambda: ours.row_topk(LOGITS, 5), lambda: rows_ref.row_topk(LOGITS, 5)),
    "select": (lambda: drafted(ours), lambda: drafted(select_ref)),
    "build_tree": (
        lambda: ours.build_tree(ROOTS, NODE_IDS, NODE_TOKENS, CANDIDATES.parents, LENS, TOPK),
        lambda: tree_ref.build_tree(ROOTS, NODE_IDS, NODE_TOKENS, CANDIDATES.parents, LENS, TOPK),
    ),
    "build_chain": (
        lambda: ours.build_chain(ROOTS, NODE_TOKENS, LENS),
        lambda: tree_ref.build_chain(ROOTS, NODE_TOKENS, LENS),
    ),
    "verify_walk": (
        lambda: ours.verify_walk(*WALKED, STEPS + 1),
        lambda: walk_ref.verify_walk(*WALKED, STEPS + 1),
    ),
    "cache_slots": (
        lambda: ours.cache_slots(torch.arange(60, dtype=torch.int32).view(3, 20), ROOTS - 5, LENS % 10, 9),
        lambda: slots_ref.cache_slots(
            torch.arange(60, dtype=torch.int32).view(3, 20), ROOTS - 5, LENS % 10, 9
        ),
    ),
}
INPUTS = {
    "LOGITS": LOGITS,
    "ROOTS": ROOTS,
    "LENS": LENS,
    "NODE_IDS": NODE_IDS,
    "NODE_TOKENS": NODE_TOKENS,
    "TARGET": TARGET,
    "parents": CANDIDATES.parents,
    **{f"step {i}, {j}": t for i, pair in enumerate(DATA) for j, t in enumerate(pair)},
    **{f"tree {i}": t for i, t in enumerate(tensors(TREE))},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", [0, 1])
def test_outputs(name: str, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op, reference = CALLS[name]
    expected = tensors(reference())
    saved = {key: value.clone() for key, value in INPUTS.items()}
    with poisoned_outputs(monkeypatch, which) as made:
        got = tensors(op())
    assert made and all(g.intact() for g in made)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert not {key for key, value in INPUTS.items() if not torch.equal(value, saved[key])}


@pytest.mark.parametrize("ints", [torch.int64, torch.int32])
def test_written_slots(ints: torch.dtype) -> None:
    before = torch.arange(40, dtype=torch.int32).view(4, 10)
    place = guarded(before)
    rows, start = torch.tensor([3, 0, 1], dtype=ints), torch.tensor([7, 0, 10], dtype=ints)
    end = torch.tensor([10, 4, 10], dtype=ints)
    slots = torch.arange(100, 107, dtype=ints)
    ours.write_slots(place.tensor, rows, start, end, slots)
    assert place.intact()
    expected = before.clone()
    expected[3, 7:], expected[0, :4] = torch.arange(100, 103), torch.arange(103, 107)
    assert torch.equal(place.tensor, expected)


def test_the_guards_themselves() -> None:
    """A write beside the tensor is seen, in front of it and behind it."""
    for offset in (-1, 6):
        place = guarded(torch.zeros(6, dtype=torch.int32))
        place.buffer.as_strided((1,), (1,), place.tensor.storage_offset() + offset).fill_(7)
        assert not place.intact()
    untouched = guarded(torch.zeros(2, 3))
    untouched.tensor.fill_(1.0)
    assert untouched.intact()
