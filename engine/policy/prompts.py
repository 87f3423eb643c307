"""Instructions as tokens: a published tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from engine.data.cache import cached
from engine.data.tokenizer import all_cores, load_tokenizer
from engine.errors import UserError

VERSION = 2  # of the stand-ins: part of their cache's key


@dataclass(frozen=True)
class Style:
    """How a family's tokenizer marks texts."""

    owner: str  # whose tokenizer it is
    special: tuple[str, ...]  # in the places that they have in its vocabulary
    pad: str
    begin: str  # before every text
    eos: str
    ends: bool  # whether `eos` stands behind every text
    unknown: str = "<unk>"

    @property
    def smallest(self) -> int:
        """Tokens of a stand-in at least: every byte is one."""
        return len(self.special) + 256


class Prompts:
    """Texts to tokens [B, S], filled up on the right; longer ones than the model reads are cut."""

    def __init__(self, style: Style, folder: Path, length: int, vocab_size: int) -> None:
        """Raises UserError for a directory without a tokenizer, or with one that has more tokens than the model."""
        self.folder, self.length = folder, length
        self._core = load_tokenizer(folder, vocab_size).core
        self._begin, self._pad = self._id(style.begin, style), self._id(style.pad, style)
        self._end = [self._id(style.eos, style)] if style.ends else []
        self.cut = 0  # prompts so far that were too long

    def _id(self, token: str, style: Style) -> int:
        found: Optional[int] = self._core.token_to_id(token)
        if found is None:
            raise UserError(f"data.tokenizer: '{self.folder}' has no token {token}; {style.owner}'s tokenizer has one")
        return found

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(int64 [B, length], bool [B, length])."""
        with all_cores(False):
            encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        rows = [self._ids(encoding.ids) for encoding in encoded]
        tokens = torch.full((len(rows), self.length), self._pad)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids in rows])
        return tokens, torch.arange(self.length) < lengths[:, None]

    def _ids(self, ids: list[int]) -> list[int]:
        ids = ids if ids[:1] == [self._begin] else [self._begin, *ids]
        room = self.length - len(self._end)
        self.cut += len(ids) > room
        return [*ids[:room], *self._end][: self.length]


def stand_in(
    style: Style,
    tasks: Sequence[str],
    spelled: Callable[[str], str],
    vocab_size: int,
    cache: Path,
    log: Callable[[str], object] = print,
) -> Path:
    """A directory with a small byte-level BPE that has the tokenizer's special tokens, learned from a dataset's tasks
    as the model reads them (`spelled`).

    It is not the published tokenizer, and weights that were trained with the one mean nothing with the other.
    """
    if vocab_size < style.smallest:
        raise UserError(f"model.vocab_size={vocab_size}: the stand-in tokenizer needs {style.smallest}; raise it")
    texts = [spelled(task) for task in sorted(set(tasks))]
    digest = hashlib.sha256(json.dumps([style.special, texts, vocab_size]).encode()).hexdigest()[:16]
    folder = cache / f"prompts-{digest}-{VERSION}-{tokenizers.__version__}"
    cached(folder, lambda temporary: _train(style, texts, vocab_size, temporary))
    log(
        f"tokenizer: a stand-in for {style.owner}'s (data.tokenizer=DIR names the real one), trained on the tasks: "
        f"{folder}"
    )
    return folder


def _train(style: Style, texts: Sequence[str], vocab_size: int, folder: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(unk_token=style.unknown))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(style.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with all_cores(False):
        core.train_from_iterator(texts, trainer)
    marks = [style.begin, *([style.eos] if style.ends else [])]
    core.post_processor = processors.TemplateProcessing(
        " ".join([marks[0], "$A", *marks[1:]]), special_tokens=[(mark, style.special.index(mark)) for mark in marks]
    )
    core.save(str(folder / "tokenizer.json"))
    named = {"pad_token": style.pad, "eos_token": style.eos, "bos_token": style.begin, "unk_token": style.unknown}
    config = named | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")
