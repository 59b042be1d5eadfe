"""What EAGLE3X serves of SGLang's features, and what it refuses, by name.

SGLang decides much by comparing the algorithm's name with ``EAGLE`` and ``EAGLE3``, so a registered
algorithm drops out of features without a word.  Here every one of them is decided on purpose:
refused at start, refused per request, or served.  :func:`markdown` prints the tables.

Knows SGLang's flags and request fields; imports neither SGLang nor torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import platform_cpu, tap_rules
from .errors import Problem
from .strict import TOPK, flag_of

SERVED = "served"  # by code of this package, tested in the engine
AS_SGLANG = "as SGLang"  # SGLang's own code, unchanged; nothing of ours touches it
RELAXED = "as SGLang (relaxed)"  # SGLang's own code, which differs from what it does without a draft
REFUSED = "refused"

CPU, CUDA = "cpu", "cuda"
CPU_ATTENTION = "eagle3x_cpu"
TREE_PAGE_BACKENDS = ("flashinfer", "fa3", "triton")  # can read a tree's branches from pages


@dataclass(frozen=True)
class StartRule:
    """A server feature.

    Attributes:
        name: what people call it.
        fields: ServerArgs fields, each with the values that mean it is not used.
        cpu, cuda: one of the words above.
        why: reason of the refusal, or what to know where it is served.
        hint: what to do; ``drop <flag>`` where empty.
    """

    name: str
    fields: Mapping[str, tuple[Any, ...]]
    cpu: str
    cuda: str
    why: str
    hint: str = ""

    def problems(self, server_args: Any, device: str) -> list[Problem]:
        """One per field in use, where this device refuses the feature."""
        if (self.cpu if device == CPU else self.cuda) != REFUSED:
            return []
        return [
            Problem(
                flag_of(name),
                repr(value),
                " or ".join(dict.fromkeys(_word(v) for v in off)),
                f"{self.name}: {self.why}",
                self.hint or f"drop {flag_of(name)}",
            )
            for name, off in self.fields.items()
            if (value := getattr(server_args, name)) not in off
        ]


def _word(value: Any) -> str:
    return "nothing" if value in (None, False, "", [], {}) else str(value)


_FLAG = (False, None)
_UNTRIED = "not tried with EAGLE3X, and SGLang decides it by the names of its own algorithms"
_NO_GPU = "it needs a GPU"
_OTHERS = "it belongs to another algorithm and would be ignored"

START_RULES: tuple[StartRule, ...] = (
    # --- other ways to speculate ----------------------------------------------------------------------
    StartRule(
        "adaptive speculation",
        {"speculative_adaptive": _FLAG, "speculative_adaptive_config": (None,)},
        REFUSED,
        REFUSED,
        "SGLang switches it off with a warning for every algorithm but its own EAGLE and EAGLE3",
    ),
    StartRule(
        "rejection sampling",
        {"speculative_use_rejection_sampling": _FLAG},
        REFUSED,
        REFUSED,
        "SGLang's kernel cannot use a draft with a reduced vocabulary, which most EAGLE-3 drafts have",
    ),
    StartRule(
        "block verification",
        {"speculative_use_block_verification": _FLAG},
        REFUSED,
        REFUSED,
        "it needs rejection sampling, and SGLang allows it by the names of its own algorithms",
    ),
    StartRule(
        "lossy acceptance",
        {"speculative_accept_threshold_single": (1.0,), "speculative_accept_threshold_acc": (1.0,)},
        REFUSED,
        REFUSED,
        "below 1.0 the output is no longer the target's own",
    ),
    StartRule(
        "simulated acceptance",
        {},  # an environment variable, see server_problems
        REFUSED,
        REFUSED,
        "SGLANG_SIMULATE_ACC_LEN overwrites what was accepted: the output would be no text of the target",
    ),
    StartRule(
        "multi-layer EAGLE",
        {"enable_multi_layer_eagle": _FLAG},
        REFUSED,
        REFUSED,
        "it serves several draft layers one after the other; an EAGLE-3 draft is one",
    ),
    StartRule(
        "token map",
        {"speculative_token_map": (None,)},
        REFUSED,
        REFUSED,
        "an EAGLE-3 draft brings its own (d2t), and SGLang ignores this one for EAGLE-3",
    ),
    StartRule(
        "draft attention window",
        {"speculative_draft_window_size": (None,), "speculative_draft_sink_size": (None,)},
        REFUSED,
        REFUSED,
        "SGLang honours it for some draft classes and attention backends and ignores it for others",
    ),
    StartRule(
        "flags of other algorithms",
        {
            "speculative_dflash_block_size": (None,),
            "speculative_domino_candidate_pool_size": (2048,),
            "speculative_dspark_block_size": (None,),
            "speculative_dspark_sps_table_path": (None,),
            "speculative_dspark_confidence_sts_path": (None,),
            "speculative_dspark_align_verify_tokens_to_graph_tier": _FLAG,
            "speculative_ngram_min_bfs_breadth": (1,),
            "speculative_ngram_max_bfs_breadth": (10,),
            "speculative_ngram_match_type": ("BFS",),
            "speculative_ngram_max_trie_depth": (18,),
            "speculative_ngram_capacity": (10_000_000,),
            "speculative_ngram_external_corpus_path": (None,),
            "speculative_ngram_external_sam_budget": (0,),
            "speculative_ngram_external_corpus_max_tokens": (10_000_000,),
            "uno_lora_path": (None,),
            "spec_trace_dir": (None,),
            "decoupled_spec_role": ("null",),
        },
        REFUSED,
        REFUSED,
        _OTHERS,
    ),
    # --- parallelism and scheduling -------------------------------------------------------------------
    StartRule(
        "tensor parallelism",
        {"tp_size": (1,)},
        SERVED,
        AS_SGLANG,
        "on the CPU over gloo",
    ),
    StartRule(
        "pipeline parallelism",
        {"pp_size": (1,)},
        REFUSED,
        REFUSED,
        "the taps would have to travel between stages; SGLang allows it for its own EAGLE only",
        "pass --pp-size 1",
    ),
    StartRule(
        "attention data parallelism",
        {"attn_dp_size": (1,), "enable_dp_attention": _FLAG, "enable_dp_lm_head": _FLAG},
        REFUSED,
        REFUSED,
        _UNTRIED,
    ),
    StartRule(
        "data parallelism (replicas)",
        {"dp_size": (1,)},
        REFUSED,
        AS_SGLANG,
        "the CPU platform serves one replica",
        "pass --dp-size 1",
    ),
    StartRule(
        "context parallelism",
        {"dcp_size": (1,), "attn_cp_size": (1,), "enable_prefill_cp": _FLAG},
        REFUSED,
        REFUSED,
        "the captured planes would be split over ranks in another order than the tokens; " + _UNTRIED,
    ),
    StartRule(
        "input-scattered attention",
        {"enable_attn_tp_input_scattered": _FLAG},
        REFUSED,
        REFUSED,
        "SGLang forbids it for EAGLE3 by name, because the taps would see a part of the tokens only; a "
        "registered algorithm slips through that test",
    ),
    StartRule(
        "prefill/decode disaggregation",
        {
            "disaggregation_mode": ("null",),
            "disaggregation_decode_enable_radix_cache": _FLAG,
            "encoder_only": _FLAG,
        },
        REFUSED,
        REFUSED,
        _UNTRIED,
    ),
    StartRule(
        "two-batch overlap",
        {"enable_two_batch_overlap": _FLAG},
        REFUSED,
        REFUSED,
        "a batch is split in two halves and a target's capture sees one of them",
    ),
    StartRule(
        "prefill/decode multiplexing",
        {"enable_pdmux": _FLAG},
        REFUSED,
        REFUSED,
        _UNTRIED,
    ),
    StartRule(
        "mixed chunked prefill",
        {"enable_mixed_chunk": _FLAG},
        REFUSED,
        AS_SGLANG,
        "a mixed step would decode requests without their draft, which the CPU round does not resume from",
    ),
    StartRule(
        "several tokenizer processes",
        {"tokenizer_worker_num": (1,)},
        REFUSED,
        REFUSED,
        "SGLang loads no plugins in them, so requests would go unchecked",
        "pass --tokenizer-worker-num 1",
    ),
    StartRule(
        "gRPC and Ray front ends",
        {"smg_grpc_mode": _FLAG, "grpc_mode": _FLAG, "grpc_port": (None,), "use_ray": _FLAG},
        REFUSED,
        REFUSED,
        "requests or processes reach the scheduler without passing the checks and options of this plugin",
    ),
    # --- memory ---------------------------------------------------------------------------------------
    StartRule(
        "hierarchical and external KV caches",
        {"enable_hierarchical_cache": _FLAG, "enable_lmcache": _FLAG, "enable_flexkv": _FLAG},
        REFUSED,
        AS_SGLANG,
        _NO_GPU,
    ),
    StartRule(
        "unified memory pool",
        {"enable_unified_memory": _FLAG},
        REFUSED,
        REFUSED,
        "SGLang serves it with a list of its own algorithms",
    ),
    StartRule(
        "quantised KV cache",
        {"kv_cache_dtype": ("auto", "bf16", "bfloat16"), "speculative_draft_kv_cache_dtype": (None, "auto")},
        REFUSED,
        AS_SGLANG,
        "the CPU attention reads and writes the model's dtype",
    ),
    # --- execution ------------------------------------------------------------------------------------
    StartRule(
        "choice of the attention backend",
        {
            "attention_backend": (None, CPU_ATTENTION),
            "prefill_attention_backend": (None, CPU_ATTENTION),
            "decode_attention_backend": (None, CPU_ATTENTION),
            "speculative_draft_attention_backend": (None, CPU_ATTENTION),
            "speculative_attention_mode": ("prefill",),
        },
        REFUSED,
        AS_SGLANG,
        f"the CPU platform has one attention backend that reads trees, {CPU_ATTENTION}",
    ),
    StartRule(
        "quantisation",
        {"quantization": (None, "unquant"), "speculative_draft_model_quantization": (None, "unquant")},
        REFUSED,
        AS_SGLANG,
        "quantised layers need kernels that a CPU build of SGLang does not have",
    ),
    StartRule(
        "half precision",
        {"dtype": ("auto", "float32", "float")},
        REFUSED,
        AS_SGLANG,
        "on the CPU a pass of several rows rounds otherwise than a pass of one, in 16 bits often enough to "
        "change the text; float32 holds such weights exactly",
    ),
    StartRule(
        "torch.compile",
        {"enable_torch_compile": _FLAG},
        REFUSED,
        AS_SGLANG,
        "it would stall the first requests for longer than it saves on the CPU platform",
    ),
    StartRule(
        "deterministic inference",
        {"enable_deterministic_inference": _FLAG},
        REFUSED,
        AS_SGLANG,
        "it asks for one of SGLang's GPU attention backends",
    ),
    StartRule(
        "sampling backend",
        {"sampling_backend": (None, "pytorch")},
        REFUSED,
        AS_SGLANG,
        "the CPU round draws with this package's own kernel, by the law of SGLang's pytorch backend",
    ),
    StartRule(
        "fused whole-model kernels",
        {"enable_nvidia_megakernel": _FLAG, "enable_amd_monokernel": _FLAG},
        REFUSED,
        REFUSED,
        "they do not expose the taps; SGLang knows that of EAGLE3 by name only",
    ),
    StartRule(
        "diffusion language models, embedding models",
        {"dllm_algorithm": (None,), "is_embedding": _FLAG},
        REFUSED,
        REFUSED,
        "there is no next token to draft",
    ),
    # --- requests that need a server flag -------------------------------------------------------------
    StartRule(
        "LoRA",
        {"enable_lora": _FLAG, "lora_paths": (None, [], {})},
        REFUSED,
        REFUSED,
        "the draft was trained on the base model's hidden states; " + _UNTRIED,
    ),
    StartRule(
        "returned hidden states",
        {
            "enable_return_hidden_states": _FLAG,
            "return_hidden_states_mode": (None,),
            "enable_return_aux_hidden_states": _FLAG,
        },
        REFUSED,
        REFUSED,
        "with EAGLE-3 the states that are captured are the taps, not the last layer",
    ),
    StartRule(
        "custom logit processors",
        {"enable_custom_logit_processor": _FLAG},
        REFUSED,
        REFUSED,
        "SGLang does not apply them in speculative verification",
    ),
    StartRule(
        "watermarks",
        {"enable_watermark": _FLAG},
        REFUSED,
        REFUSED,
        "SGLang serves them with a list of its own algorithms",
    ),
    StartRule(
        "returned routed experts and indexer choices",
        {"enable_return_routed_experts": _FLAG, "enable_return_indexer_topk": _FLAG},
        REFUSED,
        AS_SGLANG,
        "the CPU round does not collect them over the nodes of a tree",
    ),
)


_REFUSED_ENVIRONMENT = {
    "SGLANG_SIMULATE_ACC_LEN": "it overwrites what was accepted: the output would be no text of the target",
    "SGLANG_RUST_SERVER": "requests would not pass the checks of this plugin",
}


def device_of_platform() -> str:
    """``cpu`` where this package's platform serves, else ``cuda``."""
    return CPU if platform_cpu.is_active() else CUDA


