"""A tokenizer's directory by its JSON files alone: whether there is a tokenizer, its size, its end of text.

Free of torch, numpy and tokenizers, as the controller reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint.card import tokenizer_files
from engine.errors import UserError

CONVERTIBLE = ("vocab.json", "vocab.txt", "*.model", "*.tiktoken")  # what transformers makes a tokenizer.json of
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")


def check_tokenizer(directory: str, vocab_size: int | None) -> None:
    """Raise UserError for a directory without a tokenizer, a damaged one, or one with more tokens than the model."""
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.tokenizer: '{directory}' is not a directory; name one that holds a tokenizer.json")
    if not tokenizer_files(folder):
        raise UserError(f"data.tokenizer: no tokenizer in '{directory}'; name a directory that holds a tokenizer.json")
    if not (folder / "tokenizer.json").is_file():
        if not any(True for pattern in CONVERTIBLE for _ in folder.glob(pattern)):
            raise UserError(f"data.tokenizer: '{directory}' lacks its tokenizer.json; copy it there, or name another")
        return  # transformers has to convert it first
    tokens = _tokens(folder / "tokenizer.json")
    check_size(directory, 1 + max(tokens.values(), default=-1), vocab_size)
    numbers = set(tokens.values())
    find_eos_id(folder, tokens.get, numbers.__contains__)


def check_size(directory: str | Path, tokens: int, vocab_size: int | None) -> None:
    """Raise UserError if there are more tokens than the model has rows for."""
    if vocab_size is not None and tokens > vocab_size:
        raise UserError(
            f"data.tokenizer: '{directory}' has {tokens} tokens, but model.vocab_size={vocab_size}; "
            "the model needs at least as many: name its own tokenizer, or raise model.vocab_size"
        )


def _tokens(path: Path) -> dict[str, int]:
    """Tokens and their ids. UserError if the file is none of `tokenizers`."""
    try:
        content = _json(path)
        vocab = content["model"]["vocab"]
        tokens = dict(vocab) if isinstance(vocab, dict) else {piece: i for i, (piece, _) in enumerate(vocab)}
        return tokens | {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"data.tokenizer: '{path}' cannot be read as a tokenizer ({error!r})") from None


def find_eos_id(folder: Path, id_of: Callable[[str], int | None], known: Callable[[int], bool]) -> int:
    """The token that ends a text, from wherever the directory says so. UserError if it says so nowhere."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and (number := id_of(token)) is not None:
            return number
    for name in ("generation_config.json", "config.json"):
        number = _json(folder / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and known(number):
            return number
    for token in USUAL_ENDS:
        if (number := id_of(token)) is not None:
            return number
    raise UserError(f"data.tokenizer: '{folder}' names no end of text; set eos_token in its tokenizer_config.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: '{path}' is not JSON ({error})") from None
    return content if isinstance(content, dict) else {}
