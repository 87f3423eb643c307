"""A tokenised corpus on disk: every document's token ids in one flat file, and where each document begins.

It holds the corpus in its own order, so that it serves any seed and any row length.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from engine.data.cache import cached
from engine.data.documents import OnlineDocuments
from engine.data.files import digest
from engine.data.sources import BadSamples
from engine.data.split import Numbered
from engine.data.tokenizer import Tokenizer, all_cores
from engine.errors import UserError

VERSION = 1
CALLS = 2  # of the tokenizer at a time: while one hands over its results, the other keeps the cores busy
CHUNK_BYTES = 1 << 19  # of text for each of them; a token takes about 100 bytes in there
PROGRESS_SECONDS = 0.2
M_ARENA_MAX = -8  # a name of glibc's malloc.h

Progress = Callable[[int, int, str], None]  # (done, total, unit)


class TokenCache:
    """Documents that were tokenised before."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = json.loads((folder / "meta.json").read_text())
        self.bounds = np.memmap(folder / "bounds.bin", dtype=np.int64, mode="r").view(np.ndarray)
        self.tokens = np.memmap(folder / "tokens.bin", dtype=self.meta["dtype"], mode="r").view(np.ndarray)
        if len(self.tokens) != self.meta["tokens"] or len(self.bounds) != self.meta["documents"] + 1:
            raise UserError(
                f"'{folder}' is damaged (its files are shorter than when they were written); delete the folder"
            )

    def stream(self, ids: Iterator[int]) -> Iterator[np.ndarray]:
        """The documents' token ids with their ends of text, as `engine.data.documents.Documents` says."""
        for document in ids:
            start, end = self.bounds[document : document + 2].tolist()
            yield self.tokens[start:end]


def token_cache(
    corpus: Numbered, tokenizer: Tokenizer, cache: Path, bad: BadSamples, progress: Progress | None = None
) -> tuple[TokenCache, bool]:
    """The tokenised corpus, and whether it was there already; otherwise it is made, on all cores.

    The key is what the corpus consists of (names, sizes, times of change) and the tokenizer. Memory does not grow with
    the corpus. Raises UserError for more bad samples than `bad` allows, a corpus without text, or a disk that is full.
    """
    folder = cache / f"tokens-{digest(VERSION, corpus.cache_key, tokenizer.fingerprint)}"
    there = cached(folder, lambda temporary: _write(temporary, corpus, tokenizer, bad, progress))
    made = TokenCache(folder)
    for where, why in made.meta["bad_samples"].items():
        bad.add(where, why)
    return made, there


def _write(folder: Path, corpus: Numbered, tokenizer: Tokenizer, bad: BadSamples, progress: Progress | None) -> None:
    _share_heaps()
    documents = OnlineDocuments(corpus, tokenizer, bad, workers=CALLS, chunk_bytes=CHUNK_BYTES)
    sizes, text_bytes, end, shown = tokenizer.token_bytes, 0, 0, 0.0
    with all_cores(True), (folder / "tokens.bin").open("wb") as out, (folder / "bounds.bin").open("wb") as bounds:
        bounds.write(end.to_bytes(8, "little"))
        for done, tokens in enumerate(documents.stream(iter(range(len(corpus)))), 1):
            out.write(tokens.data)
            end += len(tokens)
            bounds.write(end.to_bytes(8, "little"))
            text_bytes += 0 if sizes is None else int(sizes[tokens].sum())
            if progress and (done == len(corpus) or time.monotonic() - shown > PROGRESS_SECONDS):
                shown = time.monotonic()
                progress(done, len(corpus), "documents")
    if not end:
        raise UserError(f"data.path: the {len(corpus)} documents hold no text; name files that do{bad.account()}")
    meta = {
        "version": VERSION,
        "dtype": np.dtype(tokenizer.dtype).name,
        "documents": len(corpus),
        "tokens": end,
        "text_bytes": None if sizes is None else text_bytes,
        "bad_samples": bad.seen,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _share_heaps() -> None:
    """Let threads share heaps where the C library is glibc: as many heaps as there are cores.

    With a heap for each thread, what one thread frees for another piles up in all of them; with a single heap threads
    wait for each other two thirds of the time.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, os.cpu_count() or 1)
