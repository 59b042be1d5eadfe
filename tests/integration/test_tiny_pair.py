"""The tiny pair in the real engine: the demo's three acts, and agreement with a plain-PyTorch simulation."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve import clean_environment, generate, run_engine
from sglang_eagle3_ext import assets, demo

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, NEW = 20, 96


@pytest.fixture(scope="module")
def simulation() -> Any:
    """scripts/tiny_pair/simulate.py, which shares no code with the plugin."""
    sys.path.insert(0, str(ROOT / "scripts" / "tiny_pair"))
    return importlib.import_module("simulate")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(assets.pair().target / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in demo.read_prompts()[:PROMPTS]]


@pytest.mark.parametrize(
    ("steps", "taps", "boundaries"),
    [
        (5, None, [0, 2, 8]),
        (5, ["resid@2", "resid@8", "resid@13"], [2, 8, 13]),
        (3, ["resid@8", "embed", "resid@2"], [8, 0, 2]),
    ],
    ids=["trained", "stock", "another order"],
)
def test_accept_length_is_that_of_a_simulation(
    steps: int,
    taps: list[str] | None,
    boundaries: list[int],
    simulation: Any,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Round by round: every prompt takes as many verify rounds as without any server."""
    pair = assets.pair()
    engine = {
        "model_path": str(pair.target),
        "speculative_draft_model_path": str(pair.draft),
        "speculative_algorithm": "EAGLE3X",
        "speculative_num_steps": steps,
    }
    environment = {} if taps is None else {"EAGLE3X_CONFIG": json.dumps({"taps": taps})}
    asked = [generate(ids, {"max_new_tokens": NEW}) for ids in prompts]
    served = run_engine(engine, asked, str(tmp_path / "out"), **environment)
    expected = simulation.simulate(assets.ROOT / "tiny", prompts, NEW, steps, boundaries)
    rounds = [m["spec_verify_ct"] for m in served.meta()]
    # A near tie between two draft tokens may fall otherwise in another order of summation.
    assert sum(a != b for a, b in zip(rounds, expected["verify_rounds"], strict=True)) <= 1
    accept_length = NEW * len(prompts) / sum(rounds)
    assert accept_length == pytest.approx(expected["accept_length"], rel=0.005)


def test_the_demo(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    command = [
        str(Path(sys.executable).with_name("eagle3x")),
        "demo",
        "--json",
        "--prompts",
        "6",
        "--plot",
        str(plot),
    ]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    acts = {act["name"]: act for act in told["acts"]}
    assert list(acts) == ["no_speculation", "incident_flags", "stock_taps", "trained_taps"]
    assert acts["incident_flags"]["exit_code"] == 1
    assert "--speculative-num-draft-tokens: given 16" in acts["incident_flags"]["message"]
    for name in demo.SERVED:
        assert acts[name]["exit_code"] == 0 and acts[name]["same_text"] is True
    assert acts["trained_taps"]["accept_length"] > 1.15 * acts["stock_taps"]["accept_length"]
    # The text of the page asks for 1.5 on an idle machine; this one may be shared.
    assert acts["trained_taps"]["speedup"] > 1.2
    assert told["versions"]["sglang"] == "0.5.23"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert told["command"][1:] and "EAGLE3X" in told["command"]


def test_the_assets_are_small_and_half_precision() -> None:
    from sglang_eagle3_ext.checkpoint import read_headers

    pair = assets.pair()
    size = sum(f.stat().st_size for f in (assets.ROOT / "tiny").rglob("*") if f.is_file())
    assert size < 30e6
    for folder in (pair.target, pair.draft):
        kinds = {t.dtype for name, t in read_headers(folder).items() if name not in ("d2t", "t2d")}
        assert kinds == {"BF16"}
