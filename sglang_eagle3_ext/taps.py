"""Taps: which hidden states of the target feed the draft, by name, and how they get there.

``resid@b`` is the residual stream entering decoder layer b; ``embed`` is ``resid@0``; ``out@k`` is
``resid@(k+1)``; ``final_norm`` is the state after the target's final norm.  The order is that of
training.  SGLang captures each boundary once, in ascending order; :func:`fold` moves the difference
into the columns of the draft's ``fc`` at load, so that it costs nothing at run time.

Knows names, boundaries and ``fc``; how SGLang reads ids is in ``tap_rules.py``.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import tap_rules
from .config import OPTIONS, Resolved
from .errors import Eagle3XError, Problem

logger = logging.getLogger(__name__)

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
FLAG = OPTIONS["taps"].flag
FINAL_NORM = "final_norm"
_NAME = re.compile(r"(resid|in|out|hf)@(\d+)")

# Keys that other software uses for the same list, and how it counts.
_FOREIGN_KEYS = {
    IDS_KEY: "boundaries",
    "layer_ids": "boundaries",
    "aux_hidden_states_layer_ids": "layer outputs",
    "target_layer_ids": "layer outputs",
}


@dataclass(frozen=True)
class Tap:
    """One hidden state: a boundary, or None for the state after the final norm."""

    boundary: int | None

    def __str__(self) -> str:
        if self.boundary is None:
            return FINAL_NORM
        return "embed" if self.boundary == 0 else f"resid@{self.boundary}"


def names(boundaries: Sequence[int | None]) -> str:
    """``embed,resid@2`` for (0, 2): the form that the flag takes."""
    return ",".join(str(Tap(b)) for b in boundaries)


def parse(text: str, num_layers: int) -> Tap:
    """Read one name.

    Raises:
        ValueError: no such name, or no such layer; the message says which.
    """
    if text == "embed":
        return Tap(0)
    if text == FINAL_NORM:
        return Tap(None)
    match = _NAME.fullmatch(text)
    if match is None:
        if re.fullmatch(r"-?\d+", text):
            raise ValueError("a bare number means another layer in every trainer")
        known = ("embed", FINAL_NORM, "resid@2", "out@1", "in@2", "hf@2")
        close = difflib.get_close_matches(text, known, n=1)
        raise ValueError("there is no tap of this name" + (f" (did you mean {close[0]}?)" if close else ""))
    kind, number = match[1], int(match[2])
    boundary = number + 1 if kind == "out" else number
    if boundary > num_layers or (kind == "in" and number == num_layers):
        raise ValueError(f"the target has {num_layers} layers")
    # Hugging Face puts the normed state last: hidden_states[N].
    return Tap(None) if kind == "hf" and number == num_layers else Tap(boundary)


@dataclass(frozen=True)
class Target:
    """What the taps need to know of the target's ``config.json``."""

    architecture: str
    num_layers: int
    width: int
    rule: tap_rules.TargetRule


@dataclass(frozen=True)
class TapPlan:
    """What is captured, and what the draft was trained on.

    K taps listed, U distinct planes captured, T target width.

    Attributes:
        taps: [K] in training order.
        boundaries: [U] distinct, ascending; empty where the draft reads ``final_norm``.
        ids: what SGLang's setter is given to install exactly ``boundaries``.
        target: architecture, layers and width.
        explanation: where the taps come from, one line for the log.
    """

    taps: tuple[Tap, ...]
    boundaries: tuple[int, ...]
    ids: tuple[int, ...]
    target: Target
    explanation: str

    @property
    def planes(self) -> int:
        """U, the hidden states that reach the draft side by side."""
        return max(len(self.boundaries), 1)

    @property
    def width(self) -> int:
        """U * T, the width of what the target hands over."""
        return self.planes * self.target.width

    @property
    def order(self) -> list[int]:
        """[K] the captured plane that each listed tap reads."""
        return [0 if t.boundary is None else self.boundaries.index(t.boundary) for t in self.taps]

    def describe(self) -> str:
        """What is installed, one line for the log."""
        listed = ", ".join(map(str, self.taps))
        physical = ", ".join(f"resid@{b}" for b in self.boundaries) or FINAL_NORM
        return f"{self.explanation}: draft reads [{listed}], {self.target.architecture} captures [{physical}]"


# --- from configuration to plan -----------------------------------------------------------------------


