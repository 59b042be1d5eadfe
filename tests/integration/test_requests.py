"""What a request may ask for: sampled by the target's own law, or refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from pairs import Pair, draft_recipe, make_target
from serve import Served, generate, run_both
from test_lossless import accept_length, prompt, shape

pytestmark = pytest.mark.engine

DRAWS = 3000
# Each is drawn DRAWS times, four tokens long: the second and later ones come from verify rounds.
LAWS: dict[str, dict[str, Any]] = {
    # The random target's logits are wide: at these temperatures the best token has a quarter to a half.
    "temperature": {"temperature": 2.5},
    "top-k, top-p, min-p": {"temperature": 4.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "logit bias": {"temperature": 2.5, "top_k": 20, "logit_bias": {"7": 12.0, "9": -100.0}},
}
OTHER = {"temperature": 2.9}  # a law that the test must tell from the first
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frequency_penalty": ({"frequency_penalty": 0.5}, {}),
    "presence_penalty": ({"presence_penalty": 0.5}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {}),
    "sampling_seed (seed)": ({"sampling_seed": 4, "temperature": 1.0}, {}),
    "return_logprob (logprobs)": ({}, {"return_logprob": True}),
}
SETTINGS = {"chain": shape(3, 1), "tree": shape(3, 4)}
START = prompt(9, 79)


def draws(law: dict[str, Any]) -> dict[str, Any]:
    return generate([START], {**law, "max_new_tokens": 4, "n": DRAWS})


def mixed() -> dict[str, Any]:
    """Greedy requests among sampled ones."""
    return generate(
        [prompt(6 + i, 600 + i) for i in range(8)],
        [{"temperature": 0.0 if i % 2 == 0 else 1.0} for i in range(8)],
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("requests")
    target = make_target(root / "target", "LlamaForCausalLM", scale=0.15)
    return Pair(str(target), str(draft_recipe(target).write(root / "draft")))


@pytest.fixture(scope="module")
def answers(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Of an engine without a draft, and of one for each setting."""
    folder = tmp_path_factory.mktemp("answers")
    common = {"skip_tokenizer_init": True, "max_total_tokens": 6000, "max_running_requests": 64}
    laws = [draws(law) for law in LAWS.values()]
    refusals = [
        {"do": "refused", "arguments": generate(prompt(6, 1), sampling, **more)["arguments"]}
        for sampling, more in REFUSED.values()
    ]
    alone = {"model_path": pair.target, "random_seed": 1, **common}
    jobs = [(alone, [mixed(), *laws, draws(OTHER)], str(folder / "reference"))]
    for name, settings in SETTINGS.items():
        engine = pair.arguments(random_seed=2, **common, **settings)
        jobs.append((engine, [mixed(), *laws, *refusals, mixed()], str(folder / name)))
    return dict(zip(["reference", *SETTINGS], run_both(*jobs), strict=True))


def same_law(a: list[list[int]], b: list[list[int]], at: slice) -> float:
    """p-value of a two-sample chi-square test on the tokens of ``at``; rare outcomes are pooled."""
    counts = [Counter(tuple(ids[at]) for ids in answers) for answers in (a, b)]
    common = [k for k, n in (counts[0] + counts[1]).items() if n >= 20]
    table = np.array([[c[k] for k in common] + [c.total() - sum(c[k] for k in common)] for c in counts])
    assert len(common) >= 3, "too few outcomes to compare"
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_laws_and_refusals(name: str, answers: dict[str, Served]) -> None:
    reference, served = answers["reference"], answers[name]

    def ids(of: Served, step: int) -> list[list[int]]:
        return [a["output_ids"] for a in of.answers[step]]

    # A greedy request stays exactly greedy beside sampled ones, before and after refusals.
    for step in (0, -1):
        assert ids(served, step)[::2] == ids(reference, 0)[::2]
    for i, law in enumerate(LAWS, 1):
        want, got = ids(reference, i), ids(served, i)
        assert len(want) == len(got) == DRAWS
        assert accept_length(Served([served.answers[i]], "")) > 1.05
        for at in (slice(0, 1), slice(1, 2), slice(2, 3), slice(1, 3), slice(3, 4)):
            # 30 comparisons in all, each with a fixed seed on either side.
            assert same_law(want, got, at) > 1e-4, (law, at)
    # The test has the power to see a temperature that is off by an eighth.
    assert same_law(ids(reference, len(LAWS) + 1), ids(served, 1), slice(1, 3)) < 1e-4
    for parameter, answer in zip(REFUSED, served.answers[1 + len(LAWS) : -1], strict=True):
        assert "error" in answer, f"{parameter} was answered"
        assert f"{parameter}: given" in answer["error"] and "hint: leave" in answer["error"]
