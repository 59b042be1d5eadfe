"""Argument checks shared by every op: one ``ValueError`` that names the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DEVICES = ("cpu", "cuda")  # of an op that has a Triton twin; torch calls AMD GPUs cuda as well


def expect(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    devices: Sequence[str] = ("cpu",),
    strided_rows: bool = False,
) -> None:
    """Refuse a tensor of another dtype, rank or size, on another device or not contiguous.

    Args:
        shape: one entry per dimension; None leaves that size open.
        devices: device types.
        strided_rows: rows of a 2-D tensor may be further apart than they are long.
    """
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name}: given dtype {tensor.dtype}, allowed {allowed}")
    given = tuple(tensor.shape)
    if len(given) != len(shape) or any(w is not None and w != g for w, g in zip(shape, given, strict=True)):
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name}: given shape {given}, allowed ({wanted})")
    if tensor.device.type not in devices:
        raise ValueError(f"{name}: given device {tensor.device}, allowed {' or '.join(devices)}")
    if strided_rows:
        rows, columns = tensor.shape
        if (columns > 1 and tensor.stride(1) != 1) or (rows > 1 and tensor.stride(0) < columns):
            raise ValueError(
                f"{name}: given strides {tensor.stride()}, allowed (at least {columns}, 1): "
                "rows apart, entries side by side"
            )
    elif not tensor.is_contiguous():
        raise ValueError(f"{name}: given strides {tensor.stride()}, allowed contiguous")


def same_device(**tensors: torch.Tensor) -> None:
    """Refuse tensors that are not all where the first one is."""
    (first, where), *others = ((name, tensor.device) for name, tensor in tensors.items())
    for name, device in others:
        if device != where:
            raise ValueError(f"{name}: given device {device}, allowed {where}, where {first} is")
