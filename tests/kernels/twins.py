"""Which implementation a twin test looks at: the CPU's, or under TRITON_INTERPRET=1 Triton's.

Triton decides at import between compiling and interpreting, so each needs a process of its own:

    pytest tests/kernels                                 the CPU path
    TRITON_INTERPRET=1 pytest -m twin tests/kernels      the Triton kernels, interpreted
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import eagle3_kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def implementations() -> SimpleNamespace:
    """The ops under test, by name."""
    if not INTERPRETED:
        return SimpleNamespace(
            verify_greedy=eagle3_kernels.verify_greedy, verify_sample=eagle3_kernels.verify_sample
        )
    from eagle3_kernels import greedy_triton, sample_triton

    return SimpleNamespace(
        verify_greedy=greedy_triton.verify_greedy, verify_sample=sample_triton.verify_sample
    )
