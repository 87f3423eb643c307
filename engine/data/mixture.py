"""Several sources in one run, as the settings spell them. Free of torch and numpy."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.data.chat.records import FORMATS
from engine.data.sources import CHAT, LEROBOT, SOURCES, refuse
from engine.errors import UserError
from engine.schema import Data
from engine.suggest import did_you_mean

PERIOD = 10_000  # rows after which the sources' turns repeat
KEYS = ("name", "kind", "path", "field", "split", "format", "weight")
FIELDS = {"webdataset": "txt"}  # where the text usually is, if not under `text`


@dataclass(frozen=True)
class Source:
    """One source: its name in the metrics, its share of the rows, and the settings to open it with."""

    name: str
    weight: float
    data: Data
    key: str = "data"  # where the settings spell it

    def in_its_words(self, text: str) -> str:
        """A message about `data.path` and the like, with the keys that the user wrote: `data.mixture[0].path`."""
        if self.key == "data":
            return text
        text = re.sub(r"\bdata\.(path|field|split|format)\b", rf"{self.key}.\1", text)
        return re.sub(r"\bdata=(\w+)", rf"{self.key}.kind=\1", text)


@contextmanager
def about(source: Source) -> Iterator[None]:
    """Within this, what is wrong with a source is said under the source's own keys."""
    try:
        yield
    except UserError as error:
        raise UserError(source.in_its_words(str(error))) from None


def has_chats(data: Data) -> bool:
    """Whether conversations are trained on. True or false also for settings that are no mixture."""
    return _has(data, CHAT)


def has_demonstrations(data: Data) -> bool:
    """Whether a policy's demonstrations are read. True or false also for settings that are no mixture."""
    return _has(data, LEROBOT)


def _has(data: Data, kind: str) -> bool:
    entries = data.mixture if data.name == "mixture" and isinstance(data.mixture, list) else []
    return data.name == kind or any(isinstance(entry, dict) and entry.get("kind") == kind for entry in entries)


def sources(data: Data) -> list[Source]:
    """The sources of training; one without a name where there is no mixture. Raises UserError, all mistakes at once."""
    if data.name != "mixture":
        return [Source("", 1.0, data)]
    if not data.mixture:
        raise UserError(
            "data=mixture needs data.mixture, for example [{name: a, kind: text, path: DIR, weight: 3}, ...]"
        )
    found, problems = _parse(data, "data.mixture", data.mixture, data.held_out, weighted=True)
    kinds = {source.data.name for source in found}
    if LEROBOT in kinds and len(kinds) > 1:
        others = ", ".join(sorted(kinds - {LEROBOT}))
        problems.append(f"data.mixture: kind=lerobot holds demonstrations and cannot be mixed with {others}")
    if not problems:
        shares = turns([source.weight for source in found])
        problems = [
            f"data.mixture: weight={source.weight:g} of {source.name} is less than 1 row in {PERIOD}; raise its weight"
            for source, share in zip(found, shares, strict=True)
            if share == 0
        ]
    refuse(problems)
    return found


def validation_sets(data: Data) -> list[Source]:
    """The named held-out sets that the settings spell out. Raises UserError, all mistakes at once."""
    found, problems = _parse(data, "data.validation", data.validation or [], 0.0, weighted=False)
    if not has_chats(data):
        problems += [
            f"{source.key}: kind=chat takes the chat template of the training data, which holds no conversations; "
            "judge those of data=chat or of a mixture with a chat source"
            for source in found
            if source.data.name == CHAT
        ]
    taken = {source.name for source in sources(data)} if data.name == "mixture" and data.held_out > 0 else set()
    problems += [
        f"data.validation: {source.name} is also a source of data.mixture, which holds out documents under that name; "
        "name it otherwise, or set data.held_out=0"
        for source in found
        if source.name in taken
    ]
    refuse(problems)
    return found


def turns(weights: list[float]) -> list[int]:
    """Rows of each source among PERIOD, by largest remainders: each within 1 of its exact share."""
    exact = [PERIOD * weight / math.fsum(weights) for weight in weights]
    rows = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(rows)), key=lambda i: (rows[i] - exact[i], i))
    for i in by_remainder[: PERIOD - sum(rows)]:
        rows[i] += 1
    return rows


def _parse(data: Data, key: str, entries: Any, held_out: float, weighted: bool) -> tuple[list[Source], list[str]]:
    if not isinstance(entries, list):
        return [], [f"{key} must be a list of mappings like [{{name: a, kind: text, path: DIR}}]"]
    found: list[Source] = []
    problems: list[str] = []
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    for name in {str(name): None for name in names if name is not None and names.count(name) > 1}:
        problems.append(f"{key}: two sources are named {name}; a name stands for one")
    for number, entry in enumerate(entries):
        wrong = _entry_problems(entry, f"{key}[{number}]", weighted)
        problems += wrong
        if wrong:
            continue
        kind = entry["kind"]
        settings = dataclasses.replace(
            data,
            name=kind,
            path=entry.get("path"),
            field=entry.get("field") or FIELDS.get(kind, "text"),
            split=entry.get("split") or "train",
            format=entry.get("format") or data.format,
            held_out=held_out,
            mixture=None,
            validation=None,
        )
        found.append(Source(entry["name"], float(entry.get("weight", 1)), settings, f"{key}[{number}]"))
    return found, problems


def _entry_problems(entry: Any, where: str, weighted: bool) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{where} must be a mapping like {{name: a, kind: text, path: DIR}}"]
    known = KEYS if weighted else KEYS[:-1]
    problems = [f"{where}: there is no key {key}{did_you_mean(str(key), known)}" for key in entry if key not in known]
    name, kind, weight = entry.get("name"), entry.get("kind"), entry.get("weight", 1)
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        problems.append(f"{where}: name={name} must be letters, digits, '-' and '_', since metrics are named after it")
    if kind not in SOURCES:
        problems.append(
            f"{where}: kind={kind} is no kind of source{did_you_mean(str(kind), SOURCES)} ({', '.join(SOURCES)})"
        )
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not number or not 0 < weight < math.inf:
        problems.append(f"{where}: weight={weight} must be a number greater than 0; leave the source out otherwise")
    if entry.get("format") is not None and (kind != CHAT or entry["format"] not in FORMATS):
        problems.append(f"{where}: format={entry['format']}: only kind=chat has one, which is {' or '.join(FORMATS)}")
    for part in ("path", "field", "split"):
        if entry.get(part) is not None and not isinstance(entry[part], str):
            problems.append(f"{where}: {part}={entry[part]} must be text")
    return problems
