"""The samples in a WebDataset shard: an uncompressed tar file whose members share a name up to the first dot.

The rules of grouping are those of the webdataset library. Free of torch and numpy.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.data.sources import BadSample
from engine.errors import UserError

BLOCK = 512
NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # key and extension
META = re.compile(r"__[^/]*__($|/)")  # members that are about the shard
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}

Place = tuple[int, int]  # first byte and number of bytes in the shard


@dataclass
class TarSample:
    """One sample: its key, where its first header lies, and where its parts lie by extension."""

    key: str
    header: int
    parts: dict[str, Place]


def tar_samples(path: Path) -> Iterator[TarSample]:
    """The samples of a shard in its order.

    Raises BadSample, after the samples before it, where the file is cut off or damaged, names a part twice or is
    no tar file at all, and UserError for one that is compressed or that the system does not read.
    """
    for number, sample in enumerate(_grouped(path)):
        if isinstance(sample, BadSample):
            raise BadSample(f"{sample} after {number} whole samples")
        yield sample


def _grouped(path: Path) -> Iterator[TarSample | BadSample]:
    current: TarSample | None = None
    for member in _members(path):
        if isinstance(member, BadSample):
            yield member  # what has begun may be incomplete
            return
        match = NAME.match(member.name)
        if match is None:
            continue
        key, part = match[1], match[2].lower()
        if current is None or key != current.key:
            if current is not None:
                yield current
            current = TarSample(key, member.offset, {})
        if part in current.parts:
            yield BadSample(f"names '{member.name}' twice")
            return
        current.parts[part] = (member.offset_data, member.size)
    if current is not None:
        yield current


def _members(path: Path) -> Iterator[tarfile.TarInfo | BadSample]:
    """The regular files of a shard; last a BadSample if the file does not end as a tar file does."""
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(2)
            if head in COMPRESSED:
                raise UserError(
                    f"data.path: '{path}' is compressed ({COMPRESSED[head]}); unpack it: samples are read by place"
                )
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # it keeps all otherwise
                    if member.offset_data + member.size > size:
                        yield BadSample("is cut off")
                        return
                    if member.isreg() and not META.match(member.name):
                        yield member
                end = tar.offset
            file.seek(end)
            if (rest := file.read(BLOCK)) != bytes(BLOCK):
                yield BadSample("is damaged" if len(rest) == BLOCK else "is cut off")
    except tarfile.ReadError as error:
        if path.stat().st_size and "unexpected end" in str(error):
            yield BadSample("is cut off")
            return
        yield BadSample(f"is not a tar file, or is cut off ({error}),")
    except OSError as error:
        raise UserError(f"data.path: '{path}' cannot be read ({error.strerror or error})") from None
