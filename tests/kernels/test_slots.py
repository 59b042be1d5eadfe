"""Slot tables: windows read and written, nothing beside them touched; and what is compiled when."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import eagle3_kernels
from eagle3_kernels import cache_slots, slots_ref, write_slots

INTS = (torch.int64, torch.int32)


def table() -> torch.Tensor:
    return torch.arange(60, dtype=torch.int32).view(6, 10)


@pytest.mark.parametrize("ints", INTS)
def test_reading(ints: torch.dtype) -> None:
    rows, start = torch.tensor([4, 0, 2], dtype=ints), torch.tensor([0, 7, 3], dtype=ints)
    got = cache_slots(table(), rows, start, 3)
    assert got.tolist() == [[40, 41, 42], [7, 8, 9], [23, 24, 25]] and got.dtype == torch.int64
    assert torch.equal(got, slots_ref.cache_slots(table(), rows, start, 3))
    assert cache_slots(table(), rows, start, 0).shape == (3, 0)


@pytest.mark.parametrize("ints", INTS)
def test_writing(ints: torch.dtype) -> None:
    rows = torch.tensor([4, 0, 2], dtype=ints)
    start, end = torch.tensor([0, 7, 3], dtype=ints), torch.tensor([2, 10, 3], dtype=ints)
    slots = torch.tensor([-1, -2, -3, -4, -5], dtype=ints)
    ours, theirs = table(), table()
    write_slots(ours, rows, start, end, slots)
    slots_ref.write_slots(theirs, rows, start, end, slots)
    expected = table()
    expected[4, :2] = torch.tensor([-1, -2])
    expected[0, 7:] = torch.tensor([-3, -4, -5])
    assert torch.equal(ours, expected) and torch.equal(theirs, expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"req_to_token": table().long()}, "req_to_token: given dtype"),
        ({"requests": torch.tensor([6])}, "requests: given"),
        ({"requests": torch.tensor([-1])}, "requests: given"),
        ({"requests": torch.tensor([1.0])}, "requests: given dtype"),
        ({"start": torch.tensor([1, 2])}, "start: given shape"),
        ({"start": torch.tensor([8])}, "start: given window"),
        ({"start": torch.tensor([-1])}, "start: given window"),
    ],
)
def test_bad_windows(change: dict[str, torch.Tensor], said: str) -> None:
    good = {"req_to_token": table(), "requests": torch.tensor([1]), "start": torch.tensor([2])}
    with pytest.raises(ValueError, match=said):
        cache_slots(**{**good, **change}, width=3)


def test_bad_writes() -> None:
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="given"):
        write_slots(table(), one, one, torch.tensor([4]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="given"):
        write_slots(table(), one, one, torch.tensor([11]), torch.arange(10))


def compiled() -> dict[str, int]:
    """Specialisations of every compiled function that Python calls.

    Their names begin with an underscore; the others, and ``select._best``, are compiled into them.
    """
    found = {}
    for name in ("greedy", "rows", "sample", "select", "slots", "tree", "walk"):
        module: ModuleType = importlib.import_module(f"eagle3_kernels.{name}")
        for attribute, value in vars(module).items():
            if attribute.startswith("_") and hasattr(value, "nopython_signatures"):
                found[f"{name}.{attribute}"] = len(value.nopython_signatures)
    found.pop("select._best")
    return found


SERVING = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import eagle3_kernels as k
from test_slots import compiled

k.warm_up()
before = compiled()
assert len(before) >= 9 and all(before.values()), before
for batch, topk, steps, nodes, vocab in ((1, 1, 5, 5, 99), (4, 4, 3, 15, 333), (7, 8, 6, 60, 77)):
    candidates = k.Candidates.allocate(batch, topk, steps)
    k.select_first(candidates, *k.row_topk(torch.randn(batch, vocab), topk))
    for step in range(1, steps):
        k.select_next(candidates, step, *k.row_topk(torch.randn(batch * topk, vocab), topk))
    ids, tokens = k.select_nodes(candidates, nodes)
    lens = torch.zeros(batch, dtype=torch.int64)
    if topk > 1:
        tree = k.build_tree(lens, ids, tokens, candidates.parents, lens, topk)
    else:
        tree = k.build_chain(lens, tokens, lens)
    predict = k.row_argmax(torch.randn(tree.tokens.numel(), vocab)).view(batch, -1)
    links = (tree.tokens, tree.next_token, tree.next_sibling)
    k.verify_walk(*links, predict, steps + 1)
    k.verify_greedy(*links, torch.randn(tree.tokens.numel(), vocab), steps + 1)
    k.cache_slots(torch.zeros(9, 70, dtype=torch.int32), lens, lens, nodes)
assert compiled() == before, (before, compiled())
"""


def test_nothing_compiles_after_the_warm_up() -> None:
    """In a process of its own, for which the other tests have compiled nothing."""
    command = [sys.executable, "-c", SERVING, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_op_has_a_reference_of_the_same_signature() -> None:
    checked = 0
    for name in ("greedy", "rows", "sample", "select", "slots", "tree", "walk"):
        module = importlib.import_module(f"eagle3_kernels.{name}")
        reference = importlib.import_module(f"eagle3_kernels.{name}_ref")
        for op in eagle3_kernels.__all__:
            function = vars(module).get(op)
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            assert inspect.signature(function) == inspect.signature(vars(reference)[op]), op
            checked += 1
    assert checked >= 11
