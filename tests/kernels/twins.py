"""Which implementation a twin test looks at: the CPU's, or under TRITON_INTERPRET=1 Triton's.

Triton decides at import between compiling and interpreting, so each needs a process of its own:

    pytest tests/kernels                                 the CPU path
    TRITON_INTERPRET=1 pytest -m twin tests/kernels      the Triton kernels, interpreted
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import eagle3_kernels

TWINS = (
    "build_chain",
    "build_tree",
    "row_argmax",
    "row_topk",
    "select_first",
    "select_next",
    "select_nodes",
    "verify_greedy",
    "verify_sample",
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def implementations() -> SimpleNamespace:
    """The ops under test, by name."""
    if not INTERPRETED:
        return SimpleNamespace(**{name: getattr(eagle3_kernels, name) for name in TWINS})
    from eagle3_kernels import greedy_triton, rows_triton, sample_triton, select_triton, tree_triton

    modules = (greedy_triton, rows_triton, sample_triton, select_triton, tree_triton)
    return SimpleNamespace(**{n: getattr(m, n) for n in TWINS for m in modules if hasattr(m, n)})
