"""The tiny pair behind a real HTTP server, asked by a real client."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from serve import clean_environment
from sglang_eagle3_ext import assets, demo

pytestmark = pytest.mark.engine

FLAGS = ["--speculative-num-steps", "5"]
# Reversed taps: the draft is nearly never right.
WRONG = [
    *FLAGS,
    *("--eagle3x-taps", "resid@8,resid@2,embed"),
    *("--eagle3x-accept-alarm", "2"),
    *("--eagle3x-accept-alarm-rounds", "20"),
]

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def start(name: str, flags: list[str], folder: Path) -> demo.Server:
    port = demo.free_port()
    server = demo.Server(demo.serve_command(assets.pair(), flags, port), folder / f"{name}.log", port)
    server.start()
    return server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, demo.Server]]:
    folder = tmp_path_factory.mktemp("servers")
    running = {"none": start("none", [], folder), "good": start("good", FLAGS, folder)}
    try:
        for server in running.values():
            server.wait_ready()
        running["wrong"] = start("wrong", WRONG, folder)
        running["wrong"].wait_ready()
        yield running
    finally:
        for server in running.values():
            server.stop()


def client(server: demo.Server) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def model(server: demo.Server) -> str:
    return str(client(server).models.list().data[0].id)


def native(server: demo.Server, **body: Any) -> requests.Response:
    return requests.post(f"http://127.0.0.1:{server.port}/generate", json=body, timeout=120)


def test_the_first_request_is_as_fast_as_a_warm_one(servers: dict[str, demo.Server]) -> None:
    """Asked before anything else of this server; the shapes of a round have been seen by no one."""
    times = []
    for i in range(4):
        began = time.perf_counter()
        text = demo.read_prompts()[i]
        native(servers["good"], text=text, sampling_params={"temperature": 0, "max_new_tokens": 64})
        times.append(time.perf_counter() - began)
    assert times[0] < 2 * sorted(times[1:])[1]


def test_completions_stream_and_chat(servers: dict[str, demo.Server]) -> None:
    prompt = demo.read_prompts()[3]
    texts = {}
    for name in ("none", "good"):
        server = servers[name]
        asked = {"model": model(server), "prompt": prompt, "temperature": 0, "max_tokens": 40}
        whole = client(server).completions.create(**asked)
        pieces = [c.choices[0].text for c in client(server).completions.create(**asked, stream=True)]
        assert "".join(pieces) == whole.choices[0].text and len(pieces) > 3
        chat = client(server).chat.completions.create(
            model=model(server), messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=24
        )
        several = client(server).completions.create(**{**asked, "prompt": demo.read_prompts()[:5]})
        texts[name] = [whole.choices[0].text, chat.choices[0].message.content]
        texts[name] += [c.text for c in several.choices]
        stop = whole.choices[0].text[10:14]
        stopped = client(server).completions.create(**asked, stop=[stop])
        assert stopped.choices[0].finish_reason == "stop" and stop not in stopped.choices[0].text
        texts[name].append(stopped.choices[0].text)
    assert texts["none"] == texts["good"]


def test_accept_length_is_reported(servers: dict[str, demo.Server]) -> None:
    text, tokens, rounds, _ = demo.ask(
        client(servers["good"]), model(servers["good"]), demo.read_prompts()[0], 64
    )
    assert text and tokens == 64 and 64 / 6 <= rounds < 64
    meta = native(
        servers["good"],
        text=demo.read_prompts()[0],
        sampling_params={"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
    ).json()["meta_info"]
    assert meta["spec_verify_ct"] == rounds and meta["spec_accept_length"] == 64 / rounds


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"presence_penalty": 0.2}, "presence_penalty"),
        ({"logprobs": 1}, "return_logprob (logprobs)"),
        ({"extra_body": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"seed": 3, "temperature": 1.0}, "sampling_seed (seed)"),
        ({"extra_body": {"regex": "a+"}}, "regex"),
        ({"extra_body": {"min_tokens": 3}}, "min_new_tokens"),
        (
            {
                "extra_body": {
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
                }
            },
            "json_schema (response_format, tools)",
        ),
    ],
)
def test_a_request_that_cannot_be_honoured_is_answered_400(
    more: dict[str, Any], named: str, servers: dict[str, demo.Server]
) -> None:
    server = servers["good"]
    asked = {"model": model(server), "prompt": "def f(", "max_tokens": 8, "temperature": 0}
    with pytest.raises(openai.BadRequestError) as caught:
        client(server).completions.create(**{**asked, **more})
    assert f"{named}: given" in str(caught.value) and "hint: leave" in str(caught.value)
    # The server goes on.
    assert client(server).completions.create(**asked).choices[0].text


def test_the_alarm(servers: dict[str, demo.Server]) -> None:
    server = servers["wrong"]
    alike = [
        native(
            one, text=demo.read_prompts()[1], sampling_params={"temperature": 0, "max_new_tokens": 64}
        ).json()
        for one in (servers["none"], server)
    ]
    assert alike[0]["text"] == alike[1]["text"], "wrong taps cost speed, never the text"
    log = server.log.read_text()
    assert log.count("EAGLE3X ALARM") == 1
    assert "this server feeds resid@8,resid@2,embed (taps from --eagle3x-taps)" in log
    assert "taps from --eagle3x-taps replace [-1, 1, 7] read as sglang ids for LlamaForCausalLM" in log
    assert "EAGLE3X ALARM" not in servers["good"].log.read_text()


def test_the_log_says_what_is_served(servers: dict[str, demo.Server]) -> None:
    log = servers["good"].log.read_text()
    assert "taps = embed,resid@2,resid@8" in log and "eagle3x.json" in log
    assert (
        "draft reads [embed, resid@2, resid@8], LlamaForCausalLM captures [resid@0, resid@2, resid@8]" in log
    )
    assert "first forward: 3 planes of 128 arrived" in log
    assert "--speculative-num-steps 5, --speculative-eagle-topk 1, --speculative-num-draft-tokens 6" in log


def living(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    command = ["ps", "-o", "stat=,args=", "-g", str(session)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if not line.startswith("Z")]


def test_stopping_ends_every_process(tmp_path: Path) -> None:
    server = start("stopped", FLAGS, tmp_path)
    server.wait_ready()
    assert server.process is not None
    assert len(living(server.process.pid)) >= 3
    assert server.stop() == 0
    end = time.monotonic() + 10
    while living(server.process.pid) and time.monotonic() < end:
        time.sleep(0.1)  # a killed process takes a moment to go
    assert living(server.process.pid) == []


def test_env_for_a_bug_report() -> None:
    command = [str(Path(sys.executable).with_name("eagle3x")), "env"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    for part in ("sglang-eagle3-ext", "0.5.23", "CpuPlatform", "Eagle3XAlgorithm('EAGLE3X')"):
        assert part in done.stdout
