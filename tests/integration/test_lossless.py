"""Greedy output of EAGLE3X equals the target alone, token for token, in the real engine.

One engine without speculation answers the whole workload; engines of every tree shape answer it too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pairs import VOCAB, Pair, draft_recipe, make_target
from serve import Pool, Served, generate, run_engine

pytestmark = pytest.mark.engine

CHUNK = 32
CONTEXT = 512


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB), k=length)


def workload() -> list[dict[str, Any]]:
    """One request at a time, many at once, and the places where a round is cut short."""
    steps = [generate([prompt(n, n)]) for n in (1, 2, 7)]
    # A batch that shrinks as its members finish, and grows again.
    lengths = (3, 40, 12, 25, 1, 18, 9, 31)
    steps.append(
        generate(
            [prompt(n, 100 + n) for n in lengths],
            [{"max_new_tokens": 4 + 5 * i} for i in range(len(lengths))],
        )
    )
    steps += [generate([prompt(n, 200 + n) for n in range(1, 2 + b)]) for b in (1, 3)]
    # max_new_tokens reached at every place of an accepted run.
    steps.append(generate([prompt(10, 300)] * 8, [{"max_new_tokens": n} for n in range(1, 9)]))
    return steps


def shape(steps: int, topk: int) -> dict[str, Any]:
    most = 1 + topk + (steps - 1) * topk * topk
    tokens = steps + 1 if topk == 1 else min(most, (7, 16, 33)[(steps + topk) % 3])
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }


SHAPES = {f"steps{s}-topk{k}": shape(s, k) for k, s in itertools.product((1, 2, 4, 8), range(1, 8))}
# Fewer nodes than steps.
SHAPES["steps7-topk4-two"] = {**shape(7, 4), "speculative_num_draft_tokens": 2}
SHAPES |= {f"steps{s}-page16": {**shape(s, 1), "page_size": 16} for s in (1, 5)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("lossless")
    target = make_target(root / "target", "LlamaForCausalLM", scale=0.15)
    return Pair(str(target), str(draft_recipe(target).write(root / "draft")))


def plain(pair: Pair, **more: Any) -> dict[str, Any]:
    return {"model_path": pair.target, "skip_tokenizer_init": True, "max_total_tokens": 6000, **more}


@pytest.fixture(scope="module")
def pool(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Pool]:
    """Starts what the selected tests of this module need, references first."""
    pool = Pool(str(tmp_path_factory.mktemp("answers")))
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    }
    cases = edge_cases(pair)
    pool.submit("reference", plain(pair), workload())
    for name in (n for n in wanted if n in cases):
        settings, steps, _ = cases[name]
        alone = {k: v for k, v in settings.items() if not k.startswith("speculative")}
        pool.submit(f"{name} reference", {**plain(pair), **alone}, steps)
        beyond = "draft's limit" in name
        draft = short_draft(pair) if beyond else pair
        pool.submit(
            name,
            draft.arguments(**{"max_total_tokens": 6000, **SPECULATIVE, **settings}),
            steps,
            **({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} if beyond else {}),
        )
    for name in (n for n in SHAPES if n in wanted):
        pool.submit(name, pair.arguments(max_total_tokens=6000, **SHAPES[name]), workload())
    yield pool
    pool.executor.shutdown(cancel_futures=True)


def assert_same(reference: Served, served: Served) -> None:
    assert len(reference.tokens()) == len(served.tokens()) > 0
    for i, (want, got) in enumerate(zip(reference.tokens(), served.tokens(), strict=True)):
        assert got == want, f"request {i}"
    for want, got in zip(reference.meta(), served.meta(), strict=True):
        assert got["finish_reason"] == want["finish_reason"]


def accept_length(served: Served) -> float:
    counts = [m for m in served.meta() if m.get("spec_verify_ct")]
    return sum(m["completion_tokens"] for m in counts) / sum(m["spec_verify_ct"] for m in counts)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str, pool: Pool) -> None:
    served = pool.result(name)
    assert_same(pool.result("reference"), served)
    # Without accepted drafts equality would prove little.
    assert accept_length(served) > 1.25


# --- where a round or a prompt is cut ------------------------------------------------------------------

DRAFT_TOKENS = 12
SPECULATIVE = {**shape(3, 4), "speculative_num_draft_tokens": DRAFT_TOKENS}


def edge_cases(pair: Pair) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]], Any]]:
    """name -> (engine settings for both engines, steps, what the log of the served one must hold)."""
    chunked = [generate([prompt(k * CHUNK + d, 7 * k + d)]) for k in (1, 2) for d in (-1, 0, 1)]
    chunked.append(generate([prompt(CHUNK + d, 70 + d) for d in (-1, 0, 1, 20)]))
    long = prompt(40, 900)
    radix = [step for n in range(17, 40) for step in (generate([long[:n] + prompt(3, n)]),)]
    # The cached prefix may reach into the first answer.
    radix += [generate([long]), generate([long]), generate([long[:-1]])]
    # Requests that reach past CONTEXT - draft tokens are refused by SGLang, with a message.
    full = [
        generate([prompt(CONTEXT - DRAFT_TOKENS - new, new)], {"max_new_tokens": new})
        for new in (1, 2, 3, 4, 9, 30)
    ]
    stops = [
        generate([prompt(10, 300)] * 40, [{"stop_token_ids": [t], "ignore_eos": False} for t in range(2, 42)])
    ]
    limit = [generate([prompt(20, 5)], {"max_new_tokens": 90}), generate([prompt(70, 6)])]
    # Here a round allocates more than the draft tokens: topk * steps = 56 against 16.
    wide = {**shape(7, 8), "speculative_num_draft_tokens": 16, "context_length": CONTEXT}
    at_the_end = [generate([prompt(CONTEXT - 56 - n, n)], {"max_new_tokens": n}) for n in (1, 9, 40)]
    crowd = [generate([prompt(30, 1000 + i) for i in range(8)], {"max_new_tokens": 60})]
    chain = shape(5, 1)
    long_chain = shape(DRAFT_TOKENS - 1, 1)
    return {
        "chunked prefill": ({"chunked_prefill_size": CHUNK}, chunked, None),
        "chunked prefill, chain, page 16": (
            {"chunked_prefill_size": CHUNK, "page_size": 16, **chain},
            chunked,
            None,
        ),
        "radix cache": ({}, radix, "cached-token: "),
        "radix cache, chain, page 16": ({"page_size": 16, **chain}, radix, "cached-token: "),
        "end of the context": ({"context_length": CONTEXT, **long_chain}, full, None),
        "end of the context, tree": ({"context_length": CONTEXT}, full, None),
        "end of the context, wide tree": (wide, at_the_end, None),
        "stop tokens": ({}, stops, None),
        "stop tokens, chain": (chain, stops, None),
        "beyond the draft's limit": ({}, limit, "configured for 64 positions"),
        "beyond the draft's limit, chain": (chain, limit, "configured for 64 positions"),
        "retraction": ({"max_total_tokens": 520}, crowd, "etract"),
        "retraction, chain": ({"max_total_tokens": 520, **chain}, crowd, "etract"),
    }


def short_draft(pair: Pair) -> Pair:
    """The same draft, configured for 64 positions."""
    recipe = draft_recipe(Path(pair.target))
    recipe.config["max_position_embeddings"] = 64
    return Pair(pair.target, str(recipe.write(Path(pair.draft).with_name("short"))))


@pytest.mark.parametrize("name", edge_cases(Pair("", "")))
def test_every_edge(name: str, pool: Pool, pair: Pair) -> None:
    reference, served = pool.result(f"{name} reference"), pool.result(name)
    assert_same(reference, served)
    assert accept_length(served) > 1.1
    needle = edge_cases(pair)[name][2]
    if needle is not None:
        assert needle in served.log
    if "stop" in name:
        reasons = [m["finish_reason"]["type"] for m in served.meta()]
        assert 5 < reasons.count("stop") < len(reasons)
    if "radix" in name:
        assert len({m["cached_tokens"] for m in served.meta()}) > 2
    if "end of the context" in name:
        assert {m["finish_reason"]["type"] for m in served.meta()} == {"length"}
        ends = {m["prompt_tokens"] + m["completion_tokens"] for m in served.meta()}
        assert ends == {CONTEXT - (56 if "wide" in name else DRAFT_TOKENS)}


def test_streaming_and_aborts(pair: Pair, tmp_path: Path) -> None:
    prompts = [prompt(6 + i, 40 + i) for i in range(6)]
    stream = {"do": "stream", "arguments": generate(prompts[0])["arguments"]}
    aborts = {
        "do": "abort",
        "input_ids": prompts,
        "sampling": {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True},
        "abort": [1, 4],
    }
    after = generate([prompts[1]])
    steps = [stream, aborts, after]
    want = run_engine(
        plain(pair), [generate(prompts[0]), generate(prompts, aborts["sampling"]), after], str(tmp_path / "a")
    )
    got = run_engine(pair.arguments(**SPECULATIVE, max_total_tokens=6000), steps, str(tmp_path / "b"))

    chunks = got.answers[0][0]
    assert chunks[-1] == want.answers[0]["output_ids"]
    assert len(chunks) > 3 and all(b[: len(a)] == a for a, b in zip(chunks, chunks[1:], strict=False))
    for i, (alone, beside) in enumerate(zip(want.answers[1], got.answers[1], strict=True)):
        if i in aborts["abort"]:
            assert beside["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(beside["output_ids"]) < 120
            assert alone["output_ids"][: len(beside["output_ids"])] == beside["output_ids"]
        else:
            assert beside["output_ids"] == alone["output_ids"]
    assert got.answers[2][0]["output_ids"] == want.answers[2][0]["output_ids"]
