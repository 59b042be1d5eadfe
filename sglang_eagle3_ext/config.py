"""The options of EAGLE3X: one schema for flags, environment, draft manifest and documentation.

Precedence, highest first: ``--eagle3x-*`` flags, ``EAGLE3X_CONFIG``, ``eagle3x.json`` in the draft
folder, the default.  Every value remembers where it came from.  Unknown keys and wrong types are
refused, all at once.

Knows nothing of SGLang or torch: :func:`add_flags` gets an argparse parser handed in.

How flags travel: argparse puts them into the namespace, the plugin copies them onto the ServerArgs
record made from it, and :func:`publish_flags` writes them into ``EAGLE3X_FLAGS`` when that record is
resolved, just before the scheduler processes start and inherit it.  So a second server in the same
process never sees the flags of the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Problem, RefusedError

CONFIG_ENVIRONMENT = "EAGLE3X_CONFIG"
FLAGS_ENVIRONMENT = "EAGLE3X_FLAGS"
STRICT_ENVIRONMENT = "EAGLE3X_STRICT"
NAMESPACE_FLAGS = "eagle3x_flags"  # attribute of the argparse namespace
MANIFEST = "eagle3x.json"
MANIFEST_SCHEMA = 1

# Every variable this package reads.  Another one that starts with EAGLE3X_ is a typo or a wish, and
# reading past it would be the silent default that this package exists to end.
ENVIRONMENT: dict[str, str] = {
    CONFIG_ENVIRONMENT: "options as inline JSON, or the path of a JSON file",
    STRICT_ENVIRONMENT: "1: audit SGLang's own EAGLE and EAGLE3 too; a speculative flag that SGLang changes "
    "is an error",
    "EAGLE3X_CPU_THREADS": "threads per torch operation on the CPU platform, default 1",
    FLAGS_ENVIRONMENT: "internal: carries the flags to the scheduler processes; the server sets it",
}
_MANIFEST_ONLY: dict[str, tuple[type | tuple[type, ...], str]] = {
    "schema": (int, f"the number {MANIFEST_SCHEMA}"),
    "notes": ((str, list), "text or a list of texts"),
    "provenance": (dict, "an object, free-form"),
}


# --- the schema -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """What a field of :class:`Options` says about itself beside its name and default."""

    allowed: str  # what a value may be, in words
    help: str  # what it does, one or two sentences
    parse: Callable[[str], Any]  # flag text to JSON value; ValueError where the text cannot be one
    accept: Callable[[Any], bool]  # whether a JSON value is valid
    default_text: str = ""  # where the default needs words
    freeze: Callable[[Any], Any] = lambda value: value  # JSON value to field value


def _option(default: Any, allowed: str, help: str, parse: Any, accept: Any, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"rule": _Rule(allowed, help, parse, accept, **more)})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Options:
    """Field = JSON key = ``--eagle3x-`` flag = row of ``docs/options.md``."""

    taps: tuple[str, ...] | None = _option(
        None,
        "a comma-separated list (in JSON: a list) of embed, resid@B, out@K, final_norm",
        "Hidden states the draft was trained on, in training order.",
        lambda text: [part.strip() for part in text.split(",")],
        lambda value: (
            isinstance(value, list) and bool(value) and all(isinstance(t, str) and t for t in value)
        ),
        default_text="the draft's own eagle_config, where its meaning can be proved for this target; "
        "otherwise an error",
        freeze=tuple,
    )
    kernels: str = _option(
        "auto",
        "auto, own, sglang",
        "Tree kernels: auto takes SGLang's on CUDA and our own on the CPU platform.",
        str,
        lambda value: value in ("auto", "own", "sglang"),
    )
    accept_alarm: float = _option(
        1.1,
        "0 (never), or a number from 1.0 up",
        "Warn when the mean accept length over the first rounds is below this; 1.0 is a draft that is "
        "never right.",
        float,
        lambda value: _is_number(value) and (value == 0 or value >= 1),
    )
    accept_alarm_rounds: int = _option(
        200,
        "a whole number from 1 up",
        "Verify rounds, summed over requests, after which the alarm decides.",
        int,
        lambda value: _is_whole(value) and value >= 1,
    )


@dataclass(frozen=True)
class Option:
    """One field of :class:`Options`, as the functions below need it."""

    name: str
    default: Any
    rule: _Rule

    @property
    def flag(self) -> str:
        return "--eagle3x-" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        return self.rule.default_text or str(self.default)

    def problem(self, where: str, given: Any) -> Problem:
        """``given`` cannot be a value of this option."""
        return Problem(
            where,
            repr(given),
            self.rule.allowed,
            self.rule.help,
            f"leave it out for the default ({self.default_text})",
        )


OPTIONS: dict[str, Option] = {
    field.name: Option(field.name, field.default, field.metadata["rule"])
    for field in dataclasses.fields(Options)
}


@dataclass(frozen=True)
class Resolved:
    """All layers merged: the values, and for each where it came from."""

    values: Options
    sources: Mapping[str, str]

    def describe(self) -> str:
        """One line for the log: every value with its source."""
        return "; ".join(
            f"{name} = {_text(getattr(self.values, name))} ({self.sources[name]})" for name in OPTIONS
        )


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


# --- flags ------------------------------------------------------------------------------------------


class _KeepText(argparse.Action):
    """Collect a flag beside SGLang's own arguments.

    The text is kept as typed; :func:`resolve` judges it together with everything else, so that one
    error can name all problems.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flags = dict(getattr(namespace, NAMESPACE_FLAGS, {}))
        flags[self.dest.removeprefix("eagle3x_")] = values
        setattr(namespace, NAMESPACE_FLAGS, flags)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--eagle3x-*`` to SGLang's parser."""
    group = parser.add_argument_group("EAGLE3X", "EAGLE-3 drafts served as trained (sglang-eagle3-ext)")
    for option in OPTIONS.values():
        text = f"{option.rule.help} Allowed: {option.rule.allowed}. Default: {option.default_text}."
        group.add_argument(
            option.flag,
            dest=f"eagle3x_{option.name}",
            action=_KeepText,
            default=argparse.SUPPRESS,
            metavar=option.name.upper(),
            help=text.replace("%", "%%"),  # argparse formats help with %
        )


