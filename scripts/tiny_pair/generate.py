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
from model import load_target

PROMPT, NEW = 48, 208
GREEDY_SHARE = 0.75
TEMPERATURE = 0.7


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.from_numpy(np.load(options.work / "train.npy").astype(np.int64))
    target = load_target(options.work / "target")
    began, done = time.perf_counter(), []
    for first in range(0, options.sequences, options.batch):
        size = min(options.batch, options.sequences - first)
        starts = torch.randint(tokens.numel() - PROMPT, (size,), generator=generator)
        ids = torch.stack([tokens[s : s + PROMPT] for s in starts.tolist()])
        greedy = torch.rand(size, generator=generator) < GREEDY_SHARE
        past, feed = None, ids
        for _ in range(NEW):
            hidden, past, _ = target(feed, past)
            logits = target.lm_head(hidden[:, -1]).float()
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
