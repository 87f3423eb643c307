"""Pi0.5 against lerobot 0.6.1: the same weights, images, prompts, noise and times give the same numbers in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from zoo.pi05.config import Pi05Config
from zoo.pi05.model import Pi05Policy, time_embedding
from zoo.pi05.objective import OBJECTIVE
from zoo.pi05.weights import weight_map

from engine.data.policy_batch import PolicyBatch
from tests.parity import lerobot_pi05 as lerobot

BASE: dict[str, Any] = {
    "name": "parity",
    "num_heads": 8,
    "vocab_size": 301,
    "patch_size": 7,
    "max_action_dim": 9,
    "max_state_dim": 11,
}
CASES = {
    "unlike_widths": Pi05Config(
        **BASE,
        **{"depth": 2, "num_kv_heads": 1, "head_dim": 6, "width": 40, "mlp_dim": 56, "expert_width": 24},
        **{"expert_mlp_dim": 36, "vision_width": 18, "vision_mlp_dim": 30, "vision_depth": 2, "vision_heads": 3},
        **{"image_size": 28, "chunk_size": 5, "tokenizer_max_length": 13, "num_inference_steps": 10},
    ),
    "groups_and_one_action": Pi05Config(
        **BASE,
        **{"depth": 3, "num_kv_heads": 2, "head_dim": 10, "width": 32, "mlp_dim": 40, "expert_width": 50},
        **{"expert_mlp_dim": 20, "vision_width": 20, "vision_mlp_dim": 22, "vision_depth": 1, "vision_heads": 2},
        **{"image_size": 21, "chunk_size": 1, "tokenizer_max_length": 7, "num_inference_steps": 3},
    ),
}
CAMERAS = ("observation.images.top", "observation.images.wrist", "observation.images.side")
STATE, ACTION, ROWS = 5, 3, 3


def theirs_and_ours(config: Pi05Config) -> tuple[Any, Pi05Policy]:
    theirs = lerobot.policy(config, CAMERAS, STATE, ACTION)
    lerobot.randomise(theirs, seed=3)
    ours = Pi05Policy(config)
    values = theirs.state_dict()
    assert set(values) == set(weight_map(config).published)
    ours.load_state_dict({name: values[name] for name in ours.state_dict()})
    return theirs, ours


def observed(config: Pi05Config, seed: int = 0, missing: bool = True) -> PolicyBatch:
    """Odd images of other sizes, prompts of unlike lengths; the last camera is not there."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {CAMERAS[0]: (33, 20), CAMERAS[1]: (config.image_size, config.image_size), CAMERAS[2]: (9, 14)}
    images = {
        name: torch.randint(0, 256, (ROWS, *size, 3), dtype=torch.uint8, generator=generator)
        for name, size in sizes.items()
    }
    there = torch.ones(ROWS, dtype=torch.bool)
    length = config.tokenizer_max_length
    lengths = torch.tensor([length, 1, (length + 1) // 2])
    noise = torch.randn((ROWS, config.chunk_size, config.max_action_dim), generator=generator)
    return PolicyBatch(
        images=images,
        image_masks={name: there & (not missing or name != CAMERAS[2]) for name in CAMERAS},
        state=torch.zeros(ROWS, STATE),
        actions=torch.randn((ROWS, config.chunk_size, ACTION), generator=generator),
        action_pad=torch.zeros(ROWS, config.chunk_size, dtype=torch.bool),
        sample_ids=list(range(ROWS)),
        tokens=torch.randint(0, config.vocab_size, (ROWS, length), generator=generator),
        token_mask=torch.arange(length) < lengths[:, None],
        noise=noise,
        time=torch.tensor([0.03, 0.5, 0.97]),
    )


def as_lerobot(theirs: Any, batch: PolicyBatch) -> tuple[Any, ...]:
    """What its model is called with, by its own preprocessing of images; a camera that no row has is left out."""
    seen = {
        name: images.permute(0, 3, 1, 2).float() / 255
        for name, images in batch.images.items()
        if batch.image_masks[name].any()
    }
    return *theirs._preprocess_images(seen), batch.tokens, batch.token_mask


def close(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_velocity_gradients_and_samples_equal_lerobots(case: str, missing: bool) -> None:
    config = CASES[case]
    theirs, ours = theirs_and_ours(config)
    batch = observed(config, missing=missing)
    inputs = as_lerobot(theirs, batch)
    padded = torch.nn.functional.pad(batch.actions, (0, config.max_action_dim - ACTION))
    errors = theirs.model.forward(*inputs, padded, batch.noise, batch.time)
    loss = errors[..., :ACTION].mean()
    loss.backward()

    kept: list[Tensor] = []
    total = OBJECTIVE.loss_sum(ours, batch, kept.append)
    (total / OBJECTIVE.count(batch)).backward()
    close(total / ROWS, loss)
    # lerobot gives the squares; they are of the noise minus the actions minus the velocity.
    wanted = batch.noise - padded
    close((wanted - kept[0]).square(), errors, atol=1e-4)
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if name in weight_map(config).unlearned:
            assert parameter.grad is None and (grads[name] is None or not grads[name].any()), name
        else:
            assert (parameter.grad - grads[name]).norm() <= 1e-4 * grads[name].norm() + 1e-7, name
    assert all(grads[name] is None for name in weight_map(config).kept)

    expected = lerobot.sample(theirs, *inputs, noise=batch.noise)
    with torch.no_grad():
        close(OBJECTIVE.outputs(ours, batch)["actions"], expected, atol=1e-4)


def test_steps_beyond_the_episode_and_samples_that_fill_up_do_not_count() -> None:
    """The mean over a sample's own steps, by hand from the velocity."""
    config = CASES["unlike_widths"]
    _, ours = theirs_and_ours(config)
    batch = observed(config)
    batch.action_pad[1, 2:] = True
    batch.sample_ids = [4, 5, -1]
    with torch.no_grad():
        velocity = ours(batch)
        rows = OBJECTIVE.row_losses(ours, batch)
    errors = (batch.noise[..., :ACTION] - batch.actions - velocity[..., :ACTION]).square().numpy()
    np.testing.assert_allclose(rows.numpy(), [errors[0].mean(), errors[1, :2].mean(), 0], rtol=1e-5)
    assert OBJECTIVE.count(batch) == 2


def test_a_time_is_told_as_lerobot_tells_it() -> None:
    from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding

    times = torch.tensor([0.001, 0.25, 1.0])
    expected = create_sinusoidal_pos_embedding(times, 26, 4e-3, 4.0, times.device).float()
    torch.testing.assert_close(time_embedding(times, 26, 4e-3, 4.0), expected, atol=1e-6, rtol=0)
