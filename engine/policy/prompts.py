"""Instructions as tokens: a published tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from engine.data.tokenizer import all_cores, load_tokenizer
from engine.errors import UserError
from engine.policy.stand_in import Form
from engine.policy.stand_in import stand_in as trained


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
    """See `engine.policy.stand_in.stand_in`; it learns from a dataset's tasks as the model reads them (`spelled`)."""
    named = {"pad_token": style.pad, "eos_token": style.eos, "bos_token": style.begin, "unk_token": style.unknown}
    end = style.eos if style.ends else None
    form = Form(f"{style.owner}'s", style.special, named, spelled, style.begin, end)
    return trained(form, tasks, vocab_size, cache, log)
