"""lerobot 0.6.1's GR00T N1.7 at small sizes: its copy of the backbone's config is replaced while it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lerobot.policies.groot import groot_n1_7 as theirs
from torch import Tensor
from zoo.groot_n17.backbone import qwen_config
from zoo.groot_n17.config import GrootN17Config

from engine.checkpoint.config import to_published
from engine.data.policy_batch import PolicyBatch
from engine.family import load_family
from engine.policy.groot.pixels import patches
from tests.parity.lerobot_pi05 import randomise as draw

FAMILY = load_family("groot_n17")


@contextmanager
def shrunk(config: GrootN17Config) -> Iterator[None]:
    """Within it, lerobot builds backbones of these sizes, with two layers more than it keeps."""
    backbone = qwen_config(config)
    backbone.tie_word_embeddings = backbone.text_config.tie_word_embeddings = True
    backbone.text_config.num_hidden_layers += 2
    with mock.patch.object(theirs, "_cosmos_reason2_qwen3_vl_config", lambda: backbone):
        yield


def model(config: GrootN17Config) -> Any:
    """A `GR00TN17` of these sizes in fp32, from the keys that we would publish; its weights as it draws them."""
    keys = to_published(FAMILY, config) | {"tune_llm": True, "tune_visual": True}
    with shrunk(config):
        return theirs.GR00TN17(theirs.GR00TN17Config(**keys), load_backbone_weights=False).float().eval()


def inputs(config: GrootN17Config, batch: PolicyBatch, seen: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    """What its model is called with for some rows, filled up on the left as its processor does. Only images of cameras
    that are there; `seen` are they as the tower reads them.
    """
    unit = config.patch_size
    sizes = (unit, config.spatial_merge_size, config.temporal_patch_size)
    shown = [seen[name][[row]] for row in rows for name in seen if batch.image_masks[name][row]]
    grid = [1, config.image_target_size[0] // unit, config.image_target_size[1] // unit]
    said = [batch.tokens[row][batch.token_mask[row]] for row in rows]
    longest = max(map(len, said))
    left = [torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in said]
    there = [torch.arange(longest) >= longest - len(ids) for ids in said]
    return inputs_of_head(config, batch, rows) | {
        "input_ids": torch.stack(left),
        "attention_mask": torch.stack(there).long(),
        "pixel_values": torch.cat([patches(one, *sizes)[0] for one in shown]),
        "image_grid_thw": torch.tensor([grid] * len(shown)),
    }


def inputs_of_head(config: Any, batch: PolicyBatch, rows: list[int]) -> dict[str, Tensor]:
    """Those of them that its head reads: filled up with zeros, and which numbers of the actions count."""
    padded = torch.nn.functional.pad(batch.actions, (0, config.max_action_dim - batch.actions.shape[-1]))
    counts = torch.zeros_like(padded)
    counts[..., : batch.actions.shape[-1]] = ~batch.action_pad[..., None]
    state = torch.nn.functional.pad(batch.state, (0, config.max_state_dim - batch.state.shape[-1]))
    return {
        "state": state[rows, None],
        "action": padded[rows],
        "action_mask": counts[rows],
        "embodiment_id": torch.tensor(batch.embodiments)[rows],
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Values that bite; those of a robot's own layers are as large as those of others."""
    draw(model, seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("W"):
                tensor.mul_(tensor.shape[-1] ** 0.5)


@contextmanager
def drawn(model: Any, batch: PolicyBatch, rows: list[int]) -> Iterator[list[Tensor]]:
    """Within it, its noise, times and dropped states are the batch's. Gives what its decoder answers."""
    answers: list[Tensor] = []
    hook = model.action_head.action_decoder.register_forward_hook(lambda *call: answers.append(call[2].detach()))
    dropped = batch.state_dropped if batch.state_dropped is not None else torch.zeros(len(batch.state)).bool()
    uniform = mock.patch.object(torch, "rand", lambda *_, **__: torch.where(dropped[rows], 0.0, 1.0))
    normal = mock.patch.object(torch, "randn", lambda *_, **__: batch.noise[rows].clone())
    time = mock.patch.object(model.action_head, "sample_time", lambda *_, **__: batch.time[rows])
    with uniform, normal, time:
        yield answers
    hook.remove()


def loss(model: Any, inputs: dict[str, Tensor], batch: PolicyBatch, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Its loss and its velocities [B, T, max_action_dim]."""
    with drawn(model, batch, rows) as answers:
        found = model(inputs)["loss"]
    return found, answers[0][:, -batch.noise.shape[1] :]


def sample(model: Any, inputs: dict[str, Tensor], batch: PolicyBatch, rows: list[int]) -> Tensor:
    """The actions that its sampler gives."""
    with drawn(model, batch, rows):
        given = {key: value for key, value in inputs.items() if not key.startswith("action")}
        return model.get_action(given)["action_pred"]
