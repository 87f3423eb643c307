"""From a family's config class to the `config.json` that is published. Free of torch and transformers."""

from __future__ import annotations

import json
from typing import Any

from engine.family import Family
from engine.schema import MODEL_ONLY_KEYS

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "F8_E4M3": "bfloat16"}
DTYPE_OF = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp8": "F8_E4M3"}  # our settings' names


def to_published(family: Family, model: Any) -> dict[str, Any]:
    """The published keys of a model config, with what transformers needs to find the class."""
    keys = model if isinstance(model, dict) else vars(model)
    left_out = {*MODEL_ONLY_KEYS, *getattr(model, "NOT_PUBLISHED", ())}
    name = family.architecture or family.reference.partition(":")[2]
    head = {"architectures": [name], "model_type": family.model_type}
    published = head | {key: value for key, value in keys.items() if key not in left_out}
    return model.publish(published) if hasattr(model, "publish") else published


def config_text(published: dict[str, Any], dtype: str) -> str:
    """`config.json` for weights of a dtype (F32, BF16, F16). transformers 4 reads `torch_dtype`, 5 reads `dtype`."""
    name = TORCH_NAMES.get(dtype, "float32")
    keys = ("dtype",) if "type" in published else ("dtype", "torch_dtype")  # lerobot knows the one alone
    return json.dumps(published | dict.fromkeys(keys, name), indent=2, sort_keys=True) + "\n"


def with_dtype(text: str, dtype: str) -> str:
    """A published config.json whose dtype keys are replaced; everything else as it was."""
    config = json.loads(text)
    name = TORCH_NAMES.get(dtype, "float32")
    present = [key for key in ("dtype", "torch_dtype") if key in config]
    return json.dumps(config | dict.fromkeys(present or ["dtype", "torch_dtype"], name), indent=2) + "\n"
