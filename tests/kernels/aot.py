"""Compiles the Triton kernels for GPUs that are not here, and reads what each costs there.

python tests/kernels/aot.py            print registers, spills and shared memory
python tests/kernels/aot.py --write    and store them as the budgets of test_aot.py
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3_kernels import greedy_triton, rows_triton, sample_triton, select_triton, tree_triton

BUDGETS = Path(__file__).with_name("aot_budgets.json")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class Case:
    """One specialisation, as the launcher asks for it.

    Attributes:
        types: of each parameter that is not constexpr, in Triton's notation.
        unaligned: parameters without the promise of a multiple of 16; pointers and the sizes that
            Triton specialises have it otherwise.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    num_warps: int
    unaligned: tuple[str, ...] = ()
    max_registers: int | None = None  # NVIDIA alone has the option

    def source(self) -> ASTSource:
        """What the compiler takes."""
        parameters = self.kernel.params
        names = [p.name for p in parameters]
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, p in enumerate(parameters)
            if p.name in self.types and not p.do_not_specialize and p.name not in self.unaligned
        }
        return ASTSource(
            self.kernel,
            {n: self.types.get(n, "constexpr") for n in names},
            {(names.index(n),): v for n, v in self.constants.items()},
            aligned,
        )


def _tile_best(dtype: str, unaligned: tuple[str, ...] = ()) -> Case:
    types = {"p_key": "*i32", "p_id": "*i32", "p_logits": f"*{dtype}"}
    types |= dict.fromkeys(("stride", "vocab", "tiles"), "i32")
    constants = {"TILE": greedy_triton.TILE}
    return Case(greedy_triton._tile_best, types, constants, 8, unaligned)


def _greedy_walk(nodes: int, width: int) -> Case:
    types = dict.fromkeys(("p_index", "p_lens", "p_predict", "p_key", "p_id"), "*i32")
    types |= dict.fromkeys(("p_tokens", "p_child", "p_sibling"), "*i64")
    types |= dict.fromkeys(("tiles", "nodes", "width"), "i32")
    constants = {"NODES": nodes, "WIDTH": width, "CHUNK": greedy_triton.CHUNK}
    return Case(greedy_triton._walk, types, constants, 1)


def _tile_sums(dtype: str, unaligned: tuple[str, ...] = ()) -> Case:
    types = {
        "p_key": "*i32",
        "p_id": "*i32",
        "p_sum": "*fp32",
        "p_logits": f"*{dtype}",
        "p_temperature": "*fp32",
    }
    types |= dict.fromkeys(("stride", "vocab", "tiles", "nodes"), "i32")
    return Case(sample_triton._tile_sums, types, {"TILE": sample_triton.TILE}, 4, unaligned)


def _sample_walk(dtype: str, nodes: int, width: int, sequential: bool) -> Case:
    spare = {"fp32": 0, "fp16": 13, "bf16": 16}[dtype]
    types = dict.fromkeys(("p_index", "p_lens", "p_predict", "p_key", "p_id", "p_top_k"), "*i32")
    types |= dict.fromkeys(("p_tokens", "p_child", "p_sibling"), "*i64")
    types |= dict.fromkeys(("p_sum", "p_temperature", "p_top_p", "p_min_p"), "*fp32")
    types |= {"p_logits": f"*{dtype}", "p_coins": "*fp64"}
    types |= dict.fromkeys(("stride", "vocab", "tiles", "nodes", "width"), "i32")
    constants = {"SEQUENTIAL": sequential, "SPARE": spare, "NODES": nodes, "WIDTH": width}
    constants |= {"TILE": sample_triton.TILE, "CHUNK": sample_triton.CHUNK}
    return Case(sample_triton._walk, types, constants, 4, max_registers=sample_triton.MAX_REGISTERS)


def _tree(lens: str) -> Case:
    names = (
        "p_tokens",
        "p_positions",
        "p_child",
        "p_sibling",
        "p_bonus",
        "p_ids",
        "p_node_tokens",
        "p_parents",
    )
    types = dict.fromkeys(names, "*i64") | {"p_mask": "*u8", "p_lens": f"*{lens}"}
    types |= dict.fromkeys(("nodes", "slots", "topk"), "i32")
    constants = {"ROWS": tree_triton.ROWS, "COLUMNS": tree_triton.COLUMNS}
    return Case(tree_triton._tree, types, constants, 4)


def _argmax() -> Case:
    types = {"p_out": "*i64", "p_key": "*i32", "p_id": "*i32", "tiles": "i32"}
    return Case(rows_triton._argmax, types, {"CHUNK": rows_triton.CHUNK}, 1)


def _tile_topk(dtype: str) -> Case:
    types = {"p_best": "*i64", "p_sum": "*fp32", "p_logits": f"*{dtype}"}
    types |= dict.fromkeys(("stride", "vocab", "tiles", "topk"), "i32")
    return Case(rows_triton._tile_topk, types, {"TILE": rows_triton.TILE}, 4)


