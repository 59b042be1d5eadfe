"""Taps: names, where they come from, what is refused, and folding into fc."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from sglang_eagle3_ext import config, taps
from sglang_eagle3_ext.errors import Eagle3XError, Problem
from sglang_eagle3_ext.taps import Tap

LAYERS, WIDTH = 61, 32


def target(architecture: str = "DeepseekV3ForCausalLM", **more: Any) -> taps.Target:
    settings = {
        "architectures": [architecture],
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        **more,
    }
    problems: list[Problem] = []
    found = taps.read_target(settings, "target", problems)
    assert found is not None and not problems
    return found


def options(given: list[str] | None = None) -> config.Resolved:
    sources = dict.fromkeys(config.OPTIONS, "default") | ({"taps": "--eagle3x-taps"} if given else {})
    return config.Resolved(config.Options(taps=tuple(given) if given else None), sources)


def resolve(
    given: list[str] | None = None, draft: dict[str, Any] | None = None, of: taps.Target | None = None
) -> tuple[taps.TapPlan | None, list[Problem], list[str]]:
    problems: list[Problem] = []
    notes: list[str] = []
    plan = taps.resolve(
        options(given), {"hidden_size": WIDTH, **(draft or {})}, of or target(), problems, notes
    )
    return plan, problems, notes


def ids(*values: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(values), **more}}


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("embed", 0),
        ("resid@0", 0),
        ("resid@61", 61),
        ("in@3", 3),
        ("out@0", 1),
        ("out@60", 61),
        ("hf@0", 0),
        ("hf@60", 60),
        ("hf@61", None),
        ("final_norm", None),
    ],
)
def test_names(text: str, boundary: int | None) -> None:
    assert taps.parse(text, LAYERS) == Tap(boundary)
    assert taps.parse(str(Tap(boundary)), LAYERS) == Tap(boundary)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3", "another layer in every trainer"),
        ("-1", "another layer in every trainer"),
        ("resid@62", "the target has 61 layers"),
        ("out@61", "the target has 61 layers"),
        ("in@61", "the target has 61 layers"),
        ("embd", "did you mean embed?"),
        ("final-norm", "did you mean final_norm?"),
        ("Embed", "no tap of this name"),
        ("resid@-1", "no tap of this name"),
        ("resid@2 ", "no tap of this name"),
        ("", "no tap of this name"),
    ],
)
def test_wrong_names(text: str, why: str) -> None:
    plan, problems, _ = resolve(["embed", text])
    assert plan is None
    assert [p for p in problems if p.given == repr(text) and why in p.why] == problems


@pytest.mark.parametrize(
    ("architecture", "given", "boundaries"),
    [
        ("DeepseekV3ForCausalLM", [2, 30, 58], (2, 30, 58)),
        ("DeepseekV3ForCausalLM", [1, 29, 57], (2, 30, 58)),
        ("DeepseekV3ForCausalLM", [0, 3, 31], (0, 3, 31)),
        ("KimiK25ForConditionalGeneration", [2, 30, 58], (2, 30, 58)),
        ("LlamaForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("LlamaForCausalLM", [-1, 3, 31], (0, 4, 32)),
        ("GptOssForCausalLM", [2, 30, 61], (2, 30, 61)),
        ("GptOssForCausalLM", [2, 30, 58], (3, 31, 59)),
        ("Gemma4ForCausalLM", [2, 60], (3, 61)),
    ],
)
def test_ids_of_the_draft(architecture: str, given: list[int], boundaries: tuple[int, ...]) -> None:
    plan, problems, _ = resolve(draft=ids(*given), of=target(architecture))
    assert not problems and plan is not None
    assert plan.boundaries == boundaries and plan.order == list(range(len(boundaries)))
    physical = ", ".join(f"resid@{b}" for b in boundaries)
    assert plan.explanation == f"{given} read as sglang ids for {architecture} -> {physical}"


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({}, "nothing says which hidden states"),
        ({"eagle_config": {}}, "nothing says which hidden states"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_id": [2, 30, 58]}}, "nothing says"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}, "nothing says"),
        ({"aux_hidden_states_layer_ids": [1, 29, 57]}, "nothing says"),
        ({"eagle_config": [2, 30, 58]}, "not an object"),
        (ids(2, 30, 58, use_aux_hidden_state="yes"), "not true or false"),
        (ids(2, 30, 58, use_aux_hidden_state=False), "would ignore the ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "not a list of whole numbers"),
        (ids(2, "30", 58), "not a list of whole numbers"),
        (ids(2, True), "not a list of whole numbers"),
        (ids(58, 30, 2), "ascending order"),
        (ids(2, 2, 58), "ascending order"),
        (ids(-1, 3, 31), "boundary -1"),
        (ids(2, 30, 62), "boundary 62"),
        ({**ids(2, 30, 58), "eagle_aux_hidden_state_layer_ids": [1, 29, 57]}, "vLLM reads as boundaries"),
    ],
)
def test_ids_that_prove_nothing(draft: dict[str, Any], why: str) -> None:
    plan, problems, _ = resolve(draft=draft)
    assert plan is None
    (problem,) = problems
    assert why in problem.why
    # Every way out is a flag that works.
    ways = [part.split(" if ")[0].split(" ")[-1] for part in problem.hint.split("; ")]
    assert len(ways) >= 2
    for way in ways:
        chosen, faults, _ = resolve(way.split(","), draft)
        assert chosen is not None and not faults


def test_what_a_list_could_mean() -> None:
    _, (problem,), _ = resolve(draft={"eagle_aux_hidden_state_layer_ids": [2, 30, 58]})
    assert "--eagle3x-taps resid@2,resid@30,resid@58 if eagle_aux_hidden_state_layer_ids" in problem.hint
    assert "--eagle3x-taps resid@3,resid@31,resid@59 if" in problem.hint


def test_an_option_replaces_the_draft_and_says_so() -> None:
    plan, problems, notes = resolve(["resid@31", "embed"], ids(2, 30, 58))
    assert not problems and plan is not None
    assert plan.boundaries == (0, 31) and plan.order == [1, 0] and plan.ids == (0, 31)
    assert notes == [
        "taps from --eagle3x-taps replace [2, 30, 58] read as sglang ids for DeepseekV3ForCausalLM -> "
        "resid@2, resid@30, resid@58"
    ]
    _, _, notes = resolve(["resid@2", "resid@30", "out@57"], ids(2, 30, 58))
    assert notes == []


@pytest.mark.parametrize(
    ("given", "architecture", "draft", "why"),
    [
        (["resid@2", "resid@61"], "LlamaForCausalLM", {}, "never after the last one"),
        (["resid@2", "embed"], "Gemma3ForCausalLM", {}, "feed-forward branch"),
        (["embed", "final_norm"], "LlamaForCausalLM", {}, "not both"),
        (["embed", "embed", "resid@2"], "LlamaForCausalLM", {"fc_norm": True}, "norms its taps"),
        (["resid@2"], "LlamaForCausalLM", {}, "leaves fc out"),
        (["resid@2", "resid@2"], "LlamaForCausalLM", {}, "leaves fc out"),
        (["resid@1"], "DeepseekV3ForCausalLM", {"hidden_size": 48}, "this one alone"),
    ],
)
def test_what_cannot_be_captured(
    given: list[str], architecture: str, draft: dict[str, Any], why: str
) -> None:
    plan, problems, _ = resolve(given, draft, target(architecture))
    assert plan is None and len(problems) == 1 and why in problems[0].why


def test_final_norm_alone() -> None:
    for given, draft in (
        (["final_norm"], {}),
        (["hf@61"], {}),
        (None, {"eagle_config": {"use_aux_hidden_state": False}}),
    ):
        plan, problems, _ = resolve(given, draft)
        assert not problems and plan is not None
        assert plan.boundaries == () and plan.planes == 1 and plan.width == WIDTH


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"architectures": ["LlamaForCausaLM"]}, "did you mean LlamaForCausalLM?"),
        ({"architectures": ["MindSporeForCausalLM"]}, "outside torch"),
        ({"architectures": []}, "no EAGLE-3 capture"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": None}, "names no num_hidden_layers"),
    ],
)
def test_targets_without_a_capture(settings: dict[str, Any], why: str) -> None:
    problems: list[Problem] = []
    given = {"num_hidden_layers": 2, "hidden_size": 8, **settings}
    assert taps.read_target(given, "t", problems) is None
    assert len(problems) == 1 and why in problems[0].why


def test_sizes_of_a_multimodal_target() -> None:
    text = {"num_hidden_layers": 5, "hidden_size": 7}
    problems: list[Problem] = []
    found = taps.read_target(
        {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}, "t", problems
    )
    assert found is not None and (found.num_layers, found.width) == (5, 7)


# --- folding -------------------------------------------------------------------------------------------


def draft_model(slots: int, norms: str = "") -> Any:
    """What :func:`taps.fold` touches of SGLang's draft model, with SGLang's own arithmetic."""
    torch.manual_seed(0)
    inner = torch.nn.Module()
    inner.fc = torch.nn.Linear(slots * WIDTH, 24, bias=False)
    inner.num_aux_hidden_states = slots
    inner.input_norm = inner.fc_norm = None
    if norms == "each":
        inner.fc_norm = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(slots))
        for norm in inner.fc_norm:
            torch.nn.init.uniform_(norm.weight)
    if norms == "joint":
        inner.input_norm = torch.nn.RMSNorm(slots * WIDTH)
        torch.nn.init.uniform_(inner.input_norm.weight)
    return types.SimpleNamespace(model=inner)


def fused(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    inner = model.model
    if inner.input_norm is not None:
        hidden = inner.input_norm(hidden)
    if inner.fc_norm is not None:
        chunks = hidden.chunk(inner.num_aux_hidden_states, dim=-1)
        hidden = torch.cat([norm(c) for norm, c in zip(inner.fc_norm, chunks, strict=True)], dim=-1)
    return inner.fc(hidden)


@pytest.mark.parametrize(
    ("listed", "norms"),
    [
        (["embed", "resid@2", "resid@8"], ""),
        (["resid@8", "embed", "resid@2"], ""),
        (["resid@8", "embed", "resid@2"], "each"),
        (["resid@8", "embed", "resid@2"], "joint"),
        (["resid@8", "embed", "resid@8", "resid@2"], ""),
    ],
)
def test_folding_changes_nothing_but_the_input(listed: list[str], norms: str) -> None:
    draft = {"fc_norm": True} if norms == "each" else {}
    plan, problems, _ = resolve(listed, draft, target("LlamaForCausalLM"))
    assert plan is not None and not problems
    planes = {b: torch.randn(5, WIDTH) for b in plan.boundaries}
    model = draft_model(len(listed), norms)
    as_trained = fused(
        model, torch.cat([planes[t.boundary] for t in plan.taps if t.boundary is not None], -1)
    )
    taps.fold(model, plan)
    as_served = fused(model, torch.cat([planes[b] for b in plan.boundaries], -1))
    torch.testing.assert_close(as_served, as_trained, rtol=1e-5, atol=1e-5)
    assert model.model.fc.in_features == plan.width


# --- what is installed and what arrives -----------------------------------------------------------------


def capturing(marked: list[int], flags: list[int] | None = None) -> Any:
    inner = torch.nn.Module()
    inner.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(LAYERS))
    inner.layers_to_capture = marked
    for i in flags or ():
        inner.layers[i]._is_layer_to_capture = True
    outer = torch.nn.Module()
    outer.model = inner
    return outer


def test_what_is_installed_is_looked_at() -> None:
    plan, _, _ = resolve(["resid@31", "embed"])
    assert plan is not None
    taps.check_installed(plan, capturing([31, 0]))
    taps.check_installed(plan, capturing([0, 31], flags=[0, 31]))
    for wrong in (capturing([0, 30]), capturing([]), capturing([0, 31], flags=[0])):
        with pytest.raises(Eagle3XError, match=r"planned \[0, 31\]"):
            taps.check_installed(plan, wrong)


def test_what_arrives_is_looked_at() -> None:
    plan, _, _ = resolve(["resid@31", "embed"])
    assert plan is not None
    taps.check_planes(plan, torch.zeros(4, 2 * WIDTH), 4)
    for wrong in (torch.zeros(4, WIDTH), torch.zeros(3, 2 * WIDTH), torch.zeros(4, 3 * WIDTH), None):
        with pytest.raises(Eagle3XError, match="reads 2 planes of 32"):
            taps.check_planes(plan, wrong, 4)
