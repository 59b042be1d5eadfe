"""Tree operations of EAGLE-3 decoding: stand-alone, torch and numba on the CPU.

Every op has a plain-torch reference of the same signature beside it (``<module>_ref.py``).
"""

from __future__ import annotations

import torch

from .coins import seeded_coins
from .greedy import verify_greedy
from .rows import row_argmax, row_topk
from .sample import verify_sample
from .select import Candidates, select_first, select_next, select_nodes
from .slots import cache_slots, write_slots
from .tree import TreeBuffers, build_chain, build_tree
from .walk import Accepted, verify_walk

__all__ = [
    "Accepted",
    "Candidates",
    "TreeBuffers",
    "build_chain",
    "build_tree",
    "cache_slots",
    "row_argmax",
    "row_topk",
    "seeded_coins",
    "select_first",
    "select_next",
    "select_nodes",
    "verify_greedy",
    "verify_sample",
    "verify_walk",
    "warm_up",
    "write_slots",
]


def warm_up() -> None:
    """Compile (or load from numba's cache) every op, for each dtype that serving uses.

    The first call of an op takes some 0.5 s; a server does this before it is ready.
    """
    for dtype in (torch.float32, torch.bfloat16):
        row_argmax(torch.zeros(1, 4, dtype=dtype))
        row_topk(torch.zeros(1, 4, dtype=dtype), 2)
    candidates = Candidates.allocate(1, 2, 2)
    pair = torch.zeros(1, 2)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    select_first(candidates, pair, ids)
    select_next(candidates, 1, pair.repeat(2, 1), ids.repeat(2, 1))
    nodes, tokens = select_nodes(candidates, 2)
    for lens in (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        tree = build_tree(ids[:, 0].contiguous(), nodes, tokens, candidates.parents, lens, 2)
        build_chain(ids[:, 0].contiguous(), tokens, lens)
        table = torch.zeros(1, 4, dtype=torch.int32)
        for requests in (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
            cache_slots(table, requests, lens, 2)
            for slots in (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)):
                write_slots(table, requests, lens, lens + 2, slots)
    links = (tree.tokens, tree.next_token, tree.next_sibling)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(tree.tokens.numel(), 4, dtype=dtype)
        verify_greedy(*links, logits, 2)
        one = torch.ones(1)
        coins = torch.zeros(tree.tokens.shape, dtype=torch.float64)
        verify_sample(*links, logits, 2, temperature=one, top_k=one.int(), top_p=one, min_p=one, coins=coins)
    verify_walk(*links, torch.zeros_like(tree.tokens), 2)
