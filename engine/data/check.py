"""What is wrong with the data of a run, found by the controller. Free of torch and numpy."""

from __future__ import annotations

import codecs
from importlib import import_module

from engine.data.chat.files import check_chats
from engine.data.formats import RECORDS
from engine.data.formats.files import check_records
from engine.data.mixture import about, sources, validation_sets
from engine.data.sources import (
    CHAT,
    LEROBOT,
    WIDE,
    BadSample,
    BadSamples,
    SourceFile,
    is_wide,
    list_files,
    not_utf8,
    parse_line,
    refuse,
)
from engine.data.tokenizer_files import check_tokenizer
from engine.errors import UserError
from engine.schema import Data

CHECKED_BYTES = 32 << 20  # how much of the data the controller looks at


def check_paths(data: Data, vocab_size: int | None = None) -> None:
    """Find what is wrong with the data before anything starts; reads at most the first 32 MiB.

    Raises UserError for missing, unreadable or empty data, a missing tokenizer, or more bad samples than allowed.
    """
    if not 0 <= data.held_out < 1:
        raise UserError(f"data.held_out={data.held_out} is not a share of the documents; 0 <= data.held_out < 1 is")
    if data.tokenizer is not None:
        check_tokenizer(data.tokenizer, vocab_size)
    if data.name == "mixture" or data.validation:
        _check_several(data)
    else:
        _check_source(data)


def _check_several(data: Data) -> None:
    """Every source of a mixture and every validation set."""
    problems = []
    for source in [*sources(data), *validation_sets(data)]:
        try:
            with about(source):
                _check_source(source.data)
        except UserError as error:
            problems += str(error).splitlines()
    refuse(problems)


def _check_source(data: Data) -> None:
    if data.name == CHAT:
        check_chats(data, CHECKED_BYTES)
        return
    bad = BadSamples(data.max_bad_samples)
    if data.name == LEROBOT:
        import_module("engine.data.lerobot.check").check_lerobot(data, bad)
        return
    if data.name in RECORDS:
        check_records(data, bad)
        return
    files, budget = list_files(data), CHECKED_BYTES
    if data.name == "stdlib":
        return
    has_text = False
    for file in files:
        if budget <= 0:
            return
        try:
            has_text |= (
                _check_jsonl(file, data.field, bad, budget) if data.name == "jsonl" else _check_text(file, bad, budget)
            )
        except OSError as error:
            raise UserError(f"data.path: '{file.path}' cannot be read ({error.strerror})") from None
        budget -= file.size
    if not has_text and budget >= 0:
        raise UserError(f"data.path={data.path}: there is no text in it; name files that hold text{bad.account()}")


def _check_jsonl(file: SourceFile, field: str, bad: BadSamples, budget: int) -> bool:
    has_text = False
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                has_text |= bool(parse_line(line, field))
            except BadSample as why:
                bad.add(f"{file.path}:{number}", str(why))
            budget -= len(line)
            if budget <= 0:
                break
    return has_text


def _check_text(file: SourceFile, bad: BadSamples, budget: int) -> bool:
    with file.path.open("rb") as stream:
        raw = stream.read(min(budget, file.size))
    if is_wide(raw):
        bad.add(str(file.path), WIDE)
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw, final=len(raw) == file.size)
    except UnicodeDecodeError as error:
        bad.add(str(file.path), not_utf8(error.start))
        return False
    return True
