"""Every SGLang feature is decided: served, or refused by name."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_eagle3_ext import features
from sglang_eagle3_ext.features import CPU, CUDA, REFUSED, REQUEST_RULES, START_RULES

REPOSITORY = Path(__file__).parents[2]


def sglang_defaults() -> dict[str, Any]:
    """Default of every ServerArgs field, read from SGLang's source without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt/arg_groups/fields"
    defaults: dict[str, Any] = {}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                try:
                    value = ast.literal_eval(node.value)
                except ValueError:
                    value = (
                        eval(ast.unparse(node.value), {"__builtins__": {}})
                        if _is_product(node.value)
                        else ...
                    )
                defaults[node.target.id] = value
    return defaults


def _is_product(node: ast.expr) -> bool:
    return all(isinstance(n, ast.BinOp | ast.Mult | ast.Constant) for n in ast.walk(node))


DEFAULTS = sglang_defaults()


def server_args(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **given})


def sampling(**given: Any) -> SimpleNamespace:
    neutral = {
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "beam_width": None,
        "sampling_seed": None,
    }
    return SimpleNamespace(**{**neutral, **given})


def request(params: dict[str, Any] | None = None, **given: Any) -> SimpleNamespace:
    neutral = {
        "return_logprob": False,
        "return_hidden_states": False,
        "return_sampling_mask": False,
        "custom_logit_processor": None,
        "lora_id": None,
        "input_embeds": None,
    }
    return SimpleNamespace(sampling_params=sampling(**(params or {})), **{**neutral, **given})


FIELDS = [(rule, name, off) for rule in START_RULES for name, off in rule.fields.items()]


@pytest.mark.parametrize(("rule", "name", "off"), FIELDS, ids=[name for _, name, _ in FIELDS])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_each_field_is_refused_or_not(
    rule: features.StartRule, name: str, off: tuple[Any, ...], device: str
) -> None:
    assert name in DEFAULTS, "SGLang has no such field"
    assert DEFAULTS[name] in off, "SGLang's own default would be refused"
    for value in off:
        assert features.server_problems(server_args(**{name: value}), device) == []
    used = (
        True
        if off[0] is False
        else 0.5
        if isinstance(off[0], float)
        else 2
        if isinstance(off[0], int)
        else "x"
    )
    problems = features.server_problems(server_args(**{name: used}), device)
    if (rule.cpu if device == CPU else rule.cuda) == REFUSED:
        (problem,) = problems
        assert problem.argument == "--" + name.replace("_", "-") and rule.name in problem.why
        assert problem.given == repr(used)
    else:
        assert problems == []


def test_defaults_are_served() -> None:
    assert features.server_problems(server_args(), CPU) == [] == features.server_problems(server_args(), CUDA)


def test_all_problems_at_once() -> None:
    asked = server_args(enable_lora=True, lora_paths=["a"], pp_size=2, speculative_token_map="m")
    assert len(features.server_problems(asked, CUDA)) == 4


@pytest.mark.parametrize("name", ["SGLANG_SIMULATE_ACC_LEN", "SGLANG_RUST_SERVER"])
def test_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert [p.argument for p in features.server_problems(server_args(), CPU)] == [name]
    monkeypatch.setenv(name, "0")
    assert features.server_problems(server_args(), CPU) == []


@pytest.mark.parametrize(
    ("given", "device", "argument"),
    [
        ({"device": "cuda"}, CUDA, None),
        ({"device": "cuda:1"}, CUDA, None),
        ({"device": "cpu"}, CPU, None),
        ({"device": "cpu"}, CUDA, "--device"),  # SGLang's own CPU engine
        ({"device": "xpu"}, CUDA, "--device"),
        ({"speculative_eagle_topk": 4, "page_size": 1}, CPU, None),
        ({"speculative_eagle_topk": 1, "page_size": 16}, CPU, None),
        ({"speculative_eagle_topk": 4, "page_size": 16}, CPU, "--page-size"),
        ({"speculative_eagle_topk": 4, "page_size": 16, "attention_backend": "fa3"}, CUDA, None),
        (
            {"speculative_eagle_topk": 4, "page_size": 16, "attention_backend": "flashmla"},
            CUDA,
            "--page-size",
        ),
        ({"speculative_eagle_topk": 4, "attention_backend": "trtllm_mha"}, CUDA, "--speculative-eagle-topk"),
        ({"speculative_eagle_topk": 1, "attention_backend": "trtllm_mha"}, CUDA, None),
        ({"speculative_eagle_topk": "4", "page_size": 16}, CPU, None),  # another check says so
    ],
)
def test_devices_and_trees(given: dict[str, Any], device: str, argument: str | None) -> None:
    problems = features.server_problems(server_args(**given), device)
    assert [p.argument for p in problems] == ([argument] if argument else [])


def test_kernels() -> None:
    for device, works, fails in ((CPU, "own", "sglang"), (CUDA, "sglang", "own")):
        assert not features.kernel_problems("auto", "default", device)
        assert not features.kernel_problems(works, "--eagle3x-kernels", device)
        (problem,) = features.kernel_problems(fails, "--eagle3x-kernels", device)
        assert problem.argument == "--eagle3x-kernels" and fails in str(problem.given)


USES: dict[str, SimpleNamespace] = {
    "min_p": request({"min_p": 0.1}),
    "sampling_seed (seed)": request({"sampling_seed": 0}),
    "frequency_penalty": request({"frequency_penalty": 0.5}),
    "presence_penalty": request({"presence_penalty": -0.5}),
    "repetition_penalty": request({"repetition_penalty": 1.1}),
    "min_new_tokens": request({"min_new_tokens": 1}),
    "json_schema (response_format, tools)": request({"json_schema": "{}"}),
    "regex": request({"regex": "a"}),
    "ebnf": request({"ebnf": "root ::= 'a'"}),
    "structural_tag": request({"structural_tag": "{}"}),
    "beam_width": request({"beam_width": 2}),
    "return_logprob (logprobs)": request(return_logprob=True),
    "return_hidden_states": request(return_hidden_states=True),
    "return_sampling_mask": request(return_sampling_mask=True),
    "custom_logit_processor": request(custom_logit_processor="x"),
    "lora_path": request(lora_id="x"),
    "input_embeds": request(input_embeds=[[0.0]]),
}


@pytest.mark.parametrize("rule", REQUEST_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_requests(rule: features.RequestRule, device: str) -> None:
    status = rule.cpu if device == CPU else rule.cuda
    if rule.name not in USES:
        assert status != REFUSED, "a refusal needs a request that shows it"
        return
    problems = features.request_problems(USES[rule.name], device)
    assert [p.argument for p in problems] == ([rule.name] if status == REFUSED else [])
    assert rule.given(request()) is None


def test_plain_request() -> None:
    assert features.request_problems(request(), CPU) == [] == features.request_problems(request(), CUDA)


def test_every_request_problem_at_once() -> None:
    asked = request({"regex": "a" * 100, "frequency_penalty": 1.0}, return_logprob=True)
    assert len(features.request_problems(asked, CPU)) == 3
    assert all(len(str(p.given)) <= 60 for p in features.request_problems(asked, CPU))


def test_documentation_is_in_step() -> None:
    assert (REPOSITORY / "docs/features.md").read_text(encoding="utf-8") == features.markdown()
