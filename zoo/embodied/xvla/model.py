"""X-VLA: Florence-2's encoder reads images and an instruction, a transformer turns noise into actions.

Source: arXiv 2510.10274 and github.com/2toINF/X-VLA; x_t = t noise + (1 - t) actions, the head gives the actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from engine.data.policy_batch import PolicyBatch
from zoo.xvla.config import XvlaConfig
from zoo.xvla.florence import encoded, encoder, image_features, layers_of, pixels
from zoo.xvla.head import HeadBlock, SoftPromptedTransformer
from zoo.xvla.spaces import SPACES, ActionSpace


class Xvla(nn.Module):
    """The model; `forward` is what a strategy wraps, so that everything is computed within it."""

    def __init__(self, config: XvlaConfig) -> None:
        super().__init__()
        self.config, self.space = config, SPACES[config.action_mode]
        self.vlm = encoder(config)
        self.transformer = SoftPromptedTransformer(config)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Clean actions from `batch.time`, fp32 [B, T, action_dim], grippers as logits, and errors [B, T]; or,
        with `sample`, the actions that the sampler makes of the noise, grippers from 0 to 1.

        `batch.noise` is [B, T, action_dim]; actions and state may have fewer numbers, which zeros complete.
        """
        if self.training and self.config.drops:
            # Of the first sample's number: resuming drops the same again, and ranks drop unlike things.
            torch.manual_seed(1 + max(batch.sample_ids[:1] or [0]))
        steps = batch.noise.shape[1]
        domain = batch.domains if batch.domains is not None else batch.noise.new_zeros(len(batch.noise)).long()
        state = without(filled(batch.state, self.config.state_dim), self.space.grippers)
        context = self.transformer.context(*self.seen_and_said(batch), domain, steps)

        def clean(x_BTA: Tensor, time_B: Tensor) -> Tensor:
            return self.transformer(without(x_BTA, self.space.grippers), state, time_B, domain, context).float()

        if sample:
            return self._sampled(clean, batch.noise)
        actions = filled(batch.actions, self.config.action_dim)
        time = batch.time[:, None, None]
        given = clean(time * batch.noise + (1 - time) * actions, batch.time)
        return given, step_losses(given, batch.actions, self.space)

    def _sampled(self, clean: Callable[[Tensor, Tensor], Tensor], noise_BTA: Tensor) -> Tensor:
        """From time 1 to 0: the same noise is mixed again and again with what was found last."""
        steps, actions = self.config.num_denoising_steps, torch.zeros_like(noise_BTA)
        for step in range(steps, 0, -1):
            share = step / steps
            time = torch.full(noise_BTA.shape[:1], share, device=noise_BTA.device)
            actions = clean(share * noise_BTA + (1 - share) * actions, time)
        return squashed(actions, self.space.grippers)

    def seen_and_said(self, batch: PolicyBatch) -> tuple[Tensor, Tensor]:
        """The first view with the instruction, encoded [B, P + S, d_model], and the other views' own features
        [B, (views - 1) P, d_model]. A view that is not there is zeros.
        """
        views = torch.cat([pixels(images, self.config.image_size) for images in batch.images.values()])
        there = torch.cat(list(batch.image_masks.values()))[:, None, None]
        features = image_features(self.vlm, views)  # all cameras at once
        features = torch.where(there, features, features.new_zeros(()))
        first, *others = features.chunk(len(batch.images))
        empty = max(0, (self.config.num_image_views or 0) - 1 - len(others))
        others = torch.cat([first[:, :0], *others, *[torch.zeros_like(first)] * empty], 1)
        return encoded(self.vlm, first, batch.tokens), others


class XvlaPolicy(nn.Module):
    """The model under the prefix that lerobot gives it."""

    _no_split_modules = layers_of(HeadBlock)

    def __init__(self, config: XvlaConfig) -> None:
        super().__init__()
        self.model = Xvla(config)

    def forward(self, batch: PolicyBatch, sample: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        return self.model(batch, sample)


def filled(x: Tensor, size: int) -> Tensor:
    """The vectors with zeros behind them, or cut, to `size` numbers."""
    return pad(x, (0, size - x.shape[-1]))


def without(x: Tensor, channels: Sequence[int]) -> Tensor:
    """The vectors with 0 in some of their channels."""
    x = x.clone() if channels else x
    for channel in channels:
        x[..., channel] = 0
    return x


def squashed(x: Tensor, channels: Sequence[int]) -> Tensor:
    """The vectors with some of their numbers, which are logits, as probabilities."""
    x = x.clone() if channels else x
    for channel in channels:
        x[..., channel] = x[..., channel].sigmoid()
    return x


def step_losses(given_BTA: Tensor, wanted_BTN: Tensor, space: ActionSpace) -> Tensor:
    """[B, T]: weighted errors over an action's channels. Squares, and cross-entropies where grippers are logits.

    Targets may have fewer numbers than the model: a space of its own fills them up with zeros, which are learned as the
    arm that is not there; `auto` has as many as the data.
    """
    if not space.size:
        return (given_BTA[..., : wanted_BTN.shape[-1]] - wanted_BTN).square().mean(-1)
    wanted = filled(wanted_BTN, space.size)
    errors = (given_BTA - wanted).square()
    for channel in space.grippers:
        logits = given_BTA[..., channel]
        errors[..., channel] = binary_cross_entropy_with_logits(logits, wanted[..., channel], reduction="none")
    return (errors * errors.new_tensor(space.weights)).sum(-1)
