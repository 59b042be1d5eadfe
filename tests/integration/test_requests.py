"""What a request may ask for: sampled like without a draft, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pairs import Pair, draft_recipe, make_target
from serve import Served, generate, run_engine
from test_lossless import accept_length, prompt, shape

pytestmark = pytest.mark.engine

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 1.0, "logit_bias": {"7": 3.0, "9": -100.0}},
]
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frequency_penalty": ({"frequency_penalty": 0.5}, {}),
    "presence_penalty": ({"presence_penalty": 0.5}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {}),
    "min_new_tokens": ({"min_new_tokens": 4}, {}),
    "return_hidden_states": ({}, {"return_hidden_states": True}),
}
SETTINGS = {"chain": shape(4, 1), "tree": shape(3, 4)}


def seeded(sampling: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**sampling, "sampling_seed": seed, "max_new_tokens": 20}


def workload() -> list[dict[str, Any]]:
    # A prompt of its own for each, so that no answer can be another one's.
    alone = [generate(prompt(9, 50 + i), seeded(s, i)) for i, s in enumerate(SAMPLED)]
    together = generate(
        [prompt(5 + i, 80 + i) for i in range(len(SAMPLED))],
        [seeded(s, 90 + i) for i, s in enumerate(SAMPLED)],
    )
    return [*alone, together]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("requests")
    target = make_target(root / "target", "LlamaForCausalLM", scale=0.15)
    return Pair(str(target), str(draft_recipe(target).write(root / "draft")))


@pytest.fixture(scope="module")
def reference(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine = {"model_path": pair.target, "skip_tokenizer_init": True, "max_total_tokens": 4000}
    steps = workload()
    again = generate(prompt(9, 50), seeded(SAMPLED[0], 1000))
    return run_engine(engine, [*steps, again], str(tmp_path_factory.mktemp("reference") / "out"))


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling_and_refusals(name: str, pair: Pair, reference: Served, tmp_path: Path) -> None:
    """A seed draws the same tokens with and without a draft: the law is the target's own."""
    refusals = [
        {"do": "refused", "arguments": generate(prompt(6, 1), sampling, **more)["arguments"]}
        for sampling, more in REFUSED.values()
    ]
    engine = pair.arguments(max_total_tokens=4000, **SETTINGS[name])
    served = run_engine(engine, [*workload(), *refusals, *workload()], str(tmp_path / "out"))
    count = len(workload())
    drawn = Served(served.answers[:count], "").tokens()
    wanted = Served(reference.answers[:count], "").tokens()
    assert drawn == wanted
    # Not by accident: another seed gives other tokens, and drafts were accepted.
    assert wanted[0] != reference.answers[-1]["output_ids"]
    assert accept_length(Served(served.answers[:count], "")) > 1.1
    for parameter, answer in zip(REFUSED, served.answers[count : count + len(REFUSED)], strict=True):
        assert "error" in answer, f"{parameter} was answered"
        assert f"{parameter}: given" in answer["error"] and "hint: leave" in answer["error"]
    # A refusal leaves nothing behind.
    assert Served(served.answers[count + len(REFUSED) :], "").tokens() == wanted
