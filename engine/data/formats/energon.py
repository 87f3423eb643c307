"""The metadata of Megatron-Energon datasets, read as data. Free of torch and numpy; no code of a dataset is run.

Format: https://nvidia.github.io/Megatron-Energon (a folder of WebDataset shards with `.nv-meta/`: `.info.json` counts
the samples of each shard, `split.yaml` lists the shards of each split, `dataset.yaml` maps fields to parts).
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml

from engine.data.braces import braces, named_paths
from engine.errors import UserError
from engine.schema import Data

META = ".nv-meta"
SPLITS = ("split.yaml", "split.json")
INFOS = (".info.json", ".info.yaml")


def split_shards(folder: Path, split: str) -> list[str]:
    """The shards of a split, relative to the folder. UserError if the folder is no prepared dataset."""
    if folder.is_file() or not (folder / META).is_dir():
        hint = ""
        if folder.suffix in (".yaml", ".yml"):
            hint = "; a metadataset is spelled out in data.mixture"
        raise UserError(f"data.path: '{folder}' is not a prepared Energon dataset (it has no {META}){hint}")
    if not any((folder / META / name).is_file() for name in INFOS):
        raise UserError(f"data.path: '{folder / META}' has no {INFOS[0]}; `energon prepare` writes it")
    parts = _read(folder, SPLITS).get("split_parts") or {}
    if split not in parts:
        raise UserError(
            f"data.split={split}: '{folder}' has no such split; its splits are {', '.join(map(str, parts)) or 'none'}"
        )
    left_out = set(_excludes(folder))
    names = [name for pattern in parts[split] or () for name in braces(str(pattern))]
    return [name for name in names if name not in left_out]


def excluded(data: Data) -> list[str]:
    """The samples that a dataset leaves out, as `shard/key`."""
    return [name for folder in folders(data) for name in _excludes(folder) if "/" in name]


def field_map(data: Data) -> Data:
    """The settings with `data.field` as a part of the samples, where the dataset's own field map names one."""
    for folder in folders(data):
        if not (folder / META / "dataset.yaml").is_file():
            continue
        settings = _read(folder, ("dataset.yaml",))
        part = (settings.get("field_map") or {}).get(data.field)
        if isinstance(part, str):
            # Energon spells a value inside a JSON part `json[key]`.
            inner = re.fullmatch(r"([^\[\]]+)\[([^\[\]]+)\]", part)
            return dataclasses.replace(data, field=f"{inner[1]}:{inner[2]}" if inner else part)
        if "sample_loader" in settings and data.field == "text":
            raise UserError(
                f"data.path: '{folder / META / 'dataset.yaml'}' names Python code (sample_loader), which is not run; "
                "data.field=EXTENSION names the part of the samples that holds the text, for example txt or json:text"
            )
    return data


def folders(data: Data) -> list[Path]:
    return [Path(name).expanduser() for name in named_paths(data.path or "")]


def _excludes(folder: Path) -> list[str]:
    return [name for pattern in _read(folder, SPLITS).get("exclude") or () for name in braces(str(pattern))]


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """The first of some files of the metadata that is there."""
    path = next((folder / META / name for name in names if (folder / META / name).is_file()), None)
    if path is None:
        raise UserError(f"data.path: '{folder / META}' has no {names[0]}; `energon prepare` writes it")
    try:
        text = path.read_text("utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"data.path: '{path}' cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise UserError(f"data.path: '{path}' is not a mapping")
    return content
