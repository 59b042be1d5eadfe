"""Argument checks shared by every op: one ``ValueError`` that names the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def expect(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> None:
    """Refuse a tensor of another dtype, rank or size, off the CPU or not contiguous.

    Args:
        shape: one entry per dimension; None leaves that size open.
    """
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: given dtype {tensor.dtype}, allowed {allowed}")
    given = tuple(tensor.shape)
    if len(given) != len(shape) or any(w is not None and w != g for w, g in zip(shape, given, strict=True)):
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name}: given shape {given}, allowed ({wanted})")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: given device {tensor.device}, allowed cpu")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: given strides {tensor.stride()}, allowed contiguous")
