"""The tokenizer of a run: one from a directory, or a byte-level BPE trained on the corpus."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers

from engine.data.token_bytes import token_bytes
from engine.data.tokenizer_files import check_size, find_eos_id
from engine.errors import UserError

# What belongs to a tokenizer in a published directory; weights and model configs do not.
FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "*.tiktoken",
)


class Tokenizer:
    """Text to token ids and back.

    `encode` writes no ends of documents: whoever makes documents adds `eos_id`. Special tokens spelled out in a text
    are read as such, as Hugging Face tokenizers do.
    """

    def __init__(self, core: tokenizers.Tokenizer, eos_id: int, folder: Path):
        core.no_truncation()
        core.no_padding()
        self.core, self.eos_id, self.folder = core, eos_id, folder
        self.vocab_size = 1 + max(core.get_vocab(with_added_tokens=True).values(), default=-1)  # ids may have gaps

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type that holds every id."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(self, text: str) -> list[int]:
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, in `dtype`."""
        # The fast variant skips the characters' offsets, which nobody here reads. A list of integers becomes an array
        # five times as fast by way of `array`.
        encodings = self.core.encode_batch_fast(texts, add_special_tokens=False)
        return [np.frombuffer(array("I", e.ids), dtype=np.uintc).astype(self.dtype) for e in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.core.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text by token id, int64, or None where that cannot be derived; see `engine.data.token_bytes`."""
        return token_bytes(self.core)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that encode alike and end documents alike."""
        return hashlib.sha256(f"{self.core.to_str()} {self.eos_id}".encode()).hexdigest()[:24]

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files: a directory that `AutoTokenizer.from_pretrained` loads."""
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in FILES:
            for file in self.folder.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)


def load_tokenizer(directory: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer in a directory, as published next to a model.

    Raises UserError if there is none, if it names no end of text, or if it has more tokens than the model.
    """
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.tokenizer: '{directory}' is not a directory; name one that holds a tokenizer.json")
    core = _core(folder)
    eos_id = find_eos_id(folder, core.token_to_id, lambda number: core.id_to_token(number) is not None)
    tokenizer = Tokenizer(core, eos_id, folder)
    check_size(directory, tokenizer.vocab_size, vocab_size)
    return tokenizer


def _core(folder: Path) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise UserError(f"data.tokenizer: '{folder / 'tokenizer.json'}' cannot be read ({error})") from None
    from transformers import AutoTokenizer  # costs seconds: only for directories without a tokenizer.json

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"data.tokenizer: no tokenizer in '{folder}' ({reason}); one with a tokenizer.json would be right"
        ) from None


_CHOSEN_BY_USER = os.environ.get("TOKENIZERS_PARALLELISM")


@contextmanager
def all_cores(use: bool) -> Iterator[None]:
    """Let `tokenizers` spread one call over all cores, or keep it on the calling thread. The user's choice wins."""
    if _CHOSEN_BY_USER is not None:
        yield
        return
    before = os.environ.get("TOKENIZERS_PARALLELISM", "true")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if use else "false"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before
