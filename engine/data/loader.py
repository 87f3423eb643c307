"""The data of a run: tokenizer, training rows and held-out rows for one data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.corpus import open_corpus
from engine.data.documents import Documents, OnlineDocuments
from engine.data.held_out import HeldOut
from engine.data.packing import Cursor, Packer
from engine.data.resources import Log, cache_dir, corpus_tokenizer
from engine.data.sources import BadSamples
from engine.data.token_cache import token_cache
from engine.data.tokenizer import Tokenizer
from engine.data.train_rows import TrainData
from engine.errors import UserError
from engine.schema import Run


@dataclass
class DataModule:
    """What a training run reads. `held_out` is None if nothing was held out."""

    tokenizer: Tokenizer
    train: TrainData
    held_out: HeldOut | None

    def close(self) -> None:
        """Stop the threads."""
        self.train.close()


def build_data(
    run: Run,
    dp_rank: int,
    dp_size: int,
    state: dict[str, Any] | None = None,
    log: Log = print,
    tokenizer_dir: Path | None = None,
    pin_memory: bool = False,
) -> DataModule:
    """The data of a run for one data-parallel rank; `state` from `TrainData.state` goes on where it was taken.

    `tokenizer_dir` (of a checkpoint that is resumed) goes before `data.tokenizer` and before training one.
    Raises UserError for data that cannot be used.
    """
    data, bad = run.data, BadSamples(run.data.max_bad_samples, log)
    corpus = open_corpus(data, cache_dir(run))
    tokenizer = corpus_tokenizer(run, corpus, bad, log, tokenizer_dir)
    offline = token_cache(corpus, tokenizer, cache_dir(run), bad)[0] if data.packing == "offline" else None
    documents: Documents = offline or OnlineDocuments(corpus, tokenizer, bad, data.workers)
    train_ids, held_out_ids = corpus.side(held_out=False), corpus.side(held_out=True)
    if not len(train_ids):
        raise UserError(
            f"data.path={data.path}: no document is left for training; name more text or lower data.held_out"
        )
    size = corpus.num_bytes / 1e6
    log(f"data: {len(train_ids)} documents for training, {len(held_out_ids)} held out, {size:.1f} MB in all")
    if offline:
        log(f"data: {offline.meta['tokens']} tokens from {offline.folder}")
    window_rows = max(1, data.shuffle_rows)

    def packer_at(cursor: Cursor, window: int) -> Packer:
        return Packer(documents, train_ids, data.seq_len, window_rows, run.seed, cursor, window)

    def window_start(window: int) -> Cursor:
        return offline.seek(train_ids, run.seed, window * window_rows * data.seq_len)

    identity = {
        "seed": run.seed,
        "data.seq_len": data.seq_len,
        "data.shuffle_rows": window_rows,
        "data.name": data.name,
        "data.field": data.field,
        "data.held_out": data.held_out,
        "corpus": corpus.identity,
        "tokenizer": tokenizer.fingerprint,
    }
    held_out = HeldOut(documents, held_out_ids, tokenizer, data.seq_len, data.micro_batch_size, (dp_rank, dp_size))
    known_held_out = held_out if held_out.has_text() else None
    seek = window_start if offline else None
    train = TrainData(packer_at, data, identity, dp_rank, dp_size, state, pin_memory, seek)
    return DataModule(tokenizer, train, known_held_out)