def server_problems(server_args: Any, device: str | None = None) -> list[Problem]:
    """Server features in use that EAGLE3X refuses.

    Args:
        server_args: ServerArgs or a view of them.  Before SGLang has resolved them, fields that it
            fills in (device, attention backend, page size) are None and are not judged.
        device: ``cpu`` or ``cuda``; by default what the platform says.
    """
    device = device_of_platform() if device is None else device
    problems = [p for rule in START_RULES for p in rule.problems(server_args, device)]
    problems += _device_problems(server_args, device)
    problems += _tree_problems(server_args, device)
    for name, why in _REFUSED_ENVIRONMENT.items():
        given = os.environ.get(name, "")
        if given.lower() not in ("", "0", "-1", "false", "no", "off"):
            problems.append(Problem(name, repr(given), "not set", why, f"unset {name}"))
    return problems


def kernel_problems(kernels: str, source: str, device: str | None = None) -> list[Problem]:
    """Whether the tree kernels that ``--eagle3x-kernels`` names exist on this device."""
    device = device_of_platform() if device is None else device
    works = "own" if device == CPU else "sglang"
    if kernels in ("auto", works):
        return []
    why = (
        "SGLang's tree kernels need a GPU"
        if device == CPU
        else "our own tree kernels are not served on a GPU by this version"
    )
    return [Problem(source, repr(kernels), f"auto or {works}", why, "leave it out, or say auto")]