def read_target(config: Mapping[str, Any], path: str, problems: list[Problem]) -> Target | None:
    """The target's architecture, layers and width; None with a problem where they cannot be used."""
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else "nothing"
    text = config
    for key in ("text_config", "language_config", "llm_config"):
        if "num_hidden_layers" not in text and isinstance(config.get(key), dict):
            text = config[key]
    rule = tap_rules.RULES.get(architecture)
    layers, width = text.get("num_hidden_layers"), text.get("hidden_size")
    if rule is not None and not rule.refused and isinstance(layers, int) and isinstance(width, int):
        return Target(architecture, layers, width, rule)
    known = sorted(name for name, r in tap_rules.RULES.items() if not r.refused)
    if rule is None:
        close = difflib.get_close_matches(architecture, known, n=1)
        why = "SGLang 0.5.23 has no EAGLE-3 capture for it" + (
            f" (did you mean {close[0]}?)" if close else ""
        )
    elif rule.refused:
        why = f"SGLang's {architecture} cannot be a target here: {rule.refused}"
    else:
        why = f"{path}/config.json names no num_hidden_layers and hidden_size"
    problems.append(
        Problem(
            "--model-path",
            f"{path}, architecture {architecture}",
            f"one of the {len(known)} architectures that SGLang captures taps of, such as LlamaForCausalLM, "
            "Qwen3ForCausalLM, DeepseekV3ForCausalLM (eagle3x features lists them)",
            why,
            "serve this target without --speculative-algorithm",
        )
    )
    return None


def resolve(
    options: Resolved,
    draft: Mapping[str, Any],
    target: Target,
    problems: list[Problem],
    notes: list[str],
) -> TapPlan | None:
    """Choose the taps: option, else the draft's own configuration where it can be proved, else refuse.

    Args:
        draft: the draft's config.json.
        problems, notes: appended to.
    """
    if options.values.taps is not None:
        source = options.sources["taps"]
        listed = _from_option(options.values.taps, source, target, problems)
        explanation = f"taps from {source}"
        own: list[Problem] = []
        found = _from_draft(draft, target, own)
        if listed and found and [t.boundary for t in listed] != list(found[0]):
            notes.append(f"{explanation} replace {found[1]}")
    else:
        source = "config.json of the draft"
        found = _from_draft(draft, target, problems)
        listed = [Tap(b) for b in found[0]] if found else None
        explanation = found[1] if found else ""
    if not listed:
        return None
    faults = _uncapturable(listed, draft, target, source)
    problems += faults
    if faults:
        return None
    boundaries = sorted({t.boundary for t in listed if t.boundary is not None})
    ids = tap_rules.ids_for(target.rule, boundaries, target.num_layers) if boundaries else []
    if ids is None:
        problems.append(
            Problem(
                source,
                names(boundaries),
                "another boundary, or a second one",
                f"SGLang's {target.rule.file}.py cannot be told to capture this one alone",
                f"train the draft on {names([1, 2])} instead",
            )
        )
        return None
    return TapPlan(tuple(listed), tuple(boundaries), tuple(ids), target, explanation)


def _from_option(
    texts: Sequence[str], source: str, target: Target, problems: list[Problem]
) -> list[Tap] | None:
    listed, faults = [], []
    for text in texts:
        try:
            listed.append(parse(text, target.num_layers))
        except ValueError as error:
            number = re.search(r"\d+", text)
            k = min(int(number[0]) if number else 2, target.num_layers - 1)
            faults.append(
                Problem(
                    source,
                    repr(text),
                    f"embed, resid@0 to resid@{target.num_layers}, out@0 to out@{target.num_layers - 1}, "
                    f"in@K, hf@I, {FINAL_NORM}",
                    str(error),
                    f"write resid@{k} for the state entering layer {k}, out@{k} for the one leaving it",
                )
            )
    problems += faults
    return None if faults else listed


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def _from_draft(
    draft: Mapping[str, Any], target: Target, problems: list[Problem]
) -> tuple[tuple[int | None, ...], str] | None:
    """(boundaries in order, explanation) as SGLang 0.5.23 reads the draft's configuration."""
    where = "config.json of the draft"
    nested = draft.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        problems.append(_unknown(f"{where}: eagle_config", nested, "it is not an object", draft, target))
        return None
    nested = nested or {}
    ids = nested.get(IDS_KEY)
    use_aux = nested.get("use_aux_hidden_state", True)
    if not isinstance(use_aux, bool):
        why = "it is not true or false"
        problems.append(_unknown(f"{where}: eagle_config.use_aux_hidden_state", use_aux, why, draft, target))
        return None
    if not use_aux:
        if ids:
            why = "use_aux_hidden_state is false, so that SGLang would ignore the ids"
            problems.append(_unknown(f"{where}: eagle_config.{IDS_KEY}", ids, why, draft, target))
            return None
        return (None,), "eagle_config.use_aux_hidden_state false"
    if ids is None:
        why = (
            "nothing says which hidden states the draft was trained on; stock SGLang would feed "
            f"{names(tap_rules.default_boundaries(target.rule, target.num_layers))} in silence"
        )
        problems.append(_unknown(f"{where}: eagle_config.{IDS_KEY}", "nothing", why, draft, target))
        return None
    if not _is_ids(ids):
        why = "it is not a list of whole numbers"
        problems.append(_unknown(f"{where}: eagle_config.{IDS_KEY}", ids, why, draft, target))
        return None

    read = tap_rules.boundaries(target.rule, ids, target.num_layers)
    explanation = f"{list(ids)} read as sglang ids for {target.architecture} -> " + ", ".join(
        f"resid@{b}" for b in read
    )
    why = ""
    outside = [b for b in read if not 0 <= b <= target.num_layers]
    if outside:
        why = (
            f"SGLang's {target.rule.file}.py reads {target.rule.reading}: boundary {outside[0]} of a target "
        )
        why += f"with {target.num_layers} layers"
    elif list(read) != sorted(set(read)):
        why = "SGLang captures each boundary once and in ascending order; another order may have been trained"
    top = draft.get(IDS_KEY)
    if not why and top is not None and list(top) != list(read):
        why = f"the same key at the top level says {top}, which vLLM reads as boundaries"
    if why:
        problems.append(_unknown(f"{where}: eagle_config.{IDS_KEY}", ids, why, draft, target))
        return None
    return read, explanation