def publish_flags(flags: Mapping[str, str]) -> None:
    """Make ``flags`` the ones that this process and the processes it starts read."""
    if flags:
        os.environ[FLAGS_ENVIRONMENT] = json.dumps(dict(flags))
    else:
        os.environ.pop(FLAGS_ENVIRONMENT, None)


# --- reading ----------------------------------------------------------------------------------------


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` where something known is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


_EXAMPLE = '{"taps": ["embed", "resid@2"]}'


def _refuse(source: str, given: str, why: str) -> RefusedError:
    hint = f"write for instance {_EXAMPLE}; python -m json.tool shows where JSON breaks"
    return RefusedError([Problem(source, given, "a JSON object", why, hint)])


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice")
        found[key] = value
    return found


def _read_object(text: str, source: str) -> dict[str, Any]:
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except ValueError as error:
        raise _refuse(source, shown, f"it cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refuse(source, shown, "options are read by name")
    return value


def _read_file(path: Path, source: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(source, str(path), f"the file cannot be read: {error}") from None
    return _read_object(text, source)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(CONFIG_ENVIRONMENT, "").strip()
    if not text:
        return {}
    if text[0] in "{[":
        return _read_object(text, CONFIG_ENVIRONMENT)
    if not Path(text).is_file():
        raise _refuse(CONFIG_ENVIRONMENT, repr(text), "it is neither JSON nor the path of a file")
    return _read_file(Path(text), f"{CONFIG_ENVIRONMENT}={text}")


def _check_keys(layer: Mapping[str, Any], where: str, manifest: bool) -> list[Problem]:
    known = [*(_MANIFEST_ONLY if manifest else ()), *OPTIONS]
    problems = []
    for key, value in layer.items():
        if manifest and key in _MANIFEST_ONLY:
            kind, words = _MANIFEST_ONLY[key]
            if not isinstance(value, kind) or isinstance(value, bool):
                problems.append(
                    Problem(
                        f"{where}: {key}",
                        repr(value),
                        words,
                        "it has another type",
                        f"correct or remove {key!r}",
                    )
                )
        elif key not in OPTIONS:
            problems.append(
                Problem(
                    where,
                    f"unknown key {key!r}{did_you_mean(key, known)}",
                    ", ".join(known),
                    "a key that nobody reads would be lost in silence",
                    f"correct the spelling of {key!r} or remove it"
                    + ("; free-form facts belong under 'provenance'" if manifest else ""),
                )
            )
        elif not OPTIONS[key].rule.accept(value):
            problems.append(OPTIONS[key].problem(f"{where}: {key}", value))
    if (
        manifest
        and _is_whole(layer.get("schema", MANIFEST_SCHEMA))
        and layer.get("schema") != MANIFEST_SCHEMA
    ):
        problems.append(
            Problem(
                f"{where}: schema",
                repr(layer["schema"]) if "schema" in layer else "nothing",
                str(MANIFEST_SCHEMA),
                "another version may mean other things by the same keys",
                f'write "schema": {MANIFEST_SCHEMA} if the file is meant for this version of the plugin',
            )
        )
    return problems


def _flag_layer(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    values: dict[str, Any] = {}
    problems = []
    for name, text in json.loads(environ.get(FLAGS_ENVIRONMENT) or "{}").items():
        option = OPTIONS[name]
        try:
            values[name] = option.rule.parse(text)
        except ValueError:
            problems.append(option.problem(option.flag, text))
            continue
        if not option.rule.accept(values[name]):
            problems.append(option.problem(option.flag, text))
    return values, problems


def environment_problems(environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Variables that start with ``EAGLE3X_`` and that nobody reads."""
    environ = os.environ if environ is None else environ
    return [
        Problem(
            name,
            repr(value),
            ", ".join(n for n in ENVIRONMENT if n != FLAGS_ENVIRONMENT),
            f"no variable of this name is read{did_you_mean(name, ENVIRONMENT)}",
            f"unset {name}; options go into {CONFIG_ENVIRONMENT}, for instance '{_EXAMPLE}'",
        )
        for name, value in environ.items()
        if name.startswith("EAGLE3X_") and name not in ENVIRONMENT
    ]


def resolve(draft: Path | None, environ: Mapping[str, str] | None = None) -> Resolved:
    """All layers merged.

    Args:
        draft: local folder of the draft checkpoint; None where it has none (yet).
        environ: environment to read, this process's by default.

    Raises:
        RefusedError: naming every unknown key, wrong type and unreadable value.
    """
    environ = os.environ if environ is None else environ
    problems = environment_problems(environ)
    flags, flag_problems = _flag_layer(environ)
    problems += flag_problems
    layers: list[tuple[str | None, dict[str, Any]]] = [(None, flags)]
    manifest = None if draft is None else draft / MANIFEST
    for where, is_manifest in ((CONFIG_ENVIRONMENT, False), (str(manifest), True)):
        if is_manifest and (manifest is None or not manifest.exists()):
            continue
        try:
            layer = _read_file(Path(where), where) if is_manifest else _from_environment(environ)
        except RefusedError as error:
            problems += error.problems
            continue
        problems += _check_keys(layer, where, is_manifest)
        layers.append((where, layer))
    if problems:
        raise RefusedError(problems, "options of EAGLE3X")
    values: dict[str, Any] = {}
    sources = dict.fromkeys(OPTIONS, "default")
    for where, layer in reversed(layers):
        for name, option in OPTIONS.items():
            if name in layer:
                values[name] = option.rule.freeze(layer[name])
                sources[name] = where or option.flag
    return Resolved(Options(**values), sources)


def strict_builtin(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``EAGLE3X_STRICT`` asks for the audit of SGLang's own EAGLE and EAGLE3.

    Raises:
        RefusedError: another value than 0, 1, false, true.
    """
    given = (os.environ if environ is None else environ).get(STRICT_ENVIRONMENT, "")
    if given.lower() in ("1", "true"):
        return True
    if given.lower() in ("0", "false", ""):
        return False
    raise RefusedError(
        [
            Problem(
                STRICT_ENVIRONMENT,
                repr(given),
                "0, 1, false, true",
                "it switches the audit of the built-in EAGLE and EAGLE3; a guess could switch it off",
                f"export {STRICT_ENVIRONMENT}=1",
            )
        ]
    )


# --- documentation ----------------------------------------------------------------------------------


def markdown() -> str:
    """The reference page ``docs/options.md``."""
    lines = [
        "# Options",
        "",
        "Generated by `python -m sglang_eagle3_ext.config --write docs/options.md`; a test keeps it in step",
        "with the schema.",
        "",
        "Precedence, highest first:",
        "",
        "1. the flag, in `sglang serve` and `python -m sglang.launch_server`;",
        f"2. the environment variable `{CONFIG_ENVIRONMENT}`: inline JSON or the path of a JSON file;",
        f"3. the manifest `{MANIFEST}` in the draft's folder;",
        "4. the default.",
        "",
        "`sglang.Engine` takes no flags: use 2 or 3. Every value is logged with its source when the server",
        "starts. Unknown keys, keys given twice, wrong types and unknown `EAGLE3X_*` variables are refused,",
        "all at once; so are the flags without `--speculative-algorithm EAGLE3X`.",
        "",
        "| flag | JSON key | default | allowed | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{o.flag}` | `{o.name}` | {o.default_text} | {o.rule.allowed} | {o.rule.help} |"
        for o in OPTIONS.values()
    ]
    lines += [
        "",
        "## Manifest",
        "",
        f"`{MANIFEST}` is a JSON object with `schema` ({MANIFEST_SCHEMA}), any of the keys above, and for",
        "people: `notes` (text) and `provenance` (an object, free-form). For instance:",
        "",
        "```json",
        '{"schema": 1, "taps": ["embed", "resid@2", "resid@5"], "provenance": {"trainer": "..."}}',
        "```",
        "",
        "## Environment variables",
        "",
        "| variable | meaning |",
        "| --- | --- |",
    ]
    lines += [f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()]
    lines += [
        "| `SGLANG_PLATFORM=eagle3x_cpu` | SGLang's own: force the CPU platform on a machine with an "
        "accelerator |",
        "| `SGLANG_PLUGINS` | SGLang's own: a list of plugins to load; without `eagle3x` in it SGLang does "
        "not know EAGLE3X, and without `eagle3x_cpu` not the CPU platform |",
        "| `SGLANG_PLATFORM=<another>` | SGLang's own: another platform's name excludes this package, and "
        "EAGLE3X with it |",
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """``python -m sglang_eagle3_ext.config [--write FILE]``: print or write the reference page."""
    parser = argparse.ArgumentParser(prog="python -m sglang_eagle3_ext.config", allow_abbrev=False)
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
