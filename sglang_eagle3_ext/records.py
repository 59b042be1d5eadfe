"""What one stage hands to the next: ``taps -> draft -> tree -> verify -> accept -> taps``.

B requests, k = topk, D = steps, N = draft tokens (verify nodes, root included), S = min(D + 1, N),
U = captured planes, T = target width, H = draft width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eagle3_kernels import Accepted as Walk
from eagle3_kernels import TreeBuffers


@dataclass(frozen=True)
class DraftShape:
    """The three numbers that fix a round: speculative steps, topk and draft tokens."""

    steps: int
    topk: int
    draft_tokens: int

    @property
    def width(self) -> int:
        """S: the longest accepted path, root included; a tree may have fewer nodes than steps."""
        return min(self.steps + 1, self.draft_tokens)


@dataclass(frozen=True)
class Proposal:
    """draft -> tree: the nodes to verify, without the root."""

    node_ids: torch.Tensor  # [B, N-1] int64, candidate numbers, ascending; filled by draft.py
    tokens: torch.Tensor  # [B, N-1] int64, target vocabulary; filled by draft.py
    parents: torch.Tensor  # [B, k(D-1)+1] int64, candidate expanded by each beam slot; filled by draft.py


@dataclass(frozen=True)
class DraftTree:
    """tree -> verify: the root (last verified token) and the proposed nodes, as one forward batch."""

    nodes: TreeBuffers  # tokens, positions, mask, next_token, next_sibling; filled by tree.py
    verify_input: Any  # SGLang's EagleVerifyInput over the same tensors; filled by tree.py


@dataclass(frozen=True)
class Verified:
    """verify -> accept: how far the target agrees, and what it says there."""

    walk: Walk  # accept_index [B, S], accept_lens [B] (bonus included), predict [B, N]; filled by verify.py
    logits_output: Any  # next_token_logits [B*N, V] float32, hidden_states [B*N, U*T]; filled by the target
    forward: Any  # the target worker's result, kept alive for SGLang; filled by verify.py


@dataclass(frozen=True)
class Acceptance:
    """accept -> taps and draft: the path that survived."""

    walk: Walk  # accept_index [B, S], accept_lens [B] (bonus included), predict [B, N]; filled by verify.py
    bonus_tokens: torch.Tensor  # [B] int32, root of the next round; filled by accept.py
    new_seq_lens: torch.Tensor  # [B] int64, tokens with valid target KV; filled by accept.py