def _unknown(argument: str, given: Any, why: str, draft: Mapping[str, Any], target: Target) -> Problem:
    """A configuration that does not say what it means, with everything it could mean."""
    ways = []
    for place, ids in _lists(draft):
        for dialect, who, offset in (
            ("boundaries", "vLLM, speculators", 0),
            ("layer outputs", "SpecForge, Model-Optimizer, TensorRT-LLM, AngelSlim, NeMo", 1),
        ):
            read = [i + offset for i in ids]
            if all(0 <= b <= target.num_layers for b in read):
                ways.append(f"{FLAG} {names(read)} if {place} {list(ids)} counts {dialect} ({who})")
    default = tap_rules.default_boundaries(target.rule, target.num_layers)
    if list(default) == sorted(set(default)):
        ways.append(f"{FLAG} {names(default)} if it was trained with SGLang's default taps")
    ways.append(f"{FLAG} {names([0, 1, 2])} if with the SafeAILab code on an unmodified Hugging Face model")
    return Problem(
        argument,
        given if isinstance(given, str) else repr(given),
        f"ids as SGLang reads them for {target.architecture} ({target.rule.reading}), ascending, between "
        f"boundary 0 and {target.num_layers}",
        why,
        "ask whoever trained the draft, then one of: " + "; ".join(ways),
    )


