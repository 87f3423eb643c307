"""Prompts as tokens: PaliGemma's tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from engine.data.cache import cached
from engine.data.tokenizer import all_cores, load_tokenizer
from engine.errors import UserError

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")  # in the places that they have in PaliGemma's vocabulary
PAD = 0
VERSION = 1  # of the stand-in: part of its cache's key
SMALLEST = len(SPECIAL) + 256


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


def stand_in(tasks: Sequence[str], vocab_size: int, cache: Path, log: Callable[[str], object] = print) -> Path:
    """A directory with a small byte-level BPE that has PaliGemma's special tokens, learned from a dataset's tasks.

    It is no PaliGemma tokenizer, and weights that were trained with the one mean nothing with the other.
    """
    if vocab_size < SMALLEST:
        raise UserError(f"model.vocab_size={vocab_size}: the stand-in tokenizer needs {SMALLEST}; raise it")
    digest = hashlib.sha256(json.dumps([sorted(set(tasks)), vocab_size]).encode()).hexdigest()[:16]
    folder = cache / f"prompts-{digest}-{VERSION}-{tokenizers.__version__}"
    cached(folder, lambda temporary: _train(sorted(set(tasks)), vocab_size, temporary))
    log(
        f"tokenizer: a stand-in for PaliGemma's (data.tokenizer=DIR names the real one), trained on the tasks: {folder}"
    )
    return folder


def _train(tasks: Sequence[str], vocab_size: int, folder: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = " ".join(map(str, range(-1, 256)))
    with all_cores(False):
        core.train_from_iterator([f"Task: {task}, State: {numbers};\nAction: " for task in tasks], trainer)
    core.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", SPECIAL.index("<bos>"))])
    core.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    config = named | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n")
