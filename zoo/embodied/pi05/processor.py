"""From what a robot saw and did to what Pi0.5 reads, and from its answers to actions. Training and serving share it.

Source: openpi's `PaligemmaTokenizer.tokenize` and `Normalize`; lerobot 0.6.1 `processor_pi05.py`.
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

from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.policy.draw import random_of
from engine.policy.normalise import Normaliser
from engine.policy.statistics import Statistics
from zoo.pi05.config import Pi05Config
from zoo.pi05.prompts import Prompts

BINS = 256  # steps in which a normalised number of the state is told
NORMALISATION = "quantile"


@dataclass(frozen=True)
class Draw:
    """Where noise and times come from: each sample's own numbers, whatever batch or rank it is in."""

    seed: int
    stream: str = "train"

    def __call__(self, sample: int, shape: tuple[int, int], config: Pi05Config) -> tuple[np.ndarray, float]:
        """(noise, float32 of a shape; time) of a sample."""
        random = random_of(self.stream, self.seed, sample)
        noise = random.standard_normal(shape, dtype=np.float32)
        share = random.beta(config.time_sampling_beta_alpha, config.time_sampling_beta_beta)
        return noise, config.time_sampling_scale * share + config.time_sampling_offset


class Processor:
    """Pure: the same batch in, the same batch out."""

    def __init__(
        self,
        config: Pi05Config,
        prompts: Prompts,
        state: Statistics,
        action: Statistics,
        draw: Optional[Draw] = None,
    ) -> None:
        """Statistics are those of the data that the policy was trained on. UserError for vectors that are too long."""
        for name, size, most in (
            ("action", action.size, config.max_action_dim),
            ("state", state.size, config.max_state_dim),
        ):
            if size > most:
                raise UserError(f"{name} has {size} numbers, and model.max_{name}_dim={most}; raise it")
        self.config, self.prompts, self.draw = config, prompts, draw
        self.tokenizer: Optional[Path] = prompts.folder
        self.numbers = action.size
        self.state, self.action = Normaliser(NORMALISATION, state), Normaliser(NORMALISATION, action)

    def __call__(self, batch: PolicyBatch) -> PolicyBatch:
        """Prompts as tokens, actions and state normalised; noise and times where samples have numbers to draw with.

        Images stay uint8: the model resizes them, on its own device.
        """
        state = self.state(batch.state)
        bins = discretised(state) if self.config.discrete_state_input else None
        tokens, token_mask = self.prompts(texts(batch.tasks, bins))
        made = dataclasses.replace(
            batch, state=state, actions=self.action(batch.actions), tokens=tokens, token_mask=token_mask
        )
        if self.draw is None or batch.noise is not None:
            return made
        shape = (batch.actions.shape[1], self.config.max_action_dim)
        drawn = [self.draw(sample, shape, self.config) for sample in batch.sample_ids]
        noise = torch.from_numpy(np.stack([noise for noise, _ in drawn]))
        return dataclasses.replace(made, noise=noise, time=torch.tensor([time for _, time in drawn]).float())

    def actions(self, normalised_BTA: Tensor) -> Tensor:
        """What the model gave, [B, T, max_action_dim], as actions [B, T, A] in the dataset's units."""
        return self.action.inverse(normalised_BTA[..., : self.numbers])


def discretised(state_BD: Tensor) -> np.ndarray:
    """int64 [B, D]: which of 256 equal steps from -1 to 1 each number is in; below them -1, above them the last."""
    return np.digitize(state_BD.numpy(), np.linspace(-1, 1, BINS + 1)[:-1]) - 1


def texts(tasks: Sequence[str], bins_BD: Optional[np.ndarray]) -> list[str]:
    """The prompts: the task in one line and, unless it is left out, the state."""
    cleaned = [task.strip().replace("_", " ").replace("\n", " ") for task in tasks]
    if bins_BD is None:
        return [f"{task}\n" for task in cleaned]
    told = (" ".join(map(str, row)) for row in bins_BD)
    return [f"Task: {task}, State: {row};\nAction: " for task, row in zip(cleaned, told, strict=True)]
