"""``eagle3x``: what the package offers beside serving.

Each sub-command is one entry of :data:`COMMANDS`; what it needs is imported when it runs, so that
``eagle3x --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

from . import __version__
from .errors import Eagle3XError


@dataclass(frozen=True)
class Command:
    """One sub-command.

    Attributes:
        help: one line.
        add_arguments: fills its parser; must not import anything heavy.
        run: does it and returns the exit code.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


# --- assets -------------------------------------------------------------------------------------------


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _assets(arguments: argparse.Namespace) -> int:
    from . import assets

    found = assets.paths()
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, folders in found.items():
            for part, path in folders.items():
                print(f"{name} {part:6} {path}")
    return 0


# --- options and features -----------------------------------------------------------------------------


def _page(module: str) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        print(importlib.import_module(f"{__package__}.{module}").markdown())
        return 0

    return run


def _nothing(parser: argparse.ArgumentParser) -> None:
    return None


# --- env ----------------------------------------------------------------------------------------------

_DISTRIBUTIONS = ("sglang", "torch", "triton", "transformers", "numba", "flashinfer-python", "sglang-kernel")


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment() -> dict[str, str]:
    """What somebody who reads a bug report needs to know; values are short texts."""
    import os

    from . import config, upstream

    facts = {
        "sglang-eagle3-ext": __version__,
        **{name: _distribution(name) for name in _DISTRIBUTIONS},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    try:
        upstream.check()
        facts["sglang seams"] = f"{len(upstream.SEAMS)} present"
    except Eagle3XError as error:
        facts["sglang seams"] = str(error)
    groups = {"plugin": "sglang.srt.plugins", "platform": "sglang.srt.platforms"}
    for what, group in groups.items():
        names = [entry.name for entry in importlib.metadata.entry_points(group=group)]
        facts[f"{what} entry points"] = ", ".join(sorted(names)) or "none"
    facts.update(_live())
    relevant = [
        n for n in os.environ if n in config.ENVIRONMENT or n in ("SGLANG_PLUGINS", "SGLANG_PLATFORM")
    ]
    facts.update({name: os.environ[name] for name in sorted(relevant)})
    return facts


def _live() -> dict[str, str]:
    """What SGLang makes of this package in a process like this one."""
    from . import upstream

    try:
        upstream.load_plugins()
        registered = upstream.get_registered_spec("EAGLE3X")
        return {"SGLang's platform": type(upstream.current_platform).__name__, "EAGLE3X": repr(registered)}
    except Exception as error:
        return {"EAGLE3X": f"{type(error).__name__}: {error}"}


def _env(arguments: argparse.Namespace) -> int:
    facts = environment()
    if arguments.json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:{width}}  {value}" for name, value in facts.items()))
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(__version__)
    return 0


# --- demo ---------------------------------------------------------------------------------------------


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    importlib.import_module(f"{__package__}.demo").add_arguments(parser)


def _demo(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module(f"{__package__}.demo").run(arguments))


COMMANDS: dict[str, Command] = {
    "demo": Command("replay the incident and mend it, on this machine's CPU", _demo_arguments, _demo),
    "assets": Command("where the small model pair is", _json_flag, _assets),
    "options": Command("the options of EAGLE3X, as a page of documentation", _nothing, _page("config")),
    "features": Command(
        "what is served and what is refused, as a page of documentation", _nothing, _page("features")
    ),
    "env": Command("versions, platform and registration, to copy into a bug report", _json_flag, _env),
    "version": Command("the version of this package", _nothing, _version),
}


def parser_for(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser; only the sub-command that ``arguments`` name gets its own arguments."""
    parser = argparse.ArgumentParser(
        prog="eagle3x",
        allow_abbrev=False,
        description="Serve any EAGLE-3 draft exactly as it was trained, on stock SGLang. "
        "To serve: sglang serve --speculative-algorithm EAGLE3X ...",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name in arguments:
            command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Console script ``eagle3x``; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser_for(given).parse_args(given)
    try:
        return int(parsed.run(parsed))
    except Eagle3XError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
