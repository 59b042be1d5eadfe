"""Our table of id rules against SGLang's own code, for every architecture that has a capture.

The setters of SGLang's model classes run on stand-ins for a model: nothing is loaded.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from sglang_eagle3_ext import tap_rules
from sglang_eagle3_ext.tap_rules import RULES

pytestmark = pytest.mark.engine

SETTER = "set_eagle3_layers_to_capture"
# Model classes that hand the ids to the language model inside them.
INSIDE = {
    "kimi_k25": "DeepseekV3ForCausalLM",
    "gemma3_mm": "Gemma3ForCausalLM",
    "mllama4": "Llama4ForCausalLM",
    "mindspore": "LlamaForCausalLM",
}
SIZES = (6, 16, 61)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Architecture -> class, of all that SGLang can serve."""
    from sglang.srt.models.registry import ModelRegistry

    return dict(ModelRegistry.models)


@pytest.fixture(autouse=True)
def last_rank() -> Iterator[None]:
    """Some setters ask the process-wide state whether they are on the last pipeline stage."""
    only = types.SimpleNamespace(pp_group=types.SimpleNamespace(is_last_rank=True))
    with (
        mock.patch("sglang.srt.models.exaone_moe.get_parallel", return_value=only),
        mock.patch("sglang.srt.models.minimax_m2.get_parallel", return_value=only),
    ):
        yield


def inner_model(module: types.ModuleType, layers: int) -> Any:
    """What stands in for ``self.model``; with SGLang's own inner setter where the module has one."""
    inner = types.SimpleNamespace(
        layers=[types.SimpleNamespace() for _ in range(layers)], layers_to_capture=[]
    )
    classes = list(vars(module).values())
    if module.__name__.endswith("qwen3_5_text"):  # its inner model is defined next door
        classes += vars(sys.modules["sglang.srt.models.qwen3_5"]).values()
    for cls in classes:
        method = vars(cls).get(SETTER) if isinstance(cls, type) else None
        if method is not None and "layers_to_capture" in inspect.signature(method).parameters:
            setattr(inner, SETTER, types.MethodType(method, inner))
    return inner


def installed(models: dict[str, Any], architecture: str, ids: list[int] | None, layers: int) -> list[int]:
    """Boundaries that SGLang's own code marks, in its order."""
    method = getattr(models[architecture], SETTER)
    module = inspect.getmodule(method)
    assert module is not None
    inner = inner_model(module, layers)
    config = types.SimpleNamespace(num_hidden_layers=layers)
    config.text_config = config
    stand_in = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(is_last_rank=True), config=config, model=inner, language_model=inner
    )
    other = INSIDE.get(RULES[architecture].file)
    if other is not None:
        marked: list[int] = []
        inside = types.SimpleNamespace()
        setattr(inside, SETTER, lambda given: marked.extend(installed(models, other, given, layers)))
        stand_in.language_model = stand_in.model = inside
        method(stand_in, ids)
        return marked
    method(stand_in, ids)
    return list(inner.layers_to_capture)


def test_the_table_is_complete(models: dict[str, Any]) -> None:
    with_capture = {name for name, cls in models.items() if hasattr(cls, SETTER)}
    assert with_capture == set(RULES)
    defining = {getattr(models[name], SETTER).__module__.rpartition(".")[2] for name in with_capture}
    assert defining == {rule.file for rule in RULES.values()}
    # The inner class of qwen3_5 is reached through qwen3_vl and qwen3_5_text.
    assert len(defining | {"qwen3_5"}) == 29


@pytest.mark.parametrize("architecture", RULES)
def test_the_rule_is_sglangs(architecture: str, models: dict[str, Any]) -> None:
    rule = RULES[architecture]
    for layers in SIZES:
        default = tap_rules.default_boundaries(rule, layers)
        assert sorted(default) == sorted(installed(models, architecture, None, layers))
        lists = [[2, 3, 4], [1, 3, 4], [0, 3], [3, 1], [-1, 1, 4], [1], [2, layers], [layers - 1]]
        for ids in lists:
            if max(tap_rules.boundaries(rule, ids, layers)) >= layers and not rule.last:
                continue  # classes that mark the layers themselves fail on it
            assert list(tap_rules.boundaries(rule, ids, layers)) == installed(
                models, architecture, ids, layers
            )


@pytest.mark.parametrize("architecture", RULES)
def test_every_boundary_can_be_asked_for(architecture: str, models: dict[str, Any]) -> None:
    rule = RULES[architecture]
    for layers in SIZES:
        last = layers if rule.last else layers - 1
        for wanted in ([0, 2, 3], [1, 2], [1, 3, last], [0], [2], [last], [0, 1, 2, 3, 4]):
            ids = tap_rules.ids_for(rule, wanted, layers)
            assert ids is not None
            assert sorted(installed(models, architecture, ids, layers)) == wanted
        alone = tap_rules.ids_for(rule, [1], layers)
        assert (alone is None) == (rule.reading == tap_rules.RAW_UNLESS_ONE)
