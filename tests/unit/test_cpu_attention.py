"""The CPU platform's attention: which keys each query row reads, against a list written out by hand.

The oracle names, for every query row, the (slot, position) pairs it may see, and computes softmax over
them in float64.  The KV pool holds other values in every other slot, so a key read too much or too
little changes the result.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import eagle3_kernels as kernels
from sglang_eagle3_ext import cpu_attention, upstream
from sglang_eagle3_ext.errors import RefusedError

SLOTS, CONTEXT = 400, 60
Keys = list[tuple[int, int]]  # (slot, position) of everything that a query row sees


class Pool:
    """One layer's keys and values, and what was written into them."""

    def __init__(self, kv_heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(SLOTS, kv_heads, qk_dim, generator=generator).to(dtype)
        self.values = torch.randn(SLOTS, kv_heads, v_dim, generator=generator).to(dtype)
        self.written = 0

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        assert layer == 5
        return self.keys

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        assert layer == 5
        return self.values

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.written += 1
        self.keys[where.loc] = k
        self.values[where.loc] = v


@dataclass
class Setup:
    backend: cpu_attention.TreeAttentionBackend
    pool: Pool
    table: torch.Tensor  # [6, CONTEXT] int32
    layer: Any

    def slot(self, request: int, position: int) -> int:
        return int(self.table[request, position])


def setup(heads: int = 4, kv_heads: int = 2, qk_dim: int = 8, v_dim: int = 8, window: int = -1) -> Setup:
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(SLOTS, generator=generator)[: 6 * CONTEXT].to(torch.int32).view(6, CONTEXT)
    pool = Pool(kv_heads, qk_dim, v_dim)
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
        model=torch.nn.Module(),
        use_mla_backend=False,
    )
    layer = types.SimpleNamespace(
        tp_q_head_num=heads,
        qk_head_dim=qk_dim,
        v_head_dim=v_dim,
        layer_id=5,
        sliding_window_size=window,
        scaling=0.3,
    )
    return Setup(cpu_attention.TreeAttentionBackend(runner), pool, table, layer)


def expected(case: Setup, q: torch.Tensor, seen: list[Keys], positions: list[int]) -> torch.Tensor:
    """Softmax over the named keys, one query row and head at a time."""
    heads, kv_heads = case.layer.tp_q_head_num, case.pool.keys.shape[1]
    window = case.layer.sliding_window_size
    rows = []
    for row, (keys, position) in enumerate(zip(seen, positions, strict=True)):
        near = [s for s, at in keys if window < 0 or position - at <= window]
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            k, v = case.pool.keys[near, group].double(), case.pool.values[near, group].double()
            scores = k @ q.view(-1, heads, case.layer.qk_head_dim)[row, head].double() * case.layer.scaling
            out.append(scores.softmax(0) @ v)
        rows.append(torch.cat(out))
    return torch.stack(rows)


def run(case: Setup, seen: list[Keys], positions: list[int]) -> None:
    """The backend's plan, as it stands, against the oracle."""
    width = case.layer.tp_q_head_num * case.layer.qk_head_dim
    q = torch.randn(len(seen), width, generator=torch.Generator().manual_seed(2))
    got = case.backend.forward(q, None, None, case.layer, None)
    assert got.dtype == q.dtype
    torch.testing.assert_close(got.double(), expected(case, q, seen, positions), rtol=1e-5, atol=1e-6)


def forward_batch(mode: str, **more: Any) -> Any:
    return types.SimpleNamespace(forward_mode=getattr(upstream.ForwardMode, mode), **more)


WINDOWS = pytest.mark.parametrize("window", [-1, 0, 3, 100])
REQUESTS = [4, 0, 2]


@WINDOWS
@pytest.mark.parametrize("lengths", [[9, 1, 23], [7, 7, 7]], ids=str)
def test_decode(lengths: list[int], window: int) -> None:
    case = setup(window=window)
    case.backend.init_forward_metadata(
        forward_batch(
            "DECODE",
            req_pool_indices=torch.tensor(REQUESTS),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )
    )
    seen = [[(case.slot(r, p), p) for p in range(n)] for r, n in zip(REQUESTS, lengths, strict=True)]
    run(case, seen, [n - 1 for n in lengths])


@WINDOWS
@pytest.mark.parametrize(
    ("prefix", "new"), [([0, 0, 0], [5, 1, 9]), ([8, 3, 0], [1, 4, 2]), ([6, 6, 6], [1, 1, 1])], ids=str
)
@pytest.mark.parametrize("on_host", [True, False], ids=["host lengths", "tensors"])
def test_extend(prefix: list[int], new: list[int], on_host: bool, window: int) -> None:
    """Prefill, with and without a cached prefix: causal, each request by itself."""
    case = setup(window=window)
    case.backend.init_forward_metadata(
        forward_batch(
            "EXTEND",
            req_pool_indices=torch.tensor(REQUESTS),
            extend_prefix_lens_cpu=prefix if on_host else None,
            extend_seq_lens_cpu=new if on_host else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
            extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        )
    )
    seen, positions = [], []
    for r, cached, count in zip(REQUESTS, prefix, new, strict=True):
        for at in range(cached, cached + count):
            seen.append([(case.slot(r, p), p) for p in range(at + 1)])
            positions.append(at)
    run(case, seen, positions)


