"""Train the tiny target from scratch on one CPU: Muon for the matrices, AdamW for the rest.

python scripts/tiny_pair/train_target.py --work build/tiny_pair --minutes 25
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from model import Shape, Target

SHAPE = Shape(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=16,
    num_attention_heads=2,
    vocab_size=2048,
)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024, github.com/KellerJordan/Muon)."""

    def __init__(self, params: list[torch.Tensor], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(velocity, group["momentum"])
                tall = update.shape[0] > update.shape[1]
                x = update.T if tall else update
                x = x / (x.norm() + 1e-7)
                for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                p.add_(x.T if tall else x, alpha=-group["lr"] * scale)


def schedule(progress: float) -> float:
    """Short warm-up, flat, then linear to zero over the last 40 %."""
    return min(1.0, progress / 0.02 + 0.05, (1.0 - progress) / 0.4)


def heldout_loss(
    target: Target, tokens: torch.Tensor, windows: int = 32, length: int = 257
) -> dict[str, float]:
    """Mean cross-entropy (nats) and top-1 accuracy over evenly spaced held-out windows."""
    starts = torch.linspace(0, tokens.numel() - length - 1, windows).long()
    loss = hits = count = 0.0
    with torch.no_grad():
        for start in starts.tolist():
            ids = tokens[start : start + length].view(1, -1)
            logits = target.lm_head(target(ids[:, :-1])[0])[0].float()
            loss += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            hits += (logits.argmax(-1) == ids[0, 1:]).sum().item()
            count += ids.shape[1] - 1
    return {"loss": loss / count, "top1": hits / count}


def save(target: Target, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in target.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    s = target.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_attention_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; faster where the CPU has AMX or AVX512-BF16"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile; a minute once, then 1.5 times as fast"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokens = torch.from_numpy(np.load(options.work / "train.npy").astype(np.int64))
    heldout = torch.from_numpy(np.load(options.work / "heldout.npy").astype(np.int64))

    target = Target(SHAPE)
    for name, p in target.named_parameters():
        if p.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = p.shape[1] ** -0.5 * ((2 * SHAPE.num_hidden_layers) ** -0.5 if last else 1.0)
            torch.nn.init.normal_(p, std=0.02 if "embed" in name or "lm_head" in name else std)
    matrices = [p for n, p in target.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in target.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    optimizers = [
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [g["lr"] for o in optimizers for g in o.param_groups]
    size = sum(p.numel() for p in target.parameters())
    print(f"{size / 1e6:.2f} M parameters", flush=True)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            logits = target.lm_head(target(ids[:, :-1])[0])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    if options.compile:
        loss_of = torch.compile(loss_of)
        loss_of(torch.zeros(options.batch, options.length + 1, dtype=torch.int64)).backward()
        target.zero_grad(set_to_none=True)
    began, steps = time.perf_counter(), 0
    while (progress := (time.perf_counter() - began) / (60 * options.minutes)) < 1:
        starts = torch.randint(tokens.numel() - options.length - 1, (options.batch,))
        ids = torch.stack([tokens[s : s + options.length + 1] for s in starts.tolist()])
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for group, rate in zip((g for o in optimizers for g in o.param_groups), rates, strict=True):
            group["lr"] = rate * schedule(progress)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 50 == 0:
            seen = steps * options.batch * options.length
            rate = seen / (time.perf_counter() - began)
            print(
                f"step {steps} loss {loss.item():.3f} {seen / 1e6:.2f} M tokens {rate:.0f} tokens/s",
                flush=True,
            )
        assert math.isfinite(loss.item()), "training diverged"
    target.to(torch.bfloat16).float().eval()
    result = {
        "parameters": size,
        "steps": steps,
        "tokens": steps * options.batch * options.length,
        "seconds": round(time.perf_counter() - began),
        "heldout": heldout_loss(target, heldout),
        "torch": torch.__version__,
    }
    save(target, options.work / "target")
    (options.work / "train_target.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
