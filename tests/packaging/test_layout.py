"""Who may import whom, and what the documentation promises."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_eagle3_ext import cli, config, features, upstream

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "sglang_eagle3_ext"
KERNELS = ROOT / "kernels" / "eagle3_kernels"


def imported(file: Path) -> set[str]:
    """Dotted names of everything that a file imports absolutely."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return found


def of_sglang(names: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] == "sglang"}


@pytest.mark.parametrize("file", sorted(KERNELS.glob("*.py")), ids=lambda f: f.name)
def test_the_kernel_library_stands_alone(file: Path) -> None:
    allowed = {"torch", "triton", "numba", "numpy", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in imported(file)} <= allowed


def test_the_kernel_library_loads_without_sglang() -> None:
    code = "import sys, eagle3_kernels; assert not [m for m in sys.modules if m.startswith('sglang')]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "kernels")


def test_no_package_hides_the_one_that_sglang_needs() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("file", sorted(PLUGIN.glob("*.py")), ids=lambda f: f.name)
def test_only_one_file_names_sglang(file: Path) -> None:
    if file.name == "upstream.py":
        return
    assert of_sglang(imported(file)) == set()
    # The import machinery would reach it as well.
    calls = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[2] in ("import_module", "__import__", "find_spec"):
            assert "sglang." not in ast.unparse(call)


def test_the_check_of_imports_sees_them() -> None:
    """upstream.py does import SGLang, the plugin does use torch: an empty answer would prove nothing."""
    everything = set[str]().union(*(imported(file) for file in PLUGIN.glob("*.py")))
    assert "eagle3_kernels" in everything and "torch" in everything


@pytest.mark.parametrize("file", sorted(PLUGIN.glob("*.py")), ids=lambda f: f.name)
def test_every_name_from_upstream_is_a_seam_or_a_function(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "upstream"
    }
    assert not {name for name in used if name not in upstream.SEAMS and name not in vars(upstream)}


def test_every_seam_is_used() -> None:
    text = "".join(f.read_text(encoding="utf-8") for f in PLUGIN.glob("*.py") if f.name != "upstream.py")
    own = (PLUGIN / "upstream.py").read_text(encoding="utf-8").partition("def installed_version")[2]
    # Nobody calls this one; it is where SGLang writes the attributes that upstream.py reads.
    witness = "run_resolution_pipeline"
    for alias, seam in upstream.SEAMS.items():
        if alias == witness:
            continue
        words = {alias, alias.rpartition(".")[2]}
        assert any(re.search(rf"\b{re.escape(w)}\b", text + own) for w in words), f"{alias} ({seam.use})"


def test_patches_are_listed() -> None:
    listed = (ROOT / "patches" / "README.md").read_text(encoding="utf-8")
    wanted = {
        f"| `{alias}` | {seam.drop_when.removeprefix('patches: ')} |"
        for alias, seam in upstream.SEAMS.items()
        if seam.drop_when.startswith("patches: ")
    }
    assert wanted and {line for line in listed.splitlines() if line.startswith("| `")} == wanted
    for file in (ROOT / "patches").iterdir():
        assert file.name == "README.md" or file.name in listed


@pytest.mark.parametrize(("module", "page"), [(config, "options.md"), (features, "features.md")])
def test_generated_pages_are_up_to_date(module: object, page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == module.markdown()  # type: ignore[attr-defined]


def test_what_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
    for script in re.findall(r"bash (scripts/\S+\.sh)", text):
        assert (ROOT / script).exists(), script
    commands = re.findall(r"(?:`|^)eagle3x ([a-z]+)", text, flags=re.MULTILINE)
    assert commands and set(commands) <= set(cli.COMMANDS)
    for flag in set(re.findall(r"--eagle3x-[a-z-]+", text)):
        assert flag in {option.flag for option in config.OPTIONS.values()}


def test_modules_of_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"^\| `(\w+\.py)` \|", text, flags=re.MULTILINE):
        assert (PLUGIN / name).exists(), name


def test_figures_of_the_readme_come_from_the_result_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    demo = json.loads((results / "tiny_demo.json").read_text(encoding="utf-8"))
    acts = {act["name"]: act for act in demo["acts"]}
    assert f"{demo['prompts']} held-out prompts" in text
    for name in ("stock_taps", "trained_taps"):
        row = f"| {acts[name]['accept_length']:.2f} | {acts[name]['speedup']:.2f}x | yes |"
        assert row in text and acts[name]["same_text"]
    simulated = json.loads((results / "tiny_accept_length.json").read_text(encoding="utf-8"))["simulations"]
    by_taps = {tuple(s["taps"]): s for s in simulated}
    for name, boundaries in (("stock_taps", (2, 8, 13)), ("trained_taps", (0, 2, 8))):
        assert round(by_taps[boundaries]["accept_length"], 3) == acts[name]["accept_length"]
        assert by_taps[boundaries]["prompts"] == demo["prompts"]
