"""lerobot 0.6.1's X-VLA with given noise and times, which it draws itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.xvla import modeling_xvla as theirs
from lerobot.policies.xvla.configuration_xvla import XVLAConfig
from torch import Tensor
from zoo.xvla.config import XvlaConfig

from engine.checkpoint.config import to_published
from engine.data.policy_batch import PolicyBatch
from engine.family import load_family
from tests.parity.lerobot_pi05 import randomise

OURS = ("type", "n_action_steps", "domain_ids")


def settings(config: XvlaConfig, cameras: tuple[str, ...], state: int, action: int) -> XVLAConfig:
    """Its own config class, from what we publish."""
    published = to_published(load_family("xvla"), config)
    image = (3, config.image_size, config.image_size)
    return XVLAConfig(
        **{key: value for key, value in published.items() if key not in OURS},
        device="cpu",
        n_action_steps=config.chunk_size,
        input_features={name: PolicyFeature(FeatureType.VISUAL, image) for name in cameras}
        | {"observation.state": PolicyFeature(FeatureType.STATE, (state,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (action,))},
    )


def policy(config: XvlaConfig, cameras: tuple[str, ...], state: int, action: int, seed: int = 3) -> Any:
    """An `XVLAPolicy` with weights that bite, nothing dropped."""
    found = theirs.XVLAPolicy(settings(config, cameras, state, action)).float().eval()
    randomise(found, seed)
    # It makes two tensors of the tied embedding unless a checkpoint is saved and read.
    found.model.vlm.language_model.encoder.embed_tokens.weight = found.model.vlm.language_model.shared.weight
    return found


def observation(batch: PolicyBatch) -> dict[str, Tensor]:
    """What its policy is called with, images by its own preprocessing; a camera that no row has is left out."""
    from lerobot.lerobot_types import TransitionKey
    from lerobot.policies.xvla.processor_xvla import XVLAImageNetNormalizeProcessorStep, XVLAImageToFloatProcessorStep
    from lerobot.processor.converters import create_transition

    seen = {n: i.permute(0, 3, 1, 2) for n, i in batch.images.items() if batch.image_masks[n].any()}
    transition = create_transition(seen)
    for step in (XVLAImageToFloatProcessorStep(), XVLAImageNetNormalizeProcessorStep()):
        transition = step(transition)
    found = dict(transition[TransitionKey.OBSERVATION])
    found |= {"observation.state": batch.state, "observation.language.tokens": batch.tokens}
    return found | {"action": batch.actions, "domain_id": batch.domains}


@contextmanager
def drawn(noise: Tensor, first: float | Tensor) -> Iterator[None]:
    """Its noise, and the number in [0, 1) that its stratified times begin with, or one for each row."""
    with (
        mock.patch.object(torch, "randn_like", lambda *_, **__: noise.clone()),
        mock.patch.object(torch, "randn", lambda *_, **__: noise.clone()),
        mock.patch.object(torch, "rand", lambda *_, **__: torch.as_tensor(first).reshape(-1)),
    ):
        yield


def times(rows: int, first: float) -> Tensor:
    """The times that it makes of it (`XVLAModel.forward`)."""
    return (torch.tensor([first]) + torch.arange(rows) / rows) % (1 - 1e-5)


def learned(policy: Any, batch: PolicyBatch, first: float | Tensor) -> tuple[Tensor, Tensor]:
    """Its loss, and what its head gives."""
    kept: list[Tensor] = []
    hook = policy.model.transformer.register_forward_hook(lambda _, __, out: kept.append(out))
    with drawn(batch.noise, first):
        loss, _ = policy(observation(batch))
    hook.remove()
    return loss, kept[0]


def sampled(policy: Any, batch: PolicyBatch) -> Tensor:
    """Its actions from a noise."""
    with drawn(batch.noise, 0.0):
        return policy.predict_action_chunk(observation(batch))
