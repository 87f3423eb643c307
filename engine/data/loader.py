"""The data of a run: tokenizer, training rows and held-out rows for one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.bpe import trained_bpe
from engine.data.corpus import Corpus, open_corpus
from engine.data.documents import Documents, OnlineDocuments
from engine.data.held_out import HeldOut
from engine.data.packing import Cursor, Packer
from engine.data.sources import BadSamples
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.train_rows import TrainData
from engine.errors import UserError
from engine.schema import Run

Log = Callable[[str], None]


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
    documents: Documents = OnlineDocuments(corpus, tokenizer, bad, data.workers)
    train_ids, held_out_ids = corpus.side(held_out=False), corpus.side(held_out=True)
    if not len(train_ids):
        raise UserError(
            f"data.path={data.path}: no document is left for training; name more text or lower data.held_out"
        )
    size = corpus.num_bytes / 1e6
    log(f"data: {len(train_ids)} documents for training, {len(held_out_ids)} held out, {size:.1f} MB in all")
    window_rows = max(1, data.shuffle_rows)

    def packer_at(cursor: Cursor, window: int) -> Packer:
        return Packer(documents, train_ids, data.seq_len, window_rows, run.seed, cursor, window)

    identity = {
        "seed": run.seed,
        "data.seq_len": data.seq_len,
        "data.shuffle_rows": window_rows,
        "corpus": corpus.identity,
        "tokenizer": tokenizer.fingerprint,
    }
    held_out = HeldOut(documents, held_out_ids, tokenizer, data.seq_len, data.micro_batch_size, (dp_rank, dp_size))
    train = TrainData(packer_at, data, identity, dp_rank, dp_size, state, pin_memory)
    return DataModule(tokenizer, train, held_out if held_out.has_text() else None)


def run_tokenizer(run: Run, log: Log = print) -> Tokenizer:
    """The run's tokenizer alone, for jobs that read no data. A trained one comes from the cache if it is there."""
    corpus = open_corpus(run.data, cache_dir(run)) if run.data.tokenizer is None else None
    return corpus_tokenizer(run, corpus, BadSamples(run.data.max_bad_samples, log), log)


def corpus_tokenizer(
    run: Run, corpus: Corpus | None, bad: BadSamples, log: Log = print, tokenizer_dir: Path | None = None
) -> Tokenizer:
    """The tokenizer that the run names, or one trained on the corpus. Raises UserError if it does not fit the model."""
    model_vocab, given = run.model.vocab_size, tokenizer_dir or run.data.tokenizer
    if given is not None:
        return load_tokenizer(given, model_vocab)
    wanted = run.data.vocab_size or model_vocab
    if wanted > model_vocab:
        raise UserError(
            f"data.vocab_size={wanted} is more than model.vocab_size={model_vocab}; at most that many would be right"
        )
    tokenizer = load_tokenizer(trained_bpe(corpus, wanted, cache_dir(run), bad), model_vocab)
    log(f"tokenizer: byte-level BPE of {tokenizer.vocab_size} tokens trained on the corpus, in {tokenizer.folder}")
    return tokenizer


def cache_dir(run: Run) -> Path:
    """Where tokenizers, line indexes and tokenised corpora are kept."""
    return Path(run.data.cache_dir or Path(run.output_dir) / "cache").expanduser()
