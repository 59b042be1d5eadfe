"""Plain-PyTorch target (Llama) and EAGLE-3 draft: the pair's training code and its simulator use them.

Independent of SGLang on purpose: a simulation of the served pair is evidence only if it shares no
code with the server.  Shapes: B sequences, S positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, named as in its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rope(positions: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [S, head_dim / 2] float32."""
    half = shape.head_dim // 2
    inverse = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves convention: [B, heads, S, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, width_in: int):
        super().__init__()
        self.shape = shape
        h = shape.hidden_size
        self.q_proj = nn.Linear(width_in, h, bias=False)
        self.k_proj = nn.Linear(width_in, h, bias=False)
        self.v_proj = nn.Linear(width_in, h, bias=False)
        self.o_proj = nn.Linear(h, h, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        past: KV | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KV]:
        """Attend over ``past`` and the new rows; causal unless an additive ``mask`` is given."""
        b, s, _ = x.shape
        split = (b, s, self.shape.num_attention_heads, self.shape.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if mask is None and s > 1 and past is not None:
            total = k.shape[2]
            mask = torch.full((s, total), float("-inf"), dtype=x.dtype).triu_(total - s + 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and s > 1)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1)), (k, v)


class Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past: KV | None
    ) -> tuple[torch.Tensor, KV]:
        attended, kv = self.self_attn(self.input_layernorm(x), cos, sin, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Target(nn.Module):
    """A Llama: parameters are named as in a Hugging Face checkpoint."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.model.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self, ids: torch.Tensor, past: list[KV] | None = None, want: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, list[KV], dict[int, torch.Tensor]]:
        """Final normed hidden states [B, S, H], the KV cache, and the asked boundaries.

        Boundary b is the residual stream entering layer b; b = 0 is the embedding.
        """
        start = past[0][0].shape[2] if past else 0
        cos, sin = rope(torch.arange(start, start + ids.shape[1]), self.shape)
        x = self.model.embed_tokens(ids)
        kept: dict[int, torch.Tensor] = {}
        caches = []
        for i, layer in enumerate(self.model.layers):
            if i in want:
                kept[i] = x
            x, kv = layer(x, cos, sin, past[i] if past else None)
            caches.append(kv)
        if len(self.model.layers) in want:
            kept[len(self.model.layers)] = x
        return self.model.norm(x), caches, kept


class DraftLayer(nn.Module):
    """The one decoder layer of an EAGLE-3 draft: attention over [norm(embedding), norm(hidden)]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        past: KV | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KV]:
        x = torch.cat((self.input_layernorm(embedding), self.hidden_norm(hidden)), dim=-1)
        attended, kv = self.self_attn(x, cos, sin, past, mask)
        x = hidden + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Draft(nn.Module):
    """EAGLE-3 draft (arXiv 2503.01840) with a reduced vocabulary.

    Parameters are named as SpecForge saves them.
    """

    def __init__(self, shape: Shape, draft_vocab_size: int, taps: int):
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, draft_vocab_size, bias=False)
        # Offsets: the target's id of draft id i is i + d2t[i].
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))

    def target_ids(self) -> torch.Tensor:
        """[draft vocabulary] int64."""
        return self.d2t + torch.arange(self.d2t.numel())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))


def read_shape(folder: Path) -> tuple[Shape, dict]:
    config = json.loads((folder / "config.json").read_text())
    names = Shape.__dataclass_fields__
    return Shape(**{k: config[k] for k in names if k in config}), config


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    from safetensors.torch import load_file

    shape, _ = read_shape(folder)
    target = Target(shape)
    target.load_state_dict(load_file(folder / "model.safetensors"))
    return target.to(dtype).eval()


def load_draft(folder: Path, dtype: torch.dtype = torch.float32) -> Draft:
    from safetensors.torch import load_file

    shape, config = read_shape(folder)
    state = load_file(folder / "model.safetensors")
    draft = Draft(shape, config["draft_vocab_size"], state["fc.weight"].shape[1] // shape.hidden_size)
    draft.load_state_dict(state)
    for module in draft.children():
        module.to(dtype)
    return draft.eval()
