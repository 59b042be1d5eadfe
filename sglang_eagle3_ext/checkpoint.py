"""Strict draft weights: every tensor used, every parameter filled, before a weight is read.

SGLang's draft loader skips a tensor whose name it does not know and leaves a parameter that nobody
filled as it was allocated.  Here names and shapes are compared first, from the headers of the files;
only the small vocabulary maps (and a few embedding rows) are read.

Knows how SGLang 0.5.23 names the parameters of its EAGLE-3 draft classes; does not know taps beyond
their number and width.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Problem
from .stored import Shape, Tensor, read_headers
from .taps import TapPlan

FLAG = "--speculative-draft-model-path"
LLAMA = "LlamaForCausalLMEagle3"
MLA = "Eagle3DeepseekV2ForCausalLM"
_ALIASES = {
    "Eagle3LlamaForCausalLM": LLAMA,
    "Eagle3DraftModel": LLAMA,
    "Eagle3Speculator": LLAMA,
    "LlamaForCausalLMEagle": LLAMA,
}
_EMBED = "embed_tokens.weight"
# Tables that a model derives from its configuration; checkpoints of old exporters carry them.
_DERIVED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached))$")
_SAMPLED_ROWS = 64
LONGER_ENVIRONMENT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)

# --- what SGLang's draft class has --------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-style draft, from its config.json.

    Attributes:
        width: hidden size H of the draft.
        taps: K; target_width: T.
        vocab: rows of the target's embedding; draft_vocab: rows of the draft's head.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    taps: int
    target_width: int
    vocab: int
    draft_vocab: int


def _sizes(config: Mapping[str, Any], plan: TapPlan, problems: list[Problem]) -> Sizes | None:
    def whole(key: str, default: Any = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(
                Problem(
                    f"config.json of the draft: {key}",
                    repr(value) if key in config else "nothing",
                    "a positive whole number",
                    "the shapes of the draft's weights follow from it",
                    f"write {key} as it was in training",
                )
            )
            return 1
        return value

    before = len(problems)
    width, heads = whole("hidden_size"), whole("num_attention_heads")
    sizes = Sizes(
        width=width,
        layers=whole("num_hidden_layers", 1),
        heads=heads,
        kv_heads=whole("num_key_value_heads", heads),
        head_dim=whole("head_dim", max(width // heads, 1)),
        feed_forward=whole("intermediate_size"),
        taps=len(plan.taps),
        target_width=plan.target.width,
        vocab=whole("vocab_size"),
        draft_vocab=whole("draft_vocab_size", config.get("vocab_size")),
    )
    return sizes if len(problems) == before else None


def expected(sizes: Sizes, config: Mapping[str, Any], fused: bool = True) -> dict[str, Shape]:
    """Parameters of SGLang's Llama-style draft that a checkpoint must fill, with their shapes.

    Args:
        fused: whether the draft reads its taps through ``fc``; false for ``final_norm``.
    """
    h, t = sizes.width, sizes.taps * sizes.target_width
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, Shape] = {"norm.weight": (h,)}
    if fused:
        shapes["fc.weight"] = (h, t)
        if config.get("bias"):
            shapes["fc.bias"] = (h,)
        if _norm_before_fc(config):
            shapes["input_norm.weight"] = (t,)
        if config.get("fc_norm") or config.get("use_aux_norm"):
            shapes |= {f"fc_norm.{i}.weight": (sizes.target_width,) for i in range(sizes.taps)}
    if not config.get("tie_word_embeddings") and config.get("draft_vocab_size") is not None:
        shapes["lm_head.weight"] = (sizes.draft_vocab, h)
    for i in range(sizes.layers):
        layer, width = f"layers.{i}", 2 * h if i == 0 else h
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, width),
            f"{layer}.self_attn.k_proj.weight": (kv, width),
            f"{layer}.self_attn.v_proj.weight": (kv, width),
            f"{layer}.self_attn.o_proj.weight": (h, q),
            f"{layer}.mlp.gate_proj.weight": (sizes.feed_forward, h),
            f"{layer}.mlp.up_proj.weight": (sizes.feed_forward, h),
            f"{layer}.mlp.down_proj.weight": (h, sizes.feed_forward),
            f"{layer}.hidden_norm.weight": (h,),
            f"{layer}.post_attention_layernorm.weight": (h,),
        }
        if config.get("attention_bias") or config.get("bias"):
            shapes[f"{layer}.self_attn.o_proj.bias"] = (h,)
    shapes["layers.0.input_layernorm.weight"] = (h,)
    return shapes


def _norm_before_fc(config: Mapping[str, Any]) -> bool:
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    return bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))


def normal_name(name: str) -> str:
    """The name under which SGLang's loader looks for a tensor, without ``model.``."""
    for old, new in (
        ("midlayer", "layers.0"),
        ("aux_norm_low", "fc_norm.0"),
        ("aux_norm_mid", "fc_norm.1"),
        ("aux_norm_high", "fc_norm.2"),
    ):
        name = name.replace(old, new)
    return name.removeprefix("model.")