def _merge_topk(topk: int) -> Case:
    types = {"p_probs": "*fp32", "p_ids": "*i64", "p_best": "*i64", "p_sum": "*fp32"}
    types |= {"tiles": "i32", "topk": "i32"}
    constants = {"TOPK": topk, "MERGED": rows_triton.MERGED, "CHUNK": rows_triton.CHUNK}
    return Case(rows_triton._merge_topk, types, constants, 4)


def _select(name: str, sizes: tuple[str, ...], pointers: dict[str, str], constants: dict[str, int]) -> Case:
    types = pointers | dict.fromkeys(sizes, "i32")
    return Case(getattr(select_triton, name), types, constants, 1 if name == "_first" else 4)


_ENTERED = {"p_scores": "*fp32", "p_tokens": "*i64", "p_beam": "*i64", "p_parents": "*i64"}
_STEP = {"p_out": "*i64", **_ENTERED, "p_probs": "*fp32", "p_ids": "*i64"}


CASES = {
    "greedy._tile_best bfloat16": _tile_best("bf16"),
    "greedy._tile_best float16": _tile_best("fp16"),
    "greedy._tile_best float32": _tile_best("fp32"),
    "greedy._tile_best bfloat16, odd stride": _tile_best("bf16", ("p_logits", "stride")),
    "greedy._walk N=1": _greedy_walk(1, 1),
    "greedy._walk N=16": _greedy_walk(16, 8),
    "greedy._walk N=64": _greedy_walk(64, 16),
    "greedy._walk N=1024": _greedy_walk(1024, 32),
    "sample._tile_sums bfloat16": _tile_sums("bf16"),
    "sample._tile_sums float16": _tile_sums("fp16"),
    "sample._tile_sums float32": _tile_sums("fp32"),
    "sample._tile_sums bfloat16, odd stride": _tile_sums("bf16", ("p_logits", "stride")),
    "sample._walk bfloat16 N=16 joint": _sample_walk("bf16", 16, 8, False),
    "sample._walk bfloat16 N=16 sequential": _sample_walk("bf16", 16, 8, True),
    "sample._walk float16 N=16 joint": _sample_walk("fp16", 16, 8, False),
    "sample._walk float32 N=16 joint": _sample_walk("fp32", 16, 8, False),
    "sample._walk float32 N=64 sequential": _sample_walk("fp32", 64, 16, True),
    "sample._walk bfloat16 N=1024 joint": _sample_walk("bf16", 1024, 32, False),
    "rows._argmax": _argmax(),
    "rows._tile_topk bfloat16": _tile_topk("bf16"),
    "rows._tile_topk float16": _tile_topk("fp16"),
    "rows._tile_topk float32": _tile_topk("fp32"),
    "rows._merge_topk k=8": _merge_topk(8),
    "rows._merge_topk k=64": _merge_topk(64),
    "select._first k=8": _select("_first", ("topk", "candidates", "slots"), _STEP, {"TOPK": 8}),
    "select._next k=8": _select(
        "_next", ("step", "topk", "candidates", "slots"), {**_STEP, "p_row": "*i64"}, {"TOPK": 8}
    ),
    "select._next k=64": _select(
        "_next", ("step", "topk", "candidates", "slots"), {**_STEP, "p_row": "*i64"}, {"TOPK": 64}
    ),
    "select._nodes": _select(
        "_nodes",
        ("count", "candidates"),
        {"p_numbers": "*i64", "p_out": "*i64", "p_scores": "*fp32", "p_tokens": "*i64"},
        {"BLOCK": select_triton.BLOCK},
    ),
    "tree._tree": _tree("i64"),
    "tree._tree int32 lengths": _tree("i32"),
}


def compile_case(case: Case, target: GPUTarget) -> Any:
    """Triton's compiled kernel."""
    options = {"num_warps": case.num_warps}
    if case.max_registers and target.backend == "cuda":
        options["maxnreg"] = case.max_registers
    return triton.compile(case.source(), target=target, options=options)


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Registers per thread, spilled bytes and shared memory in bytes."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = {n: int(re.search(rf"\.{n}:\s+(\d+)", text)[1]) for n in ("vgpr_count", "vgpr_spill_count")}
        registers, spills = found["vgpr_count"], 4 * found["vgpr_spill_count"]
    else:
        tool = NVIDIA_TOOLS / ("ptxas-blackwell" if target.arch >= 100 else "ptxas")
        ptx = compiled.asm["ptx"]
        arch = re.search(r"^\.target (\S+?)(,|$)", ptx, re.M)[1]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "kernel.ptx")
            source.write_text(ptx)
            command = [str(tool), "-v", f"--gpu-name={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = int(re.search(r"Used (\d+) registers", said)[1])
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return {"registers": registers, "spill_bytes": spills, "shared_bytes": compiled.metadata.shared}


def main() -> None:
    """Print the table; store it with --write."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for name, case in CASES.items():
        table[name] = {}
        for label, target in TARGETS.items():
            table[name][label] = resources(compile_case(case, target), target)
            print(f"{name:44} {label:7} {table[name][label]}", flush=True)
    if "--write" in sys.argv[1:]:
        BUDGETS.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
