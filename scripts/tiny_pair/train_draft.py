"""Train the EAGLE-3 draft on the target's own text, unrolled as it is served.

One training step runs the draft ``UNROLL`` times over the same window (training-time test, arXiv
2503.01840): step 0 reads the target's taps, step k reads the state before the norm that step k-1 left at
the same index, with the token and the position moved on by k.  Keys and values are those of serving: the
prefix as step 0 wrote it, then the branch's own steps.  The loss is the cross-entropy to the target's
distribution over the draft's vocabulary.

    python scripts/tiny_pair/train_draft.py --work build/tiny_pair --minutes 25
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

from model import Draft, Shape, load_target, rope, rotate
from train_target import Muon, schedule

TAPS = (0, 2, 8)  # boundaries: the embedding and two early layers, as in the incident
UNROLL = 6
DRAFT_VOCABULARY = 1024
FEED_FORWARD = 768
STEP_WEIGHT = 0.9  # a later step counts less, for it is reached less often


def unrolled_loss(
    draft: Draft, embedded: torch.Tensor, fused: torch.Tensor, soft: torch.Tensor, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and hits of all steps over one batch of windows.

    S positions; index t of step k stands at position t + k and predicts token t + k + 2.

    Args:
        embedded: [B, S, H] embedding of every token.
        fused: [B, S, H], fc of the taps.
        soft: [B, S, V'] the target's distribution after each position, over the draft's vocabulary.
        known: [B, S] bool, the target's best token is in the draft's vocabulary.

    Returns:
        (scalar, [UNROLL] share of positions where the best token is right)
    """
    layer, attention, shape = draft.midlayer, draft.midlayer.self_attn, draft.shape
    rows = embedded.shape[1] - UNROLL - 1
    heads = (embedded.shape[0], rows, shape.num_attention_heads, shape.head_dim)
    causal = torch.full((rows, rows), float("-inf")).triu(1)
    hidden = fused[:, :rows]
    first: tuple[torch.Tensor, torch.Tensor] | None = None
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    total, weights, hits = hidden.new_zeros(()), 0.0, []
    for k in range(UNROLL):
        cos, sin = rope(torch.arange(k, k + rows), shape)
        joined = torch.cat(
            (layer.input_layernorm(embedded[:, k + 1 : k + 1 + rows]), layer.hidden_norm(hidden)), dim=-1
        )
        q = rotate(attention.q_proj(joined).view(heads).transpose(1, 2), cos, sin)
        key = rotate(attention.k_proj(joined).view(heads).transpose(1, 2), cos, sin)
        value = attention.v_proj(joined).view(heads).transpose(1, 2)
        scale = shape.head_dim**-0.5
        if first is None:
            first = (key, value)
        else:
            later.append((key, value))
        scores = [(q @ first[0].transpose(-1, -2)).float() * scale + causal]
        scores += [(q * other).sum(-1, keepdim=True).float() * scale for other, _ in later]
        weight = torch.cat(scores, dim=-1).softmax(-1).to(value.dtype)
        mixed = weight[..., :rows] @ first[1]
        for j, (_, other) in enumerate(later):
            mixed = mixed + weight[..., rows + j : rows + j + 1] * other
        x = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(-2))
        hidden = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = draft.logits(hidden).float()
        goal, valid = soft[:, k + 1 : k + 1 + rows], known[:, k + 1 : k + 1 + rows]
        loss = -(goal * logits.log_softmax(-1)).sum(-1)
        total = total + STEP_WEIGHT**k * (loss * valid).sum() / valid.sum()
        weights += STEP_WEIGHT**k
        hits.append(((logits.argmax(-1) == goal.argmax(-1)) & valid).float().mean())
    return total / weights, torch.stack(hits).detach()


