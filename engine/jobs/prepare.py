"""job=prepare: tokenise the corpus once, into a cache that training reads with data.packing=offline."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.context import Context
from engine.data.corpus import open_corpus
from engine.data.resources import cache_dir, corpus_tokenizer
from engine.data.sources import BadSamples
from engine.data.token_cache import Progress, token_cache

PROGRESS_SECONDS = 10.0


def run(ctx: Context) -> None:
    """Make the cache or say that it is there. One rank works; the others have nothing to do."""
    if ctx.rank:
        return
    started = time.monotonic()
    data, cache = ctx.run.data, cache_dir(ctx.run)
    bad = BadSamples(data.max_bad_samples, ctx.log)
    corpus = open_corpus(data, cache)
    tokenizer = corpus_tokenizer(ctx.run, corpus, bad, ctx.log)
    made, cached = token_cache(corpus, tokenizer, cache, bad, _lines(ctx.log))
    seconds, tokens, text = time.monotonic() - started, made.meta["tokens"], made.meta["text_bytes"]
    held_out = int(corpus.held_out.sum())
    ctx.log(
        f"prepare: {'cached already' if cached else f'made in {seconds:.1f} s'}: {made.folder} · "
        f"{len(corpus) - held_out} documents for training, {held_out} held out · {tokens} tokens"
        + (f" · {text / tokens:.2f} bytes a token" if text is not None else "")
        + (f" · {len(bad.seen)} bad samples skipped" if bad.seen else "")
    )
    ctx.log("prepare: train from it with the same data settings and data.packing=offline")
    ctx.result |= {
        "cache": str(made.folder),
        "cached": cached,
        "tokenizer": str(tokenizer.folder),
        "documents": len(corpus),
        "held_out_documents": held_out,
        "tokens": tokens,
        "text_bytes": text,
        "bytes_per_token": None if text is None else text / tokens,
        "bad_samples": len(bad.seen),
        "seconds": seconds,
    }


def _lines(log: Callable[[str], None]) -> Progress:
    """Progress as a line now and then."""
    shown = time.monotonic()

    def show(done: int, total: int, unit: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            log(f"prepare: {done} of {total} {unit} ({done / total:.0%})")

    return show
