"""Samples by source and frame, as batches. A sample whose images cannot be decoded is replaced by a later frame."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.data.lerobot.corpus import Demonstrations
from engine.data.lerobot.request import Request
from engine.data.policy_batch import PolicyBatch
from engine.data.sources import BadSamples
from engine.errors import Closed, UserError

Wanted = tuple[int, int]  # source, frame
REPLACEMENT_STEP = 7919  # frames from one that cannot be decoded to the one that is tried instead; a prime
TRIES = 100


@dataclass
class Reader:
    """Makes batches, in any thread; the decoding is spread over the datasets' own threads."""

    demonstrations: Sequence[Demonstrations]
    request: Request
    bad: BadSamples
    closed: threading.Event = field(default_factory=threading.Event)  # set: nobody waits for batches any more

    def batches(self, wanted: Sequence[Wanted], sample_ids: Sequence[int], size: int) -> list[PolicyBatch]:
        """Micro-batches of `size` samples, in order.

        Raises UserError for more bad samples than allowed, and Closed once that is set.
        """
        wanted, images = self._images(list(wanted))
        cuts = range(0, len(wanted), size)
        return [
            self._batch(wanted[at : at + size], images[at : at + size], list(sample_ids[at : at + size])) for at in cuts
        ]

    def _images(self, wanted: list[Wanted]) -> tuple[list[Wanted], list[dict[str, np.ndarray]]]:
        """What is read in the end, which depends on the data alone, and its images."""
        images: list[dict[str, np.ndarray] | None] = [None] * len(wanted)
        for _ in range(TRIES):
            if self.closed.is_set():
                raise Closed
            open_places = [place for place, image in enumerate(images) if image is None]
            if not open_places:
                return wanted, images
            for source in sorted({wanted[place][0] for place in open_places}):
                places = [place for place in open_places if wanted[place][0] == source]
                one = self.demonstrations[source]
                cameras = self.request.of(one.datasets[0].meta)
                found = one.images([wanted[place][1] for place in places], cameras)
                for place, result in zip(places, found, strict=True):
                    if isinstance(result, dict):
                        images[place] = result
                    else:
                        self.bad.add(result[0], str(result[1]))
                        wanted[place] = source, self._another(one, wanted[place][1])
        where, why = next(reversed(self.bad.seen.items()))
        raise UserError(
            f"data.path: {TRIES} frames in a row cannot be decoded, the last one {where}: {why}; mend the videos"
        )

    def _another(self, one: Demonstrations, frame: int) -> int:
        """A frame of the same side of the split, further on."""
        side = one.side(one.is_held_out(frame))
        return int(side[(side.searchsorted(frame) + REPLACEMENT_STEP) % len(side)])

    def _batch(
        self, wanted: Sequence[Wanted], images: Sequence[dict[str, np.ndarray]], sample_ids: list[int]
    ) -> PolicyBatch:
        placed = [self.demonstrations[source].place(frame) for source, frame in wanted]
        states = [dataset.window(self.request.state, frame, [0]).values[0] for dataset, frame in placed]
        chunks = [dataset.window(self.request.action, frame, range(self.request.horizon)) for dataset, frame in placed]
        ones = torch.ones(len(wanted), dtype=torch.bool)
        return PolicyBatch(
            images={camera: _stacked([image[camera] for image in images], camera) for camera in images[0]},
            image_masks={camera: ones.clone() for camera in images[0]},
            state=torch.from_numpy(np.stack(states).astype(np.float32)),
            actions=torch.from_numpy(np.stack([chunk.values for chunk in chunks]).astype(np.float32)),
            action_pad=torch.from_numpy(np.stack([chunk.padding for chunk in chunks])),
            tasks=[dataset.task(frame) for dataset, frame in placed],
            sample_ids=sample_ids,
            sources=[source for source, _ in wanted],
        )


def _stacked(images: Sequence[np.ndarray], camera: str) -> torch.Tensor:
    """uint8 [B, H, W, 3]."""
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(sorted({f"{image.shape[1]} x {image.shape[0]}" for image in images}))
        raise UserError(f"{camera}: its images have several sizes ({sizes}); train on datasets of one size")
    return torch.from_numpy(np.stack(images))
