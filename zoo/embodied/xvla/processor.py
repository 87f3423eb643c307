"""From what a robot saw and did to what X-VLA reads, and from its answers to actions. Training and serving share it.

Source: lerobot 0.6.1 `processor_xvla.py`. Nothing is normalised but the images, which the model does on its own device.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from engine.data.policy_batch import PolicyBatch
from engine.policy.conventions import Conventions
from engine.policy.statistics import Statistics
from zoo.xvla.config import XvlaConfig
from zoo.xvla.layout import Actions, arm_state
from zoo.xvla.prompts import Prompts
from zoo.xvla.spaces import SPACES

DOMAINS = {  # github.com/2toINF/X-VLA: the robots and benchmarks of the published weights
    **{"widowx": 0, "google_robot": 1, "calvin_panda": 2, "libero_panda": 3, "widowx_air": 4},
    **{"air_agilex_hq": 5, "robotwin2": 6, "robocasa": 7, "vlabench": 8, "agibot": 9, "air_agilex": 10, "airbot": 18},
}
UNKNOWN = 0  # lerobot's default
LARGEST = 1 - 1e-5  # times stay below 1


@dataclass(frozen=True)
class Draw:
    """Where noise and times come from: each sample's own numbers, whatever batch or rank it is in.

    Times are stratified over `group` samples, those of a step: t = (u + place / group) mod 1, u that of the step.
    """

    seed: int
    stream: str = "train"
    group: int = 1

    def noise(self, sample: int, shape: tuple[int, int]) -> np.ndarray:
        """float32 of a shape."""
        return self._random(f"noise/{sample}").standard_normal(shape, dtype=np.float32)

    def time(self, sample: int) -> float:
        """From 0 to `LARGEST`."""
        step, place = divmod(sample, self.group)
        return (self._random(f"time/{step}").random() + place / self.group) % LARGEST

    def _random(self, what: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.stream}/{self.seed}/{what}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))


class Processor:
    """Pure: the same batch in, the same batch out."""

    def __init__(
        self,
        config: XvlaConfig,
        prompts: Prompts,
        own: Conventions,
        action: Statistics,
        domains: Sequence[int] = (UNKNOWN,),
        draw: Optional[Draw] = None,
    ) -> None:
        """`domains` of the mixture's sources. UserError for vectors that the model's action mode does not know."""
        self.config, self.prompts, self.draw = config, prompts, draw
        self.tokenizer: Optional[Path] = prompts.folder
        self.domains, self.rotation = tuple(domains), own.state.rotation
        self.layout = Actions(own, action, config.action_mode, SPACES[config.action_mode])

    def __call__(self, batch: PolicyBatch) -> PolicyBatch:
        """Instructions as tokens, vectors in the model's layout, domains; noise and times by the samples' numbers.

        Images stay uint8: the model resizes them, on its own device.
        """
        tokens, token_mask = self.prompts(batch.tasks)
        sources = batch.sources or [0] * len(batch.state)
        state, actions = batch.state.numpy(), self.layout(batch.actions.numpy())
        if self.config.use_proprio and SPACES[self.config.action_mode].arm:
            state = arm_state(state, self.rotation, self.config.max_state_dim)
        elif self.config.use_proprio:
            state = arm_state(state, "none", self.config.max_state_dim)
        made = dataclasses.replace(
            batch,
            state=torch.from_numpy(state).float(),
            actions=torch.from_numpy(actions).float(),
            domains=torch.tensor([self.domains[number] for number in sources]),
            tokens=tokens,
            token_mask=token_mask,
        )
        if self.draw is None or batch.noise is not None:
            return made
        shape = (batch.actions.shape[1], self.config.action_dim)
        noise = torch.from_numpy(np.stack([self.draw.noise(sample, shape) for sample in batch.sample_ids]))
        times = torch.tensor([self.draw.time(sample) for sample in batch.sample_ids]).float()
        return dataclasses.replace(made, noise=noise, time=times)

    def actions(self, given_BTA: Tensor) -> Tensor:
        """What the sampler gave, [B, T, action_dim], as actions [B, T, A] in the dataset's units."""
        return torch.from_numpy(self.layout.inverse(given_BTA.numpy()))


def domains_of(config: XvlaConfig, robots: Sequence[str]) -> list[int]:
    """The domain of each source: `model.domain_ids` (one of them for all, or one for each), or by its robot's name."""
    given = config.domain_ids
    if given is None:
        found = [DOMAINS.get(robot, UNKNOWN) for robot in robots]
        return [number if number < config.num_domains else UNKNOWN for number in found]
    return list(given) if len(given) == len(robots) else [given[0]] * len(robots)
