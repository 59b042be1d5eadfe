"""Verify stage: one target pass over the tree, then the walk along the target's own tokens.

A greedy request takes the argmax at each node it comes by.  A sampled one draws from the node's
distribution, with temperature, top-k, top-p and min-p combined as SGLang's samplers combine them without
speculation ("joint"), and a logit bias added first; following a child exactly when it is the token drawn
leaves the target's law unchanged (:mod:`eagle3_kernels.sample`).
"""

from __future__ import annotations

from typing import Any

import torch

import eagle3_kernels as kernels

from . import upstream
from .records import DraftTree, Verified


def run(batch: Any, tree: DraftTree, target_worker: Any, req_to_token_pool: Any, width: int) -> Verified:
    """Forward the tree through the target and walk it; the path has at most ``width`` nodes."""
    batch.spec_info = tree.verify_input
    forward_batch, _ = upstream.eagle_prepare_for_verify(
        tree.verify_input, req_to_token_pool, batch, target_worker
    )
    forward = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    walked = walk(forward.logits_output.next_token_logits, batch.sampling_info, tree.nodes, width)
    return Verified(walked, forward.logits_output, (forward, forward_batch))


def walk(logits: torch.Tensor, sampling: Any, nodes: kernels.TreeBuffers, width: int) -> kernels.Accepted:
    """The path on which every request's drafts are what the target says.

    Args:
        logits: [B*N, V] float32; a logit bias is added in place, as SGLang does without speculation.
        sampling: SGLang's SamplingBatchInfo of the B requests.
        width: S, the longest path.
    """
    batch, width_of_tree = nodes.tokens.shape
    if sampling.logit_bias is not None:
        logits.add_(sampling.logit_bias.repeat_interleave(width_of_tree, dim=0))
    tree = (nodes.tokens, nodes.next_token, nodes.next_sibling)
    if sampling.is_all_greedy:
        return kernels.verify_greedy(*tree, logits, width)
    return kernels.verify_sample(
        *tree,
        logits,
        width,
        temperature=sampling.temperatures.view(batch),
        top_k=sampling.top_ks,
        top_p=sampling.top_ps,
        min_p=sampling.min_ps,
        # From torch's generator, which SGLang seeds alike on every rank: all ranks walk the same path.
        coins=torch.rand(batch, width_of_tree, dtype=torch.float64),
    )
