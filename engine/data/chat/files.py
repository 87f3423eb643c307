"""Chat files: JSON lines, or one JSON array of records. What format each holds, and what is wrong with it.

Free of torch and numpy: the controller calls `check_chats` before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from engine.data.chat.records import FORMATS, detect, parse
from engine.data.chat.template import chat_templates
from engine.data.sources import BOM, BadSample, BadSamples, list_files
from engine.errors import UserError
from engine.schema import Data
from engine.words import kind_of

NAMED = 5  # how many lines of each format a message names
FORMAT_HINT = f"none of the chat formats {', '.join(FORMATS)}"


def is_array(path: Path) -> bool:
    """Whether a file is one JSON array rather than JSON lines."""
    with path.open("rb") as file:
        head = file.read(1 << 12).removeprefix(BOM.encode()).lstrip()
    return head.startswith(b"[")


def read_array(path: Path) -> list[Any]:
    """The records of a JSON array. UserError if it is none."""
    try:
        records = json.loads(path.read_bytes().decode("utf-8").removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: begins like a JSON array and is none ({error}); mend it, or use JSON lines") from None
    return records


def parse_json(line: bytes) -> Any:
    """The record in a line; None for a blank one. Raises BadSample."""
    if not line.strip():
        return None
    try:
        record = json.loads(line.decode("utf-8").removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise BadSample(f"is not JSON ({error})") from None
    return record


def format_of(record: Any) -> str:
    """The record's format. Raises BadSample."""
    if not isinstance(record, dict):
        raise BadSample(f"is {kind_of(record)}, not an object")
    if (kind := detect(record)) is None:
        for key in ("messages", "conversations"):
            if key in record and not isinstance(turns := record[key], list):
                raise BadSample(f"has {kind_of(turns)} under '{key}', which must be a list of turns")
            if key in record and all(isinstance(turn, str) for turn in turns):
                raise BadSample(f"has strings under '{key}'; each turn must be an object with 'role' or 'from'")
        raise BadSample(f"is {FORMAT_HINT} (its keys: {', '.join(sorted(record)[:8]) or 'none'})")
    return kind


def mixed(path: Path, seen: dict[str, list[int]]) -> UserError:
    """What to say of a file that holds several formats; `seen` has the first lines of each."""
    found = ", ".join(f"{kind} (line {', '.join(map(str, lines[:NAMED]))})" for kind, lines in seen.items())
    return UserError(f"{path}: mixes the formats {found}; a file holds one format, so divide it")


def check_chats(data: Data, budget: int) -> None:
    """Find what is wrong with the chats before anything starts; of JSON lines at most `budget` bytes are read.

    Raises UserError for missing or empty data, mixed formats, more bad samples than allowed, a tokenizer without a
    chat template, or a template without a tokenizer.
    """
    _check_template(data)
    bad, usable = BadSamples(data.max_bad_samples), 0
    for file in list_files(data):
        seen: dict[str, list[int]] = {}
        for number, line in _lines(file.path, budget):
            try:
                if (record := parse_json(line) if isinstance(line, bytes) else line) is None:
                    continue
                kind = format_of(record)
                seen.setdefault(kind, []).append(number)
                if data.format in (None, kind):
                    parse(record, kind, data.final_tool_calls)
                    usable += 1
            except BadSample as why:
                bad.add(f"{file.path}:{number}", str(why))
        _check_formats(file.path, seen, data.format)
        budget -= file.size
        if budget <= 0:
            return
    if not usable:
        raise UserError(f"data.path={data.path}: holds no conversation; name files of chats{bad.account()}")


def _check_template(data: Data) -> None:
    if data.chat_template is not None and data.tokenizer is None:
        raise UserError(
            f"data.chat_template={data.chat_template}: a template without a tokenizer; name the tokenizer that it "
            "belongs to with data.tokenizer=DIR"
        )
    if data.tokenizer is not None:
        chat_templates(data, Path(data.tokenizer))


def _check_formats(path: Path, seen: dict[str, list[int]], named: Optional[str]) -> None:
    if len(seen) > 1:
        raise mixed(path, seen)
    if named is not None and seen and named not in seen:
        raise UserError(f"data.format={named}: {path} holds {next(iter(seen))}; leave data.format out, or name that")


def _lines(path: Path, budget: int) -> Iterator[tuple[int, Any]]:
    """(number from 1, line or record)."""
    try:
        if is_array(path):
            yield from enumerate(read_array(path), 1)
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if budget <= 0:
                    return
                yield number, line
                budget -= len(line)
    except OSError as error:
        raise UserError(f"data.path: '{path}' cannot be read ({error.strerror})") from None
