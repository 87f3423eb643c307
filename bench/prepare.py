"""job=prepare against the tokenizer's bare `encode_batch` over the same texts, and its memory at two sizes of input.

    python -m bench.prepare --small 30 --large 300

The input is the standard library's source text, repeated. Speeds are of one process each, taken in turns; memory is the
highest anonymous memory (RssAnon) that the process held.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

from engine.data.corpus import open_corpus
from engine.data.resources import cache_dir, corpus_tokenizer
from engine.data.sources import BadSamples
from engine.jobs import prepare
from engine.schema import Data, Run

VOCAB = 4096
MB = 10**6


def make_input(folder: Path, megabytes: int, kind: str) -> None:
    """Write about `megabytes` MB of the standard library's sources as text files or one JSONL file."""
    corpus = open_corpus(Data(name="stdlib"), folder)
    documents = [corpus.read(i) for i in range(len(corpus))]
    written = 0
    with (folder / "docs.jsonl").open("w") if kind == "jsonl" else tempfile.TemporaryFile("w") as out:
        for number, text in enumerate(cycle(documents)):
            if written >= megabytes * MB:
                return
            if kind == "jsonl":
                out.write(json.dumps({"text": text}) + "\n")
            else:
                (folder / f"{number:06}.txt").write_text(text)
            written += len(text)


def make_run(folder: Path, kind: str, cache: Path) -> Run:
    data = Data(name=kind, path=str(folder), cache_dir=str(cache))
    return Run(family="none", data=data, model=SimpleNamespace(vocab_size=VOCAB))


def measure_prepare(run: Run) -> dict[str, float]:
    """Everything that job=prepare does once the tokenizer is there: list, index, read, tokenise, write."""
    started = time.perf_counter()
    ctx = SimpleNamespace(run=run, log=lambda line: None, progress=lambda *a: None, rank=0, result={})
    prepare.run(ctx)
    return {"seconds": time.perf_counter() - started, "bytes": ctx.result["text_bytes"]}


def measure_bare(run: Run) -> dict[str, float]:
    """`encode_batch` alone, over texts that are in memory already, in calls of about 1 MB."""
    corpus = open_corpus(run.data, cache_dir(run))
    tokenizer = corpus_tokenizer(run, corpus, BadSamples(0), lambda line: None)
    texts = (corpus.read(i) for i in range(len(corpus)))
    seconds, size = 0.0, 0
    while batch := list(islice(texts, 50)):
        size += sum(len(text.encode()) for text in batch)
        started = time.perf_counter()
        tokenizer.core.encode_batch(batch, add_special_tokens=False)
        seconds += time.perf_counter() - started
    return {"seconds": seconds, "bytes": size}


def measure(what: str, folder: Path, kind: str, cache: Path) -> dict[str, float]:
    """One measurement in a process of its own. The tokenizer is in the cache; the tokenised corpus is not."""
    for made in cache.glob("tokens-*"):
        shutil.rmtree(made)
    command = [sys.executable, "-m", "bench.prepare", "--measure", what, str(folder), kind, str(cache)]
    peak = 0
    # Watched from here: a thread of its own would change what memory the process takes.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_memory(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0
        return json.loads(process.stdout.read()) | {"memory": peak}


def anonymous_memory(process: int) -> int:
    """Bytes; 0 for a process that has just ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except ProcessLookupError:
        return 0
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 if "RssAnon:" in status else 0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=int, default=30, help="MB")
    parser.add_argument("--large", type=int, default=300, help="MB")
    parser.add_argument("--kind", choices=("text", "jsonl"), default="jsonl")
    parser.add_argument("--repeats", type=int, default=3, help="of the small size, for the speeds")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, folder, kind, cache = options.measure
        run = make_run(Path(folder), kind, Path(cache))
        print(json.dumps((measure_prepare if what == "prepare" else measure_bare)(run)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        report(Path(scratch), options)


def report(scratch: Path, options: argparse.Namespace) -> None:
    """Measure both sizes and print them."""
    print(f"{'input':>16} {'prepare':>12} {'encode_batch':>13} {'ratio':>7} {'memory':>9}")
    for megabytes, repeats in ((options.small, options.repeats), (options.large, 0)):
        folder, cache = scratch / str(megabytes), scratch / f"cache-{megabytes}"
        folder.mkdir()
        make_input(folder, megabytes, options.kind)
        run = make_run(folder, options.kind, cache)
        corpus_tokenizer(run, open_corpus(run.data, cache), BadSamples(0), lambda line: None)
        pairs = [[measure(what, folder, options.kind, cache) for what in ("prepare", "bare")] for _ in range(repeats)]
        # The larger size is for the memory alone: the speeds do not depend on it.
        lone = [] if pairs else [[measure("prepare", folder, options.kind, cache)]]
        speeds = [[part["bytes"] / part["seconds"] / MB for part in pair] for pair in pairs or lone]
        median = sorted(speeds, key=lambda pair: pair[0] / pair[-1])[len(speeds) // 2]
        memory = max(pair[0]["memory"] for pair in pairs or lone) / MB
        bare = f"{median[1]:>8.2f} MB/s {median[0] / median[1]:>7.3f}" if pairs else f"{'':>21}"
        size = f"{megabytes} MB {options.kind}"
        print(f"{size:>16} {median[0]:>7.2f} MB/s {bare} {memory:>6.0f} MB", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
