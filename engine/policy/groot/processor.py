"""From what a robot saw and did to what GR00T reads, and from its answers to actions. Training and serving share it.

Source: lerobot 0.6.1's `processor_groot.py` (`GrootN17PackInputsStep`, `GrootN17ActionDecodeStep`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.policy.draw import random_of
from engine.policy.groot.config import HeadConfig
from engine.policy.groot.prompts import Prompts, formal
from engine.policy.normalise import Normaliser
from engine.policy.statistics import Statistics


@dataclass(frozen=True)
class Draw:
    """Where noise, times and dropped states come from: each sample's own numbers, whatever batch or rank it is in."""

    seed: int
    stream: str = "train"

    def __call__(self, sample: int, config: HeadConfig) -> tuple[np.ndarray, float, bool, bool]:
        """(noise, float32 [action_horizon, max_action_dim]; time; is the state zeros; is it dropped)."""
        random = random_of(self.stream, self.seed, sample)
        noise = random.standard_normal((config.action_horizon, config.max_action_dim), dtype=np.float32)
        time = config.noise_s * (1 - random.beta(config.noise_beta_alpha, config.noise_beta_beta))
        zeros, dropped = (bool(number < config.state_dropout_prob) for number in random.random(2))
        return noise, time, zeros and config.ZERO_STATE, dropped


class Processor:
    """Pure: the same batch in, the same batch out."""

    def __init__(
        self, config: HeadConfig, prompts: Prompts, state: Statistics, action: Statistics, horizon: int, draw: Draw
    ) -> None:
        """Statistics are those of the data that the policy was trained on; `horizon` is the actions' number there.

        UserError for vectors that are too long.
        """
        for name, size, most in (
            ("action", action.size, config.max_action_dim),
            ("state", state.size, config.max_state_dim),
        ):
            if size > most:
                raise UserError(f"{name} has {size} numbers, and model.max_{name}_dim={most}; raise it")
        if horizon > config.action_horizon:
            raise UserError(
                f"data.horizon={horizon}: model.action_horizon={config.action_horizon} actions are the most"
            )
        self.config, self.prompts, self.draw = config, prompts, draw
        self.tokenizer: Optional[Path] = prompts.folder
        self.numbers, self.horizon = action.size, horizon
        mode = "quantile" if config.use_percentiles else "min_max"
        self.state, self.action = Normaliser(mode, state, clip=True), Normaliser(mode, action, clip=True)

    def __call__(self, batch: PolicyBatch) -> PolicyBatch:
        """Prompts as tokens, numbers normalised and cut to [-1, 1], chunks filled up, robots; noise, times and dropped
        states drawn by sample number. Images stay uint8: the model resizes them, on its own device.
        """
        counts = torch.stack(list(batch.image_masks.values())).sum(0).tolist()
        texts = [formal(task, self.config.formalize_language) for task in batch.tasks]
        tokens, token_mask = self.prompts(texts, counts)
        missing = self.config.action_horizon - batch.actions.shape[1]
        action_pad = pad(batch.action_pad, (0, missing), value=True)
        actions = pad(self.action(batch.actions), (0, 0, 0, missing)) * ~action_pad[..., None]
        made = dataclasses.replace(
            batch,
            state=self.state(batch.state),
            actions=actions,
            action_pad=action_pad,
            embodiments=batch.embodiments or self._robots(batch.sources, len(texts)),
            tokens=tokens,
            token_mask=token_mask,
        )
        return made if batch.noise is not None else self._drawn(made)

    def _robots(self, sources: Sequence[int], rows: int) -> list[int]:
        """One robot for all, or one for each source of the mixture."""
        robots = self.config.embodiments
        return [robots[source] for source in sources] if len(robots) > 1 and sources else [robots[0]] * rows

    def _drawn(self, batch: PolicyBatch) -> PolicyBatch:
        noise, times, zeros, dropped = zip(*(self.draw(n, self.config) for n in batch.sample_ids), strict=True)
        made = dataclasses.replace(
            batch, noise=torch.from_numpy(np.stack(noise)), time=torch.tensor(times, dtype=torch.float32)
        )
        if self.draw.stream != "train" or not self.config.state_dropout_prob:
            return made
        state = batch.state * ~torch.tensor(zeros)[:, None]
        return dataclasses.replace(made, state=state, state_dropped=torch.tensor(dropped))

    def actions(self, normalised_BTA: Tensor) -> Tensor:
        """What the model gave, [B, action_horizon, max_action_dim], as actions [B, horizon, A] in the data's units."""
        return self.action.inverse(normalised_BTA[:, : self.horizon, : self.numbers].clamp(-1, 1))
