"""Verify stage: one target pass over the tree, then the target's own token at every node.

Greedy requests take the argmax.  Sampled requests draw from every node's distribution with the
sampler that SGLang uses without speculation, so temperature, top-k, top-p, min-p and logit bias mean
the same with and without a draft: following a child exactly when it is the drawn token
leaves the target's law unchanged, and no other rule accepts more of a fixed set of children
(the argument is that of the target-only tree sampling in SGLang, seen from the other side).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import eagle3_kernels as kernels

from . import upstream
from .records import DraftTree, Verified


def run(batch: Any, tree: DraftTree, target_worker: Any, req_to_token_pool: Any) -> Verified:
    """Forward the tree through the target and predict a token after each of its nodes."""
    batch.spec_info = tree.verify_input
    forward_batch, _ = upstream.eagle_prepare_for_verify(
        tree.verify_input, req_to_token_pool, batch, target_worker
    )
    forward = target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    logits = forward.logits_output.next_token_logits
    predict = target_tokens(logits, batch.sampling_info, tree, target_worker.model_runner)
    return Verified(predict, forward.logits_output, (forward, forward_batch))


def target_tokens(logits: torch.Tensor, sampling: Any, tree: DraftTree, runner: Any) -> torch.Tensor:
    """The target's token after every node.

    Args:
        logits: [B*N, V] float32; a logit bias is added in place, as SGLang does without speculation,
            so that returned logprobs include it.
        sampling: SGLang's SamplingBatchInfo of the B requests.

    Returns:
        [B, N] int64.
    """
    batch, nodes = tree.nodes.tokens.shape
    if sampling.logit_bias is not None:
        logits.add_(sampling.logit_bias.repeat_interleave(nodes, dim=0))
    greedy = kernels.row_argmax(logits).view(batch, nodes)
    if sampling.is_all_greedy:
        return greedy
    drawn = runner.sampler(
        upstream.LogitsProcessorOutput(next_token_logits=logits.clone()),
        _per_node(sampling, nodes),
        False,
        [0] * (batch * nodes),
        [None] * (batch * nodes),
        tree.nodes.positions.view(-1),
    )
    # A greedy request in a mixed batch stays exactly greedy: SGLang stores it as top_k = 1.
    is_greedy = (sampling.top_ks == 1).view(batch, 1)
    return torch.where(is_greedy, greedy, drawn.view(batch, nodes).to(torch.int64))


def _per_node(sampling: Any, nodes: int) -> Any:
    """The sampling parameters of every request, once per node of its tree."""
    repeated = {
        name: value.repeat_interleave(nodes, dim=0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if (value := getattr(sampling, name)) is not None
    }
    return dataclasses.replace(sampling, logit_bias=None, **repeated)
