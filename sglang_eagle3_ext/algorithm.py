"""EAGLE3X as SGLang knows it: the name, the answers to SGLang's questions, the start-up callbacks.

Registration cannot fail in silence.  What goes wrong is kept in a :class:`Failure` and raised by the
callback that SGLang runs for the arguments of a registered algorithm, in the main process, before
any weight is read.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from . import features, hooks, platform_cpu, upstream
from .errors import Eagle3XError, UpstreamMismatchError
from .preflight import preflight

logger = logging.getLogger(__name__)

NAME = "EAGLE3X"
MAX_RUNNING_REQUESTS = 48  # SGLang's own default for its EAGLE family


def register() -> None:
    """Register the algorithm and the hooks; keep whatever prevents it for the first who asks.

    Raises:
        SystemExit: EAGLE3X is on the command line and SGLang's registry is gone, so that no callback
            could report it.
        Eagle3XError: the same, EAGLE3X not on the command line; SGLang logs it.
    """
    try:
        upstream.check()
        _register(create_class())
        if platform_cpu.is_active():
            upstream.add_attention_backend_choices([features.CPU_ATTENTION])
        hooks.register()
    except Exception as error:
        failure = error if isinstance(error, Eagle3XError) else _unexpected(error)
        _register_failure(failure)


def _unexpected(error: Exception) -> UpstreamMismatchError:
    return UpstreamMismatchError(
        f"EAGLE3X could not register with sglang {upstream.installed_version()}: "
        f"{type(error).__name__}: {error}\n"
        f"    hint: pip install --force-reinstall --no-deps sglang=={upstream.SUPPORTED_SGLANG[-1]}"
    )


def _register(spec_class: Any, validate: Any = None) -> None:
    decorator = upstream.SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=validate or check_start,
        spec_class=spec_class,
    )
    decorator(_worker_class)


def _register_failure(failure: Eagle3XError) -> None:
    """Let the name exist, so that asking for it says why it cannot be served."""

    def refuse(server_args: Any) -> None:
        hooks.end_start(failure)

    try:
        existing = upstream.get_registered_spec(NAME)
        if existing is not None:  # a later step failed
            existing.validate_server_args = refuse
        else:
            _register(upstream.CustomSpecAlgo, refuse)
        return
    except Exception:
        logger.exception("EAGLE3X: SGLang's registry of speculative algorithms is not usable")
    if any(NAME in argument.upper() for argument in sys.argv):
        # SGLang swallows every Exception of a plugin; SystemExit is none.
        raise SystemExit(f"error: {failure}")
    raise failure


def _worker_class(server_args: Any) -> type:
    """The factory SGLang calls in a scheduler process."""
    from .worker import Eagle3XWorker

    return Eagle3XWorker


def check_start(server_args: Any) -> None:
    """SGLang's callback for our arguments: refuse, or fill in what was left open.

    Args:
        server_args: SGLang's stand-in for ServerArgs; what is assigned is declared as a resolution.

    Raises:
        RefusedError: every problem at once.
        UpstreamMismatchError: a hook of ours was not applied.
    """
    try:
        hooks.require_landed()
        checked = preflight(server_args)
    except Eagle3XError as error:
        hooks.end_start(error)
        raise AssertionError("unreachable") from error
    server_args.speculative_num_steps = checked.steps
    server_args.speculative_eagle_topk = checked.topk
    server_args.speculative_num_draft_tokens = checked.draft_tokens
    for line in checked.log_lines():
        logger.info("EAGLE3X: %s", line)


@functools.cache
def create_class() -> type:
    """The algorithm class; built on demand, for its base comes from SGLang."""

    class Eagle3XAlgorithm(upstream.CustomSpecAlgo):
        """What SGLang asks of an algorithm, answered as for its own EAGLE3 except where said."""

        def __repr__(self) -> str:
            return f"Eagle3XAlgorithm({self.name!r})"

        # Everything that asks for the EAGLE family (scheduler, graphs, memory) finds one of it.
        def is_eagle(self) -> bool:
            return True

        def is_eagle3(self) -> bool:
            return True

        def need_topk(self) -> bool:
            return True

        def supports_mixed_chunk(self) -> bool:
            """Refused by :mod:`.features` where it is not served; true for SGLang's own checks."""
            return True

        def supports_grammar_overlap(self) -> bool:
            return True

        def carries_draft_hidden_states(self) -> bool:
            return True

        def get_platform_worker_cls(self) -> None:
            """Our factory decides, on every platform."""
            return

        def create_future_map(
            self,
            device: Any,
            req_to_token_pool: Any,
            needs_cpu_seq_lens: bool = True,
            needs_confidence_relay: bool = False,
        ) -> Any:
            return upstream.FutureMap(
                device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
            )

        def handle_server_args(self, server_args: Any) -> None:
            """The defaults that SGLang gives its own EAGLE family by name, each with a line in the log."""
            if server_args.max_running_requests is None:
                server_args.max_running_requests = MAX_RUNNING_REQUESTS
                logger.info(
                    "EAGLE3X: --max-running-requests not given: %d, as for SGLang's own EAGLE family",
                    MAX_RUNNING_REQUESTS,
                )
            if server_args.device == "cpu" and not server_args.disable_overlap_schedule:
                server_args.disable_overlap_schedule = True
                logger.info(
                    "EAGLE3X: overlap schedule off: SGLang has none for speculative decoding on a CPU"
                )

    return Eagle3XAlgorithm
