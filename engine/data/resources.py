"""What the data settings of a run name: the cache folder, the tokenizer, the documents. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.data.bpe import trained_bpe
from engine.data.sources import BadSamples
from engine.data.split import Numbered
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.schema import Run

Log = Callable[[str], None]


def corpus_tokenizer(
    run: Run, corpus: Numbered, bad: BadSamples, log: Log = print, tokenizer_dir: Path | None = None
) -> Tokenizer:
    """The tokenizer that the run names, or one trained on the corpus. Raises UserError if it does not fit the model."""
    model_vocab, given = run.model.vocab_size, tokenizer_dir or run.data.tokenizer
    if given is not None:
        return load_tokenizer(given, model_vocab)
    wanted = run.data.vocab_size or model_vocab
    if wanted > model_vocab:
        raise UserError(
            f"data.vocab_size={wanted} is more than model.vocab_size={model_vocab}; at most that many would be right"
        )
    tokenizer = load_tokenizer(trained_bpe(corpus, wanted, cache_dir(run), bad), model_vocab)
    log(f"tokenizer: byte-level BPE of {tokenizer.vocab_size} tokens trained on the corpus, in {tokenizer.folder}")
    return tokenizer


def cache_dir(run: Run) -> Path:
    """Where tokenizers, line indexes and tokenised corpora are kept."""
    return Path(run.data.cache_dir or Path(run.output_dir) / "cache").expanduser()
