"""Accept stage: keep the KV of the walked path, drop the rest."""

from __future__ import annotations

from typing import Any

import torch

import eagle3_kernels as kernels

from .records import Acceptance, DraftShape, Verified


def run(batch: Any, verified: Verified, shape: DraftShape) -> Acceptance:
    """The accepted path of every request; moves its KV to the front where a tree scattered it."""
    walk = verified.walk
    if shape.topk > 1:
        _move_kv(batch, walk, shape.draft_tokens)
    last = (walk.accept_lens.long() - 1).unsqueeze(1)
    return Acceptance(
        walk=walk,
        bonus_tokens=walk.predict.gather(1, last).squeeze(1),
        new_seq_lens=batch.seq_lens + walk.accept_lens,
    )


def _move_kv(batch: Any, walk: kernels.Accepted, nodes: int) -> None:
    """Copy the accepted nodes' target KV to the first slots behind each request's prefix.

    Accepted node j of a request never lies before window column j, so reading all sources before
    writing any target is the only care that copying in place needs.
    """
    accepted = walk.accept_index.long()
    columns = torch.arange(accepted.shape[1])
    target = torch.arange(accepted.shape[0]).unsqueeze(1) * nodes + columns
    moved = (columns < walk.accept_lens.unsqueeze(1)) & (accepted != target)
    if not bool(moved.any()):
        return
    window = batch.out_cache_loc
    source_slots, target_slots = window[accepted[moved]], window[target[moved]]
    pool = batch.token_to_kv_pool_allocator.get_kvcache()
    for buffer in _kv_buffers(pool):
        buffer[target_slots] = buffer[source_slots]


def _kv_buffers(pool: Any) -> list[torch.Tensor]:
    """Every layer's KV storage: separate keys and values, or MLA's one latent buffer."""
    if hasattr(pool, "k_buffer"):
        return [*pool.k_buffer, *pool.v_buffer]
    return list(pool.kv_buffer)
