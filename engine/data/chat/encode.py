"""Conversations as token ids with a mask of what is learned."""

from __future__ import annotations

import numpy as np

from engine.data.chat.corpus import ChatCorpus
from engine.data.chat.template import Rendered, Renderer
from engine.data.packing import Sample
from engine.data.sources import BadSample, TooLong
from engine.data.tokenizer import Tokenizer


def tokenise(rendered: Rendered, tokenizer: Tokenizer) -> Sample:
    """The text's tokens; those that hold a character of a supervised span are learned."""
    encoding = tokenizer.core.encode(rendered.text, add_special_tokens=False)
    tokens = np.array(encoding.ids, dtype=np.int32)
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    supervised = np.zeros(len(tokens), dtype=bool)
    for start, end in rendered.supervised:
        # Tokens follow each other in the text, so that those of a span are neighbours.
        supervised[ends.searchsorted(start, side="right") : starts.searchsorted(end, side="left")] = True
    return Sample(tokens, supervised)


class ChatEncoder:
    """What `engine.data.documents` calls to turn document numbers into samples."""

    def __init__(self, renderer: Renderer, seq_len: int):
        self._renderer, self._seq_len = renderer, seq_len

    def __call__(self, corpus: ChatCorpus, tokenizer: Tokenizer, ids: list[int]) -> list[Sample | BadSample]:
        """A sample, or what is wrong with it, for each document; an empty one for a blank line."""
        return [self._one(corpus, tokenizer, document) for document in ids]

    def _one(self, corpus: ChatCorpus, tokenizer: Tokenizer, document: int) -> Sample | BadSample:
        try:
            conversation = corpus.conversation(document)
            if conversation is None:
                return Sample(np.empty(0, dtype=np.int32), np.empty(0, dtype=bool))
            sample = tokenise(self._renderer(conversation), tokenizer)
        except BadSample as why:
            return why
        if len(sample) > self._seq_len:
            return TooLong(len(sample), self._seq_len)
        return sample
