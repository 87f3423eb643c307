"""Rectangles of quantised matrices as numbers: of the stored tensors only the blocks that they touch are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.checkpoint.headers import Shape
from engine.checkpoint.quantised import FP8, MXFP4, NIBBLES, Quantised

# (stored name, offset, extent) -> that part of the stored tensor
Read = Callable[[str, Shape, Shape], Tensor]

# e2m1 by its four bits: sign, two of exponent, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127


def rectangle(one: Quantised, offset: Shape, extent: Shape, read: Read) -> Tensor:
    """matrix[offset : offset + extent]: FP8 in fp32, the product of value and scale; the others in bf16."""
    if 0 in extent:
        return torch.empty(extent)
    if one.kind == MXFP4:
        return _mxfp4(one, offset, extent, read)
    scales = _scales(one, offset, extent, read)
    if one.kind == FP8:
        return read(one.values, offset, extent).float() * scales
    return (_nibbles(one, offset, extent, read) * scales).to(torch.bfloat16)


def _scales(one: Quantised, offset: Shape, extent: Shape, read: Read) -> Tensor:
    """The scale of each element, fp32."""
    first = tuple(o // b for o, b in zip(offset, one.block, strict=True))
    last = tuple((o + e - 1) // b for o, e, b in zip(offset, extent, one.block, strict=True))
    grid = widened(read(one.scales, first, tuple(b - a + 1 for a, b in zip(first, last, strict=True))))
    for dim, (o, e, b) in enumerate(zip(offset, extent, one.block, strict=True)):
        grid = grid.index_select(dim, torch.arange(o, o + e) // b - o // b)
    return grid


def widened(scales: Tensor) -> Tensor:
    """Scales in fp32; bytes are exponents of two."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(()), scales.int() - E8M0_BIAS)
    return scales.float()


def _nibbles(one: Quantised, offset: Shape, extent: Shape, read: Read) -> Tensor:
    """Signed 4-bit integers as fp32; the first of eight is in the lowest bits, 8 more than it is."""
    (row, column), (rows, columns) = offset, extent
    first, last = column // NIBBLES, (column + columns - 1) // NIBBLES
    words = read(one.values, (row, first), (rows, last - first + 1))
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts & 0xF).flatten(1) - 8
    begin = column - first * NIBBLES
    return numbers[:, begin : begin + columns].float()


def _mxfp4(one: Quantised, offset: Shape, extent: Shape, read: Read) -> Tensor:
    """[..., columns, rows] of what is stored as [..., rows, blocks, 16]; the lower half of a byte comes first."""
    (*before, column, row), (*sizes, columns, rows) = offset, extent
    size = one.block[0]
    first, last = column // size, (column + columns - 1) // size
    place, count = (*before, row, first), (*sizes, rows, last - first + 1)
    blocks = read(one.values, (*place, 0), (*count, size // 2))
    numbers = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.bfloat16)
    # A power of two: exact in bf16, unless it leaves its range.
    scaled = torch.ldexp(table[numbers.int()], read(one.scales, place, count).int().unsqueeze(-1) - E8M0_BIAS)
    begin = column - first * size
    return scaled.flatten(-2)[..., begin : begin + columns].transpose(-1, -2).to(torch.bfloat16)


def to_fp8(matrix: Tensor, block: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and the scale of each block, fp32: its largest magnitude over e4m3's largest number.

    DeepSeek-V3, arXiv 2412.19437, section 3.3. With `power_of_two` scales are rounded up to one, as DeepSeek-V3.1's.
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    rows, columns = matrix.shape
    down, across = (-(-size // part) for size, part in zip(matrix.shape, block, strict=True))
    padded = torch.nn.functional.pad(matrix.float(), (0, across * block[1] - columns, 0, down * block[0] - rows))
    tiles = padded.view(down, block[0], across, block[1])
    scales = tiles.abs().amax((1, 3)) / most
    scales = scales.where(scales > 0, 1.0)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # from a half to 1
        scales = torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int())
    values = (tiles / scales[:, None, :, None]).clamp(-most, most).to(torch.float8_e4m3fn)
    return values.view(down * block[0], across * block[1])[:rows, :columns].contiguous(), scales
