"""job=prepare: tokenise the corpus once, into a cache that training reads with data.packing=offline."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.context import Context
from engine.data.corpus import open_corpus
from engine.data.joined import join
from engine.data.mixture import sources
from engine.data.resources import cache_dir, corpus_tokenizer
from engine.data.sources import BadSamples
from engine.data.token_cache import Progress, token_cache

PROGRESS_SECONDS = 10.0


def run(ctx: Context) -> None:
    """Make the cache or say that it is there. One rank works; the others have nothing to do."""
    if ctx.rank:
        return
    started = time.monotonic()
    cache, bad = cache_dir(ctx.run), BadSamples(ctx.run.data.max_bad_samples, ctx.log)
    named = sources(ctx.run.data)
    corpora = [open_corpus(source.data, cache, bad) for source in named]
    tokenizer = corpus_tokenizer(ctx.run, join(corpora), bad, ctx.log)
    caches: dict[str, str] = {}
    tokens, text, cached = 0, 0, True
    for source, corpus in zip(named, corpora, strict=True):
        made, there = token_cache(corpus, tokenizer, cache, bad, _lines(ctx.log))
        caches[source.name], cached = str(made.folder), cached and there
        tokens += made.meta["tokens"]
        text = None if text is None or made.meta["text_bytes"] is None else text + made.meta["text_bytes"]
    seconds, folders = time.monotonic() - started, ", ".join(caches.values())
    documents, held_out = sum(map(len, corpora)), sum(int(corpus.held_out.sum()) for corpus in corpora)
    ctx.log(
        f"prepare: {'cached already' if cached else f'made in {seconds:.1f} s'}: {folders} · "
        f"{documents - held_out} documents for training, {held_out} held out · {tokens} tokens"
        + (f" · {text / tokens:.2f} bytes a token" if text is not None else "")
        + (f" · {len(bad.seen)} bad samples skipped" if bad.seen else "")
    )
    ctx.log("prepare: train from it with the same data settings and data.packing=offline")
    ctx.result |= {
        "cache": folders,
        "cached": cached,
        "tokenizer": str(tokenizer.folder),
        "documents": documents,
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
