"""Published keys that no Qwen3 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine import rope_scaling
from engine.suggest import did_you_mean
from zoo.qwen3.config import Qwen3Config, Qwen3MoeConfig, SharedKeys

# Those of transformers' activations that hold no weights of their own.
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2"),
    *("relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)


def check(model: SharedKeys, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from _activation(model.hidden_act, backend)
    if model.attention_dropout:
        yield f"model.attention_dropout={model.attention_dropout}: attention has no dropout here; it must be 0"
    for problem in rope_scaling.problems(model.rope_scaling, backend, model.head_dim):
        yield f"model.rope_scaling: {problem}"
    yield from _windows(model)
    if isinstance(model, Qwen3MoeConfig):
        yield from _experts(model)


def _experts(model: Qwen3MoeConfig) -> Iterator[str]:
    """Sizes that are no mixture of experts."""
    if not 1 <= model.num_experts_per_tok <= model.num_experts:
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok}: it must be from 1 to "
            f"model.num_experts={model.num_experts}"
        )
    wrong = [layer for layer in model.mlp_only_layers if not 0 <= layer < model.num_hidden_layers]
    if wrong:
        yield f"model.mlp_only_layers holds {wrong[0]}: the layers go from 0 to {model.num_hidden_layers - 1}"


def _activation(name: str, backend: str) -> Iterator[str]:
    known = ("silu", "swish") if backend == "megatron" else ACTIVATIONS
    if name in known:
        return
    hint = "; backend=native has it" if name in ACTIVATIONS else did_you_mean(name, known)
    yield f"model.hidden_act={name}: backend={backend} has {', '.join(known)}{hint}"


def _windows(model: SharedKeys) -> Iterator[str]:
    """transformers gives layer i a window if `use_sliding_window`, `sliding_window` is set, and i >= max_window_layers.

    `sliding_window` without `use_sliding_window` has no effect, as many published files have it.
    """
    if not model.use_sliding_window:
        return
    if model.sliding_window is None:
        yield "model.use_sliding_window=true without model.sliding_window, its size; set it or leave both out"
    elif not isinstance(model, Qwen3Config):
        yield "model.use_sliding_window=true: sliding windows are not supported yet; set it to false"
    elif model.max_window_layers < model.num_hidden_layers:
        yield (
            f"model.use_sliding_window=true: sliding windows are not supported yet; set it to false, or "
            f"model.max_window_layers={model.num_hidden_layers}, which leaves no layer with a window"
        )
