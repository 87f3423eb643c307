"""Bytes that have changed since they were written are noticed, wherever they are and however they are read."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest
import torch

from engine.backends.base import Slice
from engine.checkpoint import sharded, tensor_file
from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card
from engine.checkpoint.checksums import position
from engine.checkpoint.headers import read_header
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.sharded import save_sharded
from engine.errors import UserError

SHAPE = (37, 5, 3)
BLOCK = 64  # bytes: sixteen elements, so that blocks end inside rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(sharded, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(tensor_file.blocks, "__defaults__", (BLOCK,))
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    whole = torch.arange(37.0 * 15).reshape(SHAPE)
    parts = [Slice("param", "w", SHAPE, (0, 0, 0), whole[:20]), Slice("param", "w", SHAPE, (20, 0, 0), whole[20:])]
    card = Card("qwen3", texts={"config.json": "{}"}, tokenizer=tmp_path / "tok")
    return save_sharded(tmp_path / "step_00000001", parts, {"step": 1}, Alone(), card)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_checksums_are_those_of_zlib(folder: Path) -> None:
    raw = torch.arange(37.0 * 15)[: 20 * 15].numpy().tobytes()
    part = ShardedSource(folder).index.tensors["param"]["w"].parts[0]
    assert list(part.checksums) == [zlib.crc32(raw[at : at + BLOCK]) for at in range(0, len(raw), BLOCK)]


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_found_by_the_reads_that_touch_it(folder: Path, seed: int) -> None:
    """Whatever the rectangle: exactly the reads whose elements share a block with the bit are refused."""
    dice = random.Random(seed)
    offset = tuple(dice.randrange(n) for n in SHAPE)
    extent = tuple(dice.randint(1, n - o) for n, o in zip(SHAPE, offset, strict=True))
    flipped = tuple(dice.randrange(n) for n in SHAPE)
    first_row = 0 if flipped[0] < 20 else 20
    info = read_header(folder / "rank_00000_0.safetensors")[f"param|w|{first_row},0,0"]
    index = (flipped[0] - first_row) * 15 + flipped[1] * 3 + flipped[2]
    flip(folder / "rank_00000_0.safetensors", info.begin + 4 * index + dice.randrange(4))
    source = ShardedSource(folder)
    inside = all(o <= f < o + e for f, o, e in zip(flipped, offset, extent, strict=True))
    try:
        got = source.read("param", "w", SHAPE, offset, extent)
    except UserError as error:
        assert "rank_00000_0.safetensors" in str(error) and "param 'w'" in str(error) and "\n" not in str(error)
    else:
        assert not inside
        whole = torch.arange(37.0 * 15).reshape(SHAPE)
        assert torch.equal(got, whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))])
    with pytest.raises(UserError, match="not those that were written"):
        source.read("param", "w", SHAPE, (0, 0, 0), SHAPE)


@pytest.mark.parametrize("name", ["state.json", "config.json", "tokenizer/tokenizer.json", "index.json"])
def test_the_other_files_are_checked_too(folder: Path, name: str) -> None:
    path = folder / name
    path.write_text(path.read_text().replace("1", "3", 1) if name in ("state.json", "index.json") else "{ }")
    with pytest.raises(UserError, match=f"damaged checkpoint: .*{name}"):
        ShardedSource(folder)
    if name != "index.json":
        path.unlink()
        with pytest.raises(UserError, match=f"{name}: missing"):
            ShardedSource(folder)


def test_checkpoints_of_the_first_format_are_read(folder: Path) -> None:
    """They have no checksums."""
    index = json.loads((folder / "index.json").read_text())
    for key in ("crc32", "small", "block_bytes"):
        del index[key]
    index["schema_version"] = 1
    for part in index["tensors"]["param"]["w"]["parts"]:
        del part[3]
    (folder / "index.json").write_text(json.dumps(index))
    whole = torch.arange(37.0 * 15).reshape(SHAPE)
    assert torch.equal(ShardedSource(folder).read("param", "w", SHAPE, (0, 0, 0), SHAPE), whole)
    assert torch.equal(ShardedSource(folder).read("param", "w", SHAPE, (3, 1, 0), (30, 2, 3)), whole[3:33, 1:3])


def test_position() -> None:
    assert position((2, 1, 0), SHAPE) == 33
    assert position((), ()) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, value: float) -> None:
    good = save_sharded(
        tmp_path / "step_00000001", [Slice("param", "w", (2,), (0,), torch.ones(2))], {}, Alone(), finite=True
    )
    bad = torch.ones(3, 4)
    bad[2, 3] = value
    large = torch.full((4,), 3e38)  # whose sum has no place in fp32
    parts = [Slice("exp_avg", "v", (4,), (0,), large), Slice("param", "w", (3, 4), (0, 0), bad)]
    with pytest.raises(UserError, match=r"param 'w' holds values that are not finite.*the last checkpoint is"):
        save_sharded(tmp_path / "step_00000002", parts, {}, Alone(), finite=True)
    assert list(tmp_path.iterdir()) == [good]
    save_sharded(tmp_path / "step_00000002", parts[:1], {}, Alone(), finite=True)
    save_sharded(tmp_path / "step_00000003", parts, {}, Alone())  # job=convert keeps what it is given
