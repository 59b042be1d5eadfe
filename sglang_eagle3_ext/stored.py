"""Tensors of a checkpoint folder: names and shapes without their data, single tensors where needed.

Safetensors files, or else PyTorch's ``*.bin`` as older drafts have them, in the order in which SGLang
looks for them.  Knows file formats; does not know models.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]

_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
}


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: its file, its name there, its dtype in safetensors' spelling and its shape."""

    file: Path
    name: str
    dtype: str
    shape: Shape

    def load(self) -> Any:
        """The data, a torch tensor."""
        if self.file.suffix == ".bin":
            return _pickled(self.file)[self.name]
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as stored:
            return stored.get_tensor(self.name)

    def rows(self, indices: Sequence[int]) -> Any:
        """Some rows [len(indices), ...] in float32; of a large tensor no more is read."""
        import torch

        if self.file.suffix == ".bin":
            return self.load()[torch.tensor(list(indices))].float()
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as stored:
            part = stored.get_slice(self.name)
            return torch.stack([part[i].float() for i in indices])


def _pickled(file: Path) -> dict[str, Any]:
    """A ``*.bin`` file; nothing but tensors is unpickled."""
    import zipfile

    import torch

    # Files from before PyTorch 1.6 are no archives, and cannot be mapped.
    mapped = zipfile.is_zipfile(file)
    state = torch.load(file, map_location="cpu", mmap=mapped, weights_only=True)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ValueError("it is not a dictionary of tensors")
    return state


def _header(file: Path) -> dict[str, tuple[str, Shape]]:
    if file.suffix == ".bin":
        return {
            name: (_DTYPES.get(str(t.dtype).removeprefix("torch."), str(t.dtype)), tuple(t.shape))
            for name, t in _pickled(file).items()
        }
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= file.stat().st_size:
            raise ValueError("its header is longer than the file")
        entries = json.loads(stream.read(size))
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if 8 + size + end > file.stat().st_size:
            raise ValueError("it is cut off")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, by name.

    Raises:
        ValueError: no file of weights, an unreadable one, or a tensor stored twice.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".pt", ".pth", ".gguf"))
        raise ValueError(
            f"no *.safetensors and no *.bin file in it{' but ' + ', '.join(others) if others else ''}"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            header = _header(file)
        except (
            OSError,
            EOFError,
            ValueError,
            KeyError,
            TypeError,
            RuntimeError,
            pickle.UnpicklingError,
        ) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{file.name}: {reason}") from None
        for name, (dtype, shape) in header.items():
            if name in found:
                raise ValueError(f"{name} is in {found[name].file.name} and in {file.name}")
            found[name] = Tensor(file, name, dtype, shape)
    return found
