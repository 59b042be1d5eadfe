"""A CPU platform for stock SGLang, so that EAGLE3X can be tried, checked and tested without a GPU.

SGLang has its own CPU engine, but it needs the compiled ``sgl_kernel`` CPU build, which PyPI does
not carry.  This platform needs PyTorch alone.  It is for small models: try a draft, replay the
incident, run CI.  It never touches a machine with an accelerator: :func:`activate` answers None
there, and where SGLang's own CPU engine was asked for.

Knows about SGLang's platform interface; does not know about speculative decoding beyond the few
operations that SGLang launches as Triton kernels with no platform seam (see ``upstream.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import serve_help

PLATFORM_NAME = "eagle3x_cpu"
PLATFORM_CLASS = "sglang_eagle3_ext.platform_cpu_impl.CpuPlatform"
THREADS_ENVIRONMENT = "EAGLE3X_CPU_THREADS"

if TYPE_CHECKING:
    import torch


def _accelerator_present() -> bool:
    """True where SGLang would have an in-tree platform for this machine's accelerator."""
    import torch

    return bool(
        torch.cuda.is_available()
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        or (hasattr(torch, "npu") and torch.npu.is_available())
        or (getattr(torch.version, "musa", None) is not None)
    )


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class to use, or None to stay out.

    ``SGLANG_PLATFORM=eagle3x_cpu`` forces the platform (SGLang then calls only this entry point).
    """
    serve_help.prepare()
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return PLATFORM_CLASS
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _accelerator_present():
        return None
    return PLATFORM_CLASS


def is_active() -> bool:
    """Whether this process serves on the CPU platform; imports nothing that is not yet there."""
    platforms = sys.modules.get("sglang.srt.platforms")
    if platforms is None:
        return activate() is not None
    return getattr(platforms.current_platform, "device_name", None) == "cpu" and (
        type(platforms.current_platform).__module__ == PLATFORM_CLASS.rpartition(".")[0]
    )


def intra_op_threads() -> int:
    """Threads for one torch operation.

    The small operations of a decode step lose more to waking threads than they gain: two threads on
    two busy cores stall.  One is the default; ``EAGLE3X_CPU_THREADS`` sets another number.

    Raises:
        RefusedError: the variable is not a positive integer.
    """
    given = os.environ.get(THREADS_ENVIRONMENT, "1")
    if given.isdigit() and int(given) > 0:
        return int(given)
    from .errors import Problem, RefusedError

    raise RefusedError(
        [
            Problem(
                THREADS_ENVIRONMENT,
                repr(given),
                "a positive whole number",
                "it is handed to torch.set_num_threads",
                f"unset {THREADS_ENVIRONMENT} or set it to 1",
            )
        ]
    )


def cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """KV slots of the ``draft_token_num`` tokens from ``start_offset`` on, per request.

    Args:
        req_pool_indices: [batch] int64, row of each request in ``req_to_token``.
        req_to_token: [requests, context] int32, slot of every position.
        start_offset: [batch] int, first position; ``end_offset`` is ``start_offset + draft_token_num``.

    Returns:
        [batch * draft_token_num] int64.
    """
    del end_offset, batch_size, device
    from eagle3_kernels import cache_slots

    return cache_slots(req_to_token, req_pool_indices, start_offset, draft_token_num).view(-1)


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated KV slots into each request's row, positions ``start`` to ``end``.

    Stands in for a Triton kernel that SGLang launches without asking the platform.
    """
    del batch_size
    from eagle3_kernels import write_slots

    write_slots(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


def last_slot(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last cached token, -1 where nothing is cached: [batch] int64.

    The paged allocator continues that token's page.  Stands in for a Triton kernel, as above.
    """
    import torch

    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
    return torch.where(prefix_lens_tensor > 0, last.long(), -1)


def no_copy_kernel(pool: Any) -> None:
    """Leave out the compilation of a Triton kernel that copies KV rows; ``accept.py`` moves them itself."""
    pool._kv_copy_config = None


# Replaced functions of SGLang, by alias in upstream.SEAMS.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "assign_req_to_token_pool_func": assign_slots,
    "get_last_loc": last_slot,
    "MHATokenToKVPool._init_kv_copy_and_warmup": no_copy_kernel,
}
