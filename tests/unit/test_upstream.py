"""Private names of SGLang: each is probed, and nobody names one elsewhere."""

from __future__ import annotations

import ast
import importlib.metadata
import pickle
from pathlib import Path

import pytest

import sglang_eagle3_ext
from sglang_eagle3_ext import upstream
from sglang_eagle3_ext.errors import Problem, RefusedError, UpstreamMismatchError
from sglang_eagle3_ext.upstream import Seam

PACKAGE = Path(sglang_eagle3_ext.__file__).parent

# Documented by SGLang for plugins and platforms, or only told about in a message.
PUBLIC = {"sglang.srt.platforms"}


@pytest.mark.parametrize("alias", upstream.SEAMS)
def test_seam_is_there(alias: str) -> None:
    assert upstream.probe(upstream.SEAMS[alias]) is None


def test_check_accepts_the_supported_version() -> None:
    upstream.check()


def test_check_accepts_a_local_build_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: upstream.SUPPORTED_SGLANG[0] + "+cpu")
    upstream.check()


def test_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(UpstreamMismatchError, match=r"sglang 0\.6\.0 is installed") as caught:
        upstream.check()
    assert "hint: pip install sglang==0.5.23" in str(caught.value)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(UpstreamMismatchError, match="not installed"):
        upstream.check()


@pytest.mark.parametrize(
    ("seam", "fault"),
    [
        (Seam("sglang.srt.no_such_module:x", None, ""), "does not exist"),
        (Seam("sglang.srt.server_args:NoSuchName", None, ""), "does not exist"),
        (Seam("sglang.srt.server_args:ServerArgs.no_such_method", None, ""), "does not exist"),
        (Seam("sglang.srt.server_args:prepare_server_args.inner", None, ""), "does not exist"),
        (Seam("sglang.srt.server_args:prepare_server_args", ("argv", "more"), ""), "expected more"),
        (Seam("no_such_package.module:x", None, ""), "does not exist"),
    ],
)
def test_probe_names_the_fault(seam: Seam, fault: str) -> None:
    found = upstream.probe(seam)
    assert found is not None and fault in found


def test_all_faults_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for alias in ("first", "second"):
        monkeypatch.setitem(upstream.SEAMS, alias, Seam(f"sglang.srt.server_args:{alias}", None, ""))
    with pytest.raises(UpstreamMismatchError) as caught:
        upstream.check()
    text = str(caught.value)
    assert "seam first:" in text and "seam second:" in text and "force-reinstall" in text


def test_unknown_alias() -> None:
    with pytest.raises(AttributeError, match="not a seam"):
        _ = upstream.NoSuchSeam


def _sources() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")]


def test_every_alias_in_use_is_in_the_table() -> None:
    unknown = [
        f"{path.name}: upstream.{node.attr}"
        for path, tree in _sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "upstream"
        and node.attr not in upstream.SEAMS
        and node.attr not in vars(upstream)
    ]
    assert unknown == []


def test_nobody_else_imports_sglang() -> None:
    found = []
    for path, tree in _sources():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found += [
                f"{path.name}: {name}"
                for name in names
                if name.split(".")[0] == "sglang" and name not in PUBLIC and name != "sglang"
            ]
    assert found == []


def test_errors_survive_the_way_between_processes() -> None:
    error = RefusedError([Problem("--a", 1, "2", "w", "h"), Problem("--b", 3, "4", "w", "h")], "context")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.problems == error.problems
    assert str(error).startswith(
        "context: 2 problems\n1. --a: given 1, allowed 2\n    why: w\n    hint: h\n2. --b"
    )
