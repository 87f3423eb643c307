"""Families that are published under other keys and names than the reference class has: written from the key lists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How a model_type is published."""

    model_type: str
    architecture: str  # the class in config.json
    defaults: dict[str, Any]  # of its config class
    keys: Callable[[Mapping[str, Any]], dict[str, Any]]  # the reference's config keys for the published ones
    tensors: Callable[[Tensors], Tensors]  # the published tensors for the reference's

    def rewrite(self, folder: Path, published: Mapping[str, Any]) -> None:
        """Make a directory that the reference wrote one as it is published."""
        file = folder / "model.safetensors"
        save_file(self.tensors(load_file(file)), file, metadata={"format": "pt"})
        keys = {"model_type": self.model_type, "architectures": [self.architecture], **published}
        (folder / "config.json").write_text(json.dumps(keys, indent=2))
        (folder / "generation_config.json").unlink(missing_ok=True)


def qwen_keys(published: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen2's keys for the first Qwen's: each query head has a key, and `intermediate_size` counts gate and up."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    return {key: published[key] for key in same} | {
        "num_key_value_heads": published["num_attention_heads"],
        "intermediate_size": published["intermediate_size"] // 2,
        "rms_norm_eps": published["layer_norm_epsilon"],
        "rope_theta": published["rotary_emb_base"],
        "tie_word_embeddings": published["tie_word_embeddings"],
    }


# configuration_qwen.py, as it lies beside the published weights.
QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "emb_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "layer_norm_epsilon": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "scale_attn_weights": True,
    "kv_channels": 128,
    "rotary_pct": 1.0,
    "rotary_emb_base": 10000,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "intermediate_size": 22016,
    "no_bias": True,
    "tie_word_embeddings": False,
}
QWEN = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "input_layernorm.weight": "ln_1.weight",
    "self_attn.o_proj.weight": "attn.c_proj.weight",
    "post_attention_layernorm.weight": "ln_2.weight",
    "mlp.up_proj.weight": "mlp.w1.weight",
    "mlp.gate_proj.weight": "mlp.w2.weight",
    "mlp.down_proj.weight": "mlp.c_proj.weight",
}


def qwen_tensors(tensors: Tensors) -> Tensors:
    """The first Qwen's names; queries, keys and values are stacked in one projection."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        layer, rest = match.groups() if match else ("", name)
        home = f"transformer.h.{layer}." if match else ""
        if projection := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            kind, suffix = projection.groups()
            if kind == "q":
                parts = [tensors[f"model.layers.{layer}.self_attn.{p}_proj.{suffix}"] for p in "qkv"]
                out[f"{home}attn.c_attn.{suffix}"] = torch.cat(parts)
        else:
            out[home + QWEN.get(rest, rest)] = tensor.contiguous()
    return out


def mimo_keys(published: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen2's keys: all but how many layers predict further tokens, which the reference does not build."""
    return {key: value for key, value in published.items() if key not in ("model_type", "num_nextn_predict_layers")}


# configuration_mimo.py, as it lies beside the published weights: Qwen2's defaults and one key more.
MIMO_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
}

# By published model_type.
LAYOUTS = {
    "mimo": Layout("mimo", "MiMoForCausalLM", MIMO_DEFAULTS, mimo_keys, dict),
    "qwen": Layout("qwen", "QWenLMHeadModel", QWEN_DEFAULTS, qwen_keys, qwen_tensors),
}
