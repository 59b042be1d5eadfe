"""Tree stage: arrange the proposed nodes under the root, with mask, positions and links."""

from __future__ import annotations

import torch

import eagle3_kernels as kernels

from . import upstream
from .records import DraftShape, DraftTree, Proposal


def build(
    proposal: Proposal, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor, shape: DraftShape
) -> DraftTree:
    """The tree of one round.

    Args:
        proposal: the draft's nodes, N-1 per request.
        bonus_tokens: [B], the last verified token of each request: the root, at position ``seq_lens``.
        seq_lens: [B], tokens with valid target KV.
    """
    root = bonus_tokens.to(torch.int64)
    if shape.topk == 1:
        nodes = kernels.build_chain(root, proposal.tokens, seq_lens)
    else:
        nodes = kernels.build_tree(
            root, proposal.node_ids, proposal.tokens, proposal.parents, seq_lens, shape.topk
        )
    batch, width = nodes.tokens.shape
    verify_input = upstream.EagleVerifyInput(
        draft_token=nodes.tokens.view(-1),
        custom_mask=nodes.mask,
        positions=nodes.positions.view(-1),
        retrieve_index=torch.arange(batch * width).view(batch, width),
        retrieve_next_token=nodes.next_token,
        retrieve_next_sibling=nodes.next_sibling,
        retrieve_cum_len=None,
        spec_steps=shape.steps,
        topk=shape.topk,
        draft_token_num=width,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
    return DraftTree(nodes, verify_input)
