"""The audit of what SGLang changed, and the shape rule; hints are settings that work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_eagle3_ext import strict

DEFAULTS: dict[str, Any] = {
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
    "speculative_draft_model_quantization": None,
    "speculative_attention_mode": "prefill",
    "speculative_adaptive": False,
    "max_running_requests": None,
}
FIELD = {
    strict.STEPS: "speculative_num_steps",
    strict.TOPK: "speculative_eagle_topk",
    strict.DRAFT_TOKENS: "speculative_num_draft_tokens",
}


def audit(given: dict[str, Any], became: dict[str, Any]) -> list[strict.Problem]:
    raw = {**DEFAULTS, **given}
    return strict.audit(raw, DEFAULTS, {**raw, **became}, [("first_step", {}), ("changing_step", became)])


def settings(hint: str, given: dict[str, int | None]) -> Iterator[dict[str, int | None]]:
    """Every setting that a hint offers, applied to what was given."""
    for way in re.split(r"; |, or ", hint):
        changed = dict(given)
        for flag in re.findall(r"drop (--[\w-]+)", way):
            changed[FIELD[flag]] = None
        for flag, value in re.findall(r"(--[\w-]+) (\d+)", way):
            changed[FIELD[flag]] = int(value)
        assert changed != given, way
        yield changed


def shape(steps: Any, topk: Any, tokens: Any, **more: Any) -> list[strict.Problem]:
    return strict.shape_problems(steps, topk, tokens, **more)


def test_incident() -> None:
    (problem,) = shape(1, 1, 16)
    assert problem.argument == strict.DRAFT_TOKENS
    assert (
        "--speculative-num-steps 15 --speculative-num-draft-tokens 16 (chain of 15, 15 draft passes)"
        in problem.hint
    )
    tree = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    assert (
        tree in problem.hint
        and "drop --speculative-num-draft-tokens (chain of 1, 1 draft pass)" in problem.hint
    )


def test_shape_rule_everywhere() -> None:
    for steps in range(1, 7):
        for topk in range(1, 6):
            for tokens in range(2, 140):
                problems = shape(steps, topk, tokens)
                most = 1 + topk + (steps - 1) * topk * topk
                valid = tokens == steps + 1 if topk == 1 else tokens <= most
                assert bool(problems) is not valid, (steps, topk, tokens)
                given: dict[str, int | None] = dict(zip(FIELD.values(), (steps, topk, tokens), strict=True))
                for problem in problems:
                    for setting in settings(problem.hint, given):
                        assert not shape(*setting.values()), (given, setting)


def test_left_out() -> None:
    assert strict.fill_shape(5, None, None)[:3] == (5, 1, 6)
    assert strict.fill_shape(5, 1, None)[:3] == (5, 1, 6)
    assert strict.fill_shape(5, 4, None)[:3] == (5, 4, None)
    assert len(strict.fill_shape(5, None, None)[3]) == 2 and not strict.fill_shape(5, 1, 6)[3]
    assert not shape(5, None, None) and not shape(3, 1, None)
    for given in ((None, None, None), (None, 4, None), (None, 1, 6), (None, None, 9), (3, 4, None)):
        (problem,) = shape(*given)
        assert problem.given == "nothing"
        for setting in settings(problem.hint, dict(zip(FIELD.values(), given, strict=True))):
            assert not shape(*setting.values()), (given, setting)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "5", 10**6])
def test_not_a_number_in_range(wrong: Any) -> None:
    for position, flag in enumerate(FIELD):
        given: list[Any] = [3, 2, 8]
        given[position] = wrong
        assert flag in [problem.argument for problem in shape(*given)]


def test_topk_within_the_draft_vocabulary() -> None:
    assert not shape(2, 4, 8, draft_vocab=4)
    (problem,) = shape(2, 8, 8, draft_vocab=4)
    assert problem.argument == strict.TOPK and "1 to 4" in problem.allowed


def test_every_problem_at_once() -> None:
    assert len(shape(0, 0, 0)) == 3


def test_audit_of_the_incident_names_the_step() -> None:
    given = dict(zip(FIELD.values(), (1, 1, 16), strict=True))
    (problem,) = audit(given, {"speculative_num_draft_tokens": 2})
    assert problem.argument == "--speculative-num-draft-tokens"
    assert problem.given == "16, resolved to 2 by changing_step"
    for setting in settings(problem.hint, given):
        assert not shape(*setting.values())


@pytest.mark.parametrize(
    ("given", "became"),
    [
        ({}, {"speculative_num_steps": 5, "speculative_eagle_topk": 4}),  # not set by the user
        ({"speculative_algorithm": "eagle3"}, {"speculative_algorithm": "EAGLE3"}),
        ({"speculative_algorithm": "NEXTN"}, {"speculative_algorithm": "EAGLE"}),
        ({"speculative_draft_model_path": "/a/b/"}, {"speculative_draft_model_path": "/a/b"}),
        ({"speculative_draft_model_path": "some/id"}, {"speculative_draft_model_path": "/"}),  # downloaded
        ({"speculative_draft_model_quantization": "unquant"}, {"speculative_draft_model_quantization": None}),
        ({"max_running_requests": 100}, {"max_running_requests": 48}),  # no speculative field
        ({"speculative_num_steps": 3}, {}),
    ],
)
def test_no_false_alarm(given: dict[str, Any], became: dict[str, Any]) -> None:
    assert audit(given, became) == []


@pytest.mark.parametrize(
    ("given", "became", "hint"),
    [
        ({"speculative_adaptive": True}, {"speculative_adaptive": False}, "drop --speculative-adaptive"),
        ({"speculative_num_steps": 3}, {"speculative_num_steps": 1}, "pass --speculative-num-steps 1"),
        ({"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": "FROZEN_KV_MTP"}, "FROZEN_KV_MTP"),
        (
            {"speculative_algorithm": "EAGLE3"},
            {"speculative_algorithm": None},
            "drop --speculative-algorithm",
        ),
        ({"speculative_draft_model_path": "/"}, {"speculative_draft_model_path": "/tmp"}, "/tmp"),
        ({"speculative_attention_mode": "decode"}, {"speculative_attention_mode": "prefill"}, "prefill"),
    ],
)
def test_alarm(given: dict[str, Any], became: dict[str, Any], hint: str) -> None:
    (problem,) = audit(given, became)
    assert hint in problem.hint and "changing_step" in str(problem.given)


def test_a_change_that_no_step_declared() -> None:
    raw = {**DEFAULTS, "speculative_num_steps": 3}
    (problem,) = strict.audit(raw, DEFAULTS, {**raw, "speculative_num_steps": 4}, [])
    assert "an unnamed step" in str(problem.given)


def test_any_three_values_get_an_answer() -> None:
    values = [None, True, False, "5", 1.0, -1, 0, 1, 2, 3, 16, 10**6]
    for steps in values:
        for topk in values:
            for tokens in values:
                for problem in shape(steps, topk, tokens):
                    assert problem.render()
