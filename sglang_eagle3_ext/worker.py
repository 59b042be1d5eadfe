"""The EAGLE3X worker: read :meth:`Eagle3XWorker._decode_round` first.

One round is ``draft -> tree -> verify -> accept``, and the taps of the verify pass feed the next
draft.  The classes below extend SGLang's V2 workers: on CUDA the round is SGLang's own, graphs and
overlap included, and EAGLE3X adds the taps, the strict weights and the measurement; on the CPU
platform every stage is ours.

Knows the order of the stages; does not know how any of them works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

import eagle3_kernels as kernels

from . import accept, hooks, platform_cpu, taps, tree, upstream, verify
from .draft import CpuDrafter
from .preflight import Preflight, preflight
from .records import Acceptance, DraftShape, Proposal
from .stats import AcceptStats

logger = logging.getLogger(__name__)


class Eagle3XDraftWorker(upstream.EagleDraftWorker):
    """Loads the draft for its taps, folds their order into it, and drafts."""

    def __init__(self, plan: taps.TapPlan, **arguments: Any):
        self.plan = plan
        self.planes_checked = False
        self.drafter: CpuDrafter | None = None
        with upstream.draft_taps(len(plan.taps), aux=bool(plan.boundaries)):
            super().__init__(**arguments)
        taps.fold(self.draft_runner.model, plan)
        self.draft_runner.model_config.hf_config.num_aux_hidden_states = plan.planes

    def init_attention_backend(self) -> None:
        """On the CPU platform one attention backend serves every draft pass."""
        taps.check_installed(self.plan, self.target_worker.model_runner.model)
        if not platform_cpu.is_active():
            super().init_attention_backend()
            return
        self.draft_attn_backend = self.draft_runner.attn_backend
        self.draft_extend_attn_backend = None
        self.draft_runner.draft_attn_backend = self.draft_attn_backend
        shape = DraftShape(self.speculative_num_steps, self.topk, self.speculative_num_draft_tokens)
        self.drafter = CpuDrafter(self.draft_runner, shape, self.hot_token_id)

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden_states: Any, next_token_ids: Any, *arguments: Any, **named: Any
    ) -> Any:
        """SGLang's pass over the prompt; the first one shows whether the taps arrive."""
        if not self.planes_checked and not batch.forward_mode.is_idle():
            taps.check_planes(self.plan, target_hidden_states, batch.input_ids.numel())
            self.planes_checked = True
            logger.info(
                "EAGLE3X: first forward: %d planes of %d arrived, as planned",
                self.plan.planes,
                self.plan.target.width,
            )
        return super()._draft_extend_for_prefill(
            batch, target_hidden_states, next_token_ids, *arguments, **named
        )

    # --- on the CPU platform ------------------------------------------------------------------------

    def propose(self, batch: Any) -> Proposal:
        """Draft a tree for every request of ``batch``."""
        assert self.drafter is not None
        with upstream.draft_tp_context(self.parallel_layout):
            return self.drafter.propose(batch)

    def extend(self, batch: Any, acceptance: Acceptance, tapped: torch.Tensor) -> None:
        """Catch up on the accepted path; ``tapped`` [B*N, U*T] comes from the verify pass."""
        assert self.drafter is not None
        with upstream.draft_tp_context(self.parallel_layout):
            self.drafter.extend(batch, acceptance, tapped)


class Eagle3XWorker(upstream.EAGLEWorkerV2):
    """Target and draft of one rank, served exactly as the draft was trained."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        checked = preflight(server_args)
        hooks.apply(hooks.POOLS)
        taps.install(checked.plan, target_worker.model_runner)
        with upstream.draft_worker_class(_draft_worker_factory(checked.plan)):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.shape = DraftShape(checked.steps, checked.topk, checked.draft_tokens)
        self.stats = _stats(checked)
        if platform_cpu.is_active():
            kernels.warm_up()

    # --- one round ----------------------------------------------------------------------------------

    def _decode_round(self, batch: Any, on_publish: Any) -> Any:
        """draft -> tree -> verify -> accept, then the draft catches up on the accepted path."""
        proposal = self.draft_worker.propose(batch)
        draft_tree = tree.build(proposal, batch.spec_info.bonus_tokens, batch.seq_lens, self.shape)
        verified = verify.run(batch, draft_tree, self.target_worker, self.req_to_token_pool, self.shape.width)
        acceptance = accept.run(batch, verified, self.shape)
        if on_publish is not None:
            on_publish(acceptance.new_seq_lens)
        batch.spec_info = upstream.EagleDraftInput(bonus_tokens=acceptance.bonus_tokens)
        self.draft_worker.extend(batch, acceptance, tapped=verified.logits_output.hidden_states)
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
        mode = batch.forward_mode
        decodes = not (mode.is_extend() or mode.is_idle() or batch.is_extend_in_batch)
        if decodes and platform_cpu.is_active():
            return self._decode_round(batch, on_publish)
        return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang's hook with the accepted drafts on the host: measure, then SGLang's own use of it."""
        if upstream.get_parallel().tp_rank == 0:  # all ranks accept the same
            self.stats.add(num_correct_drafts_per_req)
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)


def _draft_worker_factory(plan: taps.TapPlan) -> Callable[..., Eagle3XDraftWorker]:
    def build(server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> Eagle3XDraftWorker:
        return Eagle3XDraftWorker(
            plan,
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            target_worker=target_worker,
        )

    return build


def _stats(checked: Preflight) -> AcceptStats:
    values = checked.options.values
    return AcceptStats(
        steps=checked.steps,
        alarm_below=values.accept_alarm,
        alarm_rounds=values.accept_alarm_rounds,
        hint=f"this server feeds {taps.names([t.boundary for t in checked.plan.taps])} "
        f"({checked.plan.explanation}); compare it with the training configuration and name the right ones "
        f"with {taps.FLAG}",
    )
