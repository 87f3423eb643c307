"""Adapter directories in PEFT's format: adapter_config.json and adapter_model.safetensors. Free of torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.headers import by_layer, read_header, read_metadata
from engine.checkpoint.index import load_index, read_json
from engine.checkpoint.paths import is_checkpoint
from engine.checkpoint.weight_map import Shape, WeightMap
from engine.errors import UserError
from engine.lora.fused import Fused, Place, fused_of, fused_places, plain_place
from engine.lora.names import PREFIX, last, layer_of, linear_layers
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
    "layer_replication": None,
    "trainable_token_indices": None,
}
PATTERNS = {"rank_pattern": "a rank", "alpha_pattern": "a number"}
FUSED = "fused"  # in a checkpoint's own config: how the reference holds experts, for the export
BLOCKS = "blocks"  # in the metadata of our files: the experts' matrices that have diagonal blocks of B


@dataclass(frozen=True)
class Adapter:
    """What an adapter directory, or a checkpoint of adapters, says of itself."""

    folder: Path
    base: str  # the weights that it belongs to
    config: dict[str, Any]

    def strength(self, key: str) -> tuple[int, float]:
        """Rank and scale of what PEFT targets by this name: a layer, or a parameter."""
        r = self._pattern("rank_pattern", key, self.config["r"])
        alpha = self._pattern("alpha_pattern", key, self.config["lora_alpha"])
        return r, alpha / (math.sqrt(r) if self.config.get("use_rslora") else r)

    def targets(self, parameter: str) -> bool:
        """Whether PEFT adapts this parameter as such, by its whole name or the end of it."""
        names = self.config.get("target_parameters") or ()
        return any(f".{parameter}".endswith(f".{name}") for name in names)

    def _pattern(self, kind: str, key: str, default: Any) -> Any:
        patterns = (self.config.get(kind) or {}).items()
        return next((value for pattern, value in patterns if re.match(_regex(pattern), key)), default)


def _regex(pattern: str) -> str:
    """What PEFT matches a name with: the pattern is its end, after a dot."""
    return rf"(.*\.)?({pattern})$"


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
    if not _is_rank(r) or not _is_number(alpha):
        raise UserError(f"{path}: r is {r!r} and lora_alpha {alpha!r}; a rank and a number should be there")
    if not isinstance(base, str) or not base:
        raise UserError(f"{path}: base_model_name_or_path is missing, so nobody knows which weights it adapts")
    for key, what in PATTERNS.items():
        fits = _is_rank if key == "rank_pattern" else _is_number
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(_is_regex(k) and fits(v) for k, v in patterns.items()):
            raise UserError(f"{path}: {key} is {patterns!r}; regular expressions with {what} for each should be there")
    names = config.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: target_parameters is {names!r}; a list of names should be there")
    return Adapter(folder, base, config)


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_regex(value: str) -> bool:
    try:
        return re.compile(_regex(value)) is not None
    except re.error:
        return False


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


def place_adapters(adapter: Adapter, weight_map: WeightMap) -> dict[str, Place]:
    """Where the pairs of the adapted layers of a model lie, by published layer.

    UserError, in one line, unless every tensor adapts a linear layer of this model.
    """
    found, layers = adapter_tensors(adapter.folder), linear_layers(weight_map.adaptable, None)
    stored, places = {layer_of(name) for name in found}, {}
    for layer, shape in layers.items():
        if layer in stored:
            parameter = f"{layer}.weight"
            places[layer] = plain_place(
                layer, shape, *adapter.strength(parameter if adapter.targets(parameter) else layer)
            )
    if not is_checkpoint(adapter.folder):
        names = read_metadata(adapter.folder / MODEL).get(BLOCKS)
        blocks = None if names is None else names.split(",")
        places |= fused_places(layers, fused_of(weight_map), adapter.targets, adapter.strength, blocks)
    wanted: dict[str, Shape] = {}
    for place in places.values():
        wanted |= place.stored_shapes()
    wrong = [name for name, shape in found.items() if wanted.get(name) != shape]
    wrong += [name for name in wanted if name not in found]
    if wrong or not found:
        raise UserError(
            f"{adapter.folder}: an adapter for another base: {', '.join(by_layer(wrong)[:3]) or 'none of its tensors'} "
            f"fits no layer of this model; its own base is {adapter.base}"
        )
    return places


def settings_of(folder: Path, places: Mapping[str, Place], published: Mapping[str, Shape]) -> dict[str, Any]:
    """The settings `task.lora` that continue an adapter. Layers of a smaller rank get ranks of zeros."""
    targets = list(dict.fromkeys(last(layer) for layer in linear_layers(published, None) if layer in places))
    if places.keys() != linear_layers(published, targets).keys():
        raise UserError(f"{folder}: adapts some layers and not others of the same name; such are not continued")
    r, scale = max(place.r for place in places.values()), next(iter(places.values())).scale
    if not all(math.isclose(place.scale, scale, rel_tol=1e-9) for place in places.values()):
        raise UserError(f"{folder}: scales its layers differently; such are not continued, job.merge=true merges them")
    return {"r": r, "alpha": scale * r, "targets": targets}


def config_text(
    settings: Lora, targets: list[str], base: str, fused: list[Fused], task: str | None = "CAUSAL_LM"
) -> str:
    """adapter_config.json of a checkpoint of adapters; `engine.lora.export` makes PEFT's of it.

    `task` is PEFT's name for the kind of model, None for one that it does not know, such as a policy.
    """
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.r,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **({FUSED: [asdict(one) for one in fused]} if fused else {}),
    }
    return json.dumps(config, indent=2) + "\n"
