"""X-VLA against lerobot 0.6.1: the same weights, images, words, domains, noise and times, in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from zoo.xvla.config import XvlaConfig
from zoo.xvla.head import time_embedding
from zoo.xvla.model import XvlaPolicy
from zoo.xvla.objective import OBJECTIVE
from zoo.xvla.weights import EMBEDDED, weight_map

from engine.data.policy_batch import PolicyBatch
from tests.parity import lerobot_xvla as lerobot

SMALL: dict[str, Any] = {
    **{"name": "parity", "vocab_size": 61, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3},
    **{"encoder_ffn_dim": 20, "max_text_positions": 40, "max_image_positions": 7, "max_frames": 3},
    **{"davit_dims": [6, 12, 10, 20], "davit_depths": [1, 2, 1, 1], "davit_heads": [2, 3, 1, 2]},
    **{"davit_groups": [3, 2, 5, 4], "davit_window": 3, "hidden_size": 30, "num_heads": 3, "depth": 2},
    **{"num_domains": 4, "max_len_seq": 64, "num_denoising_steps": 4, "initializer_range": 0.2},
}
CASES = {  # config, numbers of state and action in the data
    "ee6d": (
        XvlaConfig(**SMALL, chunk_size=5, image_size=50, tokenizer_max_length=7, len_soft_prompts=3, dim_time=7),
        *(20, 20),
    ),
    "joint": (  # one step, projections by domain, no soft prompts, a state to be filled up, three views always
        XvlaConfig(
            **SMALL | {"mlp_ratio": 2.5, "num_denoising_steps": 1},
            **{"chunk_size": 1, "image_size": 33, "tokenizer_max_length": 3, "len_soft_prompts": 0, "dim_time": 8},
            **{"action_mode": "joint", "max_state_dim": 17, "use_hetero_proj": True, "num_image_views": 3},
        ),
        *(14, 14),
    ),
    "agibot_ee6d": (
        XvlaConfig(
            **SMALL, chunk_size=3, image_size=64, action_mode="agibot_ee6d", max_state_dim=9, tokenizer_max_length=6
        ),
        *(9, 20),
    ),
    "auto": (
        XvlaConfig(**SMALL, chunk_size=4, image_size=40, action_mode="auto", max_action_dim=9, tokenizer_max_length=5),
        *(5, 3),
    ),
}
CAMERAS = ("observation.images.top", "observation.images.wrist", "observation.images.side")
ROWS, FIRST = 3, 0.83


def theirs_and_ours(case: str, cameras: int) -> tuple[Any, XvlaPolicy]:
    config, state, action = CASES[case]
    theirs = lerobot.policy(config, CAMERAS[:cameras], state, action)
    ours = XvlaPolicy(config)
    values = theirs.state_dict()
    assert set(values) == {*weight_map(config).published, EMBEDDED}
    ours.load_state_dict(values)
    return theirs, ours.eval()


def observed(case: str, cameras: int, seed: int = 0) -> PolicyBatch:
    """Odd images of other sizes, three domains, of which two rows share one, grippers between 0 and 1."""
    config, state, action = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    sizes = [(33, 20), (config.image_size, config.image_size), (9, 14)][:cameras]
    there = torch.ones(ROWS, dtype=torch.bool)
    return PolicyBatch(
        images={
            name: torch.randint(0, 256, (ROWS, *size, 3), dtype=torch.uint8, generator=generator)
            for name, size in zip(CAMERAS, sizes, strict=False)
        },
        image_masks=dict.fromkeys(CAMERAS[:cameras], there),
        state=torch.randn((ROWS, state), generator=generator),
        actions=torch.rand((ROWS, config.chunk_size, action), generator=generator),
        action_pad=torch.zeros(ROWS, config.chunk_size, dtype=torch.bool),
        sample_ids=list(range(ROWS)),
        tokens=torch.randint(0, config.vocab_size, (ROWS, config.tokenizer_max_length), generator=generator),
        noise=torch.randn((ROWS, config.chunk_size, config.action_dim), generator=generator),
        time=lerobot.times(ROWS, FIRST),
        domains=torch.tensor([2, 0, 2]),
    )


def close(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("cameras", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_loss_prediction_gradients_and_samples_equal_lerobots(case: str, cameras: int) -> None:
    theirs, ours = theirs_and_ours(case, cameras)
    batch = observed(case, cameras)
    loss, prediction = lerobot.learned(theirs, batch, FIRST)
    loss.backward()

    kept: list[Tensor] = []
    total = OBJECTIVE.loss_sum(ours, batch, kept.append)
    (total / OBJECTIVE.count(batch)).backward()
    close(kept[0], prediction)
    close(total / ROWS, loss)
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    whole = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for name, parameter in ours.named_parameters():
        # Biases of keys have no gradient but rounding, of numbers as large as the loss makes them.
        assert (parameter.grad - grads[name]).norm() <= 1e-4 * grads[name].norm() + 1e-7 * whole, name
    assert grads["model.transformer.action_encoder.fc.weight"][[1, 3]].abs().max() == 0, "domains that nobody has"

    with torch.no_grad():
        found = OBJECTIVE.outputs(ours, batch)
    numbers = CASES[case][2]
    close(found["actions"][..., :numbers], lerobot.sampled(theirs, batch)[..., :numbers])
    close(found["prediction"], prediction)
    rows = OBJECTIVE.row_losses(ours, batch)
    assert torch.allclose(rows.mean(), loss, rtol=1e-5)


def test_a_camera_that_is_missing_is_as_one_that_lerobot_fills_up() -> None:
    """lerobot fills up views behind those that there are; here they keep their places, the last one the same."""
    theirs, ours = theirs_and_ours("ee6d", 3)
    batch = observed("ee6d", 3)
    batch.image_masks = batch.image_masks | {CAMERAS[2]: torch.zeros(ROWS, dtype=torch.bool)}
    _, prediction = lerobot.learned(theirs, batch, FIRST)
    with torch.no_grad():
        close(ours(batch)[0], prediction)


def test_steps_beyond_the_episode_and_samples_that_fill_up_do_not_count() -> None:
    """Rows by lerobot's own loss, of a row cut to the steps that are within its episode."""
    theirs, ours = theirs_and_ours("ee6d", 1)
    batch = observed("ee6d", 1)
    batch.action_pad[1, 2:] = True
    batch.sample_ids = [4, 5, -1]
    with torch.no_grad():
        given, _ = ours(batch)
        rows = OBJECTIVE.row_losses(ours, batch)
    space = theirs.model.action_space
    cut = [(given[r : r + 1, :n], batch.actions[r : r + 1, :n]) for r, n in ((0, 5), (1, 2))]
    wanted = [float(sum(space(*pair).values())) for pair in cut]
    np.testing.assert_allclose(rows.numpy(), [*wanted, 0], rtol=1e-5)
    assert OBJECTIVE.count(batch) == 2


def test_a_time_is_told_as_lerobot_tells_it() -> None:
    from lerobot.policies.xvla.soft_transformer import timestep_embedding

    moments = torch.tensor([0.0, 0.25, 0.99999])
    for width in (6, 7, 32):
        torch.testing.assert_close(time_embedding(moments, width), timestep_embedding(moments, width), atol=0, rtol=0)


def test_what_is_dropped_follows_from_the_samples() -> None:
    """Twice the same in training, something else for other samples; nothing in evaluation."""
    config, *_ = CASES["ee6d"]
    _, ours = theirs_and_ours("ee6d", 1)
    batch = observed("ee6d", 1)
    with torch.no_grad():
        still = ours(batch)[0]
        ours.train()
        torch.manual_seed(0)
        first, again = ours(batch)[0], ours(batch)[0]
        batch.sample_ids = [7, 8, 9]
        other = ours(batch)[0]
    assert config.drops and torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, still)