def _device_problems(server_args: Any, device: str) -> list[Problem]:
    given = server_args.device
    if given is None or given.partition(":")[0] == device:
        return []
    if device == CPU:
        allowed, why, hint = "cpu", "this machine serves on the CPU platform of this package", "drop --device"
    elif given == "cpu":
        allowed = "cuda, or cpu on the CPU platform of this package"
        why = "SGLang's own CPU engine verifies greedily and would ignore temperature in silence"
        hint = "unset SGLANG_USE_CPU_ENGINE and set SGLANG_PLATFORM=eagle3x_cpu"
    else:
        allowed = "cuda, or cpu on the CPU platform of this package"
        why = "SGLang verifies greedily there and would ignore temperature in silence"
        hint = "drop --device"
    return [Problem("--device", repr(given), allowed, why, hint)]


def _tree_problems(server_args: Any, device: str) -> list[Problem]:
    """What SGLang checks for topk > 1 in its own EAGLE family only."""
    topk, page = server_args.speculative_eagle_topk, server_args.page_size
    if not isinstance(topk, int) or topk <= 1:
        return []
    backends = {
        getattr(server_args, name)
        for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    } - {None}
    problems = []
    if (
        isinstance(page, int)
        and page > 1
        and (device == CPU or (backends and not backends <= {*TREE_PAGE_BACKENDS}))
    ):
        allowed = "1" if device == CPU else f"1, or an attention backend of {', '.join(TREE_PAGE_BACKENDS)}"
        problems.append(
            Problem(
                "--page-size",
                f"{page} with {TOPK} {topk}",
                allowed,
                "the branches of a draft tree would share pages, which this attention backend cannot split",
                f"pass --page-size 1, or {TOPK} 1",
            )
        )
    if "trtllm_mha" in backends:
        problems.append(
            Problem(
                TOPK,
                f"{topk} with the attention backend trtllm_mha",
                "1",
                "trtllm_mha verifies a chain only",
                f"pass {TOPK} 1, or another --attention-backend",
            )
        )
    return problems


