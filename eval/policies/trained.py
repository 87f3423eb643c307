"""A policy directory behind the protocol: what `job=train` of a family of policies leaves in `hf/`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import numpy as np

from engine.errors import UserError
from engine.policy import conventions, statistics
from eval import protocol
from eval.policy import Request

if TYPE_CHECKING:
    import torch

ENDS = 2**20  # bytes at either end of a file of weights that tell it from others


class Trained:
    """Answers with actions that depend on the observation and on its seed alone.

    A forward pass of another shape rounds otherwise, and a simulator makes a failure of a success out of that. So
    every pass has `batch` rows: requests are cut into groups of that size, and the last is filled up. None takes the
    requests as they come, which is fastest, and equal only up to rounding.
    """

    needs: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        device: Optional[torch.device] = None,
        precision: str = "fp32",
        batch: Optional[int] = 1,
    ) -> None:
        """On this machine's own hardware unless `device` says otherwise. UserError for what is no policy directory."""
        device = device or _device()
        import torch

        from engine.policy.runtime import Runtime

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self._runtime, self._batch = Runtime(folder, device, dtype), batch
        self.conventions = self._runtime.conventions
        self.name = f"{self.conventions.family} {fingerprint(folder)}"

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        """Actions [horizon, A] for each. UserError for an observation that lacks something."""
        from engine.policy.runtime import Observation

        seen = [Observation(*self._read(request), seed=request.seed) for request in requests]
        actions: list[np.ndarray] = []
        for group, count in filled(seen, self._batch):
            actions += self._runtime.infer(group)[:count]
        return actions

    def forget(self, session: str) -> None:
        """Nothing is remembered."""

    def _read(self, request: Request) -> tuple[dict[str, np.ndarray], np.ndarray, str]:
        """Images, state and prompt of a message."""
        given, images = request.observation, {}
        for camera in self.conventions.cameras:
            key = protocol.image_key(camera.name)
            image = given.get(key)
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise UserError(f"'{key}' must be an image, uint8 [height, width, 3]; the policy looks at it")
            images[camera.name] = image
        state, prompt = given.get(protocol.STATE), given.get(protocol.PROMPT, "")
        size = self.conventions.state.size
        if not isinstance(state, np.ndarray) or state.shape != (size,) or state.dtype.kind not in "iuf":
            raise UserError(f"'{protocol.STATE}' must be {size} numbers: {', '.join(self.conventions.state.names)}")
        if not np.isfinite(state).all():
            raise UserError(f"'{protocol.STATE}' holds a number that is not finite")
        if not isinstance(prompt, str):
            raise UserError(f"'{protocol.PROMPT}' must be text")
        return images, state, prompt


def filled(items: Sequence, batch: Optional[int]) -> Iterator[tuple[list, int]]:
    """Groups of exactly `batch` items, the last filled up with copies, and how many of each are real."""
    size = batch or max(1, len(items))
    for at in range(0, len(items), size):
        group = list(items[at : at + size])
        yield group + group[:1] * (size - len(group) if batch else 0), len(group)


def fingerprint(folder: Path) -> str:
    """Eight digits that tell a policy directory from others: of its conventions, statistics and weights."""
    digest = hashlib.sha256()
    for name in (conventions.FILE, statistics.FILE):
        digest.update((folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as data:
            digest.update(data.read(ENDS))
            data.seek(max(ENDS, file.stat().st_size - ENDS))
            digest.update(data.read() + str(file.stat().st_size).encode())
    return digest.hexdigest()[:8]


def _device() -> torch.device:
    from hardware import registry

    hardware = registry.get("auto")
    hardware.bootstrap()  # before torch is imported
    hardware.set_device(0)
    return hardware.device(0)
