"""Where text comes from: the files behind `data.name` and `data.path`, and what a usable sample is.

Free of torch and numpy, as the controller reads it.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.data.braces import named_paths
from engine.errors import UserError
from engine.schema import Data
from engine.words import counted, kind_of

SOURCES = ("stdlib", "text", "jsonl", "chat", "parquet", "datasets", "webdataset", "energon", "lerobot")
CHAT, LEROBOT = "chat", "lerobot"
JSON_SOURCES = ("jsonl", CHAT)
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = {"jsonl": JSONL_SUFFIXES, "chat": JSONL_SUFFIXES, "parquet": (".parquet", ".pq"), "webdataset": (".tar",)}
WHOLE = ("parquet", "webdataset", "energon")  # a file of these without a byte was never finished
FOLDERS = "engine.data.formats.files"  # imported where it is needed
# Third-party code, tests and generated files: the rest is the same text wherever the same Python runs.
STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "encodings",  # tables of characters more than text
    "lib2to3",
    "turtledemo",
    "__pycache__",
}
BOM = "\ufeff"
WIDE = "is UTF-16 or UTF-32 text; convert the file to UTF-8, for example with iconv -t UTF-8"
LISTED = 20  # problems of one kind that are spelled out


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the corpus. Small, because there may be millions."""

    base: str  # the folder that the user named, or that holds the file
    identity: str  # relative to it, so that it is the same on another machine
    size: int
    mtime_ns: int

    @property
    def path(self) -> Path:
        return Path(self.base, self.identity)


class BadSample(Exception):
    """A sample that cannot be used, and why."""


class TooLong(BadSample):
    """A sample of more tokens than a row has, which must not be cut."""

    def __init__(self, tokens: int, seq_len: int):
        super().__init__(f"is longer than a row: it has {tokens} tokens, more than data.seq_len={seq_len}")
        self.tokens = tokens


class BadSamples:
    """Counts the samples that cannot be used, each once, up to `data.max_bad_samples`."""

    def __init__(self, limit: int, log: Callable[[str], None] | None = None):
        self.limit, self.log = limit, log
        self.seen: dict[str, str] = {}  # where -> why
        self.too_long: dict[str, int] = {}  # of those: where -> tokens

    def add(self, where: str, why: str | BadSample) -> None:
        """Skip a sample with a warning. Raises UserError for the first one beyond the limit."""
        if where in self.seen:
            return
        self.seen[where] = str(why)
        mend = "mend it"
        if isinstance(why, TooLong):
            self.too_long[where] = why.tokens
            mend = f"raise data.seq_len to {why.tokens}, shorten it"
        if len(self.seen) > self.limit:
            skipped = f" after {self.limit} that were skipped" if self.limit else ""
            more = f"data.max_bad_samples={max(1, 2 * self.limit)}, say"
            raise UserError(f"{where}: {why}{skipped}; {mend}, or skip more of them with {more}")
        if self.log:
            self.log(f"warning: {where}: {why}; skipped (bad sample {len(self.seen)} of at most {self.limit})")

    def account(self) -> str:
        """What was skipped so far and what would help, to end a message that says that nothing is left; else empty."""
        if not self.seen:
            return ""
        parts = []
        if lengths := self.too_long.values():
            most = max(lengths)
            span = f"{most}" if min(lengths) == most else f"{min(lengths)} to {most}"
            parts.append(f"{len(lengths)} longer than a row ({span} tokens; data.seq_len={most} would hold them)")
        others = ((where, why) for where, why in self.seen.items() if where not in self.too_long)
        if number := len(self.seen) - len(self.too_long):
            where, why = next(others)
            parts.append(f"{number} that {'is' if number == 1 else 'are'} no use (the first, {where}: {why})")
        return f"; {counted(len(self.seen), 'bad sample')} skipped: {' and '.join(parts)}"


def parse_line(line: bytes, field: str) -> str:
    """The text in one line of a JSONL file; empty for a blank line. Raises BadSample."""
    if not line.strip():
        return ""
    text = parse_value(line, field)
    if not isinstance(text, str):
        raise BadSample(f"has {kind_of(text)} under '{field}', not a string")
    return checked_text(text)