# --- the check ----------------------------------------------------------------------------------------


def check(
    draft: Path,
    config: Mapping[str, Any],
    target: Path,
    target_config: Mapping[str, Any],
    plan: TapPlan,
    problems: list[Problem],
    notes: list[str],
) -> None:
    """Append every reason why SGLang would not serve this draft as it was trained."""
    _check_switches(config, plan, problems)
    try:
        tensors = read_headers(draft)
    except ValueError as error:
        problems.append(
            Problem(
                FLAG,
                str(draft),
                "a folder with *.safetensors or *.bin files",
                str(error),
                "export or download the draft's weights again",
            )
        )
        return
    unknown_names = ""
    if _architecture(config) != LLAMA:
        unknown_names = f"{_architecture(config)} fuses and renames projections"
    elif config.get("quantization_config"):
        unknown_names = "a quantised checkpoint has tensors of its own"
    if unknown_names:
        notes.append(f"the draft's weights are not compared with SGLang's parameters: {unknown_names}")
        _check_vocabulary(config, tensors, target_config, problems)
        return
    sizes = _sizes(config, plan, problems)
    if sizes is None:
        return
    _check_tensors(sizes, config, tensors, plan, problems)
    _check_vocabulary(config, tensors, target_config, problems)
    _check_embedding(tensors, target, problems)


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else "nothing"


def check_architecture(draft: Path, config: Mapping[str, Any], on_cpu: bool, problems: list[Problem]) -> bool:
    """Whether SGLang has an EAGLE-3 draft class for this checkpoint; a problem where it has none."""
    architecture = _architecture(config)
    served = (LLAMA,) if on_cpu else (LLAMA, MLA)
    if architecture in served:
        return True
    alias = _ALIASES.get(architecture)
    if architecture == MLA:
        why = "SGLang's class for it calls CUDA when it takes over the target's embedding"
        hint = "serve it on a GPU"
    elif alias == LLAMA and architecture != "LlamaForCausalLMEagle":
        why = f"SGLang 0.5.23 knows this layout as {LLAMA} and does not register the other name"
        hint = (
            f'set "architectures": ["{LLAMA}"] in {draft}/config.json, with hidden_size and the other sizes '
            "at the top level; the next start checks every tensor"
        )
    else:
        why = "SGLang 0.5.23 has no EAGLE-3 draft class of this name"
        hint = (
            "serve an EAGLE or EAGLE-2 draft with --speculative-algorithm EAGLE"
            if architecture.endswith("Eagle")
            else f"pass {FLAG} with an EAGLE-3 draft"
        )
    problems.append(
        Problem(
            f"{FLAG}, config.json: architectures",
            architecture,
            " or ".join(served) + (" on the CPU platform" if on_cpu else ""),
            why,
            hint,
        )
    )
    return False


