"""What the plugin says when it refuses: every problem at once, each with a way out.

Knows nothing of SGLang or torch, so that any module (and the command line) can raise these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One reason not to serve, worded for the person who typed the command.

    Attributes:
        argument: flag, environment variable, file key or tensor the problem is about.
        given: the value that was met, as the user would recognise it.
        allowed: what would have been accepted.
        why: what would go wrong otherwise.
        hint: a change that works, preferably a command line to copy.
    """

    argument: str
    given: object
    allowed: str
    why: str
    hint: str

    def render(self) -> str:
        """The problem as text: one sentence with the four facts, then the hint on its own line."""
        return (
            f"{self.argument}: given {self.given}, allowed {self.allowed}\n"
            f"    why: {self.why}\n"
            f"    hint: {self.hint}"
        )


class Eagle3XError(ValueError):
    """Base of all refusals; a ``ValueError`` because SGLang ends a start cleanly on one."""


class RefusedError(Eagle3XError):
    """One or more problems, collected before the weights load.

    Args:
        problems: at least one.
        context: what was being checked, for the headline.
    """

    def __init__(
        self, problems: Iterable[Problem], context: str = "EAGLE3X cannot serve this as it was asked"
    ):
        self.problems: tuple[Problem, ...] = tuple(problems)
        assert self.problems, "a refusal needs a problem"
        self.context = context
        count = len(self.problems)
        head = f"{context}: {count} problem{'s' if count > 1 else ''}"
        body = "\n".join(f"{i}. {problem.render()}" for i, problem in enumerate(self.problems, 1))
        super().__init__(f"{head}\n{body}")

    def __reduce__(self) -> tuple[type[RefusedError], tuple[tuple[Problem, ...], str]]:
        # SGLang sends exceptions between processes; the default pickling would call
        # __init__ with the rendered text.
        return (type(self), (self.problems, self.context))


class UpstreamMismatchError(Eagle3XError):
    """The installed SGLang is not the one this plugin was written for."""
