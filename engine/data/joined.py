"""Several corpora as one, for what is learned from all of them: the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.data.files import digest
from engine.data.split import Numbered


class Joined(Numbered):
    """The documents of corpora one after the other."""

    def __init__(self, corpora: Sequence[Numbered]):
        self.corpora = corpora
        self.files = [file for corpus in corpora for file in corpus.files]
        self.first = np.concatenate([[0], np.cumsum([len(corpus) for corpus in corpora])]).astype(np.int64)
        self.held_out = np.concatenate([corpus.held_out for corpus in corpora])
        self.identity = digest("joined", [corpus.identity for corpus in corpora])
        self.cache_key = digest("joined", [corpus.cache_key for corpus in corpora])

    def read(self, document: int) -> str:
        corpus, number = self._place(document)
        return corpus.read(number)

    def where(self, document: int) -> str:
        corpus, number = self._place(document)
        return corpus.where(number)

    def size(self, document: int) -> int:
        corpus, number = self._place(document)
        return corpus.size(number)

    def _place(self, document: int) -> tuple[Numbered, int]:
        corpus = int(self.first.searchsorted(document, side="right")) - 1
        return self.corpora[corpus], document - int(self.first[corpus])


def join(corpora: Sequence[Numbered]) -> Numbered:
    """The corpora as one; a single one as it is."""
    return corpora[0] if len(corpora) == 1 else Joined(corpora)
