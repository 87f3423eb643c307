"""The batch of `job=forward`, under the names that lerobot's forward gives its inputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError

PLAIN = ("input_ids", "attention_mask", "state", "embodiment_id", "action", "action_is_pad", "noise", "time")
NEEDED = ("input_ids", "attention_mask", "state", "noise")
RIGHT = "images.N, img_masks.N, input_ids, attention_mask, state, embodiment_id, noise and, for a loss, action and time"


def read(tensors: dict[str, Tensor], config: Any, where: Path) -> PolicyBatch:
    """All rows as one batch; prompts may be filled up on either side.

    `images.N` of camera N: float [B, 3, height, width] in [-1, 1] or uint8 [B, H, W, 3]; `img_masks.N` bool [B], else
    all; `input_ids` int64 and `attention_mask` [B, S]; `state` [B, D] or [B, 1, D], normalised; `embodiment_id` [B],
    else `model.embodiments`; `noise` [B, T, max_action_dim]; `action` [B, T, A] normalised, `time` [B],
    `action_is_pad` bool [B, T]. Raises UserError for what is missing, unknown or of another shape.
    """
    cameras = sorted((name for name in tensors if re.fullmatch(r"images\.\d+", name)), key=lambda name: int(name[7:]))
    masks = {name: name.replace("images.", "img_masks.") for name in cameras}
    if unknown := sorted(set(tensors) - {*PLAIN, *cameras, *masks.values()}):
        raise UserError(f"{where} holds {', '.join(unknown)}; job=forward reads {RIGHT}")
    if missing := [name for name in NEEDED if name not in tensors] + ([] if cameras else ["images.0"]):
        raise UserError(f"{where} lacks {', '.join(missing)}; job=forward reads {RIGHT}")
    if ("action" in tensors) != ("time" in tensors):
        raise UserError(f"{where}: action and time come together, for a loss; add the other or leave both out")
    rows, length = tensors["noise"].shape[:2] if tensors["noise"].dim() == 3 else (0, 0)
    for problem in _problems(tensors, cameras, config, rows, length):
        raise UserError(f"{where}: {problem}")
    whole = torch.ones(rows, dtype=torch.bool)
    tokens, token_mask = filled_on_the_right(tensors["input_ids"].long(), tensors["attention_mask"].bool())
    padded = tensors.get("action_is_pad", torch.zeros(rows, length)).bool()
    return PolicyBatch(
        images={name: tensors[name] for name in cameras},
        image_masks={name: tensors.get(mask, whole).bool() for name, mask in masks.items()},
        state=tensors["state"].float().reshape(rows, -1),
        actions=tensors.get("action", torch.zeros(rows, length, 1)).float() * ~padded[..., None],
        action_pad=padded,
        sample_ids=list(range(rows)),
        embodiments=tensors["embodiment_id"].tolist() if "embodiment_id" in tensors else [],
        tokens=tokens,
        token_mask=token_mask,
        noise=tensors["noise"].float(),
        time=tensors["time"].float() if "time" in tensors else None,
    )


def filled_on_the_right(tokens_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The same prompts with what fills them up on their right."""
    order = (~mask_BS).to(torch.uint8).argsort(dim=1, stable=True)
    return tokens_BS.gather(1, order) * mask_BS.gather(1, order), mask_BS.gather(1, order)


def _problems(tensors: dict[str, Tensor], cameras: list[str], config: Any, rows: int, length: int) -> list[str]:
    if not rows or not length:
        return ["noise should have the shape [rows, steps, max_action_dim], at least one of each"]
    shapes: dict[str, tuple[Any, ...]] = {
        **{"noise": (rows, length, config.max_action_dim), "input_ids": (rows, None), "embodiment_id": (rows,)},
        **{"attention_mask": tuple(tensors["input_ids"].shape), "action": (rows, length, None)},
        **{"action_is_pad": (rows, length), "time": (rows,)},
        "state": (rows, None) if tensors["state"].dim() == 2 else (rows, 1, None),
    }
    for name in cameras:
        size = tuple(config.image_target_size)
        shapes[name] = (rows, 3, *size) if tensors[name].is_floating_point() else (rows, None, None, 3)
        shapes[name.replace("images.", "img_masks.")] = (rows,)
    wrong = [
        f"{name} has shape {list(tensors[name].shape)}; it should be {['any' if n is None else n for n in shape]}"
        for name, shape in shapes.items()
        if name in tensors
        and (
            tensors[name].dim() != len(shape)
            or any(n is not None and n != m for n, m in zip(shape, tensors[name].shape, strict=False))
        )
    ]
    if wrong:
        return wrong
    for name, most in (("action", config.max_action_dim), ("state", config.max_state_dim)):
        if name in tensors and tensors[name].shape[-1] > most:
            return [f"{name} has {tensors[name].shape[-1]} numbers; at most model.max_{name}_dim={most}"]
    limits = (("input_ids", config.vocab_size, "vocab_size"), ("embodiment_id", config.max_num_embodiments, "robots"))
    return [
        f"{name} must lie in [0, {limit}) ({what})"
        for name, limit, what in limits
        if name in tensors and ((tensors[name] < 0) | (tensors[name] >= limit)).any()
    ]