def _check_switches(config: Mapping[str, Any], plan: TapPlan, problems: list[Problem]) -> None:
    """Settings of other trainers that SGLang's draft class does not honour."""
    nested = config.get("eagle_config")
    flags = {**config, **(nested if isinstance(nested, dict) else {})}

    def refuse(key: str, allowed: str, why: str, hint: str) -> None:
        problems.append(Problem(f"config.json of the draft: {key}", repr(flags[key]), allowed, why, hint))

    if flags.get("norm_before_residual"):
        refuse(
            "norm_before_residual",
            "false",
            "SGLang adds the first layer's output to the fused state itself, not to its norm",
            "serve this draft with vLLM, or train it with norm_before_residual false",
        )
    window = flags.get("sliding_window")
    limit = config.get("max_position_embeddings")
    if (
        isinstance(window, int)
        and flags.get("use_sliding_window", True)
        and not (isinstance(limit, int) and window >= limit)
    ):
        refuse(
            "sliding_window",
            "null, or at least max_position_embeddings",
            "SGLang's draft attends to the whole prefix",
            f'if no training sequence was longer than {window} set "sliding_window": null; otherwise retrain',
        )
    if flags.get("qk_norm") or flags.get("use_qk_norm"):
        key = "qk_norm" if flags.get("qk_norm") else "use_qk_norm"
        refuse(
            key, "false", "SGLang's draft has no norms on queries and keys", "train the draft without them"
        )
    if "target_hidden_size" in config and config["target_hidden_size"] != plan.target.width:
        refuse(
            "target_hidden_size",
            str(plan.target.width),
            f"the target, {plan.target.architecture}, is that wide",
            "serve the target that the draft was trained for",
        )
    elif "target_hidden_size" not in config and config.get("hidden_size") != plan.target.width:
        problems.append(
            Problem(
                "config.json of the draft: hidden_size",
                repr(config.get("hidden_size")),
                f"{plan.target.width}, or target_hidden_size {plan.target.width} beside it",
                f"the target, {plan.target.architecture}, is {plan.target.width} wide",
                f'add "target_hidden_size": {plan.target.width} if the draft was trained for this target',
            )
        )
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        problems.append(
            Problem(
                "config.json of the draft: draft_vocab_size",
                "nothing",
                "the rows of the draft's head, or null for the target's head",
                "SGLang's draft class reads it and fails, after the target has loaded",
                'add "draft_vocab_size" as it was in training',
            )
        )
    if flags.get("torch_dtype", flags.get("dtype")) in ("float8_e4m3fn", "int8"):
        key = "torch_dtype" if "torch_dtype" in flags else "dtype"
        refuse(key, "bfloat16, float16, float32", "a draft is loaded unquantised", "export it in bfloat16")


def _check_tensors(
    sizes: Sizes,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    plan: TapPlan,
    problems: list[Problem],
) -> None:
    wanted = expected(sizes, config, fused=bool(plan.boundaries))
    optional = {_EMBED, "d2t", "t2d"}
    found: dict[str, str] = {}
    unknown = []
    for name in tensors:
        normal = normal_name(name)
        if normal in found:
            unknown.append((name, f"it means the same as {found[normal]}"))
        elif normal in wanted or normal in optional:
            found[normal] = name
        elif not _DERIVED.search(normal):
            unknown.append((name, _why_unknown(normal, wanted, config, plan)))
    missing = [name for name in wanted if name not in found]
    if unknown:
        problems.append(
            Problem(
                f"{FLAG}, tensors",
                ", ".join(name for name, _ in _first(unknown)),
                "tensors that SGLang's draft class uses",
                "SGLang would drop these in silence: " + "; ".join(f"{n}: {w}" for n, w in _first(unknown)),
                "correct config.json where it switches them off, otherwise export the draft for SGLang",
            )
        )
    if missing:
        problems.append(
            Problem(
                f"{FLAG}, tensors",
                "without " + ", ".join(_first(missing)),
                "a tensor for every parameter",
                "SGLang would run the draft with these as they were allocated",
                "download the whole checkpoint; if it is complete, correct config.json "
                "(num_hidden_layers, draft_vocab_size, fc_norm, norm_before_fc, bias)",
            )
        )
    for normal, name in found.items():
        if normal in wanted and tensors[name].shape != wanted[normal]:
            problems.append(_wrong_shape(normal, name, tensors[name].shape, wanted[normal], sizes, plan))


def _first(items: list[Any], count: int = 8) -> list[Any]:
    """The first few, with a last entry that says how many more there are."""
    if len(items) <= count:
        return items
    more = f"and {len(items) - count} more"
    return [*items[:count], (more, "likewise") if isinstance(items[0], tuple) else more]