# --- requests -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestRule:
    """A request feature.

    Attributes:
        name: parameter as the user writes it.
        given: reads it from SGLang's tokenized request; None where it is not used.
        cpu, cuda: as in :class:`StartRule`.
        why: reason of the refusal, or what to know where it is served.
    """

    name: str
    given: Callable[[Any], Any]
    cpu: str
    cuda: str
    why: str


def _sampling(name: str, *off: Any) -> Callable[[Any], Any]:
    def given(request: Any) -> Any:
        value = getattr(request.sampling_params, name)
        return None if value in off else value

    return given


def _field(name: str, *off: Any) -> Callable[[Any], Any]:
    def given(request: Any) -> Any:
        value = getattr(request, name)
        return None if value is None or value in off else value

    return given


_PENALTY = "a penalty depends on the tokens before it, which differ from node to node of a draft tree"
_RELAXED = "; SGLang applies the counts from before the round to every node"
_GRAMMAR = "the CPU round does not advance a grammar along the branches of a tree"

REQUEST_RULES: tuple[RequestRule, ...] = (
    RequestRule(
        "temperature, top_p, top_k", lambda r: None, SERVED, AS_SGLANG, "the target's own law is kept"
    ),
    RequestRule(
        "sampling_seed (seed)",
        _sampling("sampling_seed", None),
        REFUSED,
        AS_SGLANG,
        "SGLang honours it with deterministic inference only, which the CPU platform does not have, and "
        "ignores it otherwise",
    ),
    RequestRule(
        "min_p",
        _sampling("min_p", 0.0, None),
        SERVED,
        REFUSED,
        "SGLang's verification of speculative tokens ignores it",
    ),
    RequestRule("logit_bias", lambda r: None, SERVED, AS_SGLANG, ""),
    RequestRule(
        "frequency_penalty", _sampling("frequency_penalty", 0.0, None), REFUSED, RELAXED, _PENALTY + _RELAXED
    ),
    RequestRule(
        "presence_penalty", _sampling("presence_penalty", 0.0, None), REFUSED, RELAXED, _PENALTY + _RELAXED
    ),
    RequestRule(
        "repetition_penalty",
        _sampling("repetition_penalty", 1.0, None),
        REFUSED,
        RELAXED,
        _PENALTY + _RELAXED,
    ),
    RequestRule(
        "min_new_tokens",
        _sampling("min_new_tokens", 0, None),
        REFUSED,
        RELAXED,
        "it forbids stop tokens by position, which differs from node to node of a draft tree" + _RELAXED,
    ),
    RequestRule(
        "json_schema (response_format, tools)", _sampling("json_schema", None), REFUSED, AS_SGLANG, _GRAMMAR
    ),
    RequestRule("regex", _sampling("regex", None), REFUSED, AS_SGLANG, _GRAMMAR),
    RequestRule("ebnf", _sampling("ebnf", None), REFUSED, AS_SGLANG, _GRAMMAR),
    RequestRule("structural_tag", _sampling("structural_tag", None), REFUSED, AS_SGLANG, _GRAMMAR),
    RequestRule(
        "return_logprob (logprobs)",
        _field("return_logprob", False),
        REFUSED,
        AS_SGLANG,
        "the CPU round does not gather them along the accepted path",
    ),
    RequestRule(
        "return_hidden_states",
        lambda r: r.return_hidden_states or None,
        REFUSED,
        REFUSED,
        "with EAGLE-3 the states that are captured are the taps, not the last layer",
    ),
    RequestRule(
        "return_sampling_mask",
        _field("return_sampling_mask", False),
        REFUSED,
        REFUSED,
        "the mask of a node is not kept through verification",
    ),
    RequestRule(
        "custom_logit_processor",
        _field("custom_logit_processor"),
        REFUSED,
        REFUSED,
        "SGLang does not apply it in speculative verification",
    ),
    RequestRule("lora_path", _field("lora_id"), REFUSED, REFUSED, "the draft was trained on the base model"),
    RequestRule(
        "beam_width",
        _sampling("beam_width", None, 1),
        REFUSED,
        REFUSED,
        "beam search follows several sequences, a draft follows one",
    ),
    RequestRule(
        "input_embeds",
        _field("input_embeds"),
        REFUSED,
        REFUSED,
        "a draft reads the embeddings of token ids, and such a prompt has none",
    ),
    RequestRule(
        "n, stop, stop_token_ids, ignore_eos, streaming, aborts", lambda r: None, SERVED, AS_SGLANG, ""
    ),
)


