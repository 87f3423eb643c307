"""What a checkpoint says besides its tensors, so that it alone can be exported to Hugging Face. Free of torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from engine.checkpoint.index import load_index
from engine.errors import UserError

CONFIG = "config.json"
ADAPTER = "adapter_config.json"  # of a checkpoint that holds adapters only
POLICY = ("conventions.json", "statistics.json")  # of a robot's policy
TEXTS = (CONFIG, "generation_config.json", ADAPTER, *POLICY)
TOKENIZER = "tokenizer"
# Files that tokenizers and processors of published models consist of.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "*.tiktoken",
    "chat_template.*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


@dataclass
class Card:
    """The model's name, its published files, and what an export stores."""

    family: str = ""
    stored: dict[str, str] = field(
        default_factory=dict
    )  # published names an export writes, and their dtypes (BF16 ...)
    aliases: dict[str, str] = field(default_factory=dict)  # published names that only repeat another tensor
    texts: dict[str, str] = field(default_factory=dict)  # config.json and generation_config.json, verbatim
    tokenizer: Path | None = None  # folder that holds the tokenizer's files, possibly among others
    buffers: frozenset[str] = frozenset()  # published names that keep their dtype whatever an export asks for
    transposed: frozenset[str] = frozenset()  # names under which an export stores a matrix's transpose
    files: dict[str, bytes] = field(init=False, repr=False, default_factory=dict)  # of the tokenizer

    def __post_init__(self) -> None:
        # Read at once: the folder may be that of an older checkpoint, which the run deletes when it has newer ones.
        if self.tokenizer is not None:
            self.files = {path.name: path.read_bytes() for path in tokenizer_files(self.tokenizer)}

    def write(self, folder: Path) -> None:
        """Put the published files into a checkpoint folder and bring them to the disk. OSError if that fails."""
        for name, text in self.texts.items():
            write_synced(folder / name, text)
        if self.files:
            (folder / TOKENIZER).mkdir()
            self.write_tokenizer(folder / TOKENIZER)
            sync_folder(folder / TOKENIZER)

    def write_tokenizer(self, folder: Path) -> None:
        """Put the tokenizer's files into a folder and bring them to the disk. OSError if that fails."""
        for name, content in self.files.items():
            write_synced(folder / name, content)


def read_card(folder: Path) -> Card:
    """The card of a sharded checkpoint."""
    index = load_index(folder)
    tokenizer = folder / TOKENIZER
    return Card(
        family=index.family,
        stored=index.stored,
        aliases=index.aliases,
        buffers=index.buffers,
        transposed=index.transposed,
        texts=read_texts(folder),
        tokenizer=tokenizer if tokenizer.is_dir() else None,
    )


def read_texts(folder: Path) -> dict[str, str]:
    """The published JSON files that are there. UserError if one is not text."""
    try:
        return {name: (folder / name).read_text() for name in TEXTS if (folder / name).is_file()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: {error}") from None


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's and processor's files in a folder."""
    return sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file and bring it to the disk."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
