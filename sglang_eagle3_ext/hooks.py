"""What the plugin wraps around SGLang: its parser, its argument resolution, its request intake.

Each hook is one function and one line of :data:`START`, :data:`INTAKE` or :data:`POOLS`.  SGLang logs a
hook that it cannot apply and goes on, so :func:`require_landed` looks afterwards.

Knows SGLang's start-up order; the rules themselves are in ``config.py``, ``strict.py`` and
``features.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import config, features, platform_cpu, strict, upstream
from .errors import Eagle3XError, Problem, RefusedError, UpstreamMismatchError
from .preflight import collect

NAME = "EAGLE3X"
AUDITED = ("EAGLE", "EAGLE3", "NEXTN")
_RECORD_FLAGS = "_eagle3x_flags"


# --- ending a start -----------------------------------------------------------------------------------


def _is_command() -> bool:
    """Whether this process is an SGLang command, so that nobody can catch an exception."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name in ("sglang.launch_server", "sglang.cli.main"))
    return os.path.basename(sys.argv[0]) in ("sglang", "sglang.exe")


def end_start(error: Eagle3XError) -> NoReturn:
    """Raise ``error``; in a command print it as its last lines instead of a traceback, exit code 1."""
    if _is_command():
        raise SystemExit(f"error: {error}") from error
    raise error


# --- the hooks ----------------------------------------------------------------------------------------


def add_flags(result: Any, parser: Any) -> None:
    """After ``ServerArgs.add_cli_args``: ours stand beside SGLang's flags."""
    config.add_flags(parser)


def keep_flags(record: Any, cls: Any, arguments: Any) -> None:
    """After ``ServerArgs.from_cli_args``: the flags stay with the record made from them."""
    setattr(record, _RECORD_FLAGS, dict(getattr(arguments, config.NAMESPACE_FLAGS, {})))


def resolve_strictly(original: Callable[[Any], None], record: Any) -> None:
    """Around ``ServerArgs.resolve_once``: refuse what can be seen before, audit what was done.

    SGLang resolves in the main process, before any scheduler process starts.
    """
    if upstream.is_resolved(record):
        original(record)
        return
    try:
        flags = getattr(record, _RECORD_FLAGS, {})
        config.publish_flags(flags)
        asked = str(record.speculative_algorithm or "").upper()
        problems = [] if asked == NAME else _unused(flags)
        audited = asked == NAME or (asked in AUDITED and config.strict_builtin())
        if asked == NAME:
            problems += collect(upstream.resolving_view(record)).problems
        builtin_on_cpu = asked in AUDITED and platform_cpu.is_active()
        if builtin_on_cpu and not audited:
            problems.append(_builtin_on_cpu(asked))
        if problems:
            raise RefusedError(problems)
        original(record)
        if audited:
            problems = strict.audit(*upstream.resolution(record))
        if builtin_on_cpu:
            problems.append(_builtin_on_cpu(asked))
        if problems:
            upstream.unresolve(record)
            raise RefusedError(problems, f"{asked} would not run as it was asked to")
        if asked == NAME:
            apply(INTAKE)
    except Eagle3XError as error:
        end_start(error)


def _unused(flags: dict[str, str]) -> list[Problem]:
    return [
        Problem(
            config.OPTIONS[name].flag,
            text,
            f"together with --speculative-algorithm {NAME}",
            "without it nobody reads the flag",
            f"add --speculative-algorithm {NAME}, or drop {config.OPTIONS[name].flag}",
        )
        for name, text in flags.items()
    ]


def _builtin_on_cpu(asked: str) -> Problem:
    return Problem(
        "--speculative-algorithm",
        asked,
        f"{NAME}, or nothing",
        "the CPU platform of this package has no kernels for SGLang's own speculative decoding",
        f"pass --speculative-algorithm {NAME}; it serves the same EAGLE-3 drafts",
    )


def check_request(result: Any, tokenizer_manager: Any, request: Any, *rest: Any, **named: Any) -> None:
    """After ``TokenizerManager._create_tokenized_object``: a ValueError here answers HTTP 400."""
    if str(upstream.get_spec().speculative_algorithm or "").upper() != NAME:
        return
    problems = features.request_problems(result)
    if problems:
        raise RefusedError(problems, "EAGLE3X cannot honour this request")


def room_for_drafts(headroom: int) -> int:
    """After SGLang has sized the rows of its slot table, in tokens beyond the context.

    It allows for the draft tokens, but allocates for topk * steps, twice: near the end of the context a
    request with a wide tree would write into the row of another one.
    """
    return max(headroom, int(upstream.get_alloc_reserve_per_decode()))


Hooks = tuple[tuple[str, str, Callable[..., Any]], ...]

START: Hooks = (
    ("ServerArgs.add_cli_args", "AFTER", add_flags),
    ("ServerArgs.from_cli_args", "AFTER", keep_flags),
    ("ServerArgs.resolve_once", "AROUND", resolve_strictly),
)
# Applied only where EAGLE3X is going to be served: its target takes seconds to import.
INTAKE: Hooks = (("TokenizerManager._create_tokenized_object", "AFTER", check_request),)

# Applied in a scheduler process, before it builds its memory pools.
POOLS: Hooks = (("get_req_to_token_extra_context_len", "AFTER", room_for_drafts),)


def register(hooks: Hooks = START) -> None:
    """Hand ``hooks`` to SGLang, once; it applies them after all plugins have registered."""
    registry, kinds = upstream.HookRegistry, upstream.HookType
    for alias, kind, hook in hooks:
        if not upstream.hook_applied(alias):
            registry.register(upstream.hook_target(alias), hook, kinds[kind])


def apply(hooks: Hooks) -> None:
    """Register ``hooks`` after SGLang has applied the others, and check that they are in place.

    Raises:
        UpstreamMismatchError: see :func:`require_landed`.
    """
    register(hooks)
    upstream.HookRegistry.apply_hooks()
    require_landed(hooks)


def require_landed(hooks: Hooks = START) -> None:
    """Check that SGLang has applied every hook.

    Raises:
        UpstreamMismatchError: naming those it has not.
    """
    missing = [alias for alias, _, _ in hooks if not upstream.hook_applied(alias)]
    if missing:
        raise UpstreamMismatchError(
            f"sglang {upstream.installed_version()} did not apply EAGLE3X's hooks on {', '.join(missing)}\n"
            "    why: it logs such a failure and goes on; checks and options would be missing\n"
            "    hint: look for 'Failed to apply hooks' in the log above; SGLANG_PLUGINS=eagle3x,eagle3x_cpu "
            "starts without other plugins"
        )
