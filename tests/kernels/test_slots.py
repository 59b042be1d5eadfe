"""Slot tables: windows read and written, nothing beside them touched; and what is compiled when."""

from __future__ import annotations

import importlib
from types import ModuleType

import eagle3_kernels
import pytest
import torch
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
    """Specialisations of every compiled function."""
    found = {}
    for name in ("rows", "select", "slots", "tree", "walk"):
        module: ModuleType = importlib.import_module(f"eagle3_kernels.{name}")
        for attribute, value in vars(module).items():
            if hasattr(value, "nopython_signatures"):
                found[f"{name}.{attribute}"] = len(value.nopython_signatures)
    found.pop("select._best")  # called by the others alone, and compiled into them
    return found


def test_nothing_compiles_after_the_warm_up() -> None:
    """The other tests of this folder must not have compiled for it: a process of its own."""
    import subprocess
    import sys

    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import torch, eagle3_kernels as k; from test_slots import compiled\n"
        "k.warm_up(); before = compiled(); assert len(before) >= 9 and all(before.values()), before\n"
        "i = torch.int64\n"
        "for batch, topk, steps, nodes, vocab in ((1, 1, 5, 5, 999), (4, 4, 3, 15, 333), (7, 8, 6, 60, 77)):\n"
        "    c = k.Candidates.allocate(batch, topk, steps)\n"
        "    k.select_first(c, *k.row_topk(torch.randn(batch, vocab), topk))\n"
        "    for s in range(1, steps):\n"
        "        k.select_next(c, s, *k.row_topk(torch.randn(batch * topk, vocab), topk))\n"
        "    ids, tokens = k.select_nodes(c, nodes)\n"
        "    lens = torch.zeros(batch, dtype=i)\n"
        "    t = k.build_tree(lens, ids, tokens, c.parents, lens, topk) if topk > 1 else k.build_chain(lens, tokens, lens)\n"
        "    p = k.row_argmax(torch.randn(batch * t.tokens.shape[1], vocab)).view(batch, -1)\n"
        "    k.verify_walk(t.tokens, t.next_token, t.next_sibling, p, steps + 1)\n"
        "    k.cache_slots(torch.zeros(9, 50, dtype=torch.int32), lens, lens, nodes)\n"
        "assert compiled() == before, (before, compiled())\n"
    )
    here = str(__import__("pathlib").Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_op_has_a_reference_of_the_same_signature() -> None:
    import inspect

    checked = 0
    for name in ("rows", "select", "slots", "tree", "walk"):
        module = importlib.import_module(f"eagle3_kernels.{name}")
        reference = importlib.import_module(f"eagle3_kernels.{name}_ref")
        for op in eagle3_kernels.__all__:
            function = vars(module).get(op)
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            assert inspect.signature(function) == inspect.signature(vars(reference)[op]), op
            checked += 1
    assert checked >= 9
