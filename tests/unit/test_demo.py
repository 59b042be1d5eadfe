"""The demo's arithmetic, refusals, report and clean-up; real servers are in tests/integration/test_demo.py.

The stand-in below answers ``/health`` and nothing else: it is there for starting, failing and stopping.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_eagle3_ext import assets, demo, plot
from sglang_eagle3_ext.errors import Eagle3XError, RefusedError

STAND_IN = """
import http.server, os, subprocess, sys, time
mode, port, note = sys.argv[1], int(sys.argv[2]), sys.argv[3]
print("stand-in", mode, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(note, "w").write(str(child.pid))
if mode == "dies":
    child.kill()
    sys.exit("error: it dies")
if mode == "hangs":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server(mode: str, folder: Path) -> demo.Server:
    port = demo.free_port()
    command = [sys.executable, "-c", STAND_IN, mode, str(port), str(folder / f"{mode}.pid")]
    return demo.Server(command, folder / f"{mode}.log", port)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def child_of(mode: str, folder: Path) -> int:
    return int((folder / f"{mode}.pid").read_text())


def gone(pid: int) -> bool:
    for _ in range(50):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


def test_a_server_is_stopped_with_its_children(tmp_path: Path) -> None:
    one = server("serves", tmp_path)
    with demo.running({"one": one}):
        assert alive(child_of("serves", tmp_path))
    assert gone(child_of("serves", tmp_path))
    assert one.process is not None and one.process.poll() is not None


def test_a_server_that_dies_is_reported_and_the_others_stopped(tmp_path: Path) -> None:
    servers = {"good": server("serves", tmp_path), "bad": server("dies", tmp_path)}
    with (
        pytest.raises(Eagle3XError, match=r"(?s)exit code 1 before it was ready.*error: it dies"),
        demo.running(servers),
    ):
        raise AssertionError("unreachable")
    assert gone(child_of("serves", tmp_path))


def test_a_server_that_hangs_is_reported(tmp_path: Path) -> None:
    one = server("hangs", tmp_path)
    one.start()
    with pytest.raises(Eagle3XError, match=r"(?s)not ready after 1 s.*stand-in hangs"):
        one.wait_ready(1)
    one.stop()
    assert gone(child_of("hangs", tmp_path))


def test_an_interrupt_stops_the_servers(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), demo.running({"one": server("serves", tmp_path)}):
        signal.raise_signal(signal.SIGINT)
    assert gone(child_of("serves", tmp_path))


def arguments(**more: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    found = parser.parse_args([])
    for name, value in more.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"prompts": 0}, "--prompts: given 0, allowed 1 to 60"),
        ({"prompts": 61}, "--prompts: given 61"),
        ({"max_new_tokens": 1}, "--max-new-tokens: given 1, allowed 2 to 1024"),
        ({"max_new_tokens": 1025}, "--max-new-tokens: given 1025"),
        ({"plot": Path("/proc/nothing/plot.png")}, "--plot: given /proc/nothing/plot.png"),
    ],
)
def test_bad_arguments(more: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedError) as caught:
        demo.check_arguments(arguments(**more), 60, 2048)
    assert named in str(caught.value) and len(caught.value.problems) == 1
    demo.check_arguments(arguments(), 60, 2048)


MEASURED = {
    demo.NO_SPECULATION: demo.Measured(["a", "b"], tokens=200, seconds=10.0),
    demo.STOCK: demo.Measured(["a", "b"], tokens=200, seconds=8.0, verify_rounds=100),
    demo.TRAINED: demo.Measured(["a", "b"], tokens=200, seconds=5.0, verify_rounds=64),
}
EXITS = dict.fromkeys(demo.SERVED, 0)
REFUSAL = (1, "error: 1. --speculative-num-draft-tokens: given 16", 5.0)


def test_the_report() -> None:
    acts = demo.report(MEASURED, EXITS, REFUSAL)
    assert [act["name"] for act in acts] == ["no_speculation", "incident_flags", "stock_taps", "trained_taps"]
    keys = {"name", "exit_code", "accept_length", "tok_s", "speedup", "same_text", "message"}
    assert all(set(act) == keys for act in acts)
    assert [act["accept_length"] for act in acts] == [None, None, 2.0, 3.125]
    assert [act["tok_s"] for act in acts] == [20.0, None, 25.0, 40.0]
    assert [act["speedup"] for act in acts] == [1.0, None, 1.25, 2.0]
    assert [act["same_text"] for act in acts] == [True, None, True, True]
    assert json.loads(json.dumps(acts)) == acts
    assert demo.faults(acts) == []


@pytest.mark.parametrize(
    ("measured", "exits", "refusal", "said"),
    [
        ({demo.TRAINED: demo.Measured(["a", "c"], 200, 5.0, 64)}, {}, REFUSAL, "another text"),
        ({demo.TRAINED: demo.Measured(["a", "b"], 200, 5.0, 100)}, {}, REFUSAL, "accept length 2.0"),
        ({demo.STOCK: demo.Measured(["a", "b"], 200, 5.0, 0)}, {}, REFUSAL, "no verify rounds"),
        ({}, {demo.STOCK: 3}, REFUSAL, "exit code 3"),
        ({}, {}, (0, "the server started", 1.0), "not refused"),
        ({}, {}, (1, "error: another one", 1.0), "not refused"),
    ],
)
def test_what_goes_wrong_is_said(
    measured: dict[str, demo.Measured], exits: dict[str, int], refusal: tuple[int, str, float], said: str
) -> None:
    acts = demo.report({**MEASURED, **measured}, {**EXITS, **exits}, refusal)
    assert said in "\n".join(demo.faults(acts))


def test_the_table() -> None:
    text = demo.table(demo.report(MEASURED, EXITS, REFUSAL))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert lines[-1].split() == ["the", "trained", "taps", "3.12", "40.0", "2.00x", "yes"]
    assert "refused" in lines[3]


def test_commands() -> None:
    pair = assets.Pair(Path("t"), Path("d"))
    assert "--speculative-algorithm" not in demo.serve_command(
        pair, demo.speculative_flags(demo.NO_SPECULATION, 16)
    )
    stock = demo.speculative_flags(demo.STOCK, 16)
    assert stock[-2:] == ["--eagle3x-taps", "resid@2,resid@8,resid@13"]
    assert demo.serve_command(pair, stock, 7)[8:11] == ["--speculative-num-steps", "5", "--eagle3x-taps"]
    assert demo.serve_command(pair, stock, 7)[-5:-2] == ["--port", "7", "--sleep-on-idle"]


def test_the_picture(tmp_path: Path) -> None:
    acts = demo.report(MEASURED, EXITS, REFUSAL)
    file = tmp_path / "plot.png"
    plot.write(acts, file, "two prompts")
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    left, right = plot.figure(acts, "two prompts").axes
    assert [round(bar.get_height(), 3) for bar in left.patches] == [1.0, 2.0, 3.125]
    assert [round(bar.get_height(), 3) for bar in right.patches] == [1.0, 1.25, 2.0]
