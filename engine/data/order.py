"""The order of the documents in every epoch: a function of the corpus, the settings, the seed and the epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDER, SHUFFLE = 1, 2  # keep the random streams of documents and of rows apart


def generator(seed: int, stream: int, index: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**63, stream, index])


def epoch_order(ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The documents, or whatever belongs to them one by one, shuffled over everything."""
    return ids[generator(seed, ORDER, epoch).permutation(len(ids))]


@dataclass(frozen=True)
class Order:
    """How the documents `ids` (rising) follow each other.

    `window` None shuffles over everything, 0 not at all. A number shuffles the shards and then the documents within
    windows of that many, so that a shard is read nearly from begin to end and only a window's documents are apart.
    """

    ids: np.ndarray  # int64
    seed: int
    window: int | None = None
    shards: np.ndarray | None = None  # int64, rising: where shards begin; needed with a window

    def __len__(self) -> int:
        return len(self.ids)

    def epoch(self, epoch: int) -> np.ndarray:
        """All documents once, in the order of one epoch."""
        if self.window is None:
            return epoch_order(self.ids, self.seed, epoch)
        if self.window == 0:
            return self.ids
        random = generator(self.seed, ORDER, epoch)
        begins = self.ids[:1] if self.shards is None else self.shards
        shard = begins.searchsorted(self.ids, side="right") - 1
        rank = random.permutation(len(begins))[shard]
        streamed = self.ids[np.argsort(rank, kind="stable")]
        window = np.arange(len(streamed)) // self.window
        return streamed[np.lexsort((random.random(len(streamed)), window))]
