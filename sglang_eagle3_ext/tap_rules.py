"""How SGLang 0.5.23 turns the ids of a draft's configuration into boundaries, target by target.

29 model files read the same list by four rules.  :data:`RULES` says which file an architecture uses
and what it can capture; :func:`boundaries` and :func:`ids_for` are the rules and their inverse.  A
test compares both with SGLang's own code, for every architecture.

Knows numbers and names; imports neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLUS_ONE = "each id + 1"
RAW_UNLESS_ONE = "each id, + 1 where the list starts with 1"
RAW_IF_LAST = "each id where the largest is the number of layers, otherwise each id + 1"


@dataclass(frozen=True)
class TargetRule:
    """What one of SGLang's model files does with the ids.

    Attributes:
        file: file below ``sglang/srt/models`` that holds the rule.
        reading: one of the constants above.
        last: whether the last boundary (after the last layer, before the final norm) is captured.
        default_plus_one: whether the default list is shifted like an explicit one.
        embed_only: why nothing but the embedding is captured right, where that is so.
        refused: why the target is not served at all, where that is so.
    """

    file: str
    reading: str = PLUS_ONE
    last: bool = False
    default_plus_one: bool = False
    embed_only: str = ""
    refused: str = ""


_GEMMA3 = (
    "SGLang's Gemma3 captures the output of the feed-forward branch instead of the residual stream at "
    "every boundary but the first"
)
_MINDSPORE = "the model runs outside torch, where a capture cannot be checked"
_DRAFT = "it is a draft itself"

RULES: dict[str, TargetRule] = {
    **dict.fromkeys(("ApertusForCausalLM",), TargetRule("apertus")),
    **dict.fromkeys(
        (
            "BailingMoEForCausalLM",
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "SarvamMoEForCausalLM",
        ),
        TargetRule("bailing_moe"),
    ),
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM",
            "MistralLarge3ForCausalLM",
        ),
        TargetRule("deepseek_v2", RAW_UNLESS_ONE),
    ),
    "KimiK25ForConditionalGeneration": TargetRule("kimi_k25", RAW_UNLESS_ONE),
    "Glm4MoeLiteForCausalLM": TargetRule("glm4_moe_lite", RAW_UNLESS_ONE),
    **dict.fromkeys(("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"), TargetRule("exaone_moe")),
    "Gemma3ForCausalLM": TargetRule("gemma3_causal", last=True, embed_only=_GEMMA3),
    "Gemma3ForConditionalGeneration": TargetRule("gemma3_mm", last=True, embed_only=_GEMMA3),
    "Gemma4ForCausalLM": TargetRule("gemma4_causal", last=True),
    "Gemma4ForConditionalGeneration": TargetRule("gemma4_mm", last=True),
    "Gemma4UnifiedForConditionalGeneration": TargetRule("gemma4_mm", last=True),
    "Glm4MoeForCausalLM": TargetRule("glm4_moe"),
    "Glm5NextForConditionalGeneration": TargetRule("glm5_next"),
    "GptOssForCausalLM": TargetRule("gpt_oss", RAW_IF_LAST, last=True),
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "Phi3ForCausalLM",
            "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM",
            "Llama4ForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "TeleFLMForCausalLM",
        ),
        TargetRule("llama"),
    ),
    "Llama4ForConditionalGeneration": TargetRule("mllama4"),
    "LongcatFlashForCausalLM": TargetRule("longcat_flash"),
    "MindSporeForCausalLM": TargetRule("mindspore", refused=_MINDSPORE),
    "MiniMaxM2ForCausalLM": TargetRule("minimax_m2"),
    "MiniMaxM3SparseForCausalLM": TargetRule("minimax_m3", last=True),
    "MiniMaxM3SparseForConditionalGeneration": TargetRule("minimax_m3_vl", last=True, default_plus_one=True),
    "Qwen2ForCausalLM": TargetRule("qwen2"),
    "Qwen2_5_VLForConditionalGeneration": TargetRule("qwen2_5_vl"),
    "Qwen2MoeForCausalLM": TargetRule("qwen2_moe"),
    "Qwen3ForCausalLM": TargetRule("qwen3"),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), TargetRule("qwen3_5_text")),
    **dict.fromkeys(("Qwen3MoeForCausalLM", "MellumForCausalLM"), TargetRule("qwen3_moe")),
    "Qwen3NextForCausalLM": TargetRule("qwen3_next"),
    **dict.fromkeys(
        (
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen4ExpForConditionalGeneration",
            "Cosmos3ForConditionalGeneration",
            "InternS1ProForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
        ),
        TargetRule("qwen3_vl"),
    ),
    # SGLang gives these the method by inheritance, but nobody serves them as a target.
    **dict.fromkeys(
        (
            "DeepseekV3ForCausalLMNextN",
            "Glm5NextForConditionalGenerationNextN",
            "GlmMoeDsaForCausalLMNextN",
            "MistralLarge3ForCausalLMEagle",
        ),
        TargetRule("deepseek_v2", RAW_UNLESS_ONE, refused=_DRAFT),
    ),
    "ExaoneMoEForCausalLMMTP": TargetRule("exaone_moe", refused=_DRAFT),
    "EmbeddingGemmaModel": TargetRule("gemma3_causal", refused="it has no next token to draft"),
    **dict.fromkeys(
        ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        TargetRule("gemma4_causal", refused=_DRAFT),
    ),
    "Glm4MoeForCausalLMNextN": TargetRule("glm4_moe", refused=_DRAFT),
    "Glm4MoeLiteForCausalLMNextN": TargetRule("glm4_moe_lite", RAW_UNLESS_ONE, refused=_DRAFT),
    **dict.fromkeys(
        ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "MistralForCausalLMEagle"),
        TargetRule("llama", refused=_DRAFT),
    ),
    "LongcatFlashForCausalLMNextN": TargetRule("longcat_flash", refused=_DRAFT),
    "Qwen2ForCausalLMEagle": TargetRule("qwen2", refused=_DRAFT),
    "Qwen3MoeForCausalLMMTP": TargetRule("qwen3_moe", refused=_DRAFT),
    "Qwen3NextForCausalLMMTP": TargetRule("qwen3_next", refused=_DRAFT),
}
"""Architecture as in ``config.json`` -> rule."""


def default_boundaries(rule: TargetRule, num_layers: int) -> tuple[int, ...]:
    """What SGLang captures for a draft that names no ids: the three default boundaries."""
    shift = int(rule.default_plus_one)
    return tuple(b + shift for b in (2, num_layers // 2, num_layers - 3))


def boundaries(rule: TargetRule, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Boundaries that SGLang would install for explicit ``ids``, in the order listed, unchecked."""
    raw = (rule.reading == RAW_UNLESS_ONE and ids[0] != 1) or (
        rule.reading == RAW_IF_LAST and max(ids) == num_layers
    )
    return tuple(i if raw else i + 1 for i in ids)


def ids_for(rule: TargetRule, wanted: Sequence[int], num_layers: int) -> list[int] | None:
    """Ids for which SGLang installs exactly the boundaries ``wanted``.

    Args:
        wanted: distinct, ascending.

    Returns:
        The ids, or None where no list has that meaning.
    """
    raw = list(wanted)
    # The order of the ids decides under RAW_UNLESS_ONE; what is captured does not depend on it.
    for candidate in (raw, raw[::-1], [b - 1 for b in raw]):
        if sorted(boundaries(rule, candidate, num_layers)) == raw:
            return candidate
    return None
