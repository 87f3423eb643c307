"""Whether the bytes of a checkpoint are those that were written.

Every tensor has a CRC-32 for each block of its bytes, made while they were written. A read that covers a whole stored
tensor is checked as it is read; one of a part reads the blocks that it touches first, each of them once. CRC-32 (as in
zlib) costs about 0.4 s a GB and finds every change of up to 32 bits in a row and all but one in 4 billion of others.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

from torch import Tensor

from engine.checkpoint.headers import TensorInfo, read_header
from engine.checkpoint.index import Part, Shape
from engine.checkpoint.tensor_file import DTYPES, blocks, host_bytes
from engine.errors import UserError


class Verifier:
    """Checks what is read from one checkpoint folder. UserError naming file and tensor where the bytes have changed."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.folder, self.block_bytes = folder, block_bytes
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._seen: set[tuple[str, str, int]] = set()

    def whole(self, part: Part, key: str, tensor: Tensor) -> None:
        """The tensor of a part that was read as a whole."""
        if part.checksums:
            found = [zlib.crc32(block) for block in blocks(host_bytes(tensor), self.block_bytes)]
            self._compare(part, key, found, 0)

    def rectangle(self, part: Part, key: str, offset: Shape, extent: Shape) -> None:
        """The blocks that hold a rectangle of a part, read from the file where they were not yet."""
        if not part.checksums or not math.prod(extent):
            return
        info = self._info(part.file, key)
        item, size = DTYPES[info.dtype].itemsize, math.prod(part.extent)
        last = tuple(o + e - 1 for o, e in zip(offset, extent, strict=True))
        first_byte, end_byte = position(offset, part.extent) * item, (position(last, part.extent) + 1) * item
        touched = range(first_byte // self.block_bytes, -(-end_byte // self.block_bytes))
        unseen = [number for number in touched if (part.file, key, number) not in self._seen]
        with (self.folder / part.file).open("rb") as file:
            for number in unseen:
                begin = number * self.block_bytes
                file.seek(info.begin + begin)
                data = file.read(min(self.block_bytes, size * item - begin))
                self._compare(part, key, [zlib.crc32(data)], number)
                self._seen.add((part.file, key, number))

    def _info(self, file: str, key: str) -> TensorInfo:
        if file not in self._headers:
            self._headers[file] = read_header(self.folder / file)
        return self._headers[file][key]

    def _compare(self, part: Part, key: str, found: list[int], first: int) -> None:
        if list(part.checksums[first : first + len(found)]) != found:
            kind, name = key.split("|")[:2]
            raise UserError(
                f"damaged checkpoint: {self.folder / part.file}: the bytes of {kind} '{name}' are not those that were "
                "written; take an earlier checkpoint, or a copy of this one"
            )


def position(offset: Shape, shape: Shape) -> int:
    """Where the element at `offset` of a tensor of this shape lies in row-major order."""
    at = 0
    for index, size in zip(offset, shape, strict=True):
        at = at * size + index
    return at
