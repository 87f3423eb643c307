"""The data of a run: tokenizer, training rows and held-out rows for one data-parallel rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.chat.corpus import ChatCorpus
from engine.data.chat.load import Chats, open_chats
from engine.data.chat.preview import SHOWN, Preview, previews
from engine.data.corpus import open_corpus
from engine.data.documents import Documents, Encode, OnlineDocuments, encode
from engine.data.held_out import HeldOut
from engine.data.identity import mixture_identity, settings_identity
from engine.data.joined import join
from engine.data.mixture import Source, about, has_chats, sources, validation_sets
from engine.data.order import Order
from engine.data.packing import Cursor, Packer
from engine.data.resources import Log, cache_dir, corpus_tokenizer
from engine.data.row_reader import Stream
from engine.data.sources import CHAT, BadSamples
from engine.data.split import Numbered
from engine.data.token_cache import token_cache
from engine.data.tokenizer import Tokenizer
from engine.data.train_rows import TrainData
from engine.errors import UserError
from engine.schema import Run
from engine.words import counted


@dataclass
class DataModule:
    """What a training run reads."""

    tokenizer: Tokenizer
    train: TrainData
    validation: dict[str, HeldOut] = field(default_factory=dict)  # named sets; "" where a run has one of no name
    previews: tuple[Preview, ...] = ()  # the first conversations, for a person to check
    bad: BadSamples = field(default_factory=lambda: BadSamples(0))  # what was skipped so far
    texts: dict[str, str] = field(default_factory=dict)  # files that the model keeps of its data; a language model none

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the training sources, by the numbers in `Batch.sources`."""
        return tuple(stream.name for stream in self.train.streams)

    @property
    def held_out(self) -> HeldOut | None:
        """The first validation set; None if there is none."""
        return next(iter(self.validation.values()), None)

    def rows(self, step: int) -> dict[str, int]:
        """`rows.<source>`: rows of each source of a mixture in the first `step` steps, over all ranks."""
        return {f"rows.{name}": rows for name, rows in self.train.rows_by_source(step).items() if name}

    def close(self) -> None:
        """Stop the threads."""
        self.train.close()


@dataclass
class Opened:
    """A source with its documents as token ids."""

    source: Source
    corpus: Numbered
    documents: Documents


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
    found = sources(data)
    corpora = [_open(run, source, bad) for source in found]
    chats = open_chats(run, join(corpora), bad, log, tokenizer_dir) if has_chats(data) else None
    tokenizer = chats.tokenizer if chats else corpus_tokenizer(run, join(corpora), bad, log, tokenizer_dir)
    encoder = chats.encoder if chats else encode
    opened = [
        Opened(source, corpus, _documents(run, source, corpus, tokenizer, bad, encoder, log))
        for source, corpus in zip(found, corpora, strict=True)
    ]
    identity = settings_identity(run) | {"corpus": _identity(opened), "tokenizer": tokenizer.fingerprint}
    identity |= chats.identity if chats else {}
    streams = [_stream(run, one, bad, log) for one in opened]
    held_out = _held_out(run, opened, tokenizer, bad, encoder, log, (dp_rank, dp_size))
    train = TrainData(streams, data, identity, dp_rank, dp_size, state, pin_memory)
    shown = _previews(opened, chats) if chats and dp_rank == 0 else []
    return DataModule(tokenizer, train, held_out, tuple(shown), bad)


def _open(run: Run, source: Source, bad: BadSamples) -> Numbered:
    with about(source):
        return open_corpus(source.data, cache_dir(run), bad)


def _documents(
    run: Run, source: Source, corpus: Numbered, tokenizer: Tokenizer, bad: BadSamples, encoder: Encode, log: Log
) -> Documents:
    """A source's documents as token ids; `encoder` is that of its conversations, if it holds such."""
    if run.data.packing != "offline":
        chosen = encoder if source.data.name == CHAT else encode
        return OnlineDocuments(corpus, tokenizer, bad, run.data.workers, encode=chosen)
    cache, _ = token_cache(corpus, tokenizer, cache_dir(run), bad)
    log(f"data: {cache.meta['tokens']} tokens from {cache.folder}")
    return cache


