"""Several paths in one setting: commas, and a shell's braces. Free of torch and numpy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import UserError

MOST = 1_000_000  # names of one pattern
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")


def named_paths(text: str) -> list[str]:
    """The entries of a comma-separated list, their braces expanded; what exists under its literal name is one entry.

    Raises UserError for malformed braces.
    """
    if _exists(text):
        return [text]
    parts = [part.strip() for part in _cut(text) if part.strip()]
    return [name for part in parts for name in ([part] if _exists(part) else braces(part))]


def braces(pattern: str) -> list[str]:
    """A shell's brace expansion: `{000..002}` counts, as wide as it is written and with a step in `{0..9..3}`;
    `{a,b}` chooses; groups may follow each other and lie in each other. A word alone, `{a}`, stays as it is.

    Raises UserError, in one line, for a brace without its other half and for a range that counts no numbers.
    """
    names = list(itertools.islice(_expand(pattern, pattern), MOST + 1))
    if len(names) > MOST:
        raise UserError(f"data.path: '{pattern}' names more than {MOST} files; a folder or a glob names as many")
    return names


def _expand(text: str, whole: str) -> Iterator[str]:
    begin = text.find("{")
    head = text if begin < 0 else text[:begin]
    if "}" in head:
        raise _malformed(whole, "a '}' without its '{'")
    if begin < 0:
        yield text
        return
    end = _closing(text, begin)
    if end is None:
        raise _malformed(whole, "a '{' without its '}'")
    for value in _group(text[begin + 1 : end], whole):
        for rest in _expand(text[end + 1 :], whole):
            yield head + value + rest


def _group(inner: str, whole: str) -> Iterator[str]:
    """What one pair of braces stands for."""
    parts = _cut(inner)
    if len(parts) > 1:
        for part in parts:
            yield from _expand(part, whole)
    elif ".." not in inner or "{" in inner:
        yield from ("{" + name + "}" for name in _expand(inner, whole))
    elif match := RANGE.fullmatch(inner):
        yield from _count(match[1], match[2], int(match[3] or 1), whole)
    else:
        raise _malformed(whole, f"{{{inner}}}, which counts no whole numbers")


def _count(low: str, high: str, step: int, whole: str) -> Iterator[str]:
    if not step:
        raise _malformed(whole, "a step of 0")
    padded = any(len(x) > 1 and x.lstrip("-").startswith("0") for x in (low, high))
    width, first, last = max(len(low), len(high)) if padded else 0, int(low), int(high)
    stride = abs(step) if first <= last else -abs(step)
    return (f"{n:0{width}d}" for n in range(first, last + (1 if stride > 0 else -1), stride))


def _cut(text: str) -> list[str]:
    """The parts between the commas that lie in no braces."""
    parts, depth = [""], 0
    for character in text:
        depth = max(0, depth + (character == "{") - (character == "}"))
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _closing(text: str, begin: int) -> int | None:
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place
    return None


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a name, a home of nobody, a zero byte
        return False


def _malformed(pattern: str, what: str) -> UserError:
    return UserError(f"data.path: '{pattern}' has {what}; {{000..003}} counts and {{a,b}} chooses")
