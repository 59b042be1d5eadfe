"""Draft checkpoints that SGLang would serve otherwise than they were trained: each is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pairs import VOCAB, WIDTH, DraftRecipe, draft_recipe, make_target
from sglang_eagle3_ext import checkpoint, config, stored, taps
from sglang_eagle3_ext.errors import Problem


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), "LlamaForCausalLM")


def check(
    recipe: DraftRecipe, folder: Path, target: Path, given: list[str] | None = None, on_cpu: bool = True
) -> tuple[list[Problem], list[str]]:
    return check_folder(recipe.write(folder / "draft"), recipe.config, target, given, on_cpu)


def check_folder(
    draft: Path,
    draft_config: dict[str, Any],
    target: Path,
    given: list[str] | None = None,
    on_cpu: bool = True,
) -> tuple[list[Problem], list[str]]:
    target_config = json.loads((target / "config.json").read_text())
    problems: list[Problem] = []
    notes: list[str] = []
    described = taps.read_target(target_config, str(target), problems)
    assert described is not None
    sources = dict.fromkeys(config.OPTIONS, "default") | {"taps": "--eagle3x-taps"}
    options = config.Resolved(config.Options(taps=tuple(given or ["embed", "resid@1", "resid@4"])), sources)
    plan = taps.resolve(options, draft_config, described, problems, notes)
    assert plan is not None, problems
    if checkpoint.check_architecture(draft, draft_config, on_cpu, problems):
        checkpoint.check(draft, draft_config, target, target_config, plan, problems, notes)
    return problems, notes


def test_a_good_one(tmp_path: Path, target: Path) -> None:
    assert check(draft_recipe(target), tmp_path, target) == ([], [])


def test_the_names_that_the_loader_knows(tmp_path: Path, target: Path) -> None:
    recipe = draft_recipe(target)
    recipe.config["fc_norm"] = True
    recipe.tensors |= {f"aux_norm_{n}.weight": torch.ones(WIDTH) for n in ("low", "mid", "high")}
    recipe.tensors["model.norm.weight"] = recipe.tensors.pop("norm.weight")
    recipe.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    with_embedding = load_file(next(target.glob("*.safetensors")))["model.embed_tokens.weight"]
    recipe.tensors["embed_tokens.weight"] = with_embedding.to(torch.bfloat16)
    assert check(recipe, tmp_path, target) == ([], [])


def drop(*names: str) -> Callable[[DraftRecipe], None]:
    def change(recipe: DraftRecipe) -> None:
        for name in names:
            del recipe.tensors[name]

    return change


def add(name: str, *shape: int) -> Callable[[DraftRecipe], None]:
    def change(recipe: DraftRecipe) -> None:
        recipe.tensors[name] = torch.zeros(*shape)

    return change


def put(**settings: Any) -> Callable[[DraftRecipe], None]:
    def change(recipe: DraftRecipe) -> None:
        recipe.config.update(settings)

    return change


def without(key: str) -> Callable[[DraftRecipe], None]:
    def change(recipe: DraftRecipe) -> None:
        del recipe.config[key]

    return change


def remap(change_map: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[DraftRecipe], None]:
    def change(recipe: DraftRecipe) -> None:
        recipe.tensors["d2t"] = change_map(recipe.tensors["d2t"])

    return change


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(d2t.numel())


LAYER = "midlayer"
WRONG: dict[str, tuple[Callable[[DraftRecipe], None], str, str]] = {
    "missing": (
        drop("norm.weight", f"{LAYER}.mlp.up_proj.weight"),
        "without norm.weight",
        "as they were allocated",
    ),
    "unknown": (add("extra.weight", 3), "extra.weight", "no such parameter"),
    "near miss": (add(f"{LAYER}.hidden_norms.weight", 64), "hidden_norms", "but layers.0.hidden_norm.weight"),
    "query norm": (add(f"{LAYER}.self_attn.q_norm.weight", 16), "q_norm", "no norms on queries and keys"),
    "bias": (add(f"{LAYER}.self_attn.q_proj.bias", 64), "q_proj.bias", "no such bias"),
    "norm not asked for": (add("fc_norm.0.weight", 64), "fc_norm.0", "fc_norm is not set"),
    "norm asked for": (put(fc_norm=True), "without fc_norm.0.weight", "as they were allocated"),
    "joint norm asked for": (
        put(eagle_config={"norm_before_fc": True}),
        "without input_norm.weight",
        "as they were allocated",
    ),
    "second layer": (put(num_hidden_layers=2), "without layers.1.self_attn.q_proj.weight", "allocated"),
    "tied head": (put(tie_word_embeddings=True), "lm_head.weight", "the head would be the embedding"),
    "head of the target": (put(draft_vocab_size=None), "lm_head.weight", "would be the target's"),
    "no draft vocabulary": (without("draft_vocab_size"), "nothing", "after the target has loaded"),
    "other feed-forward": (put(intermediate_size=48), "shape [32, 64]", "follows from config.json"),
    "other head": (put(draft_vocab_size=100), "shape [103, 64]", "draft_vocab_size is 100"),
    "other vocabulary": (put(vocab_size=500), "500", "the target's vocabulary"),
    "other target": (put(target_hidden_size=80), "80", "is that wide"),
    "no size": (without("intermediate_size"), "nothing", "follow from it"),
    "size of another type": (put(hidden_size="64"), "'64'", "64 wide"),
    "residual norm": (put(norm_before_residual=True), "True", "not to its norm"),
    "window": (put(sliding_window=64), "64", "whole prefix"),
    "query norm switch": (put(qk_norm=True), "True", "no norms on queries and keys"),
    "absolute map": (remap(absolute), "as if it held ids and not offsets", "other tokens"),
    "map beyond": (remap(lambda m: m + VOCAB), "of 128", "other tokens"),
    "map twice": (
        remap(lambda m: torch.where(torch.arange(103) == 1, m - 1, m)),
        "to 102 target ids",
        "other",
    ),
    "no map": (drop("d2t", "t2d"), "without d2t", "first ids of the target"),
    "float map": (remap(lambda m: m.float()), "torch.float32", "other tokens"),
    "architecture": (put(architectures=["LlamaForCausalLMEagle"]), "LlamaForCausalLMEagle", "no EAGLE-3"),
    "alias": (put(architectures=["Eagle3Speculator"]), "Eagle3Speculator", "knows this layout as"),
    "latent attention": (put(architectures=["Eagle3DeepseekV2ForCausalLM"]), "DeepseekV2", "calls CUDA"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one(name: str, tmp_path: Path, target: Path) -> None:
    change, given, why = WRONG[name]
    recipe = draft_recipe(target)
    change(recipe)
    problems, _ = check(recipe, tmp_path, target)
    matching = [p for p in problems if given in str(p.given) and why in p.why]
    assert matching, "\n".join(p.render() for p in problems)
    assert all(p.hint and p.allowed for p in problems)


def test_marks_against_the_map(tmp_path: Path, target: Path) -> None:
    recipe = draft_recipe(target)
    recipe.tensors["t2d"] = recipe.tensors["t2d"].roll(1)
    (problem,) = check(recipe, tmp_path, target)[0]
    assert "t2d marks 103 ids" in str(problem.given)


def test_width_of_fc_names_the_number_of_taps(tmp_path: Path, target: Path) -> None:
    (problem,) = check(draft_recipe(target), tmp_path, target, ["embed", "resid@1"])[0]
    assert problem.argument.endswith("fc.weight") and "name 3 taps" in problem.hint
    recipe = draft_recipe(target)
    recipe.tensors["fc.weight"] = torch.zeros(WIDTH, 100)
    (problem,) = check(recipe, tmp_path, target)[0]
    assert "no multiple of 64" in problem.hint


def test_another_embedding(tmp_path: Path, target: Path) -> None:
    recipe = draft_recipe(target)
    recipe.tensors["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH)
    (problem,) = check(recipe, tmp_path, target)[0]
    assert "other values than the target's" in str(problem.given)


def test_a_draft_on_the_normed_state_has_no_fc(tmp_path: Path, target: Path) -> None:
    recipe = draft_recipe(target)
    (problem,) = check(recipe, tmp_path, target, ["final_norm"])[0]
    assert "hands over without fc" in problem.why
    del recipe.tensors["fc.weight"]
    assert check(recipe, tmp_path, target, ["final_norm"])[0] == []


def test_files_that_cannot_be_read(tmp_path: Path, target: Path) -> None:
    file = draft_recipe(target).write(tmp_path / "draft") / "model.safetensors"
    whole = file.read_bytes()
    for content, why in ((whole[:-10], "cut off"), (whole[:40], "longer than the file"), (b"", "longer")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            stored.read_headers(file.parent)
    file.unlink()
    (file.parent / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"no \*.safetensors and no \*.bin file in it but model.gguf"):
        stored.read_headers(file.parent)
    pickled = file.with_name("pytorch_model.bin")
    pickled.touch()
    with pytest.raises(ValueError, match="^pytorch_model.bin: "):
        stored.read_headers(file.parent)
    torch.save({"a": Path("no tensor")}, pickled)
    with pytest.raises(ValueError, match="^pytorch_model.bin: "):
        stored.read_headers(file.parent)
    torch.save([torch.zeros(1)], pickled)
    with pytest.raises(ValueError, match="not a dictionary of tensors"):
        stored.read_headers(file.parent)
    save_file({"a": torch.zeros(1)}, file.parent / "1.safetensors")
    save_file({"a": torch.zeros(1)}, file.parent / "2.safetensors")
    with pytest.raises(ValueError, match="a is in 1.safetensors and in 2.safetensors"):
        stored.read_headers(file.parent)


@pytest.mark.parametrize("archive", [True, False])
def test_an_older_draft_in_a_pickle(archive: bool, tmp_path: Path, target: Path) -> None:
    recipe = draft_recipe(target)
    with_embedding = load_file(next(target.glob("*.safetensors")))["model.embed_tokens.weight"]
    for change, problems in (
        ({}, 0),
        ({"embed_tokens.weight": with_embedding}, 0),
        ({"norm.weight": None}, 1),
    ):
        tensors = {k: v for k, v in {**recipe.tensors, **change}.items() if v is not None}
        folder = tmp_path / "draft"
        recipe.write(folder)
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
        found, _ = check_folder(folder, recipe.config, target)
        assert len(found) == problems, [p.render() for p in found]


@pytest.mark.parametrize(
    ("given", "longer", "refused", "noted"),
    [
        (None, False, True, False),
        (64, False, False, False),
        (65, False, True, False),
        (None, True, False, True),
    ],
)
def test_positions(given: int | None, longer: bool, refused: bool, noted: bool) -> None:
    problems: list[Problem] = []
    notes: list[str] = []
    draft, target = {"max_position_embeddings": 64}, {"max_position_embeddings": 512}
    checkpoint.check_positions(draft, target, given, longer, problems, notes)
    assert (bool(problems), bool(notes)) == (refused, noted)
    if refused:
        assert "--context-length 64" in problems[0].hint


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"max_position_embeddings": 8}, 8),
        ({"max_position_embeddings": 8, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}}, 32),
        ({"max_position_embeddings": 8, "rope_scaling": {"factor": 4.0, "rope_type": "llama3"}}, 8),
        (
            {
                "max_position_embeddings": 8,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 2},
            },
            8,
        ),
        ({"text_config": {"num_hidden_layers": 1, "max_position_embeddings": 9}}, 9),
        ({"max_seq_len": 5, "max_position_embeddings": 8}, 5),
        ({}, 2048),
    ],
)
def test_context_of_a_configuration(settings: dict[str, Any], positions: int) -> None:
    assert checkpoint.context_of(settings) == positions
