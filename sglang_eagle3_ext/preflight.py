"""Everything that can be known before a weight is read, and every reason not to serve, at once.

Called three times: before SGLang resolves its arguments, after it has, and in each scheduler process
(where its result is used).  Reads configuration files, safetensors headers and small tensors only.

Knows the order of the checks; the checks are in ``config.py``, ``strict.py``, ``features.py``,
``taps.py`` and ``checkpoint.py``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoint, config, features, platform_cpu, strict, taps
from .errors import Problem, RefusedError

TARGET_FILES = ["config.json"]
DRAFT_FILES = ["*.json", "*.safetensors"]
OLDER_DRAFT_FILES = ["*.bin"]  # fetched where there are no safetensors
_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Preflight:
    """A launch that can be served, or so it seems before the weights are read.

    Attributes:
        options: values of the EAGLE3X options with their sources.
        steps, topk, draft_tokens: the shape of a round, complete.
        notes: what was filled in because nobody said it, and what to know about the draft.
        plan: taps to capture and how they reach the draft.
    """

    options: config.Resolved
    steps: int
    topk: int
    draft_tokens: int
    notes: tuple[str, ...]
    plan: taps.TapPlan

    def log_lines(self) -> Iterator[str]:
        """What to say when a server starts."""
        yield self.options.describe()
        yield from self.notes
        yield (
            f"{strict.STEPS} {self.steps}, {strict.TOPK} {self.topk}, "
            f"{strict.DRAFT_TOKENS} {self.draft_tokens}"
        )
        yield self.plan.describe()


@dataclass
class Collected:
    """Problems found so far, and the result where there are none."""

    problems: list[Problem] = field(default_factory=list)
    result: Preflight | None = None


def preflight(server_args: Any) -> Preflight:
    """Check a launch.

    Args:
        server_args: ServerArgs or a view of them, resolved or not.

    Raises:
        RefusedError: every problem at once.
    """
    collected = collect(server_args)
    if collected.problems:
        raise RefusedError(collected.problems)
    assert collected.result is not None
    return collected.result


def collect(server_args: Any) -> Collected:
    """Like :func:`preflight`, with the problems as a list.

    Of a checkpoint given by repository id, what the checks read is downloaded: the target's config.json,
    and the draft, which is small and needed in any case.
    """
    found = Collected()
    problems = found.problems
    cache = server_args.download_dir
    target = _folder(
        "--model-path", server_args.model_path, server_args.revision, TARGET_FILES, cache, problems
    )
    draft = _folder(
        "--speculative-draft-model-path",
        server_args.speculative_draft_model_path,
        server_args.speculative_draft_model_revision,
        DRAFT_FILES,
        cache,
        problems,
    )

    options = None
    try:
        options = config.resolve(draft)
    except RefusedError as error:
        problems += error.problems
    problems += features.server_problems(server_args)
    if options is not None:
        problems += features.kernel_problems(options.values.kernels, options.sources["kernels"])

    given = (
        server_args.speculative_num_steps,
        server_args.speculative_eagle_topk,
        server_args.speculative_num_draft_tokens,
    )
    draft_config = _read_config(draft, "--speculative-draft-model-path", problems)
    target_config = _read_config(target, "--model-path", problems)
    problems += strict.shape_problems(*given, draft_vocab=_draft_vocab(draft_config))

    plan = None
    notes: list[str] = []
    for flag, read in (("--model-path", target_config), ("--speculative-draft-model-path", draft_config)):
        if read and read.get("quantization_config") and platform_cpu.is_active():
            problems.append(_quantised(flag, read["quantization_config"]))
    if draft_config and target_config:
        checkpoint.check_positions(
            draft_config,
            target_config,
            server_args.context_length,
            os.environ.get(checkpoint.LONGER_ENVIRONMENT, "").lower() in ("1", "true", "yes", "y", "on"),
            problems,
            notes,
        )
    if options is not None and draft is not None and target is not None and draft_config and target_config:
        described = taps.read_target(target_config, str(target), problems)
        known = checkpoint.check_architecture(draft, draft_config, platform_cpu.is_active(), problems)
        if described is not None and known:
            plan = taps.resolve(options, draft_config, described, problems, notes)
        if plan is not None:
            checkpoint.check(
                draft,
                draft_config,
                target,
                target_config,
                plan,
                problems,
                notes,
            )
    if problems:
        return found
    assert options is not None and plan is not None
    steps, topk, draft_tokens, filled = strict.fill_shape(*given)
    assert steps is not None and topk is not None and draft_tokens is not None
    found.result = Preflight(options, steps, topk, draft_tokens, (*filled, *notes), plan)
    return found


def _folder(
    flag: str,
    path: str | None,
    revision: str | None,
    files: list[str],
    cache: str | None,
    problems: list[Problem],
) -> Path | None:
    """The local folder of a checkpoint, fetched where it is a repository id; None with a problem."""
    if path and Path(path).is_dir():
        return Path(path)
    hint = f"pass {flag} with the folder of the checkpoint, or with its repository id"
    shown = repr(path) if path else "nothing"
    if not path:
        why = "there is no draft to serve"
    elif not _REPOSITORY_ID.fullmatch(path):
        why = (
            "this is a file" if Path(path).exists() else "there is no such folder, and it is no repository id"
        )
    elif os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        why = "SGLANG_USE_MODELSCOPE is set, and the checks read a local folder or the Hugging Face hub"
        hint = f"download it first and pass {flag} with its folder"
    else:
        try:
            fetched = _fetch(path, revision, files, cache)
            if files is DRAFT_FILES and not any(fetched.glob("*.safetensors")):
                fetched = _fetch(path, revision, [*DRAFT_FILES, *OLDER_DRAFT_FILES], cache)
            return fetched
        except Exception as error:  # whatever the hub client raises: offline, no such repository, no access
            reason = " ".join(str(error).split()) or type(error).__name__
            why = f"it is no folder here and cannot be fetched: {reason[:300]}"
    problems.append(Problem(flag, shown, "a folder or a repository id", why, hint))
    return None


def _fetch(path: str, revision: str | None, files: list[str], cache: str | None) -> Path:
    import huggingface_hub  # SGLang requires it

    return Path(
        huggingface_hub.snapshot_download(path, revision=revision, allow_patterns=files, cache_dir=cache)
    )


def _read_config(folder: Path | None, flag: str, problems: list[Problem]) -> dict[str, Any] | None:
    if folder is None:
        return None
    path = folder / "config.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(read, dict):
            return read
        why = "it is not a JSON object"
    except (OSError, ValueError) as error:
        why = str(error)
    problems.append(
        Problem(
            flag,
            str(folder),
            "a checkpoint folder with a readable config.json",
            f"{path.name}: {why}",
            "pass the folder that holds config.json and the safetensors files",
        )
    )
    return None


def _quantised(flag: str, settings: Any) -> Problem:
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    return Problem(
        f"{flag}, config.json: quantization_config",
        repr(method),
        "nothing",
        "quantised layers need kernels that a CPU build of SGLang does not have",
        "serve it on a GPU, or pass a checkpoint in bfloat16 or float32",
    )


def _draft_vocab(draft_config: dict[str, Any] | None) -> int | None:
    if draft_config is None:
        return None
    value = draft_config.get("draft_vocab_size") or draft_config.get("vocab_size")
    return value if isinstance(value, int) and value > 0 else None
