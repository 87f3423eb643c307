"""What a published `rope_scaling` may say, for each backend. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.suggest import did_you_mean

# What every kind needs, and what it may also have. The keys are those that transformers reads.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}
KINDS = {"megatron": ("default", "linear", "llama3", "yarn"), "native": tuple(NEEDED)}
COMMON = ("rope_type", "type", "rope_theta")
LISTS, FLAGS = ("short_factor", "long_factor"), ("truncate",)


def kind_of(scaling: dict[str, Any] | None) -> str:
    """The `rope_type`, or `type` as older files spell it."""
    return str((scaling or {}).get("rope_type", (scaling or {}).get("type", "default")))


def problems(scaling: dict[str, Any] | None, backend: str, head_dim: int | None = None) -> Iterator[str]:
    """What is wrong with a published `rope_scaling`, one a line, without the setting's name."""
    if not scaling:
        return
    kind, kinds = kind_of(scaling), KINDS[backend]
    if kind not in kinds:
        elsewhere = [name for name, has in KINDS.items() if kind in has]
        hint = f"; backend={elsewhere[0]} has it" if elsewhere else did_you_mean(kind, kinds)
        yield f"rope_type '{kind}' is not supported by backend={backend}, whose types are {', '.join(kinds)}{hint}"
        return
    if missing := [key for key in NEEDED[kind] if scaling.get(key) is None]:
        yield f"rope_type '{kind}' needs {', '.join(missing)}"
    known = (*NEEDED[kind], *OPTIONAL.get(kind, ()))
    for key, value in scaling.items():
        if key in COMMON:
            continue
        if key not in known:
            yield f"rope_type '{kind}' has no {key}{did_you_mean(key, known)}"
        elif value is not None:
            yield from _value(key, value, head_dim)
    if backend == "megatron" and scaling.get("attention_factor") is not None:
        yield "backend=megatron has no attention_factor; leave it out for YaRN's own"


def _value(key: str, value: Any, head_dim: int | None) -> Iterator[str]:
    if key in LISTS:
        wanted = head_dim // 2 if head_dim else None
        numbers = isinstance(value, list) and all(_positive(v) for v in value)
        if not numbers or (wanted and len(value) != wanted):
            yield f"{key} must be a list of {wanted or 'head_dim / 2'} numbers greater than 0"
    elif key in FLAGS:
        if not isinstance(value, bool):
            yield f"{key}={value}: must be true or false"
    elif not _positive(value):
        yield f"{key}={value}: must be a number greater than 0"


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
