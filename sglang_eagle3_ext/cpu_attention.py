"""Attention for the CPU platform: gather the cached rows, mask, call torch's SDPA.

One forward pass has one :class:`AttentionPlan`, made once and used by every layer.  Where all
requests bring the same number of query rows (decode, draft, verify) the whole batch is one padded
SDPA call; prefill runs request by request.

Knows how SGLang lays out the KV pool and the batch; does not know who decides what a tree is: the
tree mask comes in with the verify input, the slots of a draft branch with :meth:`plan_draft_step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from . import upstream
from .errors import Problem, RefusedError
from .features import CPU_ATTENTION as NAME


@dataclass(frozen=True)
class Segment:
    """Queries that share their keys: one request, or a padded group of requests of equal query count.

    Attributes:
        rows: query rows of this segment in the batch, ``groups * queries`` of them.
        slots: [groups, keys] int64, KV slots read; padding repeats slot 0 and is masked.
        visible: [groups, queries, keys] bool, or None where every key is visible.
        query_positions: [groups, queries] int64, key_positions: [groups, keys] int64; only read for
            layers with a sliding window.
        masks: additive masks made from ``visible``, by (dtype, window); filled on first use.
    """

    rows: slice
    slots: torch.Tensor
    visible: torch.Tensor | None
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    masks: dict[tuple[torch.dtype, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype, window: int) -> torch.Tensor | None:
        """Additive mask [groups, 1, queries, keys], 0 or -inf; None where nothing is hidden."""
        key = (dtype, window)
        if key not in self.masks:
            visible = self.visible
            if window >= 0:
                near = self.key_positions[:, None, :] >= self.query_positions[:, :, None] - window
                visible = near if visible is None else visible & near
            if visible is None or bool(visible.all()):
                self.masks[key] = None
            else:
                additive = torch.zeros(visible.shape, dtype=dtype)
                additive.masked_fill_(~visible, -math.inf)
                self.masks[key] = additive.unsqueeze(1)
        return self.masks[key]


@dataclass(frozen=True)
class AttentionPlan:
    """What one forward pass reads: its segments, in query-row order."""

    segments: tuple[Segment, ...]


def _padded_segment(
    rows: slice,
    slots: Sequence[torch.Tensor],
    visible: Sequence[torch.Tensor | None],
    query_positions: torch.Tensor,
    key_positions: Sequence[torch.Tensor],
) -> Segment:
    """One segment out of several requests with the same number of queries."""
    groups, queries = query_positions.shape
    lengths = [s.numel() for s in slots]
    longest = max(lengths)
    if min(lengths) == longest and all(v is None for v in visible):
        return Segment(
            rows, torch.stack(list(slots)), None, query_positions, torch.stack(list(key_positions))
        )
    all_slots = torch.zeros(groups, longest, dtype=torch.int64)
    all_positions = torch.zeros(groups, longest, dtype=torch.int64)
    all_visible = torch.zeros(groups, queries, longest, dtype=torch.bool)
    for g, length in enumerate(lengths):
        all_slots[g, :length] = slots[g]
        all_positions[g, :length] = key_positions[g]
        seen = visible[g]
        all_visible[g, :, :length] = True if seen is None else seen
    return Segment(rows, all_slots, all_visible, query_positions, all_positions)


class TreeAttentionBackend(upstream.AttentionBackend):
    """SDPA over gathered KV rows, for target and draft, chain and tree."""

    def __init__(self, model_runner: Any):
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.plan = AttentionPlan(())
        _refuse_unsupported_layers(model_runner.model)
        if model_runner.use_mla_backend:
            # Absorbed attention alone: it reads prefix, tree and new tokens from one latent cache, where
            # the expanded form would need a merge of partial softmaxes.
            method = upstream.AttnForwardMethod.MLA
            getattr(upstream, "AttentionBackendRegistry.register")(NAME, lambda *_: method)

    # --- planning: once per forward pass ------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the pass that SGLang is about to run."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.plan = AttentionPlan(())
        elif mode.is_decode():
            self.plan = self._decode_plan(forward_batch)
        elif mode.is_target_verify():
            self.plan = self._verify_plan(forward_batch)
        else:
            self.plan = self.extend_plan(
                forward_batch.req_pool_indices,
                _host_lengths(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_prefix_lens),
                _host_lengths(forward_batch.extend_seq_lens_cpu, forward_batch.extend_seq_lens),
            )

    def _rows(self, req_pool_indices: torch.Tensor) -> list[torch.Tensor]:
        table = self.req_to_token_pool.req_to_token
        return [table[r] for r in req_pool_indices.tolist()]

    def _decode_plan(self, forward_batch: Any) -> AttentionPlan:
        # seq_lens counts the token being decoded; its slot is already in the table.
        lengths = forward_batch.seq_lens.tolist()
        slots = [
            row[:n].long() for row, n in zip(self._rows(forward_batch.req_pool_indices), lengths, strict=True)
        ]
        positions = torch.tensor(lengths).view(-1, 1) - 1
        keys = [torch.arange(n) for n in lengths]
        return AttentionPlan(
            (_padded_segment(slice(0, len(lengths)), slots, [None] * len(lengths), positions, keys),)
        )

    def _verify_plan(self, forward_batch: Any) -> AttentionPlan:
        tree = forward_batch.spec_info
        nodes = tree.draft_token_num
        lengths = forward_batch.seq_lens.tolist()
        batch = len(lengths)
        positions = tree.positions.view(batch, nodes)
        tree_mask = tree.custom_mask.view(batch, nodes, nodes)
        slots, visible, keys = [], [], []
        for g, (row, n) in enumerate(zip(self._rows(forward_batch.req_pool_indices), lengths, strict=True)):
            slots.append(row[: n + nodes].long())
            seen = torch.ones(nodes, n + nodes, dtype=torch.bool)
            seen[:, n:] = tree_mask[g]
            visible.append(seen)
            keys.append(torch.cat((torch.arange(n), positions[g])))
        return AttentionPlan((_padded_segment(slice(0, batch * nodes), slots, visible, positions, keys),))

    def extend_plan(
        self, req_pool_indices: torch.Tensor, prefix_lens: Sequence[int], extend_lens: Sequence[int]
    ) -> AttentionPlan:
        """Causal attention of ``extend_lens[i]`` new tokens behind ``prefix_lens[i]`` cached ones."""
        segments, start = [], 0
        for row, prefix, new in zip(self._rows(req_pool_indices), prefix_lens, extend_lens, strict=True):
            total = prefix + new
            visible = None
            if new > 1:
                visible = torch.ones(new, total, dtype=torch.bool).tril_(prefix).unsqueeze(0)
            segments.append(
                Segment(
                    rows=slice(start, start + new),
                    slots=row[:total].long().unsqueeze(0),
                    visible=visible,
                    query_positions=torch.arange(prefix, total).unsqueeze(0),
                    key_positions=torch.arange(total).unsqueeze(0),
                )
            )
            start += new
        return AttentionPlan(tuple(segments))

    def plan_draft_step(
        self, prefix_slots: Sequence[torch.Tensor], branch_slots: torch.Tensor, lengths: Sequence[int]
    ) -> AttentionPlan:
        """Plan one draft step: every branch reads its request's prefix and its own steps so far.

        Args:
            prefix_slots: per request, [length] int64.
            branch_slots: [batch, topk, steps so far] int64, the step being written included.
            lengths: per request, the prefix length.
        """
        batch, topk, steps = branch_slots.shape
        slots, keys = [], []
        for prefix, branches, length in zip(prefix_slots, branch_slots, lengths, strict=True):
            positions = torch.arange(length + steps)
            for branch in branches:
                slots.append(torch.cat((prefix, branch)))
                keys.append(positions)
        query_positions = torch.tensor(lengths).add_(steps - 1).repeat_interleave(topk).view(batch * topk, 1)
        return AttentionPlan(
            (_padded_segment(slice(0, batch * topk), slots, [None] * len(slots), query_positions, keys),)
        )

    # --- every layer --------------------------------------------------------------------------------

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend.

        Args:
            q: [tokens, heads * head_dim]; k: [tokens, kv_heads, head_dim]; v: [tokens, kv_heads, v_dim].

        Returns:
            [tokens, heads * v_dim], in the dtype of ``q``.
        """
        extra = {name: value for name, value in extra.items() if value is not None}
        if extra:
            raise _unsupported(f"attention arguments {sorted(extra)}")
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, upstream.KVWriteLoc.for_batch(forward_batch), k, v)
        heads, qk_dim, v_dim = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
        query = q.reshape(-1, heads, qk_dim)
        out = query.new_empty(query.shape[0], heads, v_dim)
        key_buffer, value_buffer = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        window = layer.sliding_window_size
        for part in self.plan.segments:
            groups, keys = part.slots.shape
            flat = part.slots.view(-1)
            # [groups, keys, kv_heads, dim] -> [groups, kv_heads, keys, dim]
            key = key_buffer[flat].view(groups, keys, -1, qk_dim).transpose(1, 2)
            value = value_buffer[flat].view(groups, keys, -1, v_dim).transpose(1, 2)
            if key.dtype != query.dtype:
                key, value = key.to(query.dtype), value.to(query.dtype)
            rows = query[part.rows].view(groups, -1, heads, qk_dim).transpose(1, 2)
            attended = scaled_dot_product_attention(
                rows,
                key,
                value,
                attn_mask=part.mask(query.dtype, window),
                scale=layer.scaling,
                enable_gqa=key.shape[1] != heads,
            )
            out[part.rows] = attended.transpose(1, 2).reshape(-1, heads, v_dim)
        return out.view(-1, heads * v_dim)

    def support_triton(self) -> bool:
        return False


def _host_lengths(host: Sequence[int] | None, device: torch.Tensor) -> list[int]:
    return list(host) if host is not None else device.tolist()


def _unsupported(what: str) -> RefusedError:
    return RefusedError(
        [
            Problem(
                "target model",
                what,
                "plain and grouped-query attention, MLA, sliding windows",
                "the CPU platform's attention does not compute it",
                "serve this model on a GPU, where SGLang's own attention backends are used",
            )
        ]
    )


def _refuse_unsupported_layers(model: torch.nn.Module) -> None:
    for module in model.modules():
        if not isinstance(module, upstream.RadixAttention):
            continue
        if module.is_cross_attention or module.attn_type.name == "ENCODER_ONLY":
            raise _unsupported("encoder or cross attention")
        if module.logit_cap:
            raise _unsupported(f"soft-capped attention logits (cap {module.logit_cap})")
