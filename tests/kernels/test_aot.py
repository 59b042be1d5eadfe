"""Every Triton kernel compiles for the GPUs we serve on, within its stored budget and without a spill."""

from __future__ import annotations

import json

import aot
import pytest
import triton

from eagle3_kernels import greedy_triton, rows_triton, sample_triton, select_triton, tree_triton

BUDGETS = json.loads(aot.BUDGETS.read_text())
SLACK = 8  # registers; ptxas allocates by eights, and a launch is no slower below the next step

# What may cost a new compilation: a size that one server does not change.
SPECIALISED = {"stride"}


def kernels() -> dict[str, object]:
    """Every kernel that is launched, by module and name."""
    modules = {
        "greedy": greedy_triton,
        "rows": rows_triton,
        "sample": sample_triton,
        "select": select_triton,
        "tree": tree_triton,
    }
    return {
        f"{name}.{attribute}": value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, triton.runtime.JITFunction) and attribute.startswith("_")
    }


def test_every_kernel_has_a_case_and_every_case_a_budget() -> None:
    assert {case.partition(" ")[0] for case in aot.CASES} == set(kernels())
    assert set(BUDGETS["kernels"]) == set(aot.CASES)
    assert BUDGETS["triton"] == triton.__version__, "run: python tests/kernels/aot.py --write"


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("name", aot.CASES)
def test_budget(name: str, target: str) -> None:
    used = aot.resources(aot.compile_case(aot.CASES[name], aot.TARGETS[target]), aot.TARGETS[target])
    budget = BUDGETS["kernels"][name][target]
    assert used["spill_bytes"] == 0
    assert used["registers"] <= budget["registers"] + SLACK
    assert used["shared_bytes"] <= budget["shared_bytes"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kernel", ["greedy._tile_best", "sample._tile_sums", "rows._tile_topk"])
def test_logits_are_loaded_16_bytes_at_a_time(kernel: str, dtype: str, target: str) -> None:
    case = aot.CASES[f"{kernel} {dtype}"]
    ptx = aot.compile_case(case, aot.TARGETS[target]).asm["ptx"]
    assert "ld.global.v4.b32" in ptx


def test_neither_batch_nor_vocabulary_is_compiled_in() -> None:
    for name, kernel in kernels().items():
        for parameter in kernel.params:
            pointer = parameter.name.startswith("p_")
            fixed = parameter.is_constexpr or parameter.do_not_specialize
            assert pointer or fixed or parameter.name in SPECIALISED, f"{name}: {parameter.name}"
            assert not (parameter.is_constexpr and parameter.name.lower() in {"batch", "vocab", "tiles"})
