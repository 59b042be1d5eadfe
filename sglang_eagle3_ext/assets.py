"""The small model pair that comes with the package: a target and the EAGLE-3 draft trained for it.

Knows where the files are; does not read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import Problem, RefusedError

ROOT = Path(__file__).parent / "assets"
PAIRS = ("tiny",)


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def pair(name: str = "tiny") -> Pair:
    """The pair called ``name``.

    Raises:
        RefusedError: unknown name, or files missing from this installation.
    """
    if name not in PAIRS:
        raise RefusedError(
            [
                Problem(
                    "model pair",
                    repr(name),
                    ", ".join(PAIRS),
                    "no other comes with the package",
                    f"use {PAIRS[0]}",
                )
            ]
        )
    found = Pair(ROOT / name / "target", ROOT / name / "draft")
    missing = [folder for folder in (found.target, found.draft) if not (folder / "config.json").is_file()]
    if missing:
        raise RefusedError(
            [
                Problem(
                    "model pair",
                    str(folder),
                    "a folder with config.json and safetensors files",
                    "this installation lacks it",
                    "reinstall sglang-eagle3-ext from a complete clone or wheel",
                )
                for folder in missing
            ]
        )
    return found


def paths() -> dict[str, dict[str, str]]:
    """``{pair: {"target": path, "draft": path}}``, as ``eagle3x assets --json`` prints it."""
    return {name: {"target": str(pair(name).target), "draft": str(pair(name).draft)} for name in PAIRS}
