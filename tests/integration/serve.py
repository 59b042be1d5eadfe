"""Engines in processes of their own: what is asked goes in as JSON, what was answered comes out.

A crash of an engine then fails its own tests only, and two engines can start at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 420
DRIVER = Path(__file__).with_name("driver.py")


@dataclass(frozen=True)
class Served:
    """Answers of one engine, one entry per step, and its log."""

    answers: list[Any]
    log: str

    def tokens(self) -> list[list[int]]:
        """Output ids of every request of every step, in order."""
        return [a["output_ids"] for step in self.answers if step for a in as_list(step)]

    def meta(self) -> list[dict[str, Any]]:
        return [a["meta_info"] for step in self.answers if step for a in as_list(step)]


def as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def generate(input_ids: Any, sampling: Any = None, **more: Any) -> dict[str, Any]:
    """One step: a request, or several at once."""
    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    if isinstance(sampling, list):
        params: Any = [{**greedy, **s} for s in sampling]
    else:
        params = {**greedy, **(sampling or {})}
    return {"do": "generate", "arguments": {"input_ids": input_ids, "sampling_params": params, **more}}


FLUSH = {"do": "flush"}


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3X_", "SGLANG_"))}
    platform = {"SGLANG_PLATFORM": "eagle3x_cpu"}  # also where there is a GPU
    return {**kept, **platform, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def run_engine(engine: dict[str, Any], steps: list[dict[str, Any]], out: str, **environment: str) -> Served:
    """Start an engine, do the steps, stop it.

    Raises:
        AssertionError: it failed; the message ends with its log.
    """
    job = json.dumps({"engine": engine, "steps": steps, "out": out})
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=job,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    log = done.stdout + done.stderr
    assert os.path.exists(out), f"exit code {done.returncode}\n{log[-6000:]}"
    with open(out) as stream:
        return Served(json.load(stream), log)


@dataclass
class Pool:
    """Runs named engines, two at a time; asking for one waits for it."""

    folder: str
    futures: dict[str, Future[Served]] = field(default_factory=dict)
    executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=2))

    def submit(
        self, name: str, engine: dict[str, Any], steps: list[dict[str, Any]], **environment: str
    ) -> None:
        if name not in self.futures:
            out = os.path.join(self.folder, f"{len(self.futures)}.json")
            self.futures[name] = self.executor.submit(run_engine, engine, steps, out, **environment)

    def result(self, name: str) -> Served:
        return self.futures[name].result()


def run_both(*jobs: tuple[dict[str, Any], list[dict[str, Any]], str], **environment: str) -> list[Served]:
    """Several engines, two at a time; answers in the order of the jobs."""
    with ThreadPoolExecutor(max_workers=2) as executor:
        futures = [executor.submit(run_engine, *job, **environment) for job in jobs]
        return [future.result() for future in futures]
