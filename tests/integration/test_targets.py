"""Architectures: the tapped hidden states are the right ones, and the output is the target's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pairs import TARGETS, Pair, draft_recipe, make_target
from serve import Served, generate, run_both
from test_lossless import accept_length, assert_same, prompt, shape

pytestmark = pytest.mark.engine

# Wraps the check of the first forward, in whichever process that is.
SPY = """
import os
from sglang_eagle3_ext import taps
original = taps.check_planes
def check_planes(plan, hidden, tokens):
    import torch
    original(plan, hidden, tokens)
    from sglang.srt.runtime_context import get_spec
    torch.save(hidden, os.path.join(os.environ["SPY"], f"planes-{get_spec().speculative_eagle_topk}"))
taps.check_planes = check_planes
"""
SETTINGS = {"chain": shape(4, 1), "tree": shape(3, 4)}
TAPS = ["resid@3", "embed", "out@4"]  # not in the order of the layers


def workload() -> list[dict[str, Any]]:
    return [
        generate([prompt(11, 3)]),
        generate(
            [prompt(n, n) for n in (4, 19, 1, 33, 8)], [{"max_new_tokens": 9 + 4 * i} for i in range(5)]
        ),
    ]


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp(request.param)
    target = make_target(root / "target", request.param, scale=0.15)
    recipe = draft_recipe(target)
    # The configuration would not be served: the manifest goes before it.
    recipe.config["eagle_config"] = {}
    recipe.manifest = {"schema": 1, "taps": TAPS}
    return Pair(str(target), str(recipe.write(root / "draft")))


@pytest.fixture(scope="module")
def answers(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of an engine without a draft, and of one for each setting; the latter leave the planes they saw."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "sitecustomize.py").write_text(SPY)
    alone = {"model_path": pair.target, "skip_tokenizer_init": True, "max_total_tokens": 4000}
    engines = {"reference": alone}
    engines |= {n: pair.arguments(max_total_tokens=4000, **s) for n, s in SETTINGS.items()}
    served = run_both(
        *((engine, workload(), str(folder / name)) for name, engine in engines.items()),
        PYTHONPATH=str(folder),
        SPY=str(folder),
    )
    return dict(zip(engines, served, strict=True)) | {"folder": folder}


@pytest.mark.parametrize("name", SETTINGS)
def test_output_and_planes(name: str, pair: Pair, answers: dict[str, Any]) -> None:
    served = answers[name]
    assert_same(answers["reference"], served)
    assert accept_length(served) > 1.25

    architecture = json.loads((Path(pair.target) / "config.json").read_text())["architectures"][0]
    installed = f"draft reads [resid@3, embed, resid@5], {architecture} captures [resid@0, resid@3, resid@5]"
    assert installed in served.log
    planes = torch.load(answers["folder"] / f"planes-{SETTINGS[name]['speculative_eagle_topk']}")
    expected = hidden_states(pair.target, architecture, prompt(11, 3), (0, 3, 5))
    torch.testing.assert_close(planes, expected, rtol=2e-3, atol=2e-3)


def hidden_states(
    folder: str, architecture: str, ids: list[int], boundaries: tuple[int, ...]
) -> torch.Tensor:
    """The residual stream at ``boundaries`` by Hugging Face's model, side by side."""
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[b][0] for b in boundaries], dim=-1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("llama") / "target", "LlamaForCausalLM", scale=0.15)


def compare(target: Path, draft: Path, tmp_path: Path, more: dict[str, Any], **environment: str) -> Served:
    pair = Pair(str(target), str(draft))
    plain = {"model_path": pair.target, "skip_tokenizer_init": True, "max_total_tokens": 4000, **more}
    arguments = pair.arguments(**{"max_total_tokens": 4000, **shape(3, 2), **more})
    want, got = run_both(
        (plain, workload(), str(tmp_path / "want")),
        (arguments, workload(), str(tmp_path / "got")),
        **environment,
    )
    assert_same(want, got)
    return got


def test_a_draft_on_the_normed_state(llama: Path, tmp_path: Path) -> None:
    recipe = draft_recipe(llama)
    del recipe.tensors["fc.weight"]
    recipe.config["eagle_config"] = {"use_aux_hidden_state": False}
    served = compare(llama, recipe.write(tmp_path / "draft"), tmp_path, {})
    assert "draft reads [final_norm], LlamaForCausalLM captures [final_norm]" in served.log


def test_more_taps_than_three_and_one_twice(llama: Path, tmp_path: Path) -> None:
    recipe = draft_recipe(llama, taps=5)
    recipe.manifest = {"schema": 1, "taps": ["resid@5", "embed", "resid@2", "embed", "resid@4"]}
    served = compare(llama, recipe.write(tmp_path / "draft"), tmp_path, {})
    assert accept_length(served) > 1.2
    assert "captures [resid@0, resid@2, resid@4, resid@5]" in served.log


def test_an_older_draft_in_a_pickle(llama: Path, tmp_path: Path) -> None:
    recipe = draft_recipe(llama)
    draft = recipe.write(tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    torch.save(recipe.tensors, draft / "pytorch_model.bin")
    assert accept_length(compare(llama, draft, tmp_path, {})) > 1.25


def test_tensor_parallel(llama: Path, tmp_path: Path) -> None:
    draft = draft_recipe(llama).write(tmp_path / "draft")
    two = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    two["EAGLE3X_CONFIG"] = '{"accept_alarm": 9, "accept_alarm_rounds": 5}'
    served = compare(llama, draft, tmp_path, {"tp_size": 2}, **two)
    assert accept_length(served) > 1.25
    assert served.log.count("EAGLE3X ALARM") == 1, "once, not once per rank"
