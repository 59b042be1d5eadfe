"""The wheel, and an editable install, in an environment that holds nothing else of this project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--quiet")
CHECK = """
import importlib.metadata as metadata, json, sys
import eagle3_kernels, sglang_eagle3_ext
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
def points(group):
    return {e.name: e.value for e in metadata.entry_points(group=group)}
print(json.dumps({
    "plugins": points("sglang.srt.plugins"),
    "platforms": points("sglang.srt.platforms"),
    "algorithm": repr(SpeculativeAlgorithm.from_string("EAGLE3X")),
    "platform": type(current_platform).__name__,
    "files": [eagle3_kernels.__file__, sglang_eagle3_ext.__file__],
    "requires": sorted(metadata.requires("sglang-eagle3-ext")),
}))
"""


def empty_environment(folder: Path) -> Path:
    """A new environment that sees the dependencies of this one, but not this project; its python."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    # One by one, for the project itself stands among them.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "eagle3" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def tree(folder: Path) -> Path:
    """A copy of the repository's own files, as a clone would have them: no leftovers of earlier builds."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(command: list[str | Path], folder: Path) -> str:
    """Run outside the repository; standard output."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "EAGLE3X_", "SGLANG_"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = tree(tmp_path_factory.mktemp("source"))
    run([sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], folder)
    (made,) = folder.glob("*.whl")
    return made


def test_what_is_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "sglang_eagle3_ext/py.typed",
        "eagle3_kernels/rows.py",
        "sglang_eagle3_ext/assets/tiny/target/model.safetensors",
        "sglang_eagle3_ext/assets/tiny/draft/model.safetensors",
        "sglang_eagle3_ext/assets/tiny/draft/eagle3x.json",
        "sglang_eagle3_ext/assets/tiny/prompts_heldout.json",
        "sglang_eagle3_ext/assets/tiny/PROVENANCE.md",
        "licenses/LICENSE",
        "licenses/NOTICE",
    ):
        assert any(name.endswith(part) for name in names), part
    # Every module of both packages, and nothing beside them: no test, no script, no leftover.
    modules = [*ROOT.glob("sglang_eagle3_ext/*.py"), *ROOT.glob("kernels/eagle3_kernels/*.py")]
    assert {n for n in names if n.endswith(".py")} == {f"{m.parent.name}/{m.name}" for m in modules}
    assert {n.partition("/")[0].partition("-")[0] for n in names} == {"sglang_eagle3_ext", "eagle3_kernels"}


@pytest.mark.engine
@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_it_registers(how: str, wheel: Path, tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "environment")
    home = tmp_path / "environment"
    what: list[str | Path] = ["--no-deps", wheel]
    if how == "editable":
        home = tree(tmp_path / "source")
        what = ["--no-deps", "--no-build-isolation", "-e", home]
    run([python, *PIP, "install", *what], tmp_path)
    found = json.loads(run([python, "-c", CHECK], tmp_path).strip().splitlines()[-1])
    assert found["plugins"]["eagle3x"] == "sglang_eagle3_ext:register"
    assert found["platforms"]["eagle3x_cpu"] == "sglang_eagle3_ext.platform_cpu:activate"
    assert found["algorithm"] == "Eagle3XAlgorithm('EAGLE3X')" and found["platform"] == "CpuPlatform"
    assert all(Path(file).is_relative_to(home) for file in found["files"]), found["files"]
    # SGLang's CUDA packages must not come along on a machine without a GPU.
    assert not [r for r in found["requires"] if r.startswith("sglang")]

    command = python.with_name("eagle3x")
    assert run([command, "--version"], tmp_path).strip() == run([command, "version"], tmp_path).strip()
    assets = json.loads(run([command, "assets", "--json"], tmp_path))
    assert set(assets["tiny"]) == {"target", "draft"}
    for path in assets["tiny"].values():
        assert Path(path, "model.safetensors").is_file() and Path(path).is_relative_to(home)
