"""``sglang serve --help`` shows the flags of plugins, which stock SGLang forgets.

Every other command loads its plugins before it builds its parser; the help of ``sglang serve`` is
printed before.  The only code of this package that runs early enough is the platform entry point,
which calls :func:`prepare`: for that one command line it waits for SGLang's command module and has
the plugins loaded first.

Knows one function of SGLang's command line; does nothing for any other command.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULE = "sglang.cli.serve"
FUNCTION = "_print_llm_help"  # probed in upstream.py


class _Watch(importlib.abc.MetaPathFinder):
    """Lets :data:`MODULE` load as ever, then wraps its help function; once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            _wrap(module)

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType) -> None:
    original = getattr(module, FUNCTION, None)
    if original is None:
        return  # upstream.check() names what is missing

    def with_plugins(*arguments: Any) -> Any:
        from . import upstream

        upstream.load_plugins()
        return original(*arguments)

    setattr(module, FUNCTION, with_plugins)


def prepare(arguments: Sequence[str] | None = None) -> None:
    """Arrange for the flags to be shown, where ``arguments`` (sys.argv) ask for that help."""
    words = list(sys.argv if arguments is None else arguments)[1:]
    if words[:1] == ["serve"] and {"-h", "--help"} & set(words) and MODULE not in sys.modules:
        sys.meta_path.insert(0, _Watch())