def parse_value(raw: bytes, field: str) -> Any:
    """What a JSON object holds under a key. Raises BadSample."""
    try:
        record = json.loads(raw.decode("utf-8").removeprefix(BOM))
    except UnicodeDecodeError as error:
        raise BadSample(WIDE if is_wide(raw) else f"is not UTF-8 (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise BadSample(WIDE if is_wide(raw) else f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise BadSample(f'is not a JSON object like {{"{field}": "..."}}')
    if field not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        raise BadSample(f"has no key '{field}' (its keys: {keys}; data.field names the key that holds the text)")
    return record[field]


def checked_text(text: str) -> str:
    """The text itself. Raises BadSample for half a surrogate pair, which JSON can spell but no text holds."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadSample(f"holds half a surrogate pair (character {error.start})") from None
    return text


def list_files(data: Data) -> list[SourceFile]:
    """The files of the corpus in a fixed order, empty ones left out.

    Raises UserError if there are none, or if one cannot be read.
    """
    if data.name not in SOURCES:
        raise UserError(f"data.name='{data.name}' is not a source; one of {', '.join(SOURCES)} is")
    if data.name == "stdlib" and data.path is not None:
        raise UserError("data=stdlib takes no data.path; data=text data.path=... or data=jsonl data.path=... takes one")
    files: list[SourceFile] = []
    problems: list[str] = []
    if data.name == "datasets":
        _need_path(data)
        return import_module(FOLDERS).datasets_folders(data)
    if data.name == LEROBOT:
        _need_path(data)
        return import_module("engine.data.lerobot.check").lerobot_folders(data)
    for base, identity in _places(data):
        path = Path(base, identity)
        try:
            stat = path.stat()
        except OSError as error:
            problems.append(f"data.path: '{path}' cannot be read ({error.strerror})")
            continue
        if not os.access(path, os.R_OK):
            problems.append(f"data.path: '{path}' cannot be read (permission denied); make it readable")
        elif not stat.st_size and data.name in WHOLE:
            problems.append(
                f"data.path: '{path}' is empty (0 bytes): it was never finished; write it anew or leave it out"
            )
        elif stat.st_size:
            files.append(SourceFile(base, identity, stat.st_size, stat.st_mtime_ns))
    refuse(problems)
    if not files:
        raise UserError(f"data.path={data.path}: every file there is empty; name files that hold text")
    return files


def _places(data: Data) -> Iterable[tuple[str, str]]:
    """(base, identity) of the files of every kind but datasets."""
    if data.name == "stdlib":
        return _stdlib()
    _need_path(data)
    return import_module(FOLDERS).energon_files(data) if data.name == "energon" else _named(data)


def _need_path(data: Data) -> None:
    if not data.path or not data.path.strip():
        raise UserError(f"data={data.name} needs data.path: files, folders or globs, separated by commas")


def _stdlib() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in found if not (STDLIB_SKIPPED & set(path.parts) or path.name.startswith("_sysconfigdata"))]
    if not kept:
        raise UserError(f"data=stdlib: no Python sources in {root}; name a corpus with data=text data.path=...")
    base = str(root)
    return ((base, path.as_posix()) for path in kept)


def _named(data: Data) -> list[tuple[str, str]]:
    """(base, identity) of the files that `data.path` names, each once."""
    parts = named_paths(str(data.path))
    seen: set[str] = set()
    found: list[tuple[str, str]] = []
    problems: list[str] = []
    for part in parts:
        try:
            base, identities = _expand(str(Path(part).expanduser()), data.name)
        except UserError as error:
            problems.append(str(error))
            continue
        for identity in identities:
            real = os.path.realpath(os.path.join(base, identity)) if len(parts) > 1 else identity  # noqa: PTH118
            if real not in seen:
                seen.add(real)
                found.append((base, identity))
    refuse(problems)
    return found


def refuse(problems: list[str]) -> None:
    """Raise a UserError that lists the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - LISTED} more like these"] if len(problems) > LISTED else []
        raise UserError("\n".join(problems[:LISTED] + more))


def _expand(part: str, kind: str) -> tuple[str, list[str]]:
    """The files of one entry of `data.path`: the folder that they are named from, and their names in it, sorted."""
    path = Path(part)
    if path.is_dir():
        suffixes = SUFFIXES.get(kind, ())
        found = sorted(_walk(path, suffixes))
        if not found:
            wanted = f"files ending in {', '.join(suffixes)}" if suffixes else "files"
            raise UserError(f"data.path: the folder '{part}' holds no {wanted}")
        return str(path), found
    if path.is_file():
        return str(path.parent), [path.name]
    if path.exists():
        raise UserError(
            f"data.path: '{part}' is a device or a pipe, and documents are read by their place; name a file"
        )
    if not glob.has_magic(part):
        raise UserError(f"data.path: '{part}' does not exist; give files, folders or globs, separated by commas")
    matches = map(Path, glob.glob(part, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    base = Path(*_before_magic(path))
    found = sorted(name.relative_to(base).as_posix() for name in matches if name.is_file())
    if not found:
        raise UserError(f"data.path: no file matches '{part}'")
    return str(base), found


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The files below a folder that are not hidden, relative to it."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = Path(root).relative_to(folder)
        for name in files:
            if not name.startswith(".") and (not suffixes or name.endswith(suffixes)):
                yield (inner / name).as_posix()


def _before_magic(path: Path) -> list[str]:
    kept = []
    for piece in path.parts[:-1]:
        if glob.has_magic(piece):
            break
        kept.append(piece)
    return kept


def is_wide(raw: bytes) -> bool:
    """Whether bytes look like UTF-16 or UTF-32: a mark at the beginning, or a zero in most pairs of bytes."""
    return raw.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")) or raw[:4096].count(0) > len(raw[:4096]) // 4


def decode_text(raw: bytes, start: int = 0) -> str:
    """UTF-8 text that begins at byte `start` of its file. Raises BadSample."""
    if is_wide(raw):
        raise BadSample(WIDE)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSample(not_utf8(start + error.start)) from None
    return text.removeprefix(BOM) if start == 0 else text


def not_utf8(byte: int) -> str:
    return f"is not UTF-8 text (byte {byte})"
