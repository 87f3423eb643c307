"""The batch of `job=forward`, under the names that lerobot's forward gives its arguments."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from zoo.pi05.config import Pi05Config

PLAIN = ("tokens", "masks", "actions", "noise", "time", "action_is_pad")
NEEDED = ("tokens", "masks", "noise")
RIGHT = "images.N, img_masks.N, tokens, masks, noise and, for a loss, actions and time"


def read(tensors: dict[str, Tensor], config: Pi05Config, where: Path) -> PolicyBatch:
    """All rows as one batch.

    `images.N` of camera N: float [B, 3, R, R] in [-1, 1] or uint8 [B, H, W, 3]; `img_masks.N` bool [B], else all;
    `tokens` int64 and `masks` bool [B, S]; `noise` [B, T, max_action_dim]; `actions` [B, T, A] normalised, `time` [B],
    `action_is_pad` bool [B, T]. Raises UserError for what is missing, unknown or of another shape.
    """
    cameras = sorted((name for name in tensors if re.fullmatch(r"images\.\d+", name)), key=lambda name: int(name[7:]))
    masks = {name: name.replace("images.", "img_masks.") for name in cameras}
    if unknown := sorted(set(tensors) - {*PLAIN, *cameras, *masks.values()}):
        raise UserError(f"{where} holds {', '.join(unknown)}; job=forward reads {RIGHT}")
    if missing := [name for name in NEEDED if name not in tensors] + ([] if cameras else ["images.0"]):
        raise UserError(f"{where} lacks {', '.join(missing)}; job=forward reads {RIGHT}")
    if ("actions" in tensors) != ("time" in tensors):
        raise UserError(f"{where}: actions and time come together, for a loss; add the other or leave both out")
    rows, length = tensors["noise"].shape[:2] if tensors["noise"].dim() == 3 else (0, 0)
    whole = torch.ones(rows, dtype=torch.bool)
    batch = PolicyBatch(
        images={name: tensors[name] for name in cameras},
        image_masks={name: tensors.get(mask, whole).bool() for name, mask in masks.items()},
        state=torch.zeros(rows, 1),
        actions=tensors.get("actions", torch.zeros(rows, length, 1)).float(),
        action_pad=tensors.get("action_is_pad", torch.zeros(rows, length)).bool(),
        sample_ids=list(range(rows)),
        tokens=tensors["tokens"].long(),
        token_mask=tensors["masks"].bool(),
        noise=tensors["noise"].float(),
        time=tensors["time"].float() if "time" in tensors else None,
    )
    for problem in _problems(batch, config, rows, length):
        raise UserError(f"{where}: {problem}")
    return batch


def _problems(batch: PolicyBatch, config: Pi05Config, rows: int, length: int) -> list[str]:
    shapes = [("noise", batch.noise, (rows, length, config.max_action_dim))]
    shapes += [("tokens", batch.tokens, (rows, None)), ("masks", batch.token_mask, tuple(batch.tokens.shape))]
    shapes += [("actions", batch.actions, (rows, length, None))]
    shapes += [("action_is_pad", batch.action_pad, (rows, length))]
    shapes += [("time", batch.time, (rows,))] if batch.time is not None else []
    size = config.image_size
    for name, images in batch.images.items():
        shapes.append((name, images, (rows, 3, size, size) if images.is_floating_point() else (rows, None, None, 3)))
    shapes += [(name.replace("images.", "img_masks."), mask, (rows,)) for name, mask in batch.image_masks.items()]
    wrong = [
        f"{name} has shape {list(tensor.shape)}; it should be {['any' if n is None else n for n in shape]}"
        for name, tensor, shape in shapes
        if tensor.dim() != len(shape)
        or any(n is not None and n != m for n, m in zip(shape, tensor.shape, strict=False))
    ]
    if not rows or not length:
        return ["noise should have the shape [rows, steps, max_action_dim], at least one of each"]
    if wrong:
        return wrong
    if batch.actions.shape[-1] > config.max_action_dim:
        return [f"actions have {batch.actions.shape[-1]} numbers; at most model.max_action_dim={config.max_action_dim}"]
    if ((batch.tokens < 0) | (batch.tokens >= config.vocab_size)).any():
        return [f"tokens must lie in [0, {config.vocab_size}) (vocab_size)"]
    return []
