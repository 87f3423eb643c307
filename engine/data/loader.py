"""The data of a run: tokenizer, training rows and held-out rows for one data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.chat.load import open_chats
from engine.data.chat.preview import Preview, previews
from engine.data.corpus import open_corpus
from engine.data.documents import Documents, OnlineDocuments
from engine.data.held_out import HeldOut
from engine.data.identity import settings_identity
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
    previews: tuple[Preview, ...] = ()  # the first conversations, for a person to check

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
    chats = open_chats(run, bad, log, tokenizer_dir) if data.name == "chat" else None
    corpus = chats.corpus if chats else open_corpus(data, cache_dir(run))
    tokenizer = chats.tokenizer if chats else corpus_tokenizer(run, corpus, bad, log, tokenizer_dir)
    offline = token_cache(corpus, tokenizer, cache_dir(run), bad)[0] if data.packing == "offline" else None
    plain = offline or OnlineDocuments(corpus, tokenizer, bad, data.workers)
    documents: Documents = chats.documents if chats else plain
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

    def once_through(tokens: int) -> None:
        if note := repetition_note(tokens, run):
            log(note)

    def packer_at(cursor: Cursor, window: int) -> Packer:
        return Packer(documents, train_ids, data.seq_len, window_rows, run.seed, cursor, window, once_through)

    identity = settings_identity(run) | {"corpus": corpus.identity, "tokenizer": tokenizer.fingerprint}
    identity |= chats.identity if chats else {}
    held_out = HeldOut(documents, held_out_ids, tokenizer, data.seq_len, data.micro_batch_size, (dp_rank, dp_size))
    known_held_out = held_out if held_out.has_text() else None
    train = TrainData(packer_at, data, identity, dp_rank, dp_size, state, pin_memory)
    shown = previews(chats, train_ids) if chats and dp_rank == 0 else []
    return DataModule(tokenizer, train, known_held_out, tuple(shown))


def repetition_note(tokens: int, run: Run) -> str | None:
    """What to say of a corpus that is shorter than the run; None if it is not."""
    rows, batch = tokens // run.data.seq_len, run.data.global_batch_size
    times = run.schedule.steps * batch * run.data.seq_len / max(1, tokens)
    if times <= 1:
        return None
    few = f", fewer than the {batch} of one step" if rows < batch else ""
    return (
        f"data: the training documents have {tokens} tokens, {rows} rows of {run.data.seq_len}{few}; "
        f"a run of {run.schedule.steps} steps reads them {times:.1f} times"
    )
