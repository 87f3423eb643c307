"""The held-out rows: the same ones at every evaluation, whatever the seed and the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.data import IGNORE
from engine.data.batch import Batch
from engine.data.documents import Documents
from engine.data.packing import RowBuilder, Rows, epoch_order
from engine.data.tokenizer import Tokenizer
from engine.data.train_rows import to_batch

SEED = 0  # of the documents' order; not the run's, so that runs with other seeds are judged by the same rows
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
        self._rows: tuple[int, Rows] | None = None  # of the last number that was asked for

    def has_text(self) -> bool:
        """Whether anything can be predicted here."""
        return any(len(tokens) > 1 for tokens in self._documents.stream(iter(self._ids.tolist())))

    def batches(self, rows: int) -> list[Batch]:
        """This rank's share of the first `rows` rows, or of all if there are fewer.

        Every rank gets the same number of full micro-batches; rows without labels (sample id -1) fill them up.
        """
        packed = self._packed(rows)
        number = len(packed.tokens)
        batches = -(-number // (self._ranks * self._size))
        share = batches * self._size
        ids = np.arange(self._rank * share, (self._rank + 1) * share)
        mine = _take(packed, ids, self._tokenizer.eos_id)
        names = np.where(ids < number, ids, PADDING_ROW).tolist()
        cuts = range(0, share, self._size)
        return [to_batch(_take(mine, np.arange(at, at + self._size), 0), names[at : at + self._size]) for at in cuts]

    def label_bytes(self, rows: int) -> int | None:
        """Bytes of text under the labels of the first `rows` rows, over all ranks; None if the tokenizer cannot tell.

        Bits per byte are then loss_sum / ln 2 / label_bytes.
        """
        sizes = self._tokenizer.token_bytes
        if sizes is None:
            return None
        labels = self._packed(rows).labels
        return int(sizes[labels[labels != IGNORE]].sum())

    def _packed(self, rows: int) -> Rows:
        if self._rows is None or self._rows[0] != rows:
            self._rows = (rows, self._pack(rows))
        return self._rows[1]

    def _pack(self, rows: int) -> Rows:
        builder = RowBuilder(rows, self._seq_len, self._tokenizer.eos_id)
        stream = self._documents.stream(iter(epoch_order(self._ids, SEED, 0).tolist()))
        for tokens in stream:
            if builder.room:
                builder.add(tokens)
            if not builder.room:
                break
        stream.close()
        used = -(-builder.filled // self._seq_len)
        packed = builder.build()
        return Rows(packed.tokens[:used], packed.labels[:used], packed.starts[:used])


def _take(rows: Rows, ids: np.ndarray, pad_id: int) -> Rows:
    """The rows of these numbers; numbers past the end give rows without labels."""
    there = ids[ids < len(rows.tokens)]
    missing = len(ids) - len(there)

    def padded(part: np.ndarray, fill: Any) -> np.ndarray:
        return np.concatenate([part[there], np.full((missing, part.shape[1]), fill, dtype=part.dtype)])

    return Rows(padded(rows.tokens, pad_id), padded(rows.labels, IGNORE), padded(rows.starts, False))
