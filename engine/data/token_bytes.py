"""How many bytes of text each token stands for: what turns nats per token into bits per byte."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers


def token_bytes(core: tokenizers.Tokenizer) -> np.ndarray | None:
    """Bytes of (normalised) text by token id, int64; 0 for special tokens and unused ids.

    None where the tokenizer is neither byte-level nor a byte-fallback one that keeps every space.
    """
    length = _length_rule(json.loads(core.to_str()))
    if length is None:
        return None
    vocab = core.get_vocab(with_added_tokens=False)
    added = core.get_added_tokens_decoder()
    sizes = np.zeros(max([*vocab.values(), *added]) + 1, dtype=np.int64)
    for token, number in vocab.items():
        sizes[number] = length(token)
    for number, token in added.items():
        sizes[number] = 0 if token.special else len(token.content.encode("utf-8"))
    return sizes


def _length_rule(spec: dict[str, Any]):
    decoders = _kinds(spec.get("decoder"), "decoders")
    if "ByteLevel" in decoders:
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # one character stands for one byte
        return lambda token: len(token) if alphabet.issuperset(token) else len(token.encode("utf-8"))
    # A decoder that strips had an encoder that adds a space at the start of the text: bytes that are not there.
    if "ByteFallback" in decoders and "Strip" not in decoders and "Metaspace" not in decoders:
        return (
            lambda token: 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else len(token.replace("▁", " ").encode("utf-8"))
        )
    return None


def _kinds(part: dict[str, Any] | None, inner: str) -> list[str]:
    if part is None:
        return []
    return [item["type"] for item in part.get(inner, [part])]
