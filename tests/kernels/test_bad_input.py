"""Every op, every argument: a wrong dtype, rank, size, stride or device is one ValueError that names it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import eagle3_kernels as k


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def table() -> torch.Tensor:
    return torch.arange(40, dtype=torch.int32).view(4, 10)


def drafted() -> k.Candidates:
    """A finished round of 2 requests, topk 2, 3 steps."""
    candidates = k.Candidates.allocate(2, 2, 3)
    k.select_first(candidates, torch.full((2, 2), 0.5), ints(2, 2))
    for step in (1, 2):
        k.select_next(candidates, step, torch.full((4, 2), 0.5), ints(4, 2))
    return candidates


# op, arguments that are right, and per tensor argument the dimensions whose size is fixed by the others.
OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, tuple[int, ...]]]] = {
    "row_argmax": (k.row_argmax, lambda: {"logits": torch.zeros(2, 3)}, {"logits": ()}),
    "row_topk": (k.row_topk, lambda: {"logits": torch.zeros(2, 3), "k": 2}, {"logits": ()}),
    "select_first": (
        k.select_first,
        lambda: {"candidates": drafted(), "probs": torch.rand(2, 2), "ids": ints(2, 2)},
        {"probs": (0, 1), "ids": (0, 1)},
    ),
    "select_next": (
        k.select_next,
        lambda: {"candidates": drafted(), "step": 1, "probs": torch.rand(4, 2), "ids": ints(4, 2)},
        {"probs": (0, 1), "ids": (0, 1)},
    ),
    "select_nodes": (k.select_nodes, lambda: {"candidates": drafted(), "count": 3}, {}),
    "build_tree": (
        k.build_tree,
        lambda: {
            "bonus_tokens": ints(2),
            "node_ids": torch.tensor([[0, 1, 2], [0, 1, 2]]),
            "node_tokens": ints(2, 3),
            "parents": drafted().parents,
            "seq_lens": ints(2),
            "topk": 2,
        },
        {"bonus_tokens": (), "node_ids": (0,), "node_tokens": (0, 1), "parents": (0,), "seq_lens": (0,)},
    ),
    "build_chain": (
        k.build_chain,
        lambda: {"bonus_tokens": ints(2), "tokens": ints(2, 3), "seq_lens": ints(2)},
        {"bonus_tokens": (), "tokens": (0,), "seq_lens": (0,)},
    ),
    "verify_walk": (
        k.verify_walk,
        lambda: {
            "tokens": ints(2, 3),
            "next_token": ints(2, 3) - 1,
            "next_sibling": ints(2, 3) - 1,
            "target_predict": ints(2, 3),
            "width": 2,
        },
        {"tokens": (), "next_token": (0, 1), "next_sibling": (0, 1), "target_predict": (0, 1)},
    ),
    "verify_greedy": (
        k.verify_greedy,
        lambda: {
            "tokens": ints(2, 3),
            "next_token": ints(2, 3) - 1,
            "next_sibling": ints(2, 3) - 1,
            "logits": torch.zeros(6, 5),
            "width": 2,
        },
        {"tokens": (), "next_token": (0, 1), "next_sibling": (0, 1), "logits": (0,)},
    ),
    "verify_sample": (
        k.verify_sample,
        lambda: {
            "tokens": ints(2, 3),
            "next_token": ints(2, 3) - 1,
            "next_sibling": ints(2, 3) - 1,
            "logits": torch.zeros(6, 5),
            "width": 2,
            "temperature": torch.ones(2),
            "top_k": torch.ones(2, dtype=torch.int32),
            "top_p": torch.ones(2),
            "min_p": torch.zeros(2),
            "coins": torch.zeros(2, 3, dtype=torch.float64),
        },
        {
            "tokens": (),
            "next_token": (0, 1),
            "next_sibling": (0, 1),
            "logits": (0,),
            **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), (0,)),
            "coins": (0, 1),
        },
    ),
    "seeded_coins": (
        k.seeded_coins,
        lambda: {"seeds": ints(2), "positions": ints(2, 3)},
        {"seeds": (), "positions": (0,)},
    ),
    "cache_slots": (
        k.cache_slots,
        lambda: {"req_to_token": table(), "requests": ints(2), "start": ints(2), "width": 3},
        {"req_to_token": (), "requests": (), "start": (0,)},
    ),
    "write_slots": (
        k.write_slots,
        lambda: {
            "req_to_token": table(),
            "requests": torch.tensor([0, 1]),
            "start": ints(2),
            "end": torch.tensor([1, 2]),
            "slots": ints(3),
        },
        {"req_to_token": (), "requests": (), "start": (0,), "end": (0,), "slots": (0,)},
    ),
}


def variants(good: torch.Tensor, fixed: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """(what is said about it, tensor with one thing wrong)"""
    for dtype in (torch.float64, torch.complex64, torch.uint8, torch.bool):
        if good.dtype != dtype:
            yield "dtype", good.to(dtype)
    yield "shape", good.unsqueeze(0)
    yield "shape", good.reshape(-1)[0]
    for dim in fixed:
        yield "shape", torch.cat((good, good.narrow(dim, 0, 1)), dim=dim)
        yield "shape", good.narrow(dim, 0, good.shape[dim] - 1).contiguous()
    yield "strides", torch.stack((good, good), dim=-1)[..., 0]
    yield "device", good.to("meta")


def test_every_op_and_argument_is_here() -> None:
    functions = {n for n in k.__all__ if n[0].islower()} - {"warm_up"}
    assert set(OPS) == functions
    for op, make, fixed in OPS.values():
        op(**make())  # the right arguments are right
        given = {name for name, value in make().items() if isinstance(value, torch.Tensor)}
        assert set(fixed) == given


@pytest.mark.parametrize(("name", "argument"), [(n, a) for n, op in OPS.items() for a in op[2]])
def test_tensors(name: str, argument: str) -> None:
    op, make, fixed = OPS[name]
    good = make()
    for about, wrong in variants(good[argument], fixed[argument]):
        with pytest.raises(ValueError, match=f"^{argument}: given {about}.*, allowed ") as caught:
            op(**{**good, argument: wrong})
        assert str(caught.value).count("given") == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "argument", "wrong"),
    [
        ("row_topk", "k", (0, -1, 4)),
        ("select_next", "step", (0, -1, 3)),
        ("select_nodes", "count", (0, -1, 11)),
        ("build_tree", "topk", (0, -2)),
        ("verify_walk", "width", (0, -1, 4)),
        ("verify_greedy", "width", (0, -1, 4)),
        ("verify_sample", "width", (0, -1, 4)),
        ("cache_slots", "width", (-1,)),
    ],
)
def test_numbers(name: str, argument: str, wrong: tuple[int, ...]) -> None:
    op, make, _ = OPS[name]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{argument}: given {value}, allowed "):
            op(**{**make(), argument: value})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", (-1.0, math.inf, math.nan)),
        ("top_k", (0, -1)),
        ("top_p", (0.0, 1.01, -0.5, math.nan)),
        ("min_p", (-0.1, 1.5, math.nan)),
        ("coins", (1.0, -1e-9, math.nan)),
    ],
)
def test_sampling_parameters(name: str, wrong: tuple[float, ...]) -> None:
    op, make, _ = OPS["verify_sample"]
    for value in wrong:
        given = make()[name].clone()
        given.view(-1)[-1] = value
        with pytest.raises(ValueError, match=f"^{name}: given {given.view(-1)[-1].item()}, allowed "):
            op(**{**make(), name: given})


def test_an_order_that_does_not_exist() -> None:
    op, make, _ = OPS["verify_sample"]
    with pytest.raises(ValueError, match="^order: given 'both', allowed 'joint' or 'sequential'"):
        op(**make(), order="both")


def test_k_has_a_limit_of_its_own() -> None:
    k.row_topk(torch.zeros(1, 99), 64)
    with pytest.raises(ValueError, match="^k: given 65, allowed 1 to 64"):
        k.row_topk(torch.zeros(1, 99), 65)


def test_a_row_without_entries_has_no_best_one() -> None:
    with pytest.raises(ValueError, match="^logits: given shape"):
        k.row_argmax(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="^logits: given shape"):
        k.verify_greedy(ints(2, 1), ints(2, 1) - 1, ints(2, 1) - 1, torch.zeros(2, 0), 1)


def test_rows_that_overlap() -> None:
    overlapping = torch.zeros(9).as_strided((2, 5), (3, 1))
    with pytest.raises(ValueError, match="^logits: given strides"):
        k.verify_greedy(ints(2, 1), ints(2, 1) - 1, ints(2, 1) - 1, overlapping, 1)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *itertools.product(("select_first", "select_next"), ("scores", "tokens", "parents", "beam")),
        *itertools.product(("select_nodes",), ("scores", "tokens")),  # it uses no more
    ],
)
def test_candidates(name: str, field: str) -> None:
    """Candidates is public: what an op reads or writes of it is checked as its other arguments are."""
    op, make, _ = OPS[name]
    good = make()
    right = getattr(good["candidates"], field)
    wide = torch.cat((right, right), dim=1)  # larger than allowed: nothing is written outside of it
    for wrong in (right.to(torch.float64), wide, wide[:, ::2]):
        candidates = dataclasses.replace(good["candidates"], **{field: wrong})
        with pytest.raises(ValueError, match=rf"^(candidates\.)?{field}: given "):
            op(**{**good, "candidates": candidates})


@pytest.mark.parametrize(("argument", "wrong"), [("topk", 0), ("topk", -1), ("steps", 0)])
def test_allocation(argument: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: given {wrong}, allowed "):
        k.Candidates.allocate(**{"batch": 1, "topk": 2, "steps": 2, argument: wrong})


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ([5, 0], [3, 4]),  # the sum is right, the first window runs backwards
        ([0, 9], [4, 7]),
        ([0, 5], [4, 3]),
    ],
)
def test_a_window_that_runs_backwards(start: list[int], end: list[int]) -> None:
    place = table()
    slots = torch.full((sum(end) - sum(start),), -1)
    with pytest.raises(ValueError, match="^end: given "):
        k.write_slots(place, torch.tensor([0, 1]), torch.tensor(start), torch.tensor(end), slots)
    assert torch.equal(place, table())


@pytest.mark.parametrize(("start", "end"), [([-1], [1]), ([8], [11]), ([10], [11]), ([-5], [-3])])
def test_a_window_outside_of_the_table(start: list[int], end: list[int]) -> None:
    place = table()
    slots = torch.full((end[0] - start[0],), -1)
    with pytest.raises(ValueError, match="^(start|end): given "):
        k.write_slots(place, torch.tensor([0]), torch.tensor(start), torch.tensor(end), slots)
    assert torch.equal(place, table())


def test_a_start_whose_end_overflows() -> None:
    """In a process of its own: a read so far outside of the table ends the process."""
    code = (
        "import torch, eagle3_kernels as k\n"
        "last = torch.tensor([2**31 - 1], dtype=torch.int32)\n"
        "try:\n"
        "    k.cache_slots(torch.zeros(4, 10, dtype=torch.int32), last * 0, last, 1)\n"
        "except ValueError as error:\n"
        "    assert str(error).startswith('start: given'), error\n"
        "else:\n"
        "    raise SystemExit('read outside of the table')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
