"""Published keys that no Qwen3 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine import rope_scaling
from engine.suggest import did_you_mean
from zoo.qwen3.config import Qwen3Config

# Those of transformers' activations that hold no weights of their own.
ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2"),
    *("relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"),
)


def check(model: Qwen3Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from _activation(model.hidden_act, backend)
    if model.attention_dropout:
        yield f"model.attention_dropout={model.attention_dropout}: attention has no dropout here; it must be 0"
    for problem in rope_scaling.problems(model.rope_scaling, backend, model.head_dim):
        yield f"model.rope_scaling: {problem}"
    yield from _windows(model)


def _activation(name: str, backend: str) -> Iterator[str]:
    known = ("silu", "swish") if backend == "megatron" else ACTIVATIONS
    if name in known:
        return
    hint = "; backend=native has it" if name in ACTIVATIONS else did_you_mean(name, known)
    yield f"model.hidden_act={name}: backend={backend} has {', '.join(known)}{hint}"


def _windows(model: Qwen3Config) -> Iterator[str]:
    """transformers gives layer i a window if `use_sliding_window`, `sliding_window` is set, and i >= max_window_layers.

    `sliding_window` without `use_sliding_window` has no effect, as many published files have it.
    """
    if not model.use_sliding_window:
        return
    if model.sliding_window is None:
        yield "model.use_sliding_window=true without model.sliding_window, its size; set it or leave both out"
    elif model.max_window_layers < model.num_hidden_layers:
        yield (
            f"model.use_sliding_window=true: sliding windows are not supported yet; set it to false, or "
            f"model.max_window_layers={model.num_hidden_layers}, which leaves no layer with a window"
        )