def _lists(draft: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Lists in the draft's configuration that may be meant as layer ids."""
    found = []
    places: list[tuple[str, Any]] = [("", draft)]
    places += [(f"{k}.", draft.get(k)) for k in ("eagle_config", "transformer_layer_config")]
    for prefix, place in places:
        if not isinstance(place, Mapping):
            continue
        for key, value in place.items():
            near = key in _FOREIGN_KEYS or difflib.get_close_matches(key, _FOREIGN_KEYS, n=1, cutoff=0.7)
            if near and _is_ids(value):
                found.append((prefix + key, list(value)))
    return found


def _uncapturable(
    listed: Sequence[Tap], draft: Mapping[str, Any], target: Target, source: str
) -> list[Problem]:
    """What SGLang's model class or the draft's model class cannot do with these taps."""
    boundaries = sorted({t.boundary for t in listed if t.boundary is not None})
    shown = ",".join(map(str, listed))
    faults: list[tuple[str, str, str]] = []
    n = target.num_layers
    if n in boundaries and not target.rule.last:
        faults.append(
            (
                f"taps up to resid@{n - 1}",
                f"SGLang's {target.rule.file}.py captures before a layer only, never after the last one",
                f"train the draft on resid@{n - 1} or earlier; no flag makes this one available",
            )
        )
    if target.rule.embed_only and any(boundaries):
        faults.append(("embed", target.rule.embed_only, "serve this target without --speculative-algorithm"))
    mixed = any(t.boundary is None for t in listed) and len(listed) > 1
    if mixed:
        faults.append(
            (
                f"{FINAL_NORM} alone, or boundaries alone",
                "SGLang hands over either the captured boundaries or the normed state, not both",
                f"train the draft on resid@{n - 1} in the place of {FINAL_NORM}",
            )
        )
    repeated = len({t.boundary for t in listed}) < len(listed)
    nested = draft.get("eagle_config")
    flags = {**draft, **(nested if isinstance(nested, dict) else {})}
    if repeated and any(flags.get(k) for k in ("fc_norm", "use_aux_norm", "norm_before_fc")):
        faults.append(
            (
                "each tap once",
                "the draft norms its taps before fc, and SGLang captures a boundary only once",
                "train the draft without the repetition",
            )
        )
    if boundaries and not mixed and len(boundaries) * target.width == draft.get("hidden_size"):
        faults.append(
            (
                "taps whose joint width differs from the draft's hidden size",
                "SGLang's draft leaves fc out where its input is as wide as its output",
                "train the draft on two taps or more",
            )
        )
    return [Problem(f"taps ({source})", shown, *fault) for fault in faults]


# --- into the running models --------------------------------------------------------------------------


def install(plan: TapPlan, target_runner: Any) -> None:
    """Tell the target's runner what to capture; SGLang applies it when it builds attention backends."""
    capture = target_runner.spec_aux_config
    capture.eagle_use_aux_hidden_state = bool(plan.boundaries)
    capture.eagle_aux_hidden_state_layer_ids = list(plan.ids) or None


def check_installed(plan: TapPlan, model: Any) -> None:
    """Look at the model itself: exactly the planned boundaries are marked for capture.

    Args:
        model: the target, after SGLang has applied what :func:`install` left.

    Raises:
        Eagle3XError: naming both.
    """
    lists, flags = [], set()
    for module in model.modules():
        marked = getattr(module, "layers_to_capture", None)
        if marked:
            lists.append(sorted(marked))
            layers = getattr(module, "layers", ())
            flags |= {i for i, layer in enumerate(layers) if getattr(layer, "_is_layer_to_capture", False)}
    wanted = list(plan.boundaries)
    by_flag = {b for b in wanted if b < plan.target.num_layers}
    if lists == ([wanted] if wanted else []) and flags in (set(), by_flag):
        return
    raise Eagle3XError(
        f"{type(model).__name__} is set to capture {lists or 'nothing'} (layers marked: {sorted(flags)}), "
        f"planned {wanted}\n    hint: reinstall sglang; its rule for {plan.target.architecture} is not the "
        "one of 0.5.23"
    )


def fold(draft_model: Any, plan: TapPlan) -> None:
    """Rewrite the loaded draft so that it reads the captured planes instead of the listed taps.

    ``fc`` [H, K*T] becomes [H, U*T]: the column block of each listed tap goes to the plane it reads,
    blocks of a repeated tap add up.  Norms before ``fc`` move along.

    Args:
        draft_model: SGLang's draft model, loaded for K taps.
    """
    import torch

    inner, order, t = draft_model.model, plan.order, plan.target.width
    if not plan.boundaries or order == list(range(plan.planes)):
        return

    def arrange(columns: torch.Tensor) -> torch.Tensor:
        blocks = columns.unflatten(-1, (len(order), t))
        folded = blocks.new_zeros(*columns.shape[:-1], plan.planes, t)
        for slot, plane in enumerate(order):
            folded[..., plane, :] += blocks[..., slot, :]
        return folded.flatten(-2)

    with torch.no_grad():
        weight = arrange(inner.fc.weight.data)
        inner.fc.weight = torch.nn.Parameter(weight, requires_grad=False)
        inner.fc.in_features = weight.shape[1]
        if getattr(inner, "input_norm", None) is not None:
            inner.input_norm.weight.data.copy_(arrange(inner.input_norm.weight.data))
        if getattr(inner, "fc_norm", None) is not None:
            by_plane = sorted(zip(order, inner.fc_norm, strict=True), key=lambda pair: pair[0])
            inner.fc_norm = torch.nn.ModuleList(norm for _, norm in by_plane)
    inner.num_aux_hidden_states = plan.planes


def check_planes(plan: TapPlan, hidden: Any, tokens: int) -> None:
    """The first forward: exactly the planned planes arrive, one row per token.

    Args:
        hidden: what the target handed over, [tokens, U*T].

    Raises:
        Eagle3XError: another shape.
    """
    shape = None if hidden is None else tuple(hidden.shape)
    if shape == (tokens, plan.width):
        return
    raise Eagle3XError(
        f"{plan.target.architecture} handed over hidden states of shape {shape} for {tokens} tokens; the "
        f"draft reads {plan.planes} planes of {plan.target.width}: {(tokens, plan.width)}\n"
        f"    why: {plan.describe()}\n"
        "    hint: this target's capture does not work in this configuration; serve it without "
        "--speculative-algorithm and report it with the output of eagle3x env"
    )
