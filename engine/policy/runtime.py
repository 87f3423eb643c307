"""A trained policy: a policy directory in, actions for observations out. What serving and evaluation run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from engine.architecture import find_weights, read_architecture
from engine.backends.native.model import fill_buffers
from engine.checkpoint.card import TOKENIZER
from engine.checkpoint.sources import open_weights
from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.family import Family, load_dotted, load_family
from engine.policy import conventions, statistics
from engine.policy.data import Processor
from engine.policy.statistics import Statistics


@dataclass(frozen=True)
class Observation:
    """What a robot sees, with the policy's own conventions."""

    images: Mapping[str, np.ndarray]  # by the conventions' camera: uint8 [H, W, 3]; one that is not there is left out
    state: np.ndarray  # [D]
    prompt: str = ""
    seed: int = 0  # of the noise that the actions are made of, and of nothing else


class Serving(Protocol):
    """What a family brings (`Family.policy`): its model and its processor for a policy directory."""

    def __call__(
        self, config: Any, tokenizer: Path, measured: dict[str, Statistics], own: conventions.Conventions
    ) -> tuple[nn.Module, Processor]:
        """The model on the meta device, and a processor that draws noise by sample number."""


class Runtime:
    """A policy on one device. Answers do not depend on what else is in a batch."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Raises UserError for a folder that is no policy directory of a family of the zoo."""
        folder = find_weights(str(folder), "policy")
        self.conventions = conventions.load(folder)
        family = load_family(self.conventions.family)
        if family.policy is None:
            raise UserError(f"{folder}: {family.name} is no family of policies; name a policy directory")
        config, measured = read_architecture(folder, family), statistics.load(folder)
        tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else folder
        make: Serving = load_dotted(family.policy)
        self._module, self._processor = make(config, tokenizer, measured, self.conventions)
        self._device = device
        _fill(self._module, folder, family, config, device, dtype)

    @torch.no_grad()
    def infer(self, observations: Sequence[Observation]) -> list[np.ndarray]:
        """Actions float32 [horizon, A] for each, in the units that the policy was trained on."""
        batch = self._processor(self._batch(observations)).to(self._device)
        return list(self._processor.actions(self._module(batch, sample=True).cpu()).numpy())

    def _batch(self, observations: Sequence[Observation]) -> PolicyBatch:
        size, names = self.conventions.action.size, [camera.name for camera in self.conventions.cameras]
        states = [np.asarray(one.state, dtype=np.float32).reshape(-1) for one in observations]
        if wrong := [len(state) for state in states if len(state) != self.conventions.state.size]:
            raise UserError(f"a state of {wrong[0]} numbers; the policy reads {self.conventions.state.size}")
        rows, steps = len(observations), self.conventions.horizon
        return PolicyBatch(
            images={name: _images(observations, name) for name in names},
            image_masks={name: torch.tensor([name in one.images for one in observations]) for name in names},
            state=torch.from_numpy(np.stack(states)),
            actions=torch.zeros(rows, steps, size),
            action_pad=torch.zeros(rows, steps, dtype=torch.bool),
            tasks=[one.prompt for one in observations],
            sample_ids=[one.seed for one in observations],
        )


def _images(observations: Sequence[Observation], camera: str) -> Tensor:
    """uint8 [B, H, W, 3]; black where there is none. UserError for images of several sizes or types."""
    found = [one.images.get(camera) for one in observations]
    shapes = {image.shape for image in found if image is not None}
    if len(shapes) > 1 or any(image is not None and image.dtype != np.uint8 for image in found):
        raise UserError(f"images of {camera} should be uint8 [H, W, 3] of one size; they are {sorted(shapes)}")
    shape = shapes.pop() if shapes else (1, 1, 3)
    return torch.from_numpy(np.stack([np.zeros(shape, np.uint8) if image is None else image for image in found]))


def _fill(
    module: nn.Module, folder: Path, family: Family, config: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Weights onto the device, a tensor at a time."""
    source, weight_map = open_weights(folder, family, config), load_dotted(family.weights)(config)
    for prefix, owner in module.named_modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                shape = tuple(parameter.shape)
                values = source.read("param", f"{prefix}.{name}".lstrip("."), shape, (0,) * len(shape), shape)
                owner._parameters[name] = nn.Parameter(values.to(device, dtype), requires_grad=False)
        for name, buffer in list(owner._buffers.items()):
            whole = f"{prefix}.{name}".lstrip(".")
            if buffer is not None and buffer.is_meta and weight_map.is_buffer(whole):  # fp32 whatever the weights are
                shape = tuple(buffer.shape)
                values = source.read("param", whole, shape, (0,) * len(shape), shape)
                owner._buffers[name] = values.to(device, torch.float32)
    fill_buffers(module, device)
    module.eval()
