"""A byte-level BPE trained on the spot: the tokenizer of a run that names none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from engine.data import SMALLEST_BPE
from engine.data.cache import cached
from engine.data.sources import BadSample, BadSamples
from engine.data.split import Numbered
from engine.data.tokenizer import all_cores
from engine.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 24 << 20  # text that the merges are learned from; more only costs time and memory
VERSION = 1  # of everything below: part of the cache's key

# Words with the one character before them, numbers in threes, runs of punctuation, and a line end with the next line's
# indentation, which source text repeats so often that it deserves a token.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|\s+"


def trained_bpe(corpus: Numbered, vocab_size: int, cache: Path, bad: BadSamples) -> Path:
    """The directory of a tokenizer of at most `vocab_size` tokens, trained on the training documents or cached.

    The same corpus and settings give the same tokenizer. Raises UserError if `vocab_size` is too small for every byte.
    """
    if vocab_size < SMALLEST_BPE:
        raise UserError(
            f"a byte-level BPE needs at least {SMALLEST_BPE} tokens, and data.vocab_size or model.vocab_size "
            f"is {vocab_size}; raise it, or name a tokenizer with data.tokenizer=DIR"
        )
    folder = cache / f"bpe-{vocab_size}-{corpus.cache_key}-{VERSION}-{tokenizers.__version__}"
    cached(folder, lambda temporary: save_bpe(train_bpe(_sample(corpus, bad), vocab_size), temporary))
    return folder


def train_bpe(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learn merges from texts."""
    core = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with all_cores(True):
        core.train_from_iterator(texts, trainer)
    return core


def save_bpe(core: tokenizers.Tokenizer, folder: Path) -> None:
    """Write a directory that transformers' AutoTokenizer loads."""
    core.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    config = special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def _sample(corpus: Numbered, bad: BadSamples) -> Iterator[str]:
    """The training documents, or an even selection of them where they are more than SAMPLE_BYTES."""
    share = min(1.0, SAMPLE_BYTES / max(1, corpus.num_bytes))
    taken = 0.0
    for document in range(len(corpus)):
        if corpus.held_out[document]:
            continue
        taken += share
        if taken < 1.0 and share < 1.0:
            continue
        taken -= 1.0
        try:
            yield corpus.read(document)
        except BadSample as why:
            bad.add(corpus.where(document), str(why))
