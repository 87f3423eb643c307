"""Prompts as tokens: PaliGemma's tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.data.tokenizer import all_cores, load_tokenizer
from engine.errors import UserError
from engine.policy.stand_in import Form
from engine.policy.stand_in import stand_in as policy_stand_in

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # in the places that they have in PaliGemma's vocabulary
PAD = 0


class Prompts:
    """Texts to tokens [B, S], filled up on the right; longer ones than the model reads are cut, as in the reference."""

    def __init__(self, folder: Path, length: int, vocab_size: int) -> None:
        """Raises UserError for a directory without a tokenizer, or with one that has more tokens than the model."""
        self.folder, self.length = folder, length
        self._core = load_tokenizer(folder, vocab_size).core
        self._bos = self._core.token_to_id("<bos>")
        if self._bos is None:
            raise UserError(f"data.tokenizer: '{folder}' has no token <bos>; PaliGemma's tokenizer has one")
        self.cut = 0  # prompts so far that were too long

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(int64 [B, length], bool [B, length])."""
        with all_cores(False):
            encoded = self._core.encode_batch(list(texts), add_special_tokens=False)
        rows = [self._ids(encoding.ids) for encoding in encoded]
        tokens = torch.full((len(rows), self.length), PAD)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        lengths = torch.tensor([len(ids) for ids in rows])
        return tokens, torch.arange(self.length) < lengths[:, None]

    def _ids(self, ids: list[int]) -> list[int]:
        ids = ids if ids[:1] == [self._bos] else [self._bos, *ids]
        self.cut += len(ids) > self.length
        return ids[: self.length]


NUMBERS = " ".join(map(str, range(-1, 256)))  # that a state is told in
FORM = Form(
    of="PaliGemma's",
    special=SPECIAL,
    named={"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"},
    prompt=lambda task: f"Task: {task}, State: {NUMBERS};\nAction: ",
    begin="<bos>",
)


def stand_in(tasks: Sequence[str], vocab_size: int, cache: Path, log: Callable[[str], object] = print) -> Path:
    """A directory with a small byte-level BPE that has PaliGemma's special tokens, learned from a dataset's tasks."""
    return policy_stand_in(FORM, tasks, vocab_size, cache, log)
