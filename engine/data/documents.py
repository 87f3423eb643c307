"""Documents as token ids, tokenised while they are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from engine.data.sources import BadSample, BadSamples
from engine.data.split import Numbered
from engine.data.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 18  # of text for each call of the tokenizer
CHUNK_DOCUMENTS = 1024


class Documents(Protocol):
    """Where packing gets its documents from."""

    def stream(self, ids: Iterator[int]) -> Iterator[np.ndarray]:
        """For each number the document's token ids and an end of text; empty for one that has no text or is skipped."""


def encode(corpus: Numbered, tokenizer: Tokenizer, ids: list[int]) -> list[np.ndarray | BadSample]:
    """Token ids and an end of text for each document; empty without text; what is wrong with a bad sample."""
    texts: list[str] = []
    bad: dict[int, BadSample] = {}
    for place, document in enumerate(ids):
        try:
            texts.append(corpus.read(document))
        except BadSample as why:
            texts.append("")
            bad[place] = why
    eos = np.array([tokenizer.eos_id], dtype=tokenizer.dtype)
    encoded = [np.concatenate([tokens, eos]) if len(tokens) else tokens for tokens in tokenizer.encode_batch(texts)]
    return [bad.get(place, tokens) for place, tokens in enumerate(encoded)]


Encode = Callable[[Any, Tokenizer, list[int]], list[Any]]  # as `encode` above, for other kinds of documents too


def chunks(corpus: Numbered, ids: Iterator[int], max_bytes: int, max_documents: int) -> Iterator[list[int]]:
    """Cut a stream of documents into lists of about `max_bytes`."""
    chunk: list[int] = []
    size = 0
    for document in ids:
        chunk.append(document)
        size += corpus.size(document)
        if size >= max_bytes or len(chunk) >= max_documents:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class OnlineDocuments:
    """Tokenises ahead in `workers` threads. The order of the results is the order that was asked for."""

    def __init__(
        self,
        corpus: Numbered,
        tokenizer: Tokenizer,
        bad: BadSamples,
        workers: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        encode: Encode = encode,
    ):
        self.corpus, self.tokenizer, self.bad, self.encode = corpus, tokenizer, bad, encode
        self.workers, self.chunk_bytes = max(1, workers), chunk_bytes
        # One call of the tokenizer stays on one thread, so that `workers` is what it says and training keeps its cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def stream(self, ids: Iterator[int]) -> Iterator[np.ndarray]:
        todo = chunks(self.corpus, ids, self.chunk_bytes, CHUNK_DOCUMENTS)
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="tokenize")
        pending: deque[tuple[list[int], Future[list[np.ndarray | BadSample]]]] = deque()
        try:
            while True:
                for chunk in islice(todo, self.workers + 1 - len(pending)):
                    pending.append((chunk, pool.submit(self.encode, self.corpus, self.tokenizer, chunk)))
                if not pending:
                    return
                chunk, result = pending.popleft()
                yield from chain.from_iterable(map(self._checked, chunk, result.result()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _checked(self, document: int, tokens: np.ndarray | BadSample) -> list[np.ndarray]:
        if isinstance(tokens, BadSample):
            self.bad.add(self.corpus.where(document), tokens)
            return [np.empty(0, dtype=self.tokenizer.dtype)]
        return [tokens]
