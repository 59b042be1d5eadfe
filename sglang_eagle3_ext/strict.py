"""Strictness about flags: what SGLang changed, and which tree shapes exist.

The audit is generic: it compares every ``speculative_*`` field that the user set with what SGLang
resolved, and names the step that changed it.  No list of known overrides has to be kept.

Knows flags and numbers; does not know SGLang, models or drafts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import Problem

STEPS = "--speculative-num-steps"
TOPK = "--speculative-eagle-topk"
DRAFT_TOKENS = "--speculative-num-draft-tokens"

# SGLang's tree kernels walk the nodes of one request in one thread block.
MOST_DRAFT_TOKENS = 1024
# A draft pass costs about as much as a target layer or two: beyond this a chain cannot pay, and the
# KV slots reserved per request (topk * steps) grow without use.
MOST_STEPS = 128
MOST_TOPK = 64


def flag_of(field: str) -> str:
    """``speculative_num_steps`` -> ``--speculative-num-steps``."""
    return "--" + field.replace("_", "-")


# --- the audit ----------------------------------------------------------------------------------------


def audit(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    resolved: Mapping[str, Any],
    declared: Iterable[tuple[str, Mapping[str, Any]]],
) -> list[Problem]:
    """Speculative fields that the user set and SGLang resolved to something else.

    Args:
        raw: values before resolution; defaults: SGLang's defaults; resolved: values after it.
        declared: (step, {field: value}) in order, as SGLang recorded its decisions.
    """
    declared = list(declared)
    problems = []
    for field, given in raw.items():
        if not field.startswith("speculative_") or given == defaults.get(field):
            continue
        became = resolved.get(field)
        if became == given or _same_meaning(field, given, became):
            continue
        steps = [step for step, fields in declared if field in fields]
        problems.append(
            Problem(
                flag_of(field),
                f"{given!r}, resolved to {became!r} by {steps[-1] if steps else 'an unnamed step'}",
                f"a value that SGLang serves unchanged, here {became!r}",
                "the server would run with another value than you asked for, with a warning at most",
                _audit_hint(field, given, became, resolved),
            )
        )
    return problems


def _same_meaning(field: str, given: Any, became: Any) -> bool:
    """Spellings that SGLang only normalises, so that they are no change."""
    if field == "speculative_algorithm" and isinstance(given, str):
        return given.upper() == became or (given.upper() == "NEXTN" and became == "EAGLE")
    if field == "speculative_draft_model_quantization":
        return given == "unquant" and became is None  # "none, on purpose" is stored as none
    if not isinstance(given, str) or not isinstance(became, str):
        return False
    if os.path.normpath(given) == os.path.normpath(became):
        return True
    # A repository id becomes the folder it was downloaded to.
    return field.endswith("_path") and not os.path.exists(given) and os.path.exists(became)


def _audit_hint(field: str, given: Any, became: Any, resolved: Mapping[str, Any]) -> str:
    flag = flag_of(field)
    steps: Any = resolved.get("speculative_num_steps")
    if field == "speculative_num_draft_tokens" and resolved.get("speculative_eagle_topk") == 1:
        known = isinstance(steps, int) and isinstance(given, int)
        return _chain_hint(steps, given, MOST_TOPK) if known else f"drop {flag}"
    if became is None or became is False:
        return f"drop {flag}"
    if became is True:
        return f"add {flag}"
    return f"drop {flag}, or pass {flag} {became}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- the shape rule -----------------------------------------------------------------------------------


def most_draft_tokens(steps: int, topk: int) -> int:
    """Nodes of the largest tree: root, first level, then topk^2 candidates a step."""
    return 1 + topk + (steps - 1) * topk * topk


def fill_shape(
    steps: int | None, topk: int | None, draft_tokens: int | None
) -> tuple[int | None, int | None, int | None, list[str]]:
    """The shape with what has one obvious value filled in, and a line for the log for each filling.

    topk left out is 1, a chain; draft tokens left out of a chain are steps + 1.  Nothing else is
    guessed: the number of steps decides the cost, and the nodes of a tree decide what is verified.
    """
    notes = []
    if topk is None:
        topk = 1
        notes.append(f"{TOPK} not given: 1, a chain")
    if draft_tokens is None and topk == 1 and _is_whole(steps):
        assert steps is not None
        draft_tokens = steps + 1
        notes.append(f"{DRAFT_TOKENS} not given: {STEPS} + 1 = {draft_tokens}")
    return steps, topk, draft_tokens, notes


def shape_problems(
    steps: int | None, topk: int | None, draft_tokens: int | None, draft_vocab: int | None = None
) -> list[Problem]:
    """Whether the three numbers describe a tree that can be drafted; every hint is a working setting.

    Args:
        steps, topk, draft_tokens: as given, None where not given; :func:`fill_shape` applies.
        draft_vocab: rows of the draft's head, None where unknown.
    """
    filled = draft_tokens is None
    steps, topk, draft_tokens, _ = fill_shape(steps, topk, draft_tokens)
    problems = []
    most_topk = min(MOST_TOPK, draft_vocab or MOST_TOPK)
    for flag, value, least, most, what in (
        (STEPS, steps, 1, MOST_STEPS, "the draft forward passes per round, which are its cost"),
        (TOPK, topk, 1, most_topk, "the branches kept per step"),
        (
            DRAFT_TOKENS,
            draft_tokens,
            2,
            MOST_DRAFT_TOKENS,
            "the nodes the target verifies per round, root included",
        ),
    ):
        if value is None:
            if flag == DRAFT_TOKENS and steps is None:
                continue  # follows from the steps, which are asked for
            problems.append(
                Problem(
                    flag,
                    "nothing",
                    f"{least} to {most}",
                    f"it sets {what}",
                    _missing_hint(flag, steps, topk, draft_tokens),
                )
            )
        elif not _is_whole(value) or not least <= value <= most:
            if flag == DRAFT_TOKENS and filled:
                continue  # follows from the steps, which are the problem
            near = min(max(value, least), most) if _is_whole(value) else least
            hint = f"drop {flag}" if flag == DRAFT_TOKENS and topk == 1 else f"pass {flag} {near}"
            problems.append(
                Problem(flag, repr(value), f"a whole number from {least} to {most}", f"it sets {what}", hint)
            )
    if problems:
        return problems
    assert steps is not None and topk is not None and draft_tokens is not None
    if topk == 1 and draft_tokens != steps + 1:
        return [
            Problem(
                DRAFT_TOKENS,
                f"{draft_tokens} with {STEPS} {steps} and {TOPK} 1",
                f"{steps + 1}, which is {STEPS} + 1",
                "with topk 1 the draft is a chain: each step adds one token to the root. Stock SGLang would "
                f"verify {steps + 1} instead of {draft_tokens}, with a warning",
                _chain_hint(steps, draft_tokens, most_topk),
            )
        ]
    most = most_draft_tokens(steps, topk)
    if draft_tokens > most:
        need = 1 - (-(draft_tokens - 1 - topk) // (topk * topk))
        larger = f", or {STEPS} {need} ({_passes(need)})" if need <= MOST_STEPS else ""
        return [
            Problem(
                DRAFT_TOKENS,
                f"{draft_tokens} with {STEPS} {steps} and {TOPK} {topk}",
                f"2 to {most}, which is 1 + topk + (steps - 1) * topk^2",
                "the draft proposes no more candidates than that; stock SGLang fails on it after the weights "
                "have loaded",
                f"pass {DRAFT_TOKENS} {most} ({_passes(steps)}){larger}",
            )
        ]
    return []


def _missing_hint(flag: str, steps: Any, topk: Any, draft_tokens: Any) -> str:
    """A setting for a flag that was not given; the others may be of any type still."""
    if flag == STEPS:
        chain = draft_tokens - 1 if topk == 1 and _is_whole(draft_tokens) and draft_tokens > 1 else 5
        tree = f" {DRAFT_TOKENS} 16" if topk != 1 and draft_tokens is None else ""
        return f"pass {STEPS} {chain}{tree} ({_passes(chain)} per round)"
    if not (_is_whole(steps) and _is_whole(topk) and steps > 0 and topk > 1):
        return f"drop {TOPK} for a chain, or pass {DRAFT_TOKENS} 16"
    return (
        f"pass {DRAFT_TOKENS} {min(most_draft_tokens(steps, topk), 16)}, or {TOPK} 1 for a chain of {steps}"
    )


def _chain_hint(steps: int, draft_tokens: int, most_topk: int) -> str:
    ways = [f"drop {DRAFT_TOKENS} (chain of {steps}, {_passes(steps)})"]
    chain = draft_tokens - 1
    if chain <= MOST_STEPS:
        ways.append(f"{STEPS} {chain} {DRAFT_TOKENS} {draft_tokens} (chain of {chain}, {_passes(chain)})")
    tree_steps = min(max(steps, 3), 5)
    fitting = [
        k for k in (4, 8, 16, 32, 64) if k <= most_topk and most_draft_tokens(tree_steps, k) >= draft_tokens
    ]
    if draft_tokens > steps + 1 and fitting:
        ways.append(
            f"{STEPS} {tree_steps} {TOPK} {fitting[0]} {DRAFT_TOKENS} {draft_tokens} "
            f"(tree, {_passes(tree_steps)})"
        )
    return "one of: " + "; ".join(ways)


def _passes(count: int) -> str:
    return f"{count} draft pass{'es' if count != 1 else ''}"
