"""Let the target continue prompts from the training text: what the draft is trained on.

A draft proposes what the target would say, so it learns from the target's own text.  Every prompt is a
random window of the training split; most sequences are greedy, the rest drawn at temperature 0.7.

    python scripts/tiny_pair/generate.py --work build/tiny_pair --sequences 6000
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from model import Target, load_target, rope, rotate

PROMPT, NEW = 48, 208
GREEDY_SHARE = 0.75
TEMPERATURE = 0.7


class Decoder:
    """The target with keys and values written in place: concatenating them would cost more than the model."""

    def __init__(self, target: Target, batch: int, length: int):
        shape, dtype = target.shape, target.lm_head.weight.dtype
        self.target = target
        self.angles = rope(torch.arange(length), shape)
        size = (2, shape.num_hidden_layers, batch, shape.num_attention_heads, length, shape.head_dim)
        self.keys, self.values = torch.zeros(size, dtype=dtype)
        self.length = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] float32 after the last of ``ids`` [B, S]; S > 1 only in the first call."""
        batch, new = ids.shape
        start, end = self.length, self.length + new
        cos, sin = (part[start:end] for part in self.angles)
        x = self.target.model.embed_tokens(ids)
        for i, layer in enumerate(self.target.model.layers):
            attention = layer.self_attn
            split = (batch, new, attention.shape.num_attention_heads, attention.shape.head_dim)
            y = layer.input_layernorm(x)
            q = rotate(attention.q_proj(y).view(split).transpose(1, 2), cos, sin)
            self.keys[i, :, :, start:end] = rotate(attention.k_proj(y).view(split).transpose(1, 2), cos, sin)
            self.values[i, :, :, start:end] = attention.v_proj(y).view(split).transpose(1, 2)
            seen = self.keys[i, :, :, :end], self.values[i, :, :, :end]
            mixed = F.scaled_dot_product_attention(q, *seen, is_causal=new > 1)
            x = x + attention.o_proj(mixed.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.length = end
        return self.target.lm_head(self.target.model.norm(x[:, -1])).float()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="faster where the CPU has AMX or AVX512-BF16")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.from_numpy(np.load(options.work / "train.npy").astype(np.int64))
    target = load_target(options.work / "target", torch.bfloat16 if options.bf16 else torch.float32)
    began, done = time.perf_counter(), []
    for first in range(0, options.sequences, options.batch):
        size = min(options.batch, options.sequences - first)
        starts = torch.randint(tokens.numel() - PROMPT, (size,), generator=generator)
        ids = torch.stack([tokens[s : s + PROMPT] for s in starts.tolist()])
        greedy = torch.rand(size, generator=generator) < GREEDY_SHARE
        decoder, feed = Decoder(target, size, PROMPT + NEW), ids
        for _ in range(NEW):
            logits = decoder.forward(feed)
            drawn = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            feed = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
            ids = torch.cat((ids, feed), dim=1)
        done.append(ids)
        rate = sum(d.shape[0] for d in done) * NEW / (time.perf_counter() - began)
        print(f"{first + size} sequences, {rate:.0f} tokens/s", flush=True)
    np.save(options.work / "generated.npy", torch.cat(done).numpy().astype(np.uint16))
    result = {
        "sequences": options.sequences,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "greedy_share": GREEDY_SHARE,
        "temperature_of_the_rest": TEMPERATURE,
        "seconds": round(time.perf_counter() - began),
    }
    (options.work / "generate.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