def _why_unknown(name: str, wanted: Iterable[str], config: Mapping[str, Any], plan: TapPlan) -> str:
    if name == "lm_head.weight":
        if config.get("tie_word_embeddings"):
            return "tie_word_embeddings is true, so that the head would be the embedding"
        return "draft_vocab_size is missing, so that the head would be the target's"
    if name.startswith(("fc.", "fc_norm.", "input_norm.")):
        if not plan.boundaries:
            return "the draft reads final_norm, which SGLang hands over without fc"
        if name.startswith("fc_norm."):
            return f"there are {len(plan.taps)} taps, and fc_norm is {config.get('fc_norm', 'not set')}"
        return "config.json does not ask for it (bias, norm_before_fc)"
    if re.search(r"[qk]_norm\.", name):
        return "SGLang's draft has no norms on queries and keys"
    if name.endswith("proj.bias"):
        return "SGLang's draft has no such bias"
    match = re.fullmatch(r"layers\.(\d+)\.input_layernorm\.weight", name)
    if match and match[1] != "0":
        return "from the second layer on, SGLang's draft norms with hidden_norm"
    close = difflib.get_close_matches(name, list(wanted), n=1, cutoff=0.8)
    return f"there is no such parameter{f', but {close[0]}' if close else ''}"


def _wrong_shape(normal: str, name: str, given: Shape, wanted: Shape, sizes: Sizes, plan: TapPlan) -> Problem:
    why = "another size follows from config.json"
    hint = "correct config.json, or serve the checkpoint that belongs to it"
    if normal == "fc.weight" and len(given) == 2:
        why = f"{sizes.taps} taps of a target {sizes.target_width} wide"
        taps = given[1] / sizes.target_width
        if taps == int(taps):
            hint = f"name {int(taps)} taps: fc reads {given[1]} = {int(taps)} x {sizes.target_width}"
        else:
            hint = f"serve the target it was trained for: {given[1]} is no multiple of {sizes.target_width}"
    elif normal == "lm_head.weight" and given[1:] == wanted[1:]:
        why = f"draft_vocab_size is {sizes.draft_vocab}"
        hint = f'write "draft_vocab_size": {given[0]} if d2t has as many entries'
    return Problem(f"{FLAG}, {name}", f"shape {list(given)}", str(list(wanted)), why, hint)


# --- vocabulary, embedding, positions -----------------------------------------------------------------


def _check_vocabulary(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target_config: Mapping[str, Any],
    problems: list[Problem],
) -> None:
    """Vocabulary sizes agree; d2t (offsets) maps every draft id to one id of the target, as t2d says."""
    target_vocab = target_config.get("vocab_size")
    for key in ("text_config", "language_config", "llm_config"):
        if target_vocab is None and isinstance(target_config.get(key), dict):
            target_vocab = target_config[key].get("vocab_size")
    vocab = config.get("vocab_size")
    draft_vocab = config.get("draft_vocab_size") or vocab
    if not isinstance(vocab, int) or not isinstance(draft_vocab, int) or not isinstance(target_vocab, int):
        return
    if vocab != target_vocab:
        problems.append(
            Problem(
                "config.json of the draft: vocab_size",
                str(vocab),
                str(target_vocab),
                "it is the target's vocabulary that the draft reads and proposes",
                "serve the target that the draft was trained for",
            )
        )
        return
    names = {normal_name(name): name for name in tensors}
    if "d2t" not in names:
        if draft_vocab != vocab:
            problems.append(
                Problem(
                    f"{FLAG}, tensors",
                    "without d2t",
                    f"d2t of {draft_vocab} offsets",
                    f"draft ids 0 to {draft_vocab - 1} would be taken for the first ids of the target",
                    "export the draft with its vocabulary map",
                )
            )
        return
    if config.get("tie_word_embeddings") and draft_vocab != vocab:
        problems.append(
            Problem(
                "config.json of the draft: tie_word_embeddings",
                "true",
                "false, for a reduced vocabulary",
                "the head would be the first rows of the target's embedding",
                'write "tie_word_embeddings": false if the checkpoint has its own lm_head',
            )
        )
    d2t = tensors[names["d2t"]].load()
    t2d = tensors[names["t2d"]].load() if "t2d" in names else None
    fault = _map_fault(d2t, t2d, draft_vocab, vocab)
    if fault is not None:
        problems.append(
            Problem(
                f"{FLAG}, d2t and t2d",
                fault,
                "offsets: target id = draft id + d2t, each id of the target at most once, as t2d marks them",
                "the draft would propose other tokens than it means",
                "export the vocabulary map again",
            )
        )


