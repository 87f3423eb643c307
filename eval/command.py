"""`zoo eval`, `zoo serve` and `zoo eval-merge`. Torch-free."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.verbs import read_words
from eval import policies, presets
from eval.report import percent, write_report
from eval.results import Results, merge, rate
from eval.runner import evaluate
from eval.server import Server
from eval.settings import EvalSettings, ServeSettings, described, precision_problems, read, serving_problems

EVAL_HELP = described(
    "Plays a benchmark's episodes with a policy and measures how often it succeeds.",
    "zoo eval suite=NAME policy=DIR [key=value ...], or with server=ws://HOST:PORT",
    EvalSettings,
)
SERVE_HELP = described("Serves a policy over a websocket.", "zoo serve policy=DIR [key=value ...]", ServeSettings)
MERGE_HELP = """Makes one evaluation of the shards of one.

Usage: zoo eval-merge FOLDER FOLDER ... output=FOLDER"""


def evaluation(words: list[str]) -> int:
    """`zoo eval`. Several suites are run one after the other, and end in a table."""
    given = read_words("zoo eval", EVAL_HELP, words)
    if given is None:
        return 0
    settings = read(EvalSettings, given[0])
    suites = (settings.suite or "").split(",") if settings.suite else [None]
    base = Path(settings.output or f"outputs/eval/{datetime.datetime.now():%Y%m%d-%H%M%S}")
    summaries = []
    for suite in suites:
        folder = base / suite if suite and len(suites) > 1 else base
        one = dataclasses.replace(settings, suite=suite)
        summaries.append(evaluate(one, folder, _note, Progress()))
        if not given[1]:
            print(f"{suite}: {percent(summaries[-1])}, {folder / 'report.html'}", flush=True)
    if given[1]:
        print(json.dumps(summaries if len(suites) > 1 else summaries[0], indent=1))
    elif len(suites) > 1:
        print(table(summaries))
    return 0


def table(summaries: list[dict[str, Any]]) -> str:
    """A line for each suite, and their mean."""
    wide = max(len(s["suite"]) for s in summaries)
    rows = [f"{s['suite']:<{wide}}  {s['successes']:>4} of {s['episodes']:<4}  {percent(s)}" for s in summaries]
    known = [s["rate"] for s in summaries if s["rate"] is not None]
    return "\n".join([*rows, f"{'mean':<{wide}}  {'':>12}  {100 * sum(known) / len(known):.1f}%"]) if known else ""


def merging(words: list[str]) -> int:
    """`zoo eval-merge`."""
    given = read_words("zoo eval-merge", MERGE_HELP, words)
    if given is None:
        return 0
    output = [word.partition("=")[2] for word in given[0] if word.startswith("output=")]
    if len(output) != 1 or not output[0]:
        raise UserError("name one folder for the result with output=FOLDER")
    summary = merge([Path(word) for word in given[0] if not word.startswith("output=")], Path(output[0]))
    write_report(Path(output[0]))
    print(json.dumps(summary, indent=1) if given[1] else f"{summary['suite']}: {percent(summary)}")
    return 0


def serving(words: list[str]) -> int:
    """`zoo serve`: until a signal ends it."""
    given = read_words("zoo serve", SERVE_HELP, words)
    if given is None:
        return 0
    settings = read(ServeSettings, given[0])
    if settings.policy is None:
        raise UserError(f"policy is missing; name a policy directory, or one of {', '.join(policies.POLICIES)}")
    if problems := [*serving_problems(settings), *precision_problems(settings.precision)]:
        raise UserError("\n".join(problems))
    protocol = presets.benchmark(settings.benchmark)
    chosen = protocol.conventions(presets.chosen(settings.benchmark, settings.preset))
    batch = settings.max_batch if settings.fill else None
    policy = policies.chosen(settings.policy, chosen, settings.cameras, settings.precision, batch)
    return serve_until_signal(Server(policy, settings, _note))


def serve_until_signal(server: Server) -> int:
    """Serve in this thread; SIGINT and SIGTERM end it well."""

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        host = server.settings.host
        await server.run(lambda port: print(f"{server.policy.name} is served at ws://{host}:{port}", flush=True), stop)

    asyncio.run(serve())
    return 0


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Progress:
    """A line for each episode, in place on a terminal: how many, how often with success, how fast."""

    def __init__(self) -> None:
        self.started, self.first = time.monotonic(), None

    def __call__(self, results: Results, done: int, planned: int) -> None:
        if self.first is None:
            self.first = done - 1
        pace = 60 * (done - self.first) / max(1e-9, time.monotonic() - self.started)
        line = f"{done}/{planned} episodes, {percent(rate(results.lines.values()))}, {pace:.1f} a minute"
        live = sys.stderr.isatty()
        print(f"\r{line}\x1b[K" if live else line, end="" if live and done < planned else "\n", file=sys.stderr)
        sys.stderr.flush()