def request_problems(request: Any, device: str | None = None) -> list[Problem]:
    """What a request asks for and EAGLE3X cannot honour.

    Args:
        request: SGLang's tokenized generation request.
        device: ``cpu`` or ``cuda``; by default what the platform says.
    """
    device = device_of_platform() if device is None else device
    return [
        Problem(
            rule.name,
            _short(given),
            "nothing (leave it out)",
            rule.why,
            f"leave {rule.name.partition(' ')[0]} out, or serve without --speculative-algorithm",
        )
        for rule in REQUEST_RULES
        if (rule.cpu if device == CPU else rule.cuda) == REFUSED
        and (given := rule.given(request)) is not None
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- documentation ------------------------------------------------------------------------------------

TABLE: tuple[tuple[str, str, str, str], ...] = (
    *((rule.name, rule.cpu, rule.cuda, rule.why) for rule in START_RULES),
    (
        "topk > 1 with page size > 1",
        REFUSED,
        f"as SGLang, with {', '.join(TREE_PAGE_BACKENDS)}",
        "the branches of a tree would share pages",
    ),
    (
        "overlap schedule",
        "off",
        AS_SGLANG,
        "SGLang has none for speculative decoding on a CPU; the log says so",
    ),
    (
        "devices other than CUDA and the CPU platform",
        REFUSED,
        REFUSED,
        "SGLang verifies greedily there, in silence",
    ),
)
"""(feature, on the CPU platform, on CUDA, why) of everything decided at start."""

REQUEST_TABLE: tuple[tuple[str, str, str, str], ...] = tuple(
    (rule.name, rule.cpu, rule.cuda, rule.why) for rule in REQUEST_RULES
)


def markdown() -> str:
    """The reference page ``docs/features.md``."""
    lines = [
        "# Served and refused",
        "",
        "Generated by `python -m sglang_eagle3_ext.features --write docs/features.md`; a test keeps it in",
        "step.",
        "",
        f"*{SERVED}*: by code of this package, tested in the engine. *{AS_SGLANG}*: SGLang's own code,",
        "untouched; not run by this project, which had no machine that holds SGLang's CUDA stack. *refused*:",
        "the server does not start, or the request is answered with an error (HTTP 400, `ValueError` in",
        "`sglang.Engine`), naming the parameter.",
        "",
    ]
    for title, table in (("At start", TABLE), ("Per request", REQUEST_TABLE)):
        lines += [f"## {title}", "", "| feature | CPU platform | CUDA | why |", "| --- | --- | --- | --- |"]
        lines += [f"| {name} | {cpu} | {cuda} | {why} |" for name, cpu, cuda, why in table]
        lines.append("")
    lines += [
        "## Targets",
        "",
        "How SGLang 0.5.23 reads `eagle_aux_hidden_state_layer_ids`, by the file under `sglang/srt/models`",
        "that does it. Taps given by name do not depend on it.",
        "",
        "| architectures | file | boundary | last boundary |",
        "| --- | --- | --- | --- |",
    ]
    by_rule: dict[tap_rules.TargetRule, list[str]] = {}
    for name, rule in tap_rules.RULES.items():
        by_rule.setdefault(rule, []).append(name)
    for rule, names in by_rule.items():
        reading = f"refused: {rule.refused}" if rule.refused else rule.reading
        if rule.embed_only:
            reading = f"`embed` only: {rule.embed_only}"
        last = "" if rule.refused or rule.embed_only else "yes" if rule.last else "no"
        lines.append(f"| {', '.join(names)} | {rule.file} | {reading} | {last} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> None:
    """``python -m sglang_eagle3_ext.features [--write FILE]``: print or write the reference page."""
    parser = argparse.ArgumentParser(prog="python -m sglang_eagle3_ext.features", allow_abbrev=False)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page there instead of printing it"
    )
    target = parser.parse_args(arguments).write
    if target is None:
        sys.stdout.write(markdown())
    else:
        target.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
