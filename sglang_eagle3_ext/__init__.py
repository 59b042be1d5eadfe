"""Serve any EAGLE-3 draft exactly as it was trained, on stock SGLang.

This module is what SGLang's plugin loader imports in every process, so it imports nothing heavy.
"""

from __future__ import annotations

__version__ = "0.1.0"

_registered = False


def register() -> None:
    """Entry point ``sglang.srt.plugins``: make ``--speculative-algorithm EAGLE3X`` known.

    SGLang logs what a plugin raises and starts without it.  So nothing is raised here that could be
    lost: a failure is kept, and raised when somebody asks for EAGLE3X (see :mod:`.algorithm`).
    Calling it again in the same process does nothing.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from . import algorithm

    algorithm.register()