def _map_fault(d2t: Any, t2d: Any, draft_vocab: int, vocab: int) -> str | None:
    import torch

    if tuple(d2t.shape) != (draft_vocab,) or d2t.dtype.is_floating_point or d2t.dtype == torch.bool:
        return f"d2t of shape {list(d2t.shape)} and type {d2t.dtype}, draft_vocab_size {draft_vocab}"
    ids = d2t.long() + torch.arange(draft_vocab)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        absolute = int(d2t.min()) >= 0 and int(d2t.max()) < vocab and d2t.unique().numel() == draft_vocab
        return f"d2t reaches target ids {int(ids.min())} to {int(ids.max())} of {vocab}" + (
            ", as if it held ids and not offsets" if absolute else ""
        )
    if ids.unique().numel() != draft_vocab:
        return f"d2t maps {draft_vocab} draft ids to {ids.unique().numel()} target ids"
    if t2d is None:
        return None
    if tuple(t2d.shape) != (vocab,):
        return f"t2d of shape {list(t2d.shape)}, vocab_size {vocab}"
    marked = t2d.bool()
    if int(marked.sum()) != draft_vocab or not bool(marked[ids].all()):
        return f"t2d marks {int(marked.sum())} ids, {int(marked[ids].sum())} of them reached by d2t"
    return None


def _check_embedding(tensors: Mapping[str, Tensor], target: Path, problems: list[Problem]) -> None:
    """A draft that ships an embedding must ship the target's: SGLang replaces it in any case."""
    names = {normal_name(name): name for name in tensors}
    if _EMBED not in names:
        return
    try:
        of_target = {
            name: tensor
            for name, tensor in read_headers(target).items()
            if name.endswith(_EMBED) and "visual" not in name
        }
    except ValueError:
        return  # the target's own loader will say so
    if len(of_target) != 1:
        return
    import torch

    (other, theirs), ours = next(iter(of_target.items())), tensors[names[_EMBED]]
    fault = f"shape {list(ours.shape)}, the target's is {list(theirs.shape)}"
    if ours.shape == theirs.shape:
        rows = torch.linspace(0, ours.shape[0] - 1, min(_SAMPLED_ROWS, ours.shape[0])).long().tolist()
        # Either side may have been rounded to bfloat16 when it was saved.
        same = torch.allclose(ours.rows(rows), theirs.rows(rows), rtol=2**-7, atol=1e-6)
        if same:
            return
        fault = f"other values than the target's {other}"
    problems.append(
        Problem(
            f"{FLAG}, {names[_EMBED]}",
            fault,
            "the target's embedding, or none",
            "SGLang replaces the draft's embedding by the target's",
            "train the draft with the target's embedding frozen",
        )
    )


def context_of(config: Mapping[str, Any]) -> int:
    """Positions that SGLang derives from a configuration."""
    for key in ("text_config", "language_config", "llm_config"):
        if "num_hidden_layers" not in config and isinstance(config.get(key), dict):
            config = config[key]
    scaling = config.get("rope_scaling") or {}
    fixed = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1 if fixed else scaling.get("factor", 1)
    for key in _CONTEXT_KEYS:
        if isinstance(config.get(key), int):
            return int(factor * config[key])
    return 2048


def check_positions(
    config: Mapping[str, Any],
    target_config: Mapping[str, Any],
    context_length: int | None,
    longer_allowed: bool,
    problems: list[Problem],
    notes: list[str],
) -> None:
    """The served context against the positions that the draft was made for.

    Args:
        context_length: as given by the user, None where the target decides.
        longer_allowed: whether SGLang was told to extend the draft's positions.
    """
    limit = context_of(config)
    context = context_length or context_of(target_config)
    if context <= limit:
        return
    if longer_allowed:
        notes.append(
            f"the draft was configured for {limit} positions, {context} are served: beyond {limit} the "
            "output stays the target's own, the accept length may fall"
        )
        return
    given = str(context) if context_length else f"nothing, so {context} from the target"
    problems.append(
        Problem(
            "--context-length",
            given,
            f"up to {limit}, the positions of the draft (max_position_embeddings)",
            "SGLang refuses a longer context for the draft, after the target has loaded",
            f"pass --context-length {limit}, or set {LONGER_ENVIRONMENT}=1 to extend the draft's positions: "
            "the output stays the target's own, the accept length may fall beyond them",
        )
    )
