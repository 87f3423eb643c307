"""Documents into rows of equal length.

The documents of every epoch follow each other in a seeded order, each with an end of text, as one stream of tokens;
row k of the stream is its tokens [k * seq_len, (k + 1) * seq_len). Training sees the rows shuffled within windows. So a
row is a function of the corpus, the settings, the seed and its number, and a cursor of three integers is all that
resuming needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.data import IGNORE
from engine.data.documents import Documents
from engine.data.order import SHUFFLE, Order, generator
from engine.errors import Closed, UserError


@dataclass(frozen=True)
class Cursor:
    """The next token of the stream: epoch, place in the epoch's order of documents, token of that document."""

    epoch: int = 0
    position: int = 0
    offset: int = 0


START = Cursor()


@dataclass
class Rows:
    """R rows of S tokens. A row starts a document of its own, whatever `starts` says of its first column."""

    tokens: np.ndarray  # int32 [R, S]
    labels: np.ndarray  # int32 [R, S]: the next token of the same document, also at a row's end, or IGNORE
    starts: np.ndarray  # bool [R, S]


@dataclass
class Window:
    """Rows that are shuffled among themselves; the j-th in training's order is `rows[order[j]]`."""

    rows: Rows
    order: np.ndarray


@dataclass(frozen=True)
class Sample:
    """A document of which only some tokens are learned, and which is never cut: it lies in one row or in none."""

    tokens: np.ndarray
    supervised: np.ndarray  # bool: the token is to be predicted

    def __len__(self) -> int:
        return len(self.tokens)


class RowBuilder:
    """Fills rows with documents, one after the other."""

    def __init__(self, rows: int, seq_len: int, pad_id: int = 0):
        self.shape, self.filled = (rows, seq_len), 0
        self.tokens = np.full(rows * seq_len, pad_id, dtype=np.int32)
        self.labels = np.full(rows * seq_len, IGNORE, dtype=np.int32)
        self.starts = np.zeros(rows * seq_len, dtype=bool)

    @property
    def room(self) -> int:
        return len(self.tokens) - self.filled

    def add(self, document: np.ndarray | Sample, offset: int = 0) -> int:
        """Append the document's tokens from `offset` on, as many as there is room for; returns that number."""
        if isinstance(document, Sample):
            return self._add_whole(document)
        part = document[offset : offset + self.room]
        following = document[offset + 1 : offset + 1 + len(part)]
        at, self.filled = self.filled, self.filled + len(part)
        self.tokens[at : self.filled] = part
        self.labels[at : at + len(following)] = following
        if len(part):
            self.starts[at] = True
        return len(part)

    def _add_whole(self, sample: Sample) -> int:
        """All of a sample, in a row of its own if the one begun has no room for it, or nothing."""
        seq_len = self.shape[1]
        assert len(sample) <= seq_len, "whoever makes samples refuses longer ones"
        if not len(sample):
            return 0
        row_end = min(-(-self.filled // seq_len) * seq_len, len(self.tokens))
        if self.filled + len(sample) > row_end and row_end > self.filled:
            self.starts[self.filled] = True  # what is left of the row is padding, a document without labels
            self.filled = row_end
        if len(sample) > self.room:
            return 0
        at, self.filled = self.filled, self.filled + len(sample)
        self.tokens[at : self.filled] = sample.tokens
        self.labels[at : self.filled - 1] = np.where(sample.supervised[1:], sample.tokens[1:], IGNORE)
        self.starts[at] = True
        return len(sample)

    def build(self) -> Rows:
        """The rows; what was not filled is padding, a document without labels."""
        if self.room:
            self.starts[self.filled] = True
        return Rows(self.tokens.reshape(self.shape), self.labels.reshape(self.shape), self.starts.reshape(self.shape))


class Packer:
    """Packs window after window from a cursor on."""

    def __init__(
        self,
        documents: Documents,
        order: Order,
        seq_len: int,
        window_rows: int,
        cursor: Cursor = START,
        window: int = 0,
        on_epoch: Callable[[int], None] | None = None,
        nothing_left: Callable[[str], UserError] = UserError,
    ):
        """`on_epoch` is told the tokens of the first epoch once it is over, if it was packed from its start.

        `nothing_left` makes the error of the message that there is nothing to pack.
        """
        self.documents, self.order = documents, order
        self.seq_len, self.window_rows = seq_len, window_rows
        self.cursor, self.window = cursor, window  # of the next window
        self._document: np.ndarray | None = None
        self._on_epoch, self._seen = on_epoch if cursor == START else None, 0
        self._stream = documents.stream(self._order())
        self._closed, self._nothing_left = threading.Event(), nothing_left

    def next_window(self) -> Window:
        """The next window; moves the cursor. Raises UserError if no document has any text, Closed after `stop`."""
        builder = RowBuilder(self.window_rows, self.seq_len)
        without_text = 0
        while builder.room:
            if self._closed.is_set():  # documents without text fill no row, so that a window may take for ever
                raise Closed
            if self._document is None:
                self._document = next(self._stream)
            taken = builder.add(self._document, self.cursor.offset)
            without_text = 0 if taken else without_text + 1
            if without_text > len(self.order):
                raise self._nothing_left(
                    f"data.path: the {len(self.order)} training documents hold no text to learn from; name some that do"
                )
            self._advance(taken)
        order = generator(self.order.seed, SHUFFLE, self.window).permutation(self.window_rows)
        self.window += 1
        return Window(builder.build(), order)

    def stop(self) -> None:
        """End `next_window`, from any thread."""
        self._closed.set()

    def close(self) -> None:
        """Stop reading ahead. By the thread that packs, or after it."""
        self._stream.close()

    def _advance(self, taken: int) -> None:
        epoch, position, offset = self.cursor.epoch, self.cursor.position, self.cursor.offset + taken
        self._seen += taken
        if offset >= len(self._document):
            self._document, offset, position = None, 0, position + 1
        if position == len(self.order):
            if self._on_epoch and epoch == 0:
                self._on_epoch(self._seen)
            epoch, position = epoch + 1, 0
        self.cursor = Cursor(epoch, position, offset)

    def _order(self) -> Iterator[int]:
        epoch, position = self.cursor.epoch, self.cursor.position
        while True:
            yield from self.order.epoch(epoch)[position:].tolist()
            epoch, position = epoch + 1, 0
