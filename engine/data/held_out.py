"""The held-out rows: the same ones at every evaluation, whatever the seed and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data import IGNORE
from engine.data.batch import Batch
from engine.data.documents import Documents
from engine.data.order import epoch_order
from engine.data.packing import RowBuilder, Rows
from engine.data.tokenizer import Tokenizer
from engine.data.train_rows import to_batch

SEED = 0  # of the documents' order; not the run's, so that runs with other seeds are judged by the same rows
SPREAD = 8  # rows are picked from up to so many times as many
POOL_TOKENS = 1 << 22  # but from no more text than this, unless more is asked for: every rank tokenises it
PADDING_ROW = -1  # the sample id of rows that only fill a batch


class HeldOut:
    """Held-out documents, packed once through in a fixed order."""

    def __init__(
        self,
        documents: Documents,
        ids: np.ndarray,
        tokenizer: Tokenizer,
        seq_len: int,
        micro_batch_size: int,
        dp: tuple[int, int],
    ):
        self._documents, self._ids, self._tokenizer = documents, ids, tokenizer
        self._seq_len, self._size, (self._rank, self._ranks) = seq_len, micro_batch_size, dp
        self._picked: tuple[int, Picked] | None = None  # of the last number that was asked for

    def has_text(self) -> bool:
        """Whether anything can be predicted here."""
        return any(len(tokens) > 1 for tokens in self._documents.stream(iter(self._ids.tolist())))

    def batches(self, rows: int) -> list[Batch]:
        """This rank's share of `rows` rows that are spread over the held-out text, or of all if there are fewer.

        Every rank gets the same number of full micro-batches; rows without labels (sample id -1) fill them up.
        """
        packed = self._pick(rows).rows
        number = len(packed.tokens)
        batches = -(-number // (self._ranks * self._size))
        share = batches * self._size
        ids = np.arange(self._rank * share, (self._rank + 1) * share)
        mine = _take(packed, ids, self._tokenizer.eos_id)
        names = np.where(ids < number, ids, PADDING_ROW).tolist()
        cuts = range(0, share, self._size)
        return [to_batch(_take(mine, np.arange(at, at + self._size), 0), names[at : at + self._size]) for at in cuts]

    def label_bytes(self, rows: int) -> int | None:
        """Bytes of text under the labels of these rows, over all ranks; None if the tokenizer cannot tell.

        Bits per byte are then loss_sum / ln 2 / label_bytes.
        """
        sizes = self._tokenizer.token_bytes
        if sizes is None:
            return None
        labels = self._pick(rows).rows.labels
        return int(sizes[labels[labels != IGNORE]].sum())

    def coverage(self, rows: int) -> tuple[int, int, bool]:
        """(rows that are used, rows that they were picked from, whether those are all of the held-out text)."""
        picked = self._pick(rows)
        return len(picked.rows.tokens), picked.of, picked.whole

    def _pick(self, rows: int) -> Picked:
        if self._picked is None or self._picked[0] != rows:
            pool, whole = self._pool(max(rows, min(SPREAD * rows, POOL_TOKENS // self._seq_len)))
            there = len(pool.tokens)
            # Evenly spaced, so that a few rows see many documents; all of them where they are not enough.
            chosen = np.arange(min(rows, there)) * there // max(1, min(rows, there))
            self._picked = (rows, Picked(_take(pool, chosen, 0), there, whole))
        return self._picked[1]

    def _pool(self, rows: int) -> tuple[Rows, bool]:
        """Up to `rows` rows of the held-out documents in their order, and whether that is all there is."""
        builder, whole = RowBuilder(rows, self._seq_len, self._tokenizer.eos_id), True
        stream = self._documents.stream(iter(epoch_order(self._ids, SEED, 0).tolist()))
        for tokens in stream:
            whole = builder.add(tokens) == len(tokens)
            if not whole:
                break
        stream.close()
        used = -(-builder.filled // self._seq_len)
        packed = builder.build()
        return Rows(packed.tokens[:used], packed.labels[:used], packed.starts[:used]), whole


@dataclass(frozen=True)
class Picked:
    """Rows to be judged by, and how many they were picked from."""

    rows: Rows
    of: int
    whole: bool  # there is no more held-out text than that


def _take(rows: Rows, ids: np.ndarray, pad_id: int) -> Rows:
    """The rows of these numbers; numbers past the end give rows without labels."""
    there = ids[ids < len(rows.tokens)]
    missing = len(ids) - len(there)

    def padded(part: np.ndarray, fill: Any) -> np.ndarray:
        return np.concatenate([part[there], np.full((missing, part.shape[1]), fill, dtype=part.dtype)])

    return Rows(padded(rows.tokens, pad_id), padded(rows.labels, IGNORE), padded(rows.starts, False))
