"""Text for the tiny pair: the Python 3.11 documentation and standard library (PSF-2.0).

Downloads Debian's ``python3.11-doc`` (12.6 MB, not installed), unpacks it below the work folder, and
writes ``train.txt`` / ``heldout.txt`` plus a byte-level BPE tokenizer trained on the training part.
Every 20th file is held out whole, so that no held-out prompt stands in the training text.

    python scripts/tiny_pair/text.py --work build/tiny_pair
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
HELD_OUT_EVERY = 20
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + ('assistant' if m.role == 'assistant' else 'user') "
    "+ '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def documentation(work: Path) -> Path:
    """Unpack the documentation package once; returns the folder of its reST sources."""
    root = work / "doc"
    if not root.exists():
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "download", "-qq", "python3.11-doc"], cwd=work, check=True)
        package = next(work.glob("python3.11-doc_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return next(root.rglob("_sources"))


def sources(work: Path) -> list[tuple[str, str]]:
    """(name, text) of every file, in a fixed order."""
    doc = documentation(work)
    found = [(f"doc/{p.relative_to(doc)}", p) for p in doc.rglob("*.rst.txt")]
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in stdlib.rglob("*.py"):
        parts = path.relative_to(stdlib).parts
        if not {"test", "tests", "site-packages", "lib2to3", "idlelib", "__pycache__"} & set(parts):
            found.append(("stdlib/" + "/".join(parts), path))
    texts = [(name, path.read_text(encoding="utf-8", errors="ignore")) for name, path in sorted(found)]
    return [(name, text) for name, text in texts if len(text) > 400]


def train_tokenizer(texts: list[str], folder: Path) -> Tokenizer:
    """Byte-level BPE, saved so that transformers and SGLang load it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    files = sources(work)

    # A hash decides, not the position: adding a file upstream moves no other file.
    def held(name: str) -> bool:
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0

    train = [(n, t) for n, t in files if not held(n)]
    heldout = [(n, t) for n, t in files if held(n)]
    tokenizer = train_tokenizer([t for _, t in train], work / "target")
    eos = tokenizer.token_to_id("<|eos|>")
    for split, items in (("train", train), ("heldout", heldout)):
        ids: list[int] = []
        starts = []
        for name, text in items:
            starts.append((name, len(ids)))
            ids += [*tokenizer.encode(text).ids, eos]
        np.save(work / f"{split}.npy", np.asarray(ids, dtype=np.uint16))
        (work / f"{split}.json").write_text(json.dumps(starts))
        print(f"{split}: {len(items)} files, {sum(len(t) for _, t in items)} characters, {len(ids)} tokens")


if __name__ == "__main__":
    main()
