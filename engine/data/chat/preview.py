"""The first conversations as the model sees them, for a person to check what is learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.data.chat.corpus import ChatCorpus
from engine.data.chat.encode import tokenise
from engine.data.chat.load import Chats
from engine.data.sources import BadSample

SHOWN = 2
LONGEST = 4000  # characters of each
GREEN, PLAIN = "\033[32m", "\033[0m"
OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Preview:
    """One sample: where it is from, and its text in pieces, each learned or not."""

    where: str
    tokens: int
    supervised: int
    pieces: tuple[tuple[bool, str], ...]

    def text(self, colour: bool) -> str:
        """The sample with what is learned in green, or between ⟦ and ⟧ where there are no colours."""
        begin, end = (GREEN, PLAIN) if colour else (OPEN, CLOSE)
        body = "".join(f"{begin}{text}{end}" if learned else text for learned, text in self.pieces)
        return f"sample {self.where}: {self.supervised} of {self.tokens} tokens are learned\n{body.rstrip()}"


def previews(chats: Chats, corpus: ChatCorpus, ids: np.ndarray, count: int = SHOWN) -> list[Preview]:
    """The first usable conversations."""
    found: list[Preview] = []
    for document in ids.tolist():
        if len(found) == count:
            break
        try:
            conversation = corpus.conversation(document)
            if conversation is None:
                continue
            rendered = chats.renderer(conversation)
        except BadSample:
            continue  # whoever reads it for training says so
        sample = tokenise(rendered, chats.tokenizer)
        pieces = _pieces(rendered.text[:LONGEST], rendered.supervised)
        found.append(Preview(corpus.where(document), len(sample), int(sample.supervised.sum()), pieces))
    return found


def _pieces(text: str, spans: list[tuple[int, int]]) -> tuple[tuple[bool, str], ...]:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [(False, text[at:start]), (True, text[start:end])]
        at = max(at, end)
    pieces.append((False, text[at:]))
    return tuple(piece for piece in pieces if piece[1])
