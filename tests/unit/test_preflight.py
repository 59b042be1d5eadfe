"""All checks together, on checkpoints on disk and by repository id, without SGLang."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from test_features import DEFAULTS

from pairs import draft_recipe, make_target
from sglang_eagle3_ext import preflight
from sglang_eagle3_ext.errors import RefusedError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("preflight")
    target = make_target(root / "target", "LlamaForCausalLM")
    return {
        "model_path": str(target),
        "speculative_draft_model_path": str(draft_recipe(target).write(root / "draft")),
    }


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_eagle3_ext.platform_cpu.is_active", lambda: True)
    for name in ("EAGLE3X_CONFIG", "EAGLE3X_FLAGS", "SGLANG_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)


def launch(folders: dict[str, str], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **folders, "speculative_num_steps": 3, **more})


def refusals(arguments: SimpleNamespace) -> list[str]:
    with pytest.raises(RefusedError) as caught:
        preflight.preflight(arguments)
    return [problem.argument for problem in caught.value.problems]


def test_what_a_good_launch_says(folders: dict[str, str]) -> None:
    checked = preflight.preflight(launch(folders))
    assert (checked.steps, checked.topk, checked.draft_tokens) == (3, 1, 4)
    assert list(checked.log_lines()) == [
        "taps = None (default); kernels = auto (default); accept_alarm = 1.1 (default); "
        "accept_alarm_rounds = 200 (default)",
        "--speculative-eagle-topk not given: 1, a chain",
        "--speculative-num-draft-tokens not given: --speculative-num-steps + 1 = 4",
        "--speculative-num-steps 3, --speculative-eagle-topk 1, --speculative-num-draft-tokens 4",
        "[-1, 0, 3] read as sglang ids for LlamaForCausalLM -> resid@0, resid@1, resid@4: draft reads "
        "[embed, resid@1, resid@4], LlamaForCausalLM captures [resid@0, resid@1, resid@4]",
    ]


def test_problems_of_every_kind_at_once(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3X_CONFIG", '{"kernels": "sglang", "taps": ["embed", "resid@9"]}')
    found = refusals(launch(folders, pp_size=2, speculative_eagle_topk=0, context_length=9999))
    assert found == [
        "--pp-size",
        "EAGLE3X_CONFIG",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
        "--context-length",
        "EAGLE3X_CONFIG",
    ]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (None, "there is no draft to serve"),
        ("/no/such/folder", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        (__file__, "this is a file"),
    ],
)
def test_paths(path: str | None, why: str, folders: dict[str, str]) -> None:
    with pytest.raises(RefusedError) as caught:
        preflight.preflight(launch(folders, speculative_draft_model_path=path))
    (problem,) = caught.value.problems
    assert problem.argument == "--speculative-draft-model-path" and why in problem.why


def test_repository_ids(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **how: Any) -> str:
        asked.append((name, how["revision"], how["allow_patterns"], how["cache_dir"]))
        if name == "nobody/nothing":
            raise OSError("no such\nrepository")
        return folders["model_path" if "target" in name else "speculative_draft_model_path"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    by_name = {"model_path": "org/target", "speculative_draft_model_path": "org/draft"}
    preflight.preflight(launch(by_name, revision="v2", download_dir="/cache"))
    # Of the target, whose weights come later, the configuration alone.
    assert asked == [
        ("org/target", "v2", ["config.json"], "/cache"),
        ("org/draft", None, ["*.json", "*.safetensors"], "/cache"),
    ]
    older = dict(folders, speculative_draft_model_path=str(tmp_path))
    monkeypatch.setitem(folders, "speculative_draft_model_path", older["speculative_draft_model_path"])
    asked.clear()
    with pytest.raises(RefusedError):
        preflight.preflight(launch(by_name))
    assert [patterns for _, _, patterns, _ in asked][1:] == [
        ["*.json", "*.safetensors"],
        ["*.json", "*.safetensors", "*.bin"],
    ]
    with pytest.raises(RefusedError, match="cannot be fetched: no such repository"):
        preflight.preflight(launch({**by_name, "speculative_draft_model_path": "nobody/nothing"}))
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    assert refusals(launch(by_name)) == ["--model-path", "--speculative-draft-model-path"]


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_configurations_that_cannot_be_read(content: str, folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert refusals(launch(folders, model_path=str(tmp_path))) == ["--model-path"]
    (tmp_path / "config.json").unlink()
    assert refusals(launch(folders, model_path=str(tmp_path))) == ["--model-path"]


def test_a_target_for_a_draft(folders: dict[str, str]) -> None:
    """The architecture is named first; what else is wrong with such a draft would only distract."""
    swapped = {**folders, "speculative_draft_model_path": folders["model_path"]}
    assert refusals(launch(swapped)) == ["--speculative-draft-model-path, config.json: architectures"]


def test_quantised_checkpoints(folders: dict[str, str], tmp_path: Path) -> None:
    for name, flag in (
        ("model_path", "--model-path"),
        ("speculative_draft_model_path", "--speculative-draft"),
    ):
        source = Path(folders[name])
        settings = json.loads((source / "config.json").read_text()) | {
            "quantization_config": {"quant_method": "fp8"}
        }
        copy = tmp_path / name
        shutil.copytree(source, copy)
        (copy / "config.json").write_text(json.dumps(settings))
        (argument,) = refusals(launch({**folders, name: str(copy)}))
        assert argument.startswith(flag) and argument.endswith("quantization_config")
