"""Published keys that no decoder here can have, for a family's own `check` to put together. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import rope_scaling
from engine.suggest import did_you_mean

# Those of transformers' activations that hold no weights of their own.
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2"),
    *("relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)


def decoder(model: Any, backend: str) -> Iterator[str]:
    """What is wrong with the keys that every decoder has: activation, dropout, rope scaling, heads."""
    yield from activation(model.hidden_act, backend)
    if getattr(model, "attention_dropout", 0.0):
        yield f"model.attention_dropout={model.attention_dropout}: attention has no dropout here; it must be 0"
    for problem in rope_scaling.problems(model.rope_scaling, backend, rotary_channels(model)):
        yield f"model.rope_scaling: {problem}"


def rotary_channels(model: Any) -> int:
    """Channels of a head that positions rotate."""
    if rotary := getattr(model, "qk_rope_head_dim", None):  # latent attention
        return int(rotary)
    heads = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(heads * getattr(model, "partial_rotary_factor", 1.0))


def activation(name: str, backend: str) -> Iterator[str]:
    """An activation that a backend lacks."""
    known = ("silu", "swish") if backend == "megatron" else ACTIVATIONS
    if name in known:
        return
    hint = "; backend=native has it" if name in ACTIVATIONS else did_you_mean(name, known)
    yield f"model.hidden_act={name}: backend={backend} has {', '.join(known)}{hint}"


def whole_heads(model: Any) -> Iterator[str]:
    """A width that does not divide into heads, which the reference classes refuse even where `head_dim` is given."""
    if model.hidden_size % model.num_attention_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}; it must be"
        )


def topk(model: Any, chosen: str = "num_experts_per_tok", experts: str = "num_experts") -> Iterator[str]:
    """More experts of a token than there are; the arguments are the published keys."""
    if not 1 <= getattr(model, chosen) <= getattr(model, experts):
        yield (
            f"model.{chosen}={getattr(model, chosen)}: it must be from 1 to model.{experts}={getattr(model, experts)}"
        )


def layers_exist(model: Any, key: str) -> Iterator[str]:
    """A list of layers, under a published key, that names one that is not there."""
    wrong = [layer for layer in getattr(model, key) if not 0 <= layer < model.num_hidden_layers]
    if wrong:
        yield f"model.{key} holds {wrong[0]}: the layers go from 0 to {model.num_hidden_layers - 1}"


def windows(model: Any) -> Iterator[str]:
    """Sliding windows of no size.

    `sliding_window` without `use_sliding_window` has no effect, as many published files have it.
    """
    if not model.use_sliding_window:
        return
    if model.sliding_window is None:
        yield "model.use_sliding_window=true without model.sliding_window, its size; set it or leave both out"
    elif model.sliding_window < 1:
        yield f"model.sliding_window={model.sliding_window}: a token sees itself, so it must be at least 1"