def vocabulary(tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(kept target ids ascending [V'], marks [V] bool): the most frequent tokens."""
    counts = torch.bincount(tokens.flatten(), minlength=size)
    kept = counts.argsort(descending=True, stable=True)[:DRAFT_VOCABULARY].sort().values
    marks = torch.zeros(size, dtype=torch.bool)
    marks[kept] = True
    return kept, marks


def save(draft: Draft, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        k: (v if v.dtype in (torch.int64, torch.bool) else v.detach().to(torch.bfloat16)).contiguous()
        for k, v in draft.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    s = draft.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_attention_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab_size,
        "draft_vocab_size": draft.d2t.numel(),
        "max_position_embeddings": 2048,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # SGLang's ids for a Llama target are boundaries - 1.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in TAPS],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    manifest = {"schema": 1, "taps": ["embed" if b == 0 else f"resid@{b}" for b in TAPS]}
    (folder / "eagle3x.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; faster where the CPU has AMX or AVX512-BF16"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile; two minutes once")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokens = torch.from_numpy(np.load(options.work / "generated.npy").astype(np.int64))
    target = load_target(options.work / "target").requires_grad_(False)
    base = target.shape
    kept, marks = vocabulary(tokens[:, 48:], base.vocab_size)
    shape = Shape(**{**vars(base), "intermediate_size": FEED_FORWARD, "num_hidden_layers": 1})
    draft = Draft(shape, DRAFT_VOCABULARY, len(TAPS))
    draft.d2t.copy_(kept - torch.arange(kept.numel()))
    draft.t2d.copy_(marks)
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[kept])
        for name, p in draft.named_parameters():
            if p.ndim == 2 and "lm_head" not in name:
                torch.nn.init.normal_(
                    p,
                    std=p.shape[1] ** -0.5
                    * (0.2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1),
                )

    def loss_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            with torch.no_grad():
                final, _, planes = target(ids, want=TAPS)
                logits = target.lm_head(final).float()
                known = marks[logits.argmax(-1)]
                soft = logits[..., kept].softmax(-1)
                embedded = target.model.embed_tokens(ids)
            fused = draft.fc(torch.cat([planes[b] for b in TAPS], dim=-1))
            return unrolled_loss(draft, embedded, fused, soft, known)

    matrices = [p for n, p in draft.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    rest = [p for n, p in draft.named_parameters() if not (p.ndim == 2 and "lm_head" not in n)]
    optimizers = [
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(rest, lr=0.002, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [g["lr"] for o in optimizers for g in o.param_groups]
    if options.compile:
        loss_of = torch.compile(loss_of)
        loss_of(tokens[: options.batch])[0].backward()
        draft.zero_grad(set_to_none=True)

    held = tokens[-200:]  # never trained on
    order = torch.randperm(len(tokens) - 200)
    began, steps = time.perf_counter(), 0
    while (progress := (time.perf_counter() - began) / (60 * options.minutes)) < 1:
        at = steps * options.batch % (len(order) - options.batch)
        loss, hits = loss_of(tokens[order[at : at + options.batch]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for group, rate in zip((g for o in optimizers for g in o.param_groups), rates, strict=True):
            group["lr"] = rate * schedule(progress)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 50 == 0:
            shares = " ".join(f"{h:.3f}" for h in hits.tolist())
            rate = steps * options.batch * tokens.shape[1] / (time.perf_counter() - began)
            print(
                f"step {steps} loss {loss.item():.3f} right by step {shares} {rate:.0f} tokens/s", flush=True
            )
        assert math.isfinite(loss.item()), "training diverged"
    with torch.no_grad():
        # As served: the weights as they are saved.
        for module in draft.children():
            module.to(torch.bfloat16).float()
        batches = [loss_of(held[i : i + options.batch])[1] for i in range(0, 192, options.batch)]
        right = torch.stack(batches).mean(0)
    save(draft, options.work / "draft")
    result = {
        "taps": list(TAPS),
        "unroll": UNROLL,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "draft_vocabulary": DRAFT_VOCABULARY,
        "generated_tokens_in_draft_vocabulary": round(marks[tokens[:, 48:]].float().mean().item(), 4),
        "steps": steps,
        "tokens": steps * options.batch * tokens.shape[1],
        "seconds": round(time.perf_counter() - began),
        "right_by_step_on_untrained_sequences": [round(h, 4) for h in right.tolist()],
        "torch": torch.__version__,
    }
    (options.work / "train_draft.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
