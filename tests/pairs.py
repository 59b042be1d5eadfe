"""Random model pairs for tests: a Hugging Face target made tiny, and a draft that is often right.

The target's layers are scaled down, so that its next token mostly follows from its last one.  The
draft knows that map: its attention looks at its own position and hands on the embedding it finds
there, its head is the target's.  So accepted runs of every length occur without any training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 128
WIDTH = 64
HEAD_DIM = 16
LAYERS = 6

_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // HEAD_DIM,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

TARGETS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_COMMON, "model_type": "llama", "head_dim": HEAD_DIM},
    "Qwen2ForCausalLM": {**_COMMON, "model_type": "qwen2", "use_sliding_window": False},
    "Qwen3ForCausalLM": {**_COMMON, "model_type": "qwen3", "head_dim": HEAD_DIM},
    # Multi-head latent attention and a mixture of experts, as in Kimi-K2.5.
    "DeepseekV3ForCausalLM": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": WIDTH // HEAD_DIM,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "hidden_act": "silu",
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}


@dataclass(frozen=True)
class Pair:
    """Folders of a target and a draft."""

    target: str
    draft: str

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of ``sglang.Engine`` for a chain of 3, unless ``more`` says otherwise."""
        return {
            "model_path": self.target,
            "speculative_draft_model_path": self.draft,
            "speculative_algorithm": "EAGLE3X",
            "speculative_num_steps": 3,
            "skip_tokenizer_init": True,
            **more,
        }


def make_target(folder: Path, architecture: str, scale: float = 1.0, seed: int = 0, **config: Any) -> Path:
    """A Hugging Face checkpoint with random weights.

    Args:
        scale: of what the layers add to the residual stream; 0 leaves a map from token to token.
    """
    import transformers

    torch.manual_seed(seed)
    settings = {**TARGETS[architecture], **config}
    loaded = transformers.AutoConfig.for_model(**settings)
    model = getattr(transformers, architecture)(loaded).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.normal_(0, 1)
            elif name.endswith(("o_proj.weight", "down_proj.weight")) or "experts.down_proj" in name:
                weight.normal_(0, scale / weight.shape[-1] ** 0.5)
            elif weight.ndim >= 2 and "norm" not in name:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                weight.uniform_(0.8, 1.2)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    # What transformers leaves out because it is its own default, and SGLang reads.
    (folder / "config.json").write_text(json.dumps({**written, **settings, "architectures": [architecture]}))
    return folder


@dataclass
class DraftRecipe:
    """What :func:`make_draft` writes; tests change a part of it to make it wrong."""

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.manifest is not None:
            (folder / "eagle3x.json").write_text(json.dumps(self.manifest))
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / "model.safetensors")
        return folder


def draft_recipe(target: Path, taps: int = 3, ids: list[int] | None = None, seed: int = 1) -> DraftRecipe:
    """A draft for ``target`` with a reduced vocabulary (every token but each fifth)."""
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    with safe_open(next(target.glob("*.safetensors")), "pt") as stored:
        head = stored.get_tensor("lm_head.weight").float()
    vocab, width = head.shape
    kept = torch.arange(vocab)[torch.arange(vocab) % 5 != 4]
    eye, none = torch.eye(width), torch.zeros(width, width)
    look = torch.cat((3 * eye, none), dim=1)  # queries and keys: the normed embedding alone
    layer = "midlayer"
    return DraftRecipe(
        config={
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": width // HEAD_DIM,
            "num_key_value_heads": width // HEAD_DIM,
            "head_dim": HEAD_DIM,
            "vocab_size": vocab,
            "draft_vocab_size": kept.numel(),
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": ids or [-1, 0, 3],
                "use_aux_hidden_state": True,
            },
        },
        tensors={
            "fc.weight": 0.05 * noise(width, taps * width),
            f"{layer}.self_attn.q_proj.weight": look,
            f"{layer}.self_attn.k_proj.weight": look.clone(),
            f"{layer}.self_attn.v_proj.weight": torch.cat((eye, none), dim=1),
            f"{layer}.self_attn.o_proj.weight": 8 * eye,
            f"{layer}.mlp.gate_proj.weight": 0.1 * noise(32, width),
            f"{layer}.mlp.up_proj.weight": 0.1 * noise(32, width),
            f"{layer}.mlp.down_proj.weight": 0.1 * noise(width, 32),
            "lm_head.weight": head[kept].clone(),
            "d2t": kept - torch.arange(kept.numel()),
            "t2d": torch.isin(torch.arange(vocab), kept),
            "norm.weight": torch.ones(width),
            **{
                f"{layer}.{name}.weight": torch.ones(width)
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            },
        },
    )


def make_pair(root: Path, architecture: str = "LlamaForCausalLM", scale: float = 0.3, **config: Any) -> Pair:
    """A target and its draft below ``root``."""
    target = make_target(root / "target", architecture, scale, **config)
    draft = draft_recipe(target).write(root / "draft")
    return Pair(str(target), str(draft))
