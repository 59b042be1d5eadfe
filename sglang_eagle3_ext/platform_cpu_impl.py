"""The platform class behind :mod:`.platform_cpu`; imported by SGLang once the platform is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch

from . import hooks, platform_cpu, upstream

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "eagle3x_cpu"
# SGLang fills the memory with its KV pool, as on a GPU that is there for it alone.
KV_TOKENS = 131_072
CPU_HOOKS: hooks.Hooks = tuple(
    (alias, "REPLACE", function) for alias, function in platform_cpu.REPLACEMENTS.items()
)


class CpuPlatform(upstream.SRTPlatform):
    """SGLang on torch's CPU kernels: no Triton, no graphs, gloo for tensor parallelism."""

    _enum = upstream.PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        # SGLang's own EAGLE is not served: hooks.py refuses it by name, after its flags were audited.
        return algorithm in ("EAGLE3X", "EAGLE", "EAGLE3")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "EAGLE3X" and backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return platform_cpu.cache_locs

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open and SGLang would fill in for its own CPU engine.

        SGLang's CPU default for attention needs ``sgl_kernel``.  And it serves a checkpoint in the
        dtype it is stored in, which on most CPUs means emulated bfloat16: slower than float32, and
        coarse enough for a verify pass of several rows to round to another argmax than a decode step
        of one.  float32 holds every bfloat16 and float16 weight exactly.
        """
        given = upstream.raw_input(server_args)
        if given.get("attention_backend") is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if given.get("dtype") in (None, "auto"):
            server_args.dtype = "float32"
        asked = [given.get(name) for name in ("max_total_tokens", "mem_fraction_static")]
        if asked == [None, None] and (given.get("context_length") or 0) <= KV_TOKENS:
            server_args.max_total_tokens = KV_TOKENS
            logger.info("--max-total-tokens not given: at most %d, for a CPU shares its memory", KV_TOKENS)

    def init_backend(self) -> None:
        """Once per worker process, before any model is built."""
        torch.set_num_threads(platform_cpu.intra_op_threads())
        upstream.register_attention_backend(ATTENTION_BACKEND)(_create_attention_backend)
        hooks.apply(CPU_HOOKS)


def _create_attention_backend(runner: Any) -> Any:
    from .cpu_attention import TreeAttentionBackend

    return TreeAttentionBackend(runner)
