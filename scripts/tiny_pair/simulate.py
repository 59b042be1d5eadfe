"""Accept length of a pair in plain PyTorch, without any server: greedy, chain of K, one request at a time.

Shares no code with the plugin or with SGLang, so that agreement with the engine is evidence for both.

    python scripts/tiny_pair/simulate.py --pair sglang_eagle3_ext/assets/tiny --steps 5
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from model import Draft, Target, load_draft, load_target, rope


@torch.no_grad()
def continue_greedily(target: Target, prompt: list[int], new: int) -> list[int]:
    """The target's own continuation, without an end of text."""
    past, feed, out = None, torch.tensor([prompt]), []
    for _ in range(new):
        hidden, past, _ = target(feed, past)
        out.append(int(target.lm_head(hidden[:, -1]).argmax()))
        feed = torch.tensor([[out[-1]]])
    return out


@torch.no_grad()
def verify_counts(
    target: Target, draft: Draft, prompt: list[int], continuation: list[int], steps: int, taps: list[int]
) -> list[int]:
    """Drafts accepted in each verify round.

    The first token of the continuation comes from the prompt's own pass.  A round proposes ``steps``
    tokens, keeps those that continue the target's text and adds the target's next token.
    """
    ids = torch.tensor([prompt + continuation])
    _, _, planes = target(ids, want=tuple(set(taps)))
    fused = draft.fc(torch.cat([planes[b] for b in taps], dim=-1))
    embedded = target.model.embed_tokens(ids)
    to_target = draft.target_ids()
    n = ids.shape[1]
    cos, sin = rope(torch.arange(n + steps), draft.shape)
    # Keys and values of every verified position, as the target's own states give them.
    _, (keys, values) = draft.midlayer(embedded[:, 1:], fused[:, :-1], cos[: n - 1], sin[: n - 1])
    accepted = []
    last = len(prompt)  # position of the last token that is known and not yet forwarded
    while last < n - 1:
        t = last - 1
        hidden, token = fused[:, t : t + 1], embedded[:, last : last + 1]
        past = (keys[:, :, :t], values[:, :, :t])
        count, matches = 0, True
        for k in range(steps):
            at = slice(t + k, t + k + 1)
            hidden, past = draft.midlayer(token, hidden, cos[at], sin[at], past)
            proposed = int(to_target[int(draft.logits(hidden)[0, 0].argmax())])
            wanted = int(ids[0, last + k + 1]) if last + k + 1 < n else -1
            matches = matches and proposed == wanted
            count += matches
            token = target.model.embed_tokens(torch.tensor([[proposed]]))
        accepted.append(count)
        last += count + 1
    return accepted


def simulate(pair: Path, prompts: list[list[int]], new: int, steps: int, taps: list[int]) -> dict[str, Any]:
    """Verify rounds per prompt, and the accept length over all.

    The accept length is counted as SGLang does it: all new tokens, the first one included, by rounds.
    """
    target, draft = load_target(pair / "target"), load_draft(pair / "draft")
    rounds, reached = [], [0] * (steps + 1)
    for prompt in prompts:
        accepted = verify_counts(target, draft, prompt, continue_greedily(target, prompt, new), steps, taps)
        rounds.append(len(accepted))
        for count in accepted:
            for i in range(count + 1):
                reached[i] += 1
    return {
        "taps": taps,
        "steps": steps,
        "prompts": len(prompts),
        "new_tokens": new,
        "verify_rounds": rounds,
        "accept_length": new * len(prompts) / sum(rounds),
        "acceptance_by_position": [b / a for a, b in zip(reached, reached[1:], strict=False) if a],
    }


def main() -> None:
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/ and draft/")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--taps", default="0,2,8", help="boundaries, in the order of fc's columns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = json.loads((options.pair / "prompts_heldout.json").read_text())[: options.prompts]
    tokenizer = Tokenizer.from_file(str(options.pair / "target" / "tokenizer.json"))
    prompts = [tokenizer.encode(t["text"]).ids for t in texts]
    taps = [int(b) for b in options.taps.split(",")]
    print(json.dumps(simulate(options.pair, prompts, options.new_tokens, options.steps, taps)))


if __name__ == "__main__":
    main()
