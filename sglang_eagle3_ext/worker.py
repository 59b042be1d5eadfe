"""The EAGLE3X worker: read :meth:`Eagle3XWorker._decode_round` first.

One round is ``draft -> tree -> verify -> accept``, and the taps of the verify pass feed the next
draft.  The classes below extend SGLang's V2 workers: on CUDA the round is SGLang's own, graphs and
overlap included, and EAGLE3X adds the taps, the strict weights and the measurement; on the CPU
platform every stage is ours.

Knows the order of the stages; does not know how any of them works.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from . import accept, platform_cpu, taps, tree, upstream, verify
from .config import Resolved
from .draft import CpuDrafter
from .preflight import Preflight, preflight
from .records import DraftShape
from .stats import AcceptStats

logger = logging.getLogger(__name__)


class Eagle3XDraftWorker(upstream.EagleDraftWorker):  # type: ignore[misc]  # resolved at run time
    """Loads the draft strictly, folds the tap order into it, and drafts."""

    def __init__(self, plan: taps.TapPlan, **arguments: Any):
        with upstream.draft_tap_count(len(plan.taps)):
            super().__init__(**arguments)
        taps.fold(self.draft_runner, plan)
        self.shape = DraftShape(
            self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens
        )
        self.drafter: CpuDrafter | None = None

    def init_attention_backend(self) -> None:
        """On the CPU platform one attention backend serves every draft pass."""
        if not platform_cpu.is_active():
            super().init_attention_backend()
            return
        self.draft_attn_backend = self.draft_runner.attn_backend
        self.draft_extend_attn_backend = None
        self.draft_runner.draft_attn_backend = self.draft_attn_backend
        self.drafter = CpuDrafter(self.draft_runner, self.shape, self.hot_token_id)


class Eagle3XWorker(upstream.EAGLEWorkerV2):  # type: ignore[misc]  # resolved at run time
    """Target and draft of one rank, served exactly as the draft was trained."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        checked = preflight(server_args)
        taps.install(checked.plan, target_worker.model_runner)
        with upstream.draft_worker_class(_draft_worker_factory(checked.plan)):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.plan = checked.plan
        self.shape = DraftShape(
            self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens
        )
        self.stats = _stats(checked, self.shape)
        self._first_forward_checked = False
        logger.info("EAGLE3X %s", checked.describe())

    # --- one round ----------------------------------------------------------------------------------

    def _decode_round(self, batch: Any, on_publish: Any) -> Any:
        """draft -> tree -> verify -> accept, then the draft catches up on the accepted path."""
        proposal = self.draft_worker.drafter.propose(batch)
        draft_tree = tree.build(proposal, batch.spec_info.bonus_tokens, batch.seq_lens, self.shape)
        verified = verify.run(batch, draft_tree, self.target_worker, self.req_to_token_pool)
        acceptance = accept.run(batch, draft_tree, verified, self.shape)
        if on_publish is not None:
            on_publish(acceptance.new_seq_lens)
        batch.spec_info = upstream.EagleDraftInput(bonus_tokens=acceptance.bonus_tokens)
        self.draft_worker.drafter.extend(batch, acceptance, verified.logits_output.hidden_states)
        return upstream.GenerationBatchResult(
            logits_output=verified.logits_output,
            next_token_ids=acceptance.walk.predict.view(-1),
            speculative_num_draft_tokens=self.shape.draft_tokens,
            next_draft_input=batch.spec_info,
            accept_lens=acceptance.walk.accept_lens,
            accept_index=acceptance.walk.accept_index,
            new_seq_lens=acceptance.new_seq_lens,
            extra_keep_alive_refs=[verified.forward],
        )

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """SGLang's entry point: one prefill or one decode round of ``batch``."""
        ours = platform_cpu.is_active()
        decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch)
        if ours and decode and not batch.forward_mode.is_idle():
            with upstream.draft_tp_context(self.draft_worker.parallel_layout):
                return self._decode_round(batch, on_publish)
        return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)

    def _forward_prefill_batch(self, batch: Any, *arguments: Any, **named: Any) -> Any:
        result = super()._forward_prefill_batch(batch, *arguments, **named)
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang's hook with the accepted drafts on the host: measure, then SGLang's own use of it."""
        self.stats.add(num_correct_drafts_per_req)
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)


def _draft_worker_factory(plan: taps.TapPlan) -> Any:
    def build(server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> Eagle3XDraftWorker:
        return Eagle3XDraftWorker(
            plan,
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_worker=target_worker,
        )

    return build