def _previews(opened: list[Opened], chats: Chats) -> list[Preview]:
    """The first conversations; of a mixture one of each source."""
    corpora = [one.corpus for one in opened if isinstance(one.corpus, ChatCorpus)]
    count = SHOWN if len(opened) == 1 else 1
    return [one for corpus in corpora for one in previews(chats, corpus, corpus.side(held_out=False), count)]


def _identity(opened: list[Opened]) -> str:
    if len(opened) == 1 and not opened[0].source.name:
        return opened[0].corpus.identity
    return mixture_identity([(one.source.name, one.corpus.identity) for one in opened])


def _stream(run: Run, one: Opened, bad: BadSamples, log: Log) -> Stream:
    """The rows of a source's training documents."""
    data, ids = run.data, one.corpus.side(held_out=False)
    called = f"{one.source.name}: " if one.source.name else ""
    if not len(ids):
        raise UserError(
            f"{one.source.key}.path={one.source.data.path}: no document is left for training; name more text or lower "
            f"data.held_out{bad.account()}"
        )
    held_out, size = len(one.corpus) - len(ids), one.corpus.num_bytes / 1e6
    log(f"data: {called}{counted(len(ids), 'document')} for training, {held_out} held out, {size:.1f} MB in all")
    order = Order(ids, run.seed, data.shuffle_documents, one.corpus.shards)

    def once_through(tokens: int) -> None:
        if note := repetition_note(tokens, run, one.source, share):
            log(note)

    def nothing_left(message: str) -> UserError:
        return UserError(one.source.in_its_words(f"{message}{bad.account()}"))

    def packer_at(cursor: Cursor, window: int) -> Packer:
        rows = max(1, data.shuffle_rows)
        return Packer(one.documents, order, data.seq_len, rows, cursor, window, once_through, nothing_left)

    total = sum(source.weight for source in sources(data))
    share = one.source.weight / total
    return Stream(one.source.name, one.source.weight, packer_at)


def _held_out(
    run: Run,
    opened: list[Opened],
    tokenizer: Tokenizer,
    bad: BadSamples,
    encoder: Encode,
    log: Log,
    dp: tuple[int, int],
) -> dict[str, HeldOut]:
    """What was held out of each source, and the sets that the settings name; those without text are left out."""
    named = validation_sets(run.data)
    corpora = [_open(run, source, bad) for source in named]
    # A set is read once at each evaluation, so that there is no use in a token cache.
    online = dataclasses.replace(run, data=dataclasses.replace(run.data, packing="online"))
    others = [
        Opened(source, corpus, _documents(online, source, corpus, tokenizer, bad, encoder, log))
        for source, corpus in zip(named, corpora, strict=True)
    ]
    ids = [(one, one.corpus.side(held_out=True)) for one in opened]
    ids += [(one, np.arange(len(one.corpus))) for one in others]
    found = {}
    for one, documents in ids:
        rows = HeldOut(one.documents, documents, tokenizer, run.data.seq_len, run.data.micro_batch_size, dp)
        if rows.has_text():
            found[one.source.name] = rows
        elif one in others:
            where = f"{one.source.key}.path={one.source.data.path}"
            raise UserError(f"{where}: holds no text; name files that hold some{bad.account()}")
        elif len(documents):
            log(f"data: no held-out document of {one.source.name or 'the data'} is of use{bad.account()}")
    for one in others:
        log(f"data: {one.source.name}: {counted(len(one.corpus), 'document')} for validation")
    return found


def repetition_note(tokens: int, run: Run, source: Source, share: float = 1.0) -> str | None:
    """What to say of a corpus that is shorter than its share of the run; None if it is not."""
    rows, batch = tokens // run.data.seq_len, run.data.global_batch_size
    times = run.schedule.steps * batch * run.data.seq_len * share / max(1, tokens)
    if times <= 1:
        return None
    few = f", fewer than the {batch} of one step" if rows < batch else ""
    called = f"{source.name}: " if source.name else ""
    return (
        f"data: {called}the training documents have {tokens} tokens, {counted(rows, 'row')} of "
        f"{run.data.seq_len}{few}; a run of {run.schedule.steps} steps reads them {times:.1f} times"
    )
