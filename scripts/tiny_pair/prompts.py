"""Held-out prompts: windows of files that neither model was trained on.

python scripts/tiny_pair/prompts.py --work build/tiny_pair --count 60
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    tokens = np.load(options.work / "heldout.npy").astype(int)
    files = json.loads((options.work / "heldout.json").read_text())
    tokenizer = Tokenizer.from_file(str(options.work / "target" / "tokenizer.json"))
    random = np.random.default_rng(0)
    chosen = []
    while len(chosen) < options.count:
        name, start = files[len(chosen) % len(files)]
        end = next((s for _, s in files if s > start), len(tokens))
        if end - start < 4 * LENGTH:
            files.remove([name, start])
            continue
        at = int(random.integers(start, end - LENGTH - 1))
        ids = tokens[at : at + LENGTH].tolist()
        text = tokenizer.decode(ids)
        # Only windows that a client can send as text and the server reads as the same tokens.
        if tokenizer.encode(text).ids == ids:
            chosen.append({"id": f"{name}@{at - start}", "text": text})
    (options.work / "prompts_heldout.json").write_text(json.dumps(chosen, indent=1) + "\n")
    print(
        f"{len(chosen)} prompts of {LENGTH} tokens from {len({c['id'].split('@')[0] for c in chosen})} files"
    )


if __name__ == "__main__":
    main()