@WINDOWS
@pytest.mark.parametrize("lengths", [[9, 1, 23], [12, 12, 12], [5, 0, 5]], ids=str)
def test_verify(lengths: list[int], window: int) -> None:
    """A node sees the prefix, its ancestors and itself; a window counts positions, not slots."""
    case = setup(window=window)
    parent = [[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 2, 4]]
    nodes = len(parent[0])
    mask = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    positions = torch.zeros(3, nodes, dtype=torch.int64)
    seen: list[Keys] = []
    for b, (r, n) in enumerate(zip(REQUESTS, lengths, strict=True)):
        depth = [0] * nodes
        for i in range(nodes):
            depth[i] = depth[parent[b][i]] + 1 if i else 0
            positions[b, i] = n + depth[i]
            path = [i]
            while parent[b][path[-1]] != -1:
                path.append(parent[b][path[-1]])
            mask[b, i, path] = True
            # Node j lies in the slot of table column n + j, whatever its position.
            prefix = [(case.slot(r, p), p) for p in range(n)]
            seen.append(prefix + [(case.slot(r, n + j), n + depth[j]) for j in path])
    tree = types.SimpleNamespace(draft_token_num=nodes, positions=positions.view(-1), custom_mask=mask)
    case.backend.init_forward_metadata(
        forward_batch(
            "TARGET_VERIFY",
            spec_info=tree,
            req_pool_indices=torch.tensor(REQUESTS),
            seq_lens=torch.tensor(lengths),
        )
    )
    run(case, seen, positions.view(-1).tolist())


def test_verify_reads_the_mask_of_the_tree_op() -> None:
    """The two parts together: a selected tree, its mask, and a path walked back by hand."""
    case = setup()
    batch, topk, steps, nodes, lengths = 3, 3, 3, 9, [4, 0, 11]
    generator = torch.Generator().manual_seed(3)
    candidates = kernels.Candidates.allocate(batch, topk, steps)
    for step in range(steps):
        rows = batch if step == 0 else batch * topk
        drafted = torch.randn(rows, 20, generator=generator).softmax(1).topk(topk, dim=1)
        if step == 0:
            kernels.select_first(candidates, *drafted)
        else:
            kernels.select_next(candidates, step, *drafted)
    ids, tokens = kernels.select_nodes(candidates, nodes - 1)
    lens = torch.tensor(lengths)
    built = kernels.build_tree(torch.arange(batch), ids, tokens, candidates.parents, lens, topk)
    seen: list[Keys] = []
    for b, (r, n) in enumerate(zip(REQUESTS, lengths, strict=True)):
        place = {-1: 0, **{c: i + 1 for i, c in enumerate(ids[b].tolist())}}
        for node in range(nodes):
            path, at = [0], int(ids[b, node - 1]) if node else -1
            while at != -1:
                path.append(place[at])
                at = int(candidates.parents[b, at // topk])
            seen.append([(case.slot(r, p), p) for p in range(n)] + [(case.slot(r, n + j), 0) for j in path])
    case.backend.init_forward_metadata(
        forward_batch(
            "TARGET_VERIFY",
            spec_info=types.SimpleNamespace(
                draft_token_num=nodes, positions=built.positions.view(-1), custom_mask=built.mask
            ),
            req_pool_indices=torch.tensor(REQUESTS),
            seq_lens=lens,
        )
    )
    run(case, seen, [0] * (batch * nodes))


@WINDOWS
@pytest.mark.parametrize("lengths", [[9, 1, 23], [4, 4, 4], [0, 3, 1]], ids=str)
@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (3, 1), (2, 4)])
def test_draft_step(topk: int, steps: int, lengths: list[int], window: int) -> None:
    """Every branch sees its request's prefix and its own steps, not its neighbours'."""
    case = setup(window=window)
    free = torch.arange(SLOTS - 3 * topk * steps, SLOTS).view(3, topk, steps)
    prefixes = [case.table[r, :n].long() for r, n in zip(REQUESTS, lengths, strict=True)]
    case.backend.plan = case.backend.plan_draft_step(prefixes, free, lengths)
    seen, positions = [], []
    for b, (r, n) in enumerate(zip(REQUESTS, lengths, strict=True)):
        for branch in free[b].tolist():
            own = [(s, n + i) for i, s in enumerate(branch)]
            seen.append([(case.slot(r, p), p) for p in range(n)] + own)
            positions.append(n + steps - 1)
    run(case, seen, positions)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(8, 8), (12, 4)])
