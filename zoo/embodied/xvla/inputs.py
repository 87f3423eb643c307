"""The batch of `job=forward`, under the names that lerobot's `XVLAModel.forward` gives its arguments."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from zoo.xvla.config import XvlaConfig

KNOWN = ("image_input", "image_mask", "input_ids", "domain_id", "proprio", "noise", "action", "time", "action_is_pad")
NEEDED = ("image_input", "input_ids", "proprio", "noise")
RIGHT = f"{', '.join(NEEDED)} and, for a loss, action and time"


def read(tensors: dict[str, Tensor], config: XvlaConfig, where: Path) -> PolicyBatch:
    """All rows as one batch.

    `image_input` [B, V, 3, R, R], normalised by ImageNet's mean and deviation; `image_mask` bool [B, V], else all;
    `input_ids` int64 [B, S]; `domain_id` int64 [B], else 0; `proprio` [B, D]; `noise` [B, T, action_dim]; `action`
    [B, T, A] in the model's layout, `time` [B], `action_is_pad` bool [B, T]. Raises UserError for what is missing,
    unknown or of another shape.
    """
    if unknown := sorted(set(tensors) - set(KNOWN)):
        raise UserError(f"{where} holds {', '.join(unknown)}; job=forward reads {RIGHT}")
    if missing := [name for name in NEEDED if name not in tensors]:
        raise UserError(f"{where} lacks {', '.join(missing)}; job=forward reads {RIGHT}")
    if ("action" in tensors) != ("time" in tensors):
        raise UserError(f"{where}: action and time come together, for a loss; add the other or leave both out")
    for problem in _problems(tensors, config):
        raise UserError(f"{where}: {problem}")
    (rows, length), views = tensors["noise"].shape[:2], tensors["image_input"].shape[1]
    there = tensors.get("image_mask", torch.ones(rows, views)).bool()
    return PolicyBatch(
        images={str(view): tensors["image_input"][:, view].float() for view in range(views)},
        image_masks={str(view): there[:, view] for view in range(views)},
        state=tensors["proprio"].float(),
        actions=tensors.get("action", torch.zeros(rows, length, 1)).float(),
        action_pad=tensors.get("action_is_pad", torch.zeros(rows, length)).bool(),
        sample_ids=list(range(rows)),
        tokens=tensors["input_ids"].long(),
        noise=tensors["noise"].float(),
        time=tensors["time"].float() if "time" in tensors else None,
        domains=tensors.get("domain_id", torch.zeros(rows)).long(),
    )


def _problems(tensors: dict[str, Tensor], config: XvlaConfig) -> list[str]:
    rows, length = tensors["noise"].shape[:2] if tensors["noise"].dim() == 3 else (0, 0)
    views = tensors["image_input"].shape[1] if tensors["image_input"].dim() == 5 else 0
    if not rows or not length or not views:
        return ["noise should have the shape [rows, steps, numbers], and image_input [rows, views, 3, size, size]"]
    shapes = {
        "image_input": (rows, views, 3, config.image_size, config.image_size),
        "image_mask": (rows, views),
        "input_ids": (rows, None),
        "domain_id": (rows,),
        "proprio": (rows, None),
        "noise": (rows, length, config.action_dim),
        "action": (rows, length, None),
        "time": (rows,),
        "action_is_pad": (rows, length),
    }
    for name, tensor in tensors.items():
        wanted = shapes[name]
        same = zip(wanted, tensor.shape, strict=False)
        if tensor.dim() != len(wanted) or any(n is not None and n != m for n, m in same):
            return [
                f"{name} has shape {list(tensor.shape)}; it should be {['any' if n is None else n for n in wanted]}"
            ]
    ids, domains = tensors["input_ids"], tensors.get("domain_id", torch.zeros(1))
    if ((ids < 0) | (ids >= config.vocab_size)).any():
        return [f"input_ids must lie in [0, {config.vocab_size}) (vocab_size)"]
    if ((domains < 0) | (domains >= config.num_domains)).any():
        return [f"domain_id must lie in [0, {config.num_domains}) (num_domains)"]
    for name, most in (("proprio", config.max_state_dim), ("action", config.action_dim)):
        if name in tensors and tensors[name].shape[-1] > most:
            return [f"{name} has {tensors[name].shape[-1]} numbers; at most {most} fit"]
    tokens = length + ids.shape[1] + max(views, config.num_image_views or 0) * config.image_tokens
    if tokens > config.max_len_seq:
        return [f"{tokens} tokens, and model.max_len_seq={config.max_len_seq}"]
    return []
