"""Plain-torch reference of :mod:`.sample`; same signature."""

from __future__ import annotations

import torch

from . import rows_ref, walk_ref
from .walk import Accepted


def law(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    order: str,
) -> torch.Tensor:
    """Probability of every token at every row, by the definition in :mod:`.sample`.

    Args:
        logits: [R, V]; the others [R], one per row.

    Returns:
        [R, V] float64.
    """
    x = logits.double()
    ids = torch.arange(x.shape[1]).expand_as(x)
    clean = torch.where(x.isnan(), float("-inf"), x)
    top = clean.max(dim=1, keepdim=True).values
    heat = temperature.double().clamp(min=1e-300).unsqueeze(1)
    weight = torch.where(clean == top, 1.0, ((clean - top) / heat).exp())
    weight = torch.where(x.isnan() | (clean == float("-inf")), 0.0, weight)
    weight = torch.where(top == float("inf"), (clean == top).double(), weight)

    sorting = clean.sort(dim=1, descending=True, stable=True).indices
    w = weight.gather(1, sorting)
    rank = ids
    in_k = rank < top_k.unsqueeze(1)
    mass = (w * in_k if order == "sequential" else w).sum(dim=1, keepdim=True)
    before = w.cumsum(dim=1) - w
    whole = (top_p == 1).unsqueeze(1)
    in_p = whole | (before < top_p.double().unsqueeze(1) * mass)
    kept = in_k & in_p & (w >= min_p.double().unsqueeze(1))
    weight = torch.zeros_like(weight).scatter(1, sorting, w * kept)

    one = torch.nn.functional.one_hot(rows_ref.row_argmax(logits), x.shape[1]).double()
    greedy = (temperature == 0) | (top_k == 1)
    certain = greedy.unsqueeze(1) | (top == float("-inf"))
    return torch.where(certain, one, weight / weight.sum(dim=1, keepdim=True))


def verify_sample(
    tokens: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    logits: torch.Tensor,
    width: int,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    coins: torch.Tensor,
    order: str = "joint",
) -> Accepted:
    """See :func:`eagle3_kernels.verify_sample`."""
    nodes = tokens.shape[1]
    temperature, top_k, top_p, min_p = (
        t.repeat_interleave(nodes) for t in (temperature, top_k, top_p, min_p)
    )
    probability = law(logits, temperature, top_k, top_p, min_p, order)
    reached = probability.cumsum(dim=1)
    goal = coins.reshape(-1, 1) * reached[:, -1:]
    hit = (reached > goal) & (probability > 0)
    last = (probability > 0).cumsum(dim=1).argmax(dim=1)
    target = torch.where(hit.any(dim=1), hit.to(torch.int8).argmax(dim=1), last)
    return walk_ref.verify_walk(tokens, next_token, next_sibling, target.view(tokens.shape), width)
