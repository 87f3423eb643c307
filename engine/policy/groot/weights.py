"""The tensors of GR00T's action head and of Qwen3's decoder, under the names of NVIDIA's checkpoints. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable

from engine.checkpoint.weight_map import Shape
from engine.policy.groot.config import HeadConfig

Tensors = dict[str, Shape]

HEAD = "action_head."


def by_prefix(names: Iterable[str], prefix: str) -> set[str]:
    """The names that begin so."""
    return {name for name in names if name.startswith(prefix)}


def frozen(model: HeadConfig, names: Iterable[str], vision: set[str], language: set[str], layers: str) -> set[str]:
    """What stands still, as `tune_*` says."""
    still = (set() if model.tune_visual else set(vision)) | (set() if model.tune_llm else set(language))
    for layer in range(model.select_layer - model.tune_top_llm_layers, model.select_layer):
        still -= by_prefix(still, f"{layers}{layer}.")
    projector = ("state_encoder.", "action_encoder.", "action_decoder.", "position_embedding.", "mask_token")
    for tuned, parts in (
        (model.tune_projector, projector),
        (model.tune_diffusion_model, ("model.",)),
        (model.tune_vlln, ("vlln.", "vl_self_attention.")),
    ):
        if not tuned:
            still |= {name for part in parts for name in by_prefix(names, f"{HEAD}{part}")}
    return still


def head_tensors(model: HeadConfig, mask_token: bool = False) -> Tensors:
    """The action head's."""
    c, robots, width = model, model.max_num_embodiments, model.input_embedding_dim
    dit, hidden, seen = f"{HEAD}model.", model.hidden_size, model.backbone_embedding_dim
    time = f"{dit}timestep_encoder.timestep_embedder."
    tensors = {**linear(f"{time}linear_1", 256, width), **linear(f"{time}linear_2", width, width)}
    for number in range(c.dit_layers):
        block = f"{dit}transformer_blocks.{number}."
        tensors |= linear(f"{block}norm1.linear", width, 2 * width)
        tensors |= _block(block, width, width if number % 2 else seen)
    tensors |= linear(f"{dit}proj_out_1", width, 2 * width) | linear(f"{dit}proj_out_2", width, hidden)
    for name, inner, outer in (
        ("state_encoder.layer1", c.max_state_dim, hidden),
        ("state_encoder.layer2", hidden, width),
        ("action_encoder.W1", c.max_action_dim, width),
        ("action_encoder.W2", 2 * width, width),
        ("action_encoder.W3", width, width),
        ("action_decoder.layer1", hidden, hidden),
        ("action_decoder.layer2", hidden, c.max_action_dim),
    ):
        tensors |= {f"{HEAD}{name}.W": (robots, inner, outer), f"{HEAD}{name}.b": (robots, outer)}
    tensors |= norm(f"{HEAD}vlln", seen)
    for number in range(c.vlsa_layers):
        block = f"{HEAD}vl_self_attention.transformer_blocks.{number}."
        tensors |= norm(f"{block}norm1", seen) | norm(f"{block}norm3", seen) | _block(block, seen, seen)
    tensors[f"{HEAD}position_embedding.weight"] = (c.max_seq_len, width)
    return tensors | ({f"{HEAD}mask_token": (1, 1, width)} if mask_token else {})


def _block(prefix: str, width: int, seen: int) -> Tensors:
    attention, ff = f"{prefix}attn1.", f"{prefix}ff.net."
    tensors = linear(f"{attention}to_q", width, width) | linear(f"{attention}to_k", seen, width)
    tensors |= linear(f"{attention}to_v", seen, width) | linear(f"{attention}to_out.0", width, width)
    return tensors | linear(f"{ff}0.proj", width, 4 * width) | linear(f"{ff}2", 4 * width, width)


def qwen_tensors(prefix: str, model: HeadConfig, heads: int, kv_heads: int, head_dim: int, mlp_dim: int) -> Tensors:
    """Qwen3's decoder: its embedding, layers and last norm."""
    width = model.backbone_embedding_dim
    tensors: Tensors = {f"{prefix}embed_tokens.weight": (model.vocab_size, width)}
    for layer in (f"{prefix}layers.{number}." for number in range(model.select_layer)):
        tensors |= {
            f"{layer}self_attn.q_proj.weight": (heads * head_dim, width),
            f"{layer}self_attn.k_proj.weight": (kv_heads * head_dim, width),
            f"{layer}self_attn.v_proj.weight": (kv_heads * head_dim, width),
            f"{layer}self_attn.o_proj.weight": (width, heads * head_dim),
            f"{layer}self_attn.q_norm.weight": (head_dim,),
            f"{layer}self_attn.k_norm.weight": (head_dim,),
            f"{layer}mlp.gate_proj.weight": (mlp_dim, width),
            f"{layer}mlp.up_proj.weight": (mlp_dim, width),
            f"{layer}mlp.down_proj.weight": (width, mlp_dim),
            f"{layer}input_layernorm.weight": (width,),
            f"{layer}post_attention_layernorm.weight": (width,),
        }
    return tensors | {f"{prefix}norm.weight": (width,)}


def norm(name: str, width: int) -> Tensors:
    """A LayerNorm's."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear(name: str, inner: int, outer: int) -> Tensors:
    """A linear layer's."""
    return {f"{name}.weight": (outer, inner), f"{name}.bias": (outer,)}
