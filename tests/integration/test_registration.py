"""Registration, hooks and refusals through SGLang's own commands, each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.engine

LIMIT_S = 15.0  # for the incident, from the command to its error
WIDTH, HEADS, HEAD_DIM, FFN, LAYERS, VOCAB, DRAFT_VOCAB = 32, 2, 16, 64, 6, 64, 32

INCIDENT = {"num_steps": 1, "eagle_topk": 1, "num_draft_tokens": 16}
INCIDENT_FLAGS = [
    *("--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "16"),
]
COMMANDS = {
    "serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
    "launch_server": [sys.executable, "-m", "sglang.launch_server"],
}
ENGINE = """
import json, sys
import sglang
if __name__ == "__main__":
    try:
        sglang.Engine(**json.loads(sys.argv[1]))
    except ValueError as error:
        print(f"caught {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(3)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a random Llama and a random EAGLE-3 draft for it; big enough to be read, no more."""
    root = tmp_path_factory.mktemp("pair")
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    common = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    target = {**common, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS}
    draft = {
        **common,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
    }
    kept = torch.arange(VOCAB) % 2 == 0
    weights = {
        "fc.weight": random(WIDTH, 3 * WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": random(DRAFT_VOCAB, WIDTH),
        "d2t": torch.arange(DRAFT_VOCAB),
        "t2d": kept,
        **{f"midlayer.self_attn.{n}_proj.weight": random(HEADS * HEAD_DIM, 2 * WIDTH) for n in "qkv"},
        "midlayer.self_attn.o_proj.weight": random(WIDTH, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(FFN, WIDTH),
        "midlayer.mlp.up_proj.weight": random(FFN, WIDTH),
        "midlayer.mlp.down_proj.weight": random(WIDTH, FFN),
        **{
            f"midlayer.{name}.weight": torch.ones(WIDTH)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
    }
    for name, config in (("target", target), ("draft", draft)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, str(root / "draft/model.safetensors"), metadata={"format": "pt"})
    return {name: str(root / name) for name in ("target", "draft")}


def run(command: list[str], **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run to the end; wall seconds beside the result."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3X_", "SGLANG_"))}
    start = time.monotonic()
    done = subprocess.run(
        command,
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, time.monotonic() - start


def serve(
    how: str, pair: dict[str, str], algorithm: str, flags: list[str], **environment: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Start a server by command; the flags come in SGLang's spelling."""
    paths = ["--model-path", pair["target"], "--speculative-draft-model-path", pair["draft"]]
    return run([*COMMANDS[how], *paths, "--speculative-algorithm", algorithm, *flags], **environment)


def engine(
    pair: dict[str, str], algorithm: str, arguments: dict[str, object], **environment: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Start ``sglang.Engine``; exit code 3 where it raises a ValueError."""
    given = {
        "model_path": pair["target"],
        "speculative_draft_model_path": pair["draft"],
        "speculative_algorithm": algorithm,
        **arguments,
    }
    return run([sys.executable, "-c", ENGINE, json.dumps(given)], **environment)


def last_lines(done: subprocess.CompletedProcess[str]) -> str:
    """The error as a person sees it: from the last ``error:`` to the end."""
    text = done.stderr
    assert "\nerror: " in text, text[-3000:]
    return text[text.rindex("\nerror: ") + 1 :]


def assert_incident_refused(message: str) -> None:
    assert "--speculative-num-draft-tokens: given 16" in message
    assert "drop --speculative-num-draft-tokens" in message
    assert "--speculative-num-steps 15" in message
    assert "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16" in message


@pytest.mark.parametrize("how", COMMANDS)
@pytest.mark.parametrize("strict", [False, True], ids=["EAGLE3X", "EAGLE3-strict"])
def test_incident_by_command(how: str, strict: bool, pair: dict[str, str]) -> None:
    environment = {"EAGLE3X_STRICT": "1"} if strict else {}
    done, seconds = serve(how, pair, "EAGLE3" if strict else "EAGLE3X", INCIDENT_FLAGS, **environment)
    assert done.returncode == 1
    message = last_lines(done)
    assert_incident_refused(message)
    assert ("resolved to 2 by _handle_eagle_family" in message) is strict
    assert "Traceback" not in done.stderr and "Load weight" not in done.stderr
    assert seconds < LIMIT_S


@pytest.mark.parametrize("strict", [False, True], ids=["EAGLE3X", "EAGLE3-strict"])
def test_incident_in_the_engine(strict: bool, pair: dict[str, str]) -> None:
    environment = {"EAGLE3X_STRICT": "1"} if strict else {}
    arguments = {f"speculative_{name}": value for name, value in INCIDENT.items()}
    done, seconds = engine(pair, "EAGLE3" if strict else "EAGLE3X", arguments, **environment)
    assert done.returncode == 3, done.stderr[-3000:]
    assert "caught RefusedError" in done.stderr
    assert_incident_refused(done.stderr)
    assert seconds < LIMIT_S


@pytest.mark.parametrize("how", COMMANDS)
def test_help_shows_the_flags(how: str) -> None:
    done, _ = run([*COMMANDS[how], "--help"])
    assert done.returncode == 0
    for flag in ("--eagle3x-taps", "--eagle3x-kernels", "--eagle3x-accept-alarm-rounds"):
        assert flag in done.stdout


def test_all_problems_in_one_error(pair: dict[str, str]) -> None:
    flags = ["--eagle3x-kernels", "fast", "--pp-size", "2", "--enable-lora", "--speculative-num-steps", "0"]
    done, _ = serve("launch_server", pair, "EAGLE3X", flags, EAGLE3X_CONFIG='{"tabs": ["embed"]}')
    message = last_lines(done)
    assert "5 problems" in message
    for part in (
        "--eagle3x-kernels: given 'fast'",
        "did you mean taps?",
        "--pp-size",
        "--enable-lora",
        "--speculative-num-steps",
    ):
        assert part in message


@pytest.mark.parametrize("flags", [["--eagle3x-taps", "embed"], ["--eagle3x-kernels=own"]])
def test_flags_without_the_algorithm(flags: list[str], pair: dict[str, str]) -> None:
    done, _ = run([*COMMANDS["launch_server"], "--model-path", pair["target"], *flags])
    assert done.returncode == 1
    message = last_lines(done)
    assert flags[0].partition("=")[0] in message and "add --speculative-algorithm EAGLE3X" in message


def test_strict_switch_must_be_one_of_its_values(pair: dict[str, str]) -> None:
    done, _ = serve("launch_server", pair, "EAGLE3", INCIDENT_FLAGS, EAGLE3X_STRICT="yes")
    assert done.returncode == 1 and "EAGLE3X_STRICT: given 'yes'" in last_lines(done)


def test_missing_draft(pair: dict[str, str]) -> None:
    wrong = {**pair, "draft": pair["draft"] + "/no/such/folder"}
    done, seconds = serve("launch_server", wrong, "EAGLE3X", ["--speculative-num-steps", "3"])
    assert done.returncode == 1 and seconds < LIMIT_S
    assert "--speculative-draft-model-path" in last_lines(done) and "no such folder" in last_lines(done)


def _site(folder: Path, code: str) -> str:
    """A PYTHONPATH whose sitecustomize runs ``code`` first in every process."""
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


OTHER_VERSION = """
import importlib.metadata as metadata
original = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else original(name)
"""
NO_SEAM = """
import sys
sys.dont_write_bytecode = True
import sglang_eagle3_ext.upstream as upstream
upstream.SEAMS["gone"] = upstream.Seam("sglang.srt.server_args:NoSuchName", None, "a test")
"""
NO_HOOKS = """
import sglang.srt.plugins.hook_registry as registry
def fail(target, hooks):
    raise RuntimeError("not applied")
registry.HookRegistry._apply_target = staticmethod(fail)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (OTHER_VERSION, ["sglang 0.5.99 is installed", "pip install sglang==0.5.23"]),
        (NO_SEAM, ["seam gone:", "NoSuchName does not exist", "reinstall"]),
        (NO_HOOKS, ["did not apply EAGLE3X's hooks on", "ServerArgs.resolve_once"]),
    ],
    ids=["version", "seam", "hooks"],
)
@pytest.mark.parametrize("how", ["launch_server", "engine"])
def test_a_failure_of_registration_ends_the_start(
    how: str, code: str, expected: list[str], pair: dict[str, str], tmp_path: Path
) -> None:
    path = _site(tmp_path, code)
    if how == "engine":
        done, _ = engine(pair, "EAGLE3X", {"speculative_num_steps": 3}, PYTHONPATH=path)
        assert done.returncode == 3 and "caught UpstreamMismatchError" in done.stderr
        message = done.stderr
    else:
        done, _ = serve(how, pair, "EAGLE3X", ["--speculative-num-steps", "3"], PYTHONPATH=path)
        assert done.returncode == 1
        message = last_lines(done)
    for part in expected:
        assert part in message


def test_a_failure_of_registration_leaves_other_servers_alone(pair: dict[str, str], tmp_path: Path) -> None:
    code = "import sglang; from sglang.srt.plugins import load_plugins; load_plugins()\n"
    code += "from sglang.srt.server_args import ServerArgs; import sys\n"
    code += "args = ServerArgs(model_path=sys.argv[1]); args.resolve_once(); print('resolved')"
    command = [sys.executable, "-c", code, pair["target"]]
    done, _ = run(command, PYTHONPATH=_site(tmp_path, OTHER_VERSION))
    assert done.stdout.strip().endswith("resolved"), done.stderr[-3000:]


LANDED = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
load_plugins()  # SGLang calls it again in places; registering is done once
from sglang.srt.server_args import prepare_server_args, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.platforms import current_platform
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_eagle3_ext import config

record = prepare_server_args(sys.argv[1:])
record.resolve_once()
view = resolving_view(record)
algorithm = SpeculativeAlgorithm.from_string("eagle3x")
enum = {n for n in vars(SpeculativeAlgorithm) if callable(getattr(SpeculativeAlgorithm, n)) and n[0] != "_"}
first = {
    "algorithm": repr(algorithm),
    "missing": sorted(n for n in enum if not hasattr(algorithm, n) and n not in ("from_string", "register")),
    "shape": [view.speculative_num_steps, view.speculative_eagle_topk, view.speculative_num_draft_tokens],
    "requests": view.max_running_requests,
    "overlap off": view.disable_overlap_schedule,
    "device": view.device,
    "platform": type(current_platform).__name__,
    "intake": hasattr(TokenizerManager._create_tokenized_object, "__wrapped__"),
    "kernels": config.resolve(None).values.kernels,
}
# A second server of the same process, without flags, sees none.
again = ServerArgs(**{f: getattr(record, f) for f in (
    "model_path", "speculative_draft_model_path", "speculative_algorithm", "speculative_num_steps")})
again.resolve_once()
first["kernels of the next"] = config.resolve(None).values.kernels
print(json.dumps(first))
"""


def test_everything_took_effect(pair: dict[str, str]) -> None:
    flags = ["--model-path", pair["target"], "--speculative-draft-model-path", pair["draft"]]
    flags += [
        "--speculative-algorithm",
        "eagle3x",
        "--speculative-num-steps",
        "3",
        "--eagle3x-kernels",
        "own",
    ]
    done, _ = run([sys.executable, "-c", LANDED, *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {
        "algorithm": "Eagle3XAlgorithm('EAGLE3X')",
        "missing": [],
        "shape": [3, 1, 4],
        "requests": 48,
        "overlap off": True,
        "device": "cpu",
        "platform": "CpuPlatform",
        "intake": True,
        "kernels": "own",
        "kernels of the next": "auto",
    }
