"""Adapter directories in PEFT's format: adapter_config.json and adapter_model.safetensors. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.headers import by_layer, read_header
from engine.checkpoint.index import load_index, read_json
from engine.checkpoint.paths import is_checkpoint
from engine.checkpoint.weight_map import Shape
from engine.errors import UserError
from engine.lora.names import PREFIX, adapter_shapes, is_adapter_name, last, layer_of, linear_layers
from engine.schema import Lora

CONFIG = "adapter_config.json"
MODEL = "adapter_model.safetensors"
# What PEFT can do besides, and this program not: the value that leaves it off.
UNUSED: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}


@dataclass(frozen=True)
class Adapter:
    """What an adapter directory, or a checkpoint of adapters, says of itself."""

    folder: Path
    r: int
    scale: float
    base: str  # the weights that it belongs to
    config: dict[str, Any]


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters: in PEFT's format, or a checkpoint of ours."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """What a folder says of its adapters. UserError if it is not plain LoRA or does not name its base."""
    config = read_json(folder / CONFIG)
    path = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters are read")
    for key, off in UNUSED.items():
        if config.get(key, off) not in (off, None):
            raise UserError(f"{path}: {key} is {config[key]!r}; only plain LoRA is read, where it is {off!r}")
    r, alpha, base = config.get("r"), config.get("lora_alpha"), config.get("base_model_name_or_path")
    if type(r) is not int or r < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise UserError(f"{path}: r is {r!r} and lora_alpha {alpha!r}; a rank and a number should be there")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base_model_name_or_path is missing, so nobody knows which weights it adapts")
    scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    return Adapter(folder, r, scale, base, config)


def base_of(folder: Path) -> Path:
    """The weights' folder itself, or the one that an adapter's folder names. UserError if that is not here."""
    if not is_adapter(folder):
        return folder
    base = Path(read_adapter(folder).base).expanduser()
    if not base.is_dir():
        raise UserError(
            f"{folder / CONFIG}: base_model_name_or_path={base} is not a directory here; put the path of its base there"
        )
    return base.resolve()


def adapter_tensors(folder: Path) -> dict[str, Shape]:
    """The tensors that a folder holds, under published names."""
    if is_checkpoint(folder):
        return load_index(folder).shapes()
    return {name.removeprefix(PREFIX): info.shape for name, info in read_header(folder / MODEL).items()}


def check_adapter(adapter: Adapter, published: Mapping[str, Shape]) -> None:
    """UserError, in one line, unless every tensor adapts a linear layer of this model."""
    found = adapter_tensors(adapter.folder)
    layers = linear_layers(published, None)
    wanted = adapter_shapes({m: s for m, s in layers.items() if m in {layer_of(n) for n in found}}, adapter.r)
    wrong = [name for name, shape in found.items() if not is_adapter_name(name) or wanted.get(name) != shape]
    wrong += [name for name in wanted if name not in found]
    if wrong or not found:
        raise UserError(
            f"{adapter.folder}: an adapter for another base: {', '.join(by_layer(wrong)[:3]) or 'none of its tensors'} "
            f"fits no layer of this model; its own base is {adapter.base}"
        )


def settings_of(adapter: Adapter, published: Mapping[str, Shape]) -> dict[str, Any]:
    """The settings `task.lora` that continue an adapter."""
    adapted = {layer_of(name) for name in adapter_tensors(adapter.folder)}
    targets = list(dict.fromkeys(last(module) for module in published_order(published) if module in adapted))
    if adapted != set(linear_layers(published, targets)):
        raise UserError(f"{adapter.folder}: adapts some layers and not others of the same name; such are not continued")
    return {"r": adapter.r, "alpha": adapter.scale * adapter.r, "targets": targets}


def published_order(published: Mapping[str, Shape]) -> list[str]:
    """The linear layers in the order of the model."""
    return list(linear_layers(published, None))


def config_text(settings: Lora, targets: list[str], base: str) -> str:
    """adapter_config.json for adapters of these settings."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    return json.dumps(config, indent=2) + "\n"
