"""``eagle3x demo``: the incident this package exists for, replayed and mended on a CPU.

Three real servers stand side by side (no speculation, SGLang's default taps, the trained taps) and get
the same held-out prompts in turn, one request at a time, through the OpenAI-compatible endpoint.  Times
are compared within the run only: what else the machine does hits all three.

Knows SGLang by its command line and its HTTP interface alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from . import __version__, assets, taps
from .errors import Eagle3XError, Problem, RefusedError

STEPS = 5
READY_LIMIT_S = 300
INCIDENT_LIMIT_S = 120
STOP_LIMIT_S = 20
REQUEST_LIMIT_S = 300

NO_SPECULATION, INCIDENT, STOCK, TRAINED = "no_speculation", "incident_flags", "stock_taps", "trained_taps"
SERVED = (NO_SPECULATION, STOCK, TRAINED)
TITLES = {
    NO_SPECULATION: "no speculation",
    INCIDENT: "the incident's flags",
    STOCK: "SGLang's default taps",
    TRAINED: "the trained taps",
}


# --- what is asked for -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``eagle3x demo``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="held-out prompts (default 12)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="tokens per answer (default 96)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write the comparison as PNG (default eagle3x-demo.png; with --json only where asked for)",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the servers' logs there (default: kept on failure)"
    )


def read_prompts() -> list[str]:
    """The held-out prompts that come with the tiny pair."""
    file = assets.ROOT / "tiny" / "prompts_heldout.json"
    return [entry["text"] for entry in json.loads(file.read_text(encoding="utf-8"))]


def _context(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["max_position_embeddings"])


def check_arguments(arguments: argparse.Namespace, available: int, context: int) -> None:
    """Refuse what cannot work before any server starts.

    Args:
        available: prompts there are; context: positions of the target.

    Raises:
        RefusedError: every problem at once.
    """
    problems = []
    if not 1 <= arguments.prompts <= available:
        problems.append(
            Problem(
                "--prompts",
                str(arguments.prompts),
                f"1 to {available}",
                "that many held-out prompts come with the package",
                "leave it out for 12",
            )
        )
    most = context // 2
    if not 2 <= arguments.max_new_tokens <= most:
        problems.append(
            Problem(
                "--max-new-tokens",
                str(arguments.max_new_tokens),
                f"2 to {most}",
                f"prompt and answer share a context of {context} tokens, and one token needs no draft",
                "leave it out for 96",
            )
        )
    if arguments.plot is not None:
        try:
            arguments.plot.parent.mkdir(parents=True, exist_ok=True)
            with arguments.plot.open("ab"):
                pass
        except OSError as error:
            problems.append(
                Problem(
                    "--plot", str(arguments.plot), "a file that can be written", str(error), "name another"
                )
            )
        if importlib.util.find_spec("matplotlib") is None:
            problems.append(
                Problem(
                    "--plot",
                    str(arguments.plot),
                    "nothing, without matplotlib",
                    "matplotlib draws it and is not installed",
                    "pip install matplotlib, or leave --plot out",
                )
            )
    if problems:
        raise RefusedError(problems, "eagle3x demo")


# --- servers ------------------------------------------------------------------------------------------


def serve_command(pair: assets.Pair, speculative: Sequence[str], port: int | None = None) -> list[str]:
    """The command line of one server."""
    # By its path where the shell would not find it.
    sglang = "sglang" if shutil.which("sglang") else str(Path(sys.executable).with_name("sglang"))
    command = [sglang, "serve", "--model-path", str(pair.target)]
    if speculative:
        command += ["--speculative-algorithm", "EAGLE3X", "--speculative-draft-model-path", str(pair.draft)]
    command += speculative
    if port is None:
        return command
    # Three servers share the machine: small pools, and no scheduler that spins while it is idle.
    return [*command, "--port", str(port), "--sleep-on-idle", "--max-total-tokens", "16384"]


def speculative_flags(name: str, num_layers: int) -> list[str]:
    """The flags by which the acts differ."""
    if name == NO_SPECULATION:
        return []
    if name == INCIDENT:
        return [
            *("--speculative-num-steps", "1"),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "16"),
        ]
    flags = ["--speculative-num-steps", str(STEPS)]
    if name == STOCK:
        flags += [taps.FLAG, taps.names([2, num_layers // 2, num_layers - 3])]
    return flags


def _environment() -> dict[str, str]:
    """For the servers: this package's CPU platform, one thread, and nothing of the caller's settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3X_", "SGLANG_"))}
    scripts = str(Path(sys.executable).parent)
    return {
        **kept,
        "PATH": os.pathsep.join([scripts, kept.get("PATH", os.defpath)]),
        "SGLANG_PLATFORM": "eagle3x_cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Server:
    """One server process with its children.

    Attributes:
        command: what is run; log: where its output goes; port: where it listens.
    """

    command: list[str]
    log: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in a process group of its own, so that :meth:`stop` reaches its schedulers."""
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=_environment(), start_new_session=True
            )

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Return when it answers ``/health``.

        Raises:
            Eagle3XError: it ended, or took longer than ``limit_s``; with the end of its log.
        """
        assert self.process is not None
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            code = self.process.poll()
            if code is not None:
                raise Eagle3XError(f"a server ended with exit code {code} before it was ready\n{self.tail()}")
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise Eagle3XError(f"a server was not ready after {limit_s:.0f} s\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"last lines of {self.log}:", *text[-lines:]])

    def stop(self) -> int:
        """End it and its children; 0 where it ended because it was told to."""
        assert self.process is not None
        code = self.process.poll()
        if code is not None:
            return code
        self.process.terminate()
        try:
            code = self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return 0 if code in (0, -signal.SIGTERM, 128 + signal.SIGTERM) else self.process.returncode


@contextlib.contextmanager
def running(servers: dict[str, Server]) -> Iterator[None]:
    """Start all, wait for all, stop all whatever happens."""
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        yield
    finally:
        for server in servers.values():
            if server.process is not None:
                server.stop()


# --- measuring ----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What one server answered.

    Attributes:
        texts: one per prompt; tokens and seconds over all; verify_rounds 0 without speculation.
    """

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    verify_rounds: int = 0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float | None:
        """New tokens per verify round, as SGLang counts it; None without speculation."""
        return self.tokens / self.verify_rounds if self.verify_rounds else None


def ask(client: Any, model: str, prompt: str, new_tokens: int) -> tuple[str, int, int, float]:
    """One greedy completion: (text, tokens, verify rounds, seconds)."""
    began = time.perf_counter()
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        temperature=0,
        max_tokens=new_tokens,
        extra_body={"ignore_eos": True, "return_spec_tokens_details": True},
    )
    seconds = time.perf_counter() - began
    details = ((answer.model_extra or {}).get("sglext") or {}).get("spec_tokens_details") or {}
    return answer.choices[0].text, answer.usage.completion_tokens, details.get("spec_verify_ct", 0), seconds


def measure(
    servers: dict[str, Server], prompts: Sequence[str], new_tokens: int, out: TextIO
) -> dict[str, Measured]:
    """Ask every server every prompt, in turn and one at a time; the first server changes with the prompt."""
    import openai

    clients = {
        name: openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key="none",
            timeout=REQUEST_LIMIT_S,
            max_retries=0,
        )
        for name, server in servers.items()
    }
    models = {name: client.models.list().data[0].id for name, client in clients.items()}
    for name, client in clients.items():
        ask(client, models[name], prompts[0], new_tokens)  # not counted
    found = {name: Measured() for name in servers}
    names = list(servers)
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            text, tokens, rounds, seconds = ask(clients[name], models[name], prompt, new_tokens)
            measured = found[name]
            measured.texts.append(text)
            measured.tokens += tokens
            measured.verify_rounds += rounds
            measured.seconds += seconds
        print(
            f"  {i + 1} of {len(prompts)} prompts", end="\r" if out.isatty() else "\n", file=out, flush=True
        )
    return found


def replay_incident(command: list[str], log: Path) -> tuple[int, str, float]:
    """Start a server that should refuse: (exit code, its error, seconds)."""
    began = time.monotonic()
    server = Server(command, log, 0)
    server.start()
    assert server.process is not None
    try:
        code = server.process.wait(INCIDENT_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.stop()
        return 0, "the server started", time.monotonic() - began
    text = log.read_text(errors="replace")
    at = text.rfind("\nerror: ")
    return code, text[at + 1 :].strip() if at >= 0 else server.tail(), time.monotonic() - began


# --- reporting ----------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What was run."""
    found = {"sglang-eagle3-ext": __version__, "python": sys.version.split()[0]}
    for name in ("sglang", "torch", "transformers"):
        found[name] = importlib.metadata.version(name)
    return found


def report(
    measured: dict[str, Measured], exits: dict[str, int], incident: tuple[int, str, float]
) -> list[dict[str, Any]]:
    """The acts, in order, as ``--json`` prints them."""
    base = measured[NO_SPECULATION]
    acts = []
    for name in (NO_SPECULATION, INCIDENT, STOCK, TRAINED):
        if name == INCIDENT:
            acts.append(_act(name, incident[0], message=incident[1]))
            continue
        one = measured[name]
        acts.append(
            _act(
                name,
                exits[name],
                accept_length=one.accept_length,
                tok_s=one.tok_s,
                speedup=one.tok_s / base.tok_s,
                same_text=one.texts == base.texts,
            )
        )
    return acts


def _act(
    name: str,
    exit_code: int,
    accept_length: float | None = None,
    tok_s: float | None = None,
    speedup: float | None = None,
    same_text: bool | None = None,
    message: str = "",
) -> dict[str, Any]:
    def short(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        "name": name,
        "exit_code": exit_code,
        "accept_length": short(accept_length),
        "tok_s": short(tok_s),
        "speedup": short(speedup),
        "same_text": same_text,
        "message": message,
    }


def faults(acts: Sequence[dict[str, Any]]) -> list[str]:
    """What did not go as told; empty where all did."""
    by_name = {act["name"]: act for act in acts}
    found = []
    incident = by_name[INCIDENT]
    if incident["exit_code"] == 0 or "--speculative-num-draft-tokens" not in incident["message"]:
        found.append("the incident's flags were not refused")
    for name in SERVED:
        if by_name[name]["exit_code"] != 0:
            found.append(f"{TITLES[name]}: the server ended with exit code {by_name[name]['exit_code']}")
        if not by_name[name]["same_text"]:
            found.append(f"{TITLES[name]}: another text than without speculation")
    stock, trained = by_name[STOCK]["accept_length"], by_name[TRAINED]["accept_length"]
    if stock is None or trained is None:
        found.append("a speculating server reported no verify rounds")
    elif trained <= stock:
        found.append(f"the trained taps reached accept length {trained}, the default ones {stock}")
    return found


def table(acts: Sequence[dict[str, Any]]) -> str:
    """The acts for a terminal."""
    rows = [("", "accept length", "tok/s", "against none", "same text")]
    for act in acts:
        if act["name"] == INCIDENT:
            rows.append((TITLES[INCIDENT], "refused", "", "", ""))
            continue
        rows.append(
            (
                TITLES[act["name"]],
                "" if act["accept_length"] is None else f"{act['accept_length']:.2f}",
                f"{act['tok_s']:.1f}",
                f"{act['speedup']:.2f}x",
                "yes" if act["same_text"] else "NO",
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run(arguments: argparse.Namespace) -> int:
    """The whole demo; the exit code is 0 where every act went as told."""
    pair = assets.pair("tiny")
    prompts = read_prompts()
    check_arguments(arguments, len(prompts), _context(pair.target))
    if arguments.plot is None and not arguments.json:
        arguments.plot = Path("eagle3x-demo.png")
        check_arguments(arguments, len(prompts), _context(pair.target))
    prompts = prompts[: arguments.prompts]
    out = sys.stderr if arguments.json else sys.stdout

    def say(text: str = "") -> None:
        print(text, file=out, flush=True)

    keep = arguments.logs is not None
    logs = arguments.logs if keep else Path(tempfile.mkdtemp(prefix="eagle3x-demo-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        acts = _perform(pair, prompts, arguments.max_new_tokens, logs, say, out)
    except BaseException:
        say(f"The servers' logs are in {logs}")
        raise
    wrong = faults(acts)
    command = serve_command(pair, speculative_flags(TRAINED, 0))
    say()
    say(table(acts))
    say()
    if arguments.plot is not None:
        from . import plot

        plot.write(acts, arguments.plot, f"{len(prompts)} held-out prompts, chain of {STEPS}, greedy")
        say(f"The comparison as a picture: {arguments.plot}")
    if wrong:
        say("\n".join(["This did not go as told:", *(f"  {fault}" for fault in wrong)]))
        say(f"The servers' logs are in {logs}")
    else:
        say("To serve this pair yourself:\n  " + " ".join(command))
        if not keep:
            shutil.rmtree(logs)
    if arguments.json:
        print(
            json.dumps(
                {
                    "acts": acts,
                    "versions": versions(),
                    "prompts": len(prompts),
                    "max_new_tokens": arguments.max_new_tokens,
                    "command": command,
                }
            )
        )
    return 1 if wrong else 0


def _perform(
    pair: assets.Pair, prompts: Sequence[str], new_tokens: int, logs: Path, say: Any, out: TextIO
) -> list[dict[str, Any]]:
    layers = int(json.loads((pair.target / "config.json").read_text())["num_hidden_layers"])
    say("A draft model was trained for this target on the hidden states embed, resid@2 and resid@8.")
    say("In the incident it was first served with flags that stock SGLang changes in silence:")
    say()
    command = serve_command(pair, speculative_flags(INCIDENT, layers))
    say("$ " + " ".join(command))
    incident = replay_incident(command, logs / f"{INCIDENT}.log")
    say(incident[1])
    say(f"(exit code {incident[0]} after {incident[2]:.0f} s; stock SGLang starts, and verifies 2 tokens)")
    say()
    say("With the flags mended, the server still fed its default hidden states. Three servers start now:")
    servers = {}
    for name in SERVED:
        port = free_port()
        flags = speculative_flags(name, layers)
        servers[name] = Server(serve_command(pair, flags, port), logs / f"{name}.log", port)
        say(f"  {TITLES[name]}: {' '.join(flags) or 'no speculative flags'}")
    with running(servers):
        say("They are ready. Each answers the same prompts in turn, one request at a time:")
        measured = measure(servers, prompts, new_tokens, out)
        exits = {name: server.stop() for name, server in servers.items()}
    return report(measured, exits, incident)
