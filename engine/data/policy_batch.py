"""One micro-batch of robot demonstrations, as every policy's processor reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

LISTS = ("tasks", "sample_ids", "sources", "embodiments")


@dataclass
class PolicyBatch:
    """B samples: what was seen and said at one frame, and the actions from there on.

    D numbers of state, A of action, T actions of a chunk. Numbers are in the dataset's units until a processor
    normalises them.
    """

    images: dict[str, Tensor]  # by camera: uint8 [B, H, W, 3], RGB; a processor's may be floats of another layout
    image_masks: dict[str, Tensor]  # by camera: bool [B]; False where a sample has no such camera
    state: Tensor  # float32 [B, D]
    actions: Tensor  # float32 [B, T, A]
    action_pad: Tensor  # bool [B, T]: beyond the episode's end, not to be learned
    tasks: list[str] = field(default_factory=list)  # the instruction in words
    sample_ids: list[int] = field(default_factory=list)  # places in the global order; -1 for one that only fills up
    sources: list[int] = field(default_factory=list)  # number of each sample's source in the mixture
    embodiments: list[int] = field(default_factory=list)  # each sample's robot, by a family's own numbers
    state_dropped: Optional[Tensor] = None  # bool [B]: samples whose state the model shall do without
    tokens: Optional[Tensor] = None  # int64 [B, S]: the prompt, once a processor has made it
    token_mask: Optional[Tensor] = None  # bool [B, S]
    noise: Optional[Tensor] = None  # float32 [B, T, A]: given instead of drawn (parity, validation)
    time: Optional[Tensor] = None  # float32 [B]
    domains: Optional[Tensor] = None  # int64 [B]: which robot or benchmark, for models that tell them apart

    @property
    def num_items(self) -> int:
        """Samples that count: what the loss is averaged over."""
        return sum(number >= 0 for number in self.sample_ids) if self.sample_ids else self.state.shape[0]

    def counted(self) -> Tensor:
        """bool [B]: the samples that count."""
        numbers = self.sample_ids or [0] * self.state.shape[0]
        return torch.tensor([number >= 0 for number in numbers])

    def uncounted(self) -> PolicyBatch:
        """The same samples, only to fill up."""
        return dataclasses.replace(self, sample_ids=[-1] * self.state.shape[0])

    def take(self, rows: list[int]) -> PolicyBatch:
        """Some of the samples, in this order."""
        changed = self._each(lambda tensor: tensor[rows])
        lists = {name: [getattr(self, name)[row] for row in rows] for name in LISTS if getattr(self, name)}
        return dataclasses.replace(changed, **lists)

    def to(self, device: torch.device) -> PolicyBatch:
        """The batch on a device; copies do not block where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PolicyBatch:
        """The batch in memory from which copies to a device do not block."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> PolicyBatch:
        changed: dict[str, Any] = {}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Tensor):
                changed[part.name] = change(value)
            elif isinstance(value, dict):
                changed[part.name] = {name: change(tensor) for name, tensor in value.items()}
        return dataclasses.replace(self, **changed)
