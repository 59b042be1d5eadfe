"""Draft stage: run the draft model ``steps`` times and choose the nodes worth verifying.

On CUDA this is SGLang's own draft loop with its graphs.  On the CPU platform it is the loop below,
which differs from SGLang's in one point: with topk > 1 a branch reads the keys and values of its
true ancestors, as in training, where SGLang reads whatever earlier beam held the same slot.

Knows the draft model and its KV slots; does not know the target.
"""

from __future__ import annotations

from typing import Any

import torch

import eagle3_kernels as kernels

from . import upstream
from .records import Acceptance, DraftShape, Proposal


class CpuDrafter:
    """The draft model's forward passes on the CPU platform.

    Args:
        runner: SGLang's ModelRunner of the draft, weights loaded.
        shape: steps, topk and draft tokens.
        hot_token_id: [draft vocabulary] int64, target id of each draft id; None where the draft uses
            the target's vocabulary.
    """

    def __init__(self, runner: Any, shape: DraftShape, hot_token_id: torch.Tensor | None):
        self.runner = runner
        self.shape = shape
        self.hot_token_id = hot_token_id
        self.model = runner.model
        self.backend = runner.attn_backend
        self.table = runner.req_to_token_pool.req_to_token
        config = self.model.config
        self.vocab_size = getattr(config, "draft_vocab_size", None) or config.vocab_size

    def propose(self, batch: Any) -> Proposal:
        """Draft from the state that the last extend left in ``batch.spec_info``.

        Reads topk_p [B, k], topk_index [B, k] (draft ids) and hidden_states [B, H]; writes draft KV
        into the slots behind every request's verified prefix.
        """
        state, shape = batch.spec_info, self.shape
        size, steps, topk = len(batch.seq_lens), shape.steps, shape.topk
        lengths = batch.seq_lens.tolist()
        slots = kernels.cache_slots(self.table, batch.req_pool_indices, batch.seq_lens, topk * steps)
        slots = slots.view(size, topk, steps)
        prefixes = [
            self.table[r, :n].long() for r, n in zip(batch.req_pool_indices.tolist(), lengths, strict=True)
        ]
        requests = batch.req_pool_indices.repeat_interleave(topk)
        start = batch.seq_lens.repeat_interleave(topk)

        candidates = kernels.Candidates.allocate(size, topk, steps)
        tokens = kernels.select_first(candidates, state.topk_p, self.to_target(state.topk_index))
        hidden = state.hidden_states.repeat_interleave(topk, dim=0)
        path = slots[:, :, :0]
        for step in range(1, steps):
            path = torch.cat((path, slots[:, :, step - 1 : step]), dim=2)
            plan = self.backend.plan_draft_step(prefixes, path, lengths)
            hidden, normed = self.forward(
                tokens, hidden, start + (step - 1), slots[:, :, step - 1].reshape(-1), requests, plan
            )
            probs, ids = self.top(normed)
            tokens, parent_row = kernels.select_next(candidates, step, probs, self.to_target(ids))
            hidden = hidden[parent_row]
            path = path.reshape(size * topk, -1)[parent_row].view(size, topk, -1)
        node_ids, node_tokens = kernels.select_nodes(candidates, shape.draft_tokens - 1)
        return Proposal(node_ids, node_tokens, candidates.parents)

    def extend(self, batch: Any, acceptance: Acceptance, target_hidden: torch.Tensor) -> None:
        """Rewrite the draft's KV over the accepted path with the target's own hidden states.

        Only accepted rows are computed.  Fills ``topk_p``, ``topk_index`` and ``hidden_states`` of the
        state that the next round starts from.

        Args:
            target_hidden: [B*N, U*T], captured by the verify pass, in node order.
        """
        walk = acceptance.walk
        counts = walk.accept_lens.tolist()
        lengths = batch.seq_lens.tolist()
        rows = torch.cat([walk.accept_index[b, :n] for b, n in enumerate(counts)]).long()
        tokens = torch.cat([walk.predict[b, :n] for b, n in enumerate(counts)]).long()
        positions = torch.cat([torch.arange(n, n + c) for n, c in zip(lengths, counts, strict=True)])
        slots = torch.cat(
            [
                self.table[r, n : n + c].long()
                for r, n, c in zip(batch.req_pool_indices.tolist(), lengths, counts, strict=True)
            ]
        )
        plan = self.backend.extend_plan(batch.req_pool_indices, lengths, counts)
        hidden, normed = self.forward(
            tokens, target_hidden[rows], positions, slots, batch.req_pool_indices, plan
        )
        last = walk.accept_lens.long().cumsum(0) - 1
        state = batch.spec_info
        state.topk_p, state.topk_index = self.top(normed[last])
        state.hidden_states = hidden[last]

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        requests: torch.Tensor,
        plan: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the draft's layers.

        Args:
            tokens: [rows] int64 target ids; hidden: [rows, U*T] (fused by ``fc``) or [rows, H].
            positions: [rows] int64; slots: [rows] int64, where the new KV goes.

        Returns:
            (fed back to the next step [rows, H], input of the head [rows, H])
        """
        forward_batch = upstream.ForwardBatch(
            forward_mode=upstream.ForwardMode.DECODE,
            batch_size=tokens.numel(),
            input_ids=tokens,
            req_pool_indices=requests,
            seq_lens=positions,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            spec_info=upstream.EagleDraftInput(hidden_states=hidden),
        )
        self.backend.plan = plan
        with upstream.forward_context(upstream.ForwardContext(attn_backend=self.backend)):
            normed, fed_back = self.model.model(tokens, positions, forward_batch)
        return fed_back[0], normed

    def top(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [rows, k] float32 and draft ids [rows, k] int64 of the best next tokens."""
        head = self.model.lm_head
        logits = head.quant_method.apply(head, normed, None)
        if upstream.get_parallel().tp_size > 1:
            logits = upstream.tensor_model_parallel_all_gather(logits)
        logits = logits[:, : self.vocab_size].contiguous()  # without the rows that pad the head
        if self.shape.topk > 1:
            return kernels.row_topk(logits, self.shape.topk)
        ids = kernels.row_argmax(logits).unsqueeze(1)
        # A chain has no choice to score.
        return torch.ones(ids.shape, dtype=torch.float32), ids

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target vocabulary ids of draft vocabulary ids, same shape."""
        return draft_ids if self.hot_token_id is None else self.hot_token_id[draft_ids]
