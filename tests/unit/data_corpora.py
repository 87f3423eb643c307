"""Small corpora and an independent packer for the data tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.data.loader import DataModule, build_data
from engine.schema import Data, Run

END = "<|endoftext|>"
IGNORED = -100
# Hard documents: empty, one token, one character of four bytes, longer than several rows, only blanks.
TEXTS = [
    "",
    "a",
    "the cat sat",
    "\U0001f600",
    "x" * 61,
    "  \n\n ",
    "line one\nline two\n",
    "né à la mer",
    "b",
    "0123456789" * 3,
]


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer that needs no training: one token for each byte, token 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {END: 256}, []))
    core.add_special_tokens([END])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return core


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def make_run(
    folder: Path, path: Path | str, name: str = "jsonl", model_vocab: int = 300, seed: int = 5, **data: Any
) -> Run:
    """A run over `path` with the byte tokenizer, unless told otherwise."""
    if "tokenizer" not in data:
        byte_tokenizer(folder / "tokenizer")
        data["tokenizer"] = str(folder / "tokenizer")
    defaults = {"held_out": 0.0, "seq_len": 7, "global_batch_size": 4, "micro_batch_size": 1, "shuffle_rows": 5}
    settings = Data(name=name, path=None if name == "stdlib" else str(path), **(defaults | data))
    return Run(
        family="none",
        output_dir=str(folder / "out"),
        seed=seed,
        data=settings,
        model=SimpleNamespace(vocab_size=model_vocab),
    )


def open_data(run: Run, rank: int = 0, size: int = 1, **more: Any) -> DataModule:
    return build_data(run, rank, size, log=lambda line: None, **more)


def steps(module: DataModule, count: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Tokens and labels [rows, seq_len] and the row numbers of the next `count` steps of one rank."""
    batches = [batch for _ in range(count) for batch in module.train.next_step()]
    tokens = np.concatenate([batch.tokens_BS.numpy() for batch in batches])
    labels = np.concatenate([batch.labels_BS.numpy() for batch in batches])
    return tokens, labels, [number for batch in batches for number in batch.sample_ids]


def naive_rows(
    documents: list[list[int]], orders: list[list[int]], seq_len: int, count: int
) -> list[tuple[list[int], list[int]]]:
    """The first `count` rows of the stream: documents (ends included) in the given order of each epoch."""
    tokens: list[int] = []
    labels: list[int] = []
    for order in orders:
        for document in order:
            ids = documents[document]
            tokens += ids
            labels += [*ids[1:], IGNORED] if ids else []
    assert len(tokens) >= seq_len * count, "give more epochs"
    return [(tokens[at : at + seq_len], labels[at : at + seq_len]) for at in range(0, seq_len * count, seq_len)]
