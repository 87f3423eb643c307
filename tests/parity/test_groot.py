"""GR00T N1.7 against lerobot 0.6.1: the same weights, images, prompts, noise and times give the same numbers in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.groot_n17.config import GrootN17Config
from zoo.groot_n17.model import GrootN17
from zoo.groot_n17.objective import OBJECTIVE
from zoo.groot_n17.pixels import pixels
from zoo.groot_n17.weights import NORM, OUTPUT, weight_map

from engine.backends.native.model import fill_buffers
from engine.data.policy_batch import PolicyBatch
from tests.parity import lerobot_groot as lerobot
from tests.parity.lerobot_pi05 import randomise

BASE: dict[str, Any] = {
    **{"name": "parity", "vocab_size": 101, "image_token_id": 97, "patch_size": 4, "dit_dropout": 0.3},
    **{"vlsa_dropout": 0.3, "max_state_dim": 9, "max_action_dim": 8, "max_num_embodiments": 5, "max_seq_len": 19},
    **{"tune_llm": True, "tune_visual": True, "num_position_embeddings": 25},
}
CASES = {
    "two_cameras": GrootN17Config(
        **BASE,
        **{"select_layer": 3, "backbone_embedding_dim": 40, "text_mlp_dim": 56, "text_heads": 6, "text_kv_heads": 2},
        **{"text_head_dim": 14, "mrope_section": [3, 2, 2], "vision_width": 24, "vision_mlp_dim": 30},
        **{"vision_depth": 3, "vision_heads": 2, "deepstack_visual_indexes": [0, 2], "image_target_size": [24, 16]},
        **{"image_crop_size": [21, 21], "dit_layers": 6, "dit_heads": 3, "dit_head_dim": 10},
        **{"input_embedding_dim": 30, "hidden_size": 26, "vlsa_layers": 2, "vlsa_heads": 5, "vlsa_head_dim": 8},
        **{"action_horizon": 7, "num_inference_timesteps": 4},
    ),
    "one_action": GrootN17Config(
        **BASE,
        **{"select_layer": 1, "backbone_embedding_dim": 24, "text_mlp_dim": 20, "text_heads": 2, "text_kv_heads": 2},
        **{"text_head_dim": 12, "mrope_section": [2, 2, 2], "vision_width": 16, "vision_mlp_dim": 22},
        **{"vision_depth": 1, "vision_heads": 2, "deepstack_visual_indexes": [], "image_target_size": [8, 8]},
        **{"image_crop_size": None, "dit_layers": 3, "dit_heads": 1, "dit_head_dim": 18, "attend_text_every_n_blocks": 1},
        **{"input_embedding_dim": 18, "hidden_size": 10, "vlsa_layers": 1, "vlsa_heads": 2, "vlsa_head_dim": 12},
        **{"action_horizon": 1, "num_inference_timesteps": 3},
    ),
}
CAMERAS = ("top", "wrist")
STATE, ACTION, ROWS = 5, 3, 3


def ours_of(values: dict[str, Tensor], config: GrootN17Config) -> GrootN17:
    with torch.device("meta"):
        ours = GrootN17(config)
    ours.to_empty(device="cpu")
    fill_buffers_again(ours)
    ours.load_state_dict({name: values[name] for name in ours.state_dict()})
    return ours.eval()


def fill_buffers_again(module: torch.nn.Module) -> None:
    """Buffers that `to_empty` gave memory: their values are those that no checkpoint holds."""
    for part in module.modules():
        part._buffers = {name: buffer.to("meta") for name, buffer in part._buffers.items()}
    fill_buffers(module, torch.device("cpu"))


def theirs_and_ours(config: GrootN17Config) -> tuple[Any, GrootN17]:
    theirs = lerobot.model(config)
    randomise(theirs, seed=3)
    values = theirs.state_dict()
    assert {name: tuple(t.shape) for name, t in values.items() if name != OUTPUT} == weight_map(config).published
    return theirs, ours_of(values, config)


def observed(config: GrootN17Config, ragged: bool) -> PolicyBatch:
    """Three robots, odd images of other sizes; `ragged`: prompts of unlike lengths, one without its second camera."""
    generator = torch.Generator().manual_seed(1)
    sizes = {CAMERAS[0]: (33, 20), CAMERAS[1]: (24, 24)}
    images = {n: torch.randint(0, 256, (ROWS, *size, 3), generator=generator).byte() for n, size in sizes.items()}
    unit = config.patch_size * config.spatial_merge_size
    tokens = (config.image_target_size[0] // unit) * (config.image_target_size[1] // unit)
    there = torch.ones(ROWS, 2, dtype=torch.bool)
    there[1, 0] = not ragged
    rows = []
    for row, words in enumerate((4, 7, 1) if ragged else (4, 4, 4)):
        said = torch.randint(0, 90, (words + 4,), generator=generator)
        image = torch.tensor([91, *[config.image_token_id] * tokens, 92])
        rows.append(torch.cat([said[:2], *[image] * int(there[row].sum()), said[2:]]))
    lengths = torch.tensor([len(row) for row in rows])
    prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    shape = (ROWS, config.action_horizon)
    return PolicyBatch(
        images=images,
        image_masks={name: there[:, n] for n, name in enumerate(CAMERAS)},
        state=torch.randn((ROWS, STATE), generator=generator),
        actions=torch.randn((*shape, ACTION), generator=generator),
        action_pad=torch.zeros(shape, dtype=torch.bool),
        sample_ids=list(range(ROWS)),
        embodiments=[4, 0, 4],
        tokens=prompts,
        token_mask=torch.arange(prompts.shape[1]) < lengths[:, None],
        noise=torch.randn((*shape, config.max_action_dim), generator=generator),
        time=torch.tensor([0.0305, 0.5, 0.9985]),
    )


def seen(config: GrootN17Config, batch: PolicyBatch) -> dict[str, Tensor]:
    return {n: pixels(one, config.image_target_size, config.image_crop_size) for n, one in batch.images.items()}


def close(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_velocity_gradients_and_samples_equal_lerobots(case: str, ragged: bool) -> None:
    """Where prompts are of unlike lengths lerobot gets each row alone: its VL self-attention reads what fills up."""
    config = CASES[case]
    theirs, ours = theirs_and_ours(config)
    batch = observed(config, ragged)
    groups = [[row] for row in range(ROWS)] if ragged else [list(range(ROWS))]
    shown, losses, velocities, sampled = seen(config, batch), [], [], []
    for rows in groups:
        inputs = lerobot.inputs(config, batch, shown, rows)
        loss, velocity = lerobot.loss(theirs, inputs, batch, rows)
        (loss * len(rows) / ROWS).backward()
        losses.append(loss.item() * len(rows) / ROWS)
        velocities.append(velocity)
        sampled.append(lerobot.sample(theirs, inputs, batch, rows))

    kept: list[Tensor] = []
    total = OBJECTIVE.loss_sum(ours, batch, kept.append)
    (total / ROWS).backward()
    close(total / ROWS, torch.tensor(sum(losses)))
    close(kept[0], torch.cat(velocities))
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if grads[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert (parameter.grad - grads[name]).norm() <= 1e-4 * grads[name].norm() + 1e-7, name
    assert grads[NORM] is None, "nothing reads the last norm"
    with torch.no_grad():
        close(OBJECTIVE.outputs(ours, batch)["actions"], torch.cat(sampled), atol=1e-4)


def test_training_with_dropout_dropped_states_and_padded_steps_equals_lerobots() -> None:
    """The same draws of torch's generator: dropout stands in the same places, in the same order."""
    config = CASES["two_cameras"]
    theirs, ours = theirs_and_ours(config)
    batch = observed(config, ragged=False)
    batch.action_pad[:, 5:] = True
    batch.actions = batch.actions * ~batch.action_pad[..., None]  # as both processors do
    batch.state_dropped = torch.tensor([False, True, False])
    theirs.train(), ours.train()
    rows = list(range(ROWS))
    inputs = lerobot.inputs(config, batch, seen(config, batch), rows)
    torch.manual_seed(5)
    expected, velocity = lerobot.loss(theirs, inputs, batch, rows)
    torch.manual_seed(5)
    kept: list[Tensor] = []
    close(OBJECTIVE.loss_sum(ours, batch, kept.append) / ROWS, expected)
    close(kept[0], velocity)
