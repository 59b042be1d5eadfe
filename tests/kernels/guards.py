"""Memory that tells when it was not written, or written beside: for the ops' outputs and inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

MARGIN = 64  # elements before and behind every tensor

# Two fills per dtype: an element that an op leaves alone differs between the two.
POISON: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (math.nan, 3.0e38),
    torch.int64: (-(2**62), 2**62),
    torch.int32: (-(2**30), 2**30),
    torch.bool: (True, False),
}


class Guarded:
    """A contiguous tensor in the middle of a larger buffer; ``intact`` looks at what surrounds it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float):
        size = math.prod(shape)
        self.buffer = torch.full((size + 2 * MARGIN,), fill, dtype=dtype)
        self.tensor = self.buffer[MARGIN : MARGIN + size].view(shape)
        self.before = self._margins().clone()

    def _margins(self) -> torch.Tensor:
        return torch.cat((self.buffer[:MARGIN], self.buffer[-MARGIN:]))

    def intact(self) -> bool:
        return bool(torch.equal(self._margins().nan_to_num(-1.5), self.before.nan_to_num(-1.5)))


def guarded(values: torch.Tensor) -> Guarded:
    """``values`` in a guarded place."""
    made = Guarded(tuple(values.shape), values.dtype, POISON[values.dtype][0])
    made.tensor.copy_(values)
    return made


@contextlib.contextmanager
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch, which: int) -> Iterator[list[Guarded]]:
    """Inside, ``torch.empty`` gives guarded memory full of poison; the list says what was asked for."""
    made: list[Guarded] = []

    def empty(
        *shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, device: object = "cpu"
    ) -> torch.Tensor:
        flat = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        made.append(Guarded(flat, dtype, POISON[dtype][which]))  # type: ignore[arg-type]
        return made[-1].tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield made
