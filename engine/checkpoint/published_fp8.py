"""Exports in the FP8 format that some families are published in: which matrices, in which blocks. Free of torch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.card import CONFIG, Card
from engine.checkpoint.headers import read_folder
from engine.checkpoint.index import load_index
from engine.checkpoint.paths import is_checkpoint
from engine.checkpoint.quantised import CONFIG_KEY, FP8_BLOCK, FP8_DTYPE
from engine.errors import UserError
from engine.family import Family, load_family
from engine.lora.adapter import base_of, is_adapter
from engine.schema import Run

SCALE = "_scale_inv"
LINEAR = re.compile(r".*\blayers\.\d+\..*\.(\w+)\.weight")


@dataclass(frozen=True)
class Fp8:
    """What an export quantises."""

    names: frozenset[str]
    block: tuple[int, int] = FP8_BLOCK
    power_of_two: bool = False  # scales


def fp8_of(card: Card, shapes: dict[str, tuple[int, ...]]) -> Fp8:
    """What the published directory had in FP8, or else what the family is published with in FP8.

    UserError for a family that is not published so.
    """
    own = {name for name, dtype in card.stored.items() if dtype == FP8_DTYPE}
    if own:
        config = json.loads(card.texts[CONFIG]).get(CONFIG_KEY) or {}
        block = config.get("weight_block_size") or FP8_BLOCK
        return Fp8(frozenset(own), (block[0], block[1]), config.get("scale_fmt") == "ue8m0")
    kept = load_family(card.family).fp8_keeps
    if kept is None:
        raise UserError(_refusal(card.family))
    names = {name for name in card.stored if _linear(name, shapes.get(name, ()), kept)}
    return Fp8(frozenset(names - card.buffers))


def check(run: Run, family: Family) -> None:
    """UserError, before anything starts, for `checkpoint.export_dtype=fp8` where nothing is published so."""
    if run.checkpoint.export_dtype != "fp8":
        return
    if run.task.name == "lora" and run.job.name == "train":
        raise UserError("checkpoint.export_dtype=fp8: adapters are not published in FP8; leave it out")
    folder = run.checkpoint.resume or run.model.weights or getattr(run.job, "source", None)
    if family.fp8_keeps is None and FP8_DTYPE not in (_dtypes(Path(folder)) if folder else ()):
        raise UserError(_refusal(family.name))


def _refusal(family: str) -> str:
    return (
        f"checkpoint.export_dtype=fp8: {family} is not published in FP8, and neither were these weights; "
        "bf16 would be right"
    )


def _dtypes(folder: Path) -> set[str]:
    """Of the tensors that an export of some weights has."""
    if is_adapter(folder):
        return _dtypes(base_of(folder))
    if is_checkpoint(folder):
        return set(load_index(folder).stored.values())
    return {info.dtype for info in read_folder(folder).values()}


def _linear(name: str, shape: tuple[int, ...], kept: tuple[str, ...]) -> bool:
    found = LINEAR.fullmatch(name)
    return found is not None and len(shape) == 2 and found[1] not in kept


def config_with(text: str, fp8: Fp8 | None) -> str:
    """A published config.json whose quantization_config is what an export has."""
    config: dict[str, Any] = json.loads(text)
    if fp8 is None:
        config.pop(CONFIG_KEY, None)
    else:
        config.setdefault(
            CONFIG_KEY,
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": list(fp8.block),
            },
        )
    return json.dumps(config, indent=2) + "\n"