def test_head_layouts(heads: int, kv_heads: int, qk_dim: int, v_dim: int) -> None:
    case = setup(heads, kv_heads, qk_dim, v_dim)
    case.backend.plan = case.backend.extend_plan(torch.tensor([1, 3]), [4, 0], [3, 2])
    ranges = [(1, p) for p in (4, 5, 6)] + [(3, p) for p in (0, 1)]
    run(case, [[(case.slot(r, p), p) for p in range(at + 1)] for r, at in ranges], [at for _, at in ranges])


def test_new_keys_are_written_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = setup()
    case.backend.plan = case.backend.extend_plan(torch.tensor([1]), [2], [2])
    where = torch.tensor([case.slot(1, 2), case.slot(1, 3)])
    place = types.SimpleNamespace(for_batch=lambda batch: types.SimpleNamespace(loc=where))
    monkeypatch.setattr(upstream, "KVWriteLoc", place, raising=False)
    k, v = torch.full((2, 2, 8), 0.5), torch.full((2, 2, 8), 0.25)
    q = torch.ones(2, 32)
    untouched = case.backend.forward(q, k, v, case.layer, None, save_kv_cache=False)
    assert case.pool.written == 0
    got = case.backend.forward(q, k, v, case.layer, None)
    assert case.pool.written == 1 and torch.equal(case.pool.values[where], v)
    assert not torch.allclose(got, untouched)
    seen = [[(case.slot(1, p), p) for p in range(at + 1)] for at in (2, 3)]
    torch.testing.assert_close(got.double(), expected(case, q, seen, [2, 3]), rtol=1e-5, atol=1e-6)


def test_queries_of_another_dtype_than_the_cache() -> None:
    case = setup()
    case.backend.plan = case.backend.extend_plan(torch.tensor([1]), [0], [5])
    q = torch.randn(5, 32, generator=torch.Generator().manual_seed(4)).bfloat16()
    got = case.backend.forward(q, None, None, case.layer, None)
    assert got.dtype == torch.bfloat16
    seen = [[(case.slot(1, p), p) for p in range(at + 1)] for at in range(5)]
    torch.testing.assert_close(got.double(), expected(case, q, seen, list(range(5))), rtol=3e-2, atol=3e-2)


def test_masks_are_made_once_and_only_where_something_is_hidden() -> None:
    case = setup()
    (ragged,) = case.backend.extend_plan(torch.tensor([1]), [2], [3]).segments
    mask = ragged.mask(torch.float32, -1)
    assert mask is not None and mask.shape == (1, 1, 3, 5)
    assert mask[0, 0].tolist() == [
        [0, 0, 0, -math.inf, -math.inf],
        [0, 0, 0, 0, -math.inf],
        [0, 0, 0, 0, 0],
    ]
    assert ragged.mask(torch.float32, -1) is mask
    assert ragged.mask(torch.bfloat16, -1).dtype == torch.bfloat16  # type: ignore[union-attr]
    near = ragged.mask(torch.float32, 1)
    assert near is not None and near[0, 0, 2].tolist() == [-math.inf, -math.inf, -math.inf, 0, 0]
    (single,) = case.backend.extend_plan(torch.tensor([1]), [6], [1]).segments
    assert single.mask(torch.float32, -1) is None and single.mask(torch.float32, 6) is None
    assert single.mask(torch.float32, 5) is not None


def test_idle() -> None:
    case = setup()
    case.backend.plan = case.backend.extend_plan(torch.tensor([1]), [0], [2])
    case.backend.init_forward_metadata(forward_batch("IDLE"))
    assert case.backend.plan.segments == ()
    assert case.backend.forward(torch.zeros(0, 32), None, None, case.layer, None).shape == (0, 32)


def test_unknown_arguments_are_refused() -> None:
    case = setup()
    case.backend.plan = case.backend.extend_plan(torch.tensor([1]), [0], [1])
    case.backend.forward(torch.zeros(1, 32), None, None, case.layer, None, sinks=None)
    with pytest.raises(RefusedError, match=r"target model: given attention arguments \['sinks'\]"):
        case.backend.forward(torch.zeros(1, 32), None, None, case.layer, None, sinks=torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logit_cap": 30.0}, r"soft-capped attention logits \(cap 30.0\)"),
        ({"is_cross_attention": True}, "encoder or cross attention"),
        ({"attn_type": types.SimpleNamespace(name="ENCODER_ONLY")}, "encoder or cross attention"),
    ],
)
def test_layers_that_it_does_not_compute_are_refused(change: dict[str, Any], said: str) -> None:
    model = torch.nn.Module()
    model.attn = upstream.RadixAttention(4, 8, 0.3, 2, layer_id=0)
    runner = types.SimpleNamespace(
        req_to_token_pool=None, token_to_kv_pool=None, model=model, use_mla_backend=False
    )
    cpu_attention.TreeAttentionBackend(runner)
    for name, value in change.items():
        setattr(model.attn, name, value)
    with pytest.raises(RefusedError, match=said):
        cpu_attention.TreeAttentionBackend(runner)
