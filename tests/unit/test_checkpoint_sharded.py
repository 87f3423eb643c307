"""The checkpoint format: any tiling written by any ranks is read back bit for bit, and failures leave things whole."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint import share as share_module
from engine.checkpoint import tensor_file
from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card, read_card
from engine.checkpoint.index import Part, overlapping
from engine.checkpoint.paths import complete, find_checkpoint, newest, step_folder
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.sharded import save_sharded
from engine.errors import UserError
from tests.unit.thread_ranks import on_ranks


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits, so that NaNs, infinities and subnormal numbers occur."""
    count = max(1, torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size())
    raw = torch.frombuffer(bytearray(dice.randbytes(count)), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    return raw[: torch.Size(shape).numel() * dtype.itemsize].clone().view(dtype).reshape(shape)


def tiles(dice: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A random tiling into rectangles by cutting again and again; (offset, extent) of each."""
    todo, done = [((0,) * len(shape), shape)], []
    while todo:
        offset, extent = todo.pop()
        cuttable = [d for d, n in enumerate(extent) if n > 1]
        if not cuttable or dice.random() < 0.3:
            done.append((offset, extent))
            continue
        d = dice.choice(cuttable)
        at = dice.randrange(1, extent[d])
        low, high = list(extent), list(extent)
        low[d], high[d] = at, extent[d] - at
        moved = list(offset)
        moved[d] += at
        todo += [(offset, tuple(low)), (tuple(moved), tuple(high))]
    return done


def cut(tensor: Tensor, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


SHAPES = [(7, 5), (1,), (13,), (), (0, 4), (3, 0), (4, 3, 5), (1, 1), (64, 33)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.int8]


@pytest.mark.parametrize("seed", range(6))
def test_any_tiling_reads_back_bit_exactly(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    world = dice.choice([1, 2, 3, 4])
    whole = {
        (dice.choice(["param", "exp_avg"]), f"layer.{i}.weight"): random_tensor(dice, shape, dice.choice(DTYPES))
        for i, shape in enumerate(SHAPES * 2)
    }
    shares: list[list[Slice]] = [[] for _ in range(world)]
    for (kind, name), tensor in whole.items():
        for offset, extent in tiles(dice, tuple(tensor.shape)):
            part = Slice(kind, name, tuple(tensor.shape), offset, cut(tensor, offset, extent))
            shares[dice.randrange(world)].append(part)

    def save(comm: Any) -> Path:
        return save_sharded(tmp_path / "step_00000001", iter(shares[comm.rank]), {"step": 1}, comm, max_file_bytes=900)

    assert on_ranks(world, save) == [tmp_path / "step_00000001"] * world
    source = ShardedSource(tmp_path / "step_00000001")
    assert {(k, n): s for k, n, s in source.tensors()} == {key: tuple(t.shape) for key, t in whole.items()}
    for (kind, name), tensor in whole.items():
        shape = tuple(tensor.shape)
        requests = [((0,) * len(shape), shape)]
        for _ in range(8):
            low = [dice.randint(0, n) for n in shape]
            high = [dice.randint(a, n) for a, n in zip(low, shape, strict=True)]
            requests.append((tuple(low), tuple(h - a for a, h in zip(low, high, strict=True))))
        for offset, extent in requests:
            got = source.read(kind, name, shape, offset, extent)
            assert got.dtype == tensor.dtype and got.shape == extent
            assert bits(got) == bits(cut(tensor, offset, extent))
    assert source.state() == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def rows(name: str, tensor: Tensor, cuts: list[int], kind: str = "param") -> Iterator[Slice]:
    """Slices of a matrix cut before the given rows."""
    for low, high in itertools.pairwise([0, *cuts, tensor.shape[0]]):
        offset = (low,) + (0,) * (tensor.dim() - 1)
        yield Slice(kind, name, tuple(tensor.shape), offset, tensor[low:high])


def save_one(folder: Path, tensor: Tensor | None = None, **more: Any) -> Path:
    tensor = torch.arange(12.0).reshape(6, 2) if tensor is None else tensor
    return save_sharded(folder, rows("w", tensor, [2]), {"step": 1}, Alone(), **more)


def test_views_of_shared_memory_and_strides(tmp_path: Path) -> None:
    """Megatron keeps parameters as views of one buffer; a transposed view has no rows in memory order."""
    buffer = torch.arange(24.0)
    parts = [
        Slice("param", "a", (3, 4), (0, 0), buffer[:12].view(3, 4)),
        Slice("param", "b", (4, 3), (0, 0), buffer[12:].view(3, 4).t()),
    ]
    source = ShardedSource(save_sharded(tmp_path / "step_00000001", parts, {}, Alone()))
    assert source.read("param", "a", (3, 4), (1, 1), (1, 2)).tolist() == [[5.0, 6.0]]
    assert source.read("param", "b", (4, 3), (1, 0), (1, 3)).tolist() == [[13.0, 17.0, 21.0]]


def test_many_tensors_outgrow_one_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file.TensorFile.__init__, "__defaults__", (1024, None))
    parts = [Slice("param", f"blocks.{i}.weight", (1,), (0,), torch.tensor([float(i)])) for i in range(50)]
    source = ShardedSource(save_sharded(tmp_path / "step_00000001", parts, {}, Alone()))
    assert len(source.index.files) > 3
    assert [source.read("param", f"blocks.{i}.weight", (1,), (0,), (1,)).item() for i in range(50)] == list(range(50))


def test_missing_and_misshapen(tmp_path: Path) -> None:
    source = ShardedSource(save_one(tmp_path / "step_00000001"))
    with pytest.raises(UserError, match="holds no exp_avg 'w'"):
        source.read("exp_avg", "w", (6, 2), (0, 0), (6, 2))
    with pytest.raises(UserError, match="holds no param 'v'"):
        source.read("param", "v", (6, 2), (0, 0), (6, 2))
    with pytest.raises(UserError, match=r"shape \(6, 2\), the model needs \(2, 6\)"):
        source.read("param", "w", (2, 6), (0, 0), (2, 6))


def test_slices_must_add_up(tmp_path: Path) -> None:
    half = [Slice("param", "w", (4, 2), (0, 0), torch.zeros(2, 2))]
    with pytest.raises(ValueError, match="param 'w'"):
        save_sharded(tmp_path / "step_00000001", half, {}, Alone())
    assert list(tmp_path.iterdir()) == []


def test_overlap() -> None:
    a, b, c = Part((0, 0), (2, 2), "f"), Part((1, 1), (2, 2), "f"), Part((0, 2), (2, 2), "f")
    assert overlapping([a, c]) is None
    assert overlapping([a, c, b]) is not None
    assert overlapping([Part((), (), "f"), Part((), (), "f")]) is not None


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = save_one(tmp_path / "step_00000001")
    path = folder / "rank_00000_0.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"rank_00000_0\.safetensors.*truncated"):
        ShardedSource(folder)


def test_damaged_header_is_named(tmp_path: Path) -> None:
    folder = save_one(tmp_path / "step_00000001")
    path = folder / "rank_00000_0.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(UserError, match=r"rank_00000_0\.safetensors.*damaged"):
        ShardedSource(folder).read("param", "w", (6, 2), (0, 0), (6, 2))


def change(path: Path, edit: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "file outside": lambda d: d["files"].update({"../x.safetensors": 1}),
    "absolute file": lambda d: d["files"].update({"/etc/passwd": 1}),
    "part in an unlisted file": lambda d: d["tensors"]["param"]["w"]["parts"][0].__setitem__(2, "y.safetensors"),
    "negative offset": lambda d: d["tensors"]["param"]["w"]["parts"][0].__setitem__(0, [-1, 0]),
    "huge shape": lambda d: d["tensors"]["param"]["w"].update(shape=[1 << 40, 1 << 40]),
    "part beyond": lambda d: d["tensors"]["param"]["w"]["parts"][1].__setitem__(1, [5, 2]),
    "overlap": lambda d: d["tensors"]["param"]["w"]["parts"].append(d["tensors"]["param"]["w"]["parts"][0]),
    "other rank": lambda d: d["tensors"]["param"]["w"]["parts"][0].__setitem__(0, [0]),
    "floats": lambda d: d["tensors"]["param"]["w"].update(shape=[6.0, 2]),
    "booleans": lambda d: d["tensors"]["param"]["w"].update(shape=[6, True]),
    "dtype": lambda d: d["tensors"]["param"]["w"].update(dtype="Q4"),
    "no tensors": lambda d: d.pop("tensors"),
    "tensors a list": lambda d: d.update(tensors=[]),
    "newer version": lambda d: d.update(schema_version=99),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_index_is_not_trusted(tmp_path: Path, case: str) -> None:
    folder = save_one(tmp_path / "step_00000001")
    change(folder / "index.json", HOSTILE[case])
    with pytest.raises(UserError, match=r"index\.json"):
        ShardedSource(folder)


def test_index_that_lies_about_a_file(tmp_path: Path) -> None:
    folder = save_one(tmp_path / "step_00000001")
    change(folder / "index.json", lambda d: d["tensors"]["param"]["w"].update(dtype="BF16") or d.pop("crc32"))
    with pytest.raises(UserError, match="not of the dtype"):
        ShardedSource(folder).read("param", "w", (6, 2), (0, 0), (6, 2))


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index\.json: no such file"):
        ShardedSource(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        ShardedSource(tmp_path)


class FullDisk(tensor_file.TensorFile):
    """A disk that takes one tensor and refuses the next."""

    def add(self, key: str, tensor: Tensor) -> list[int]:
        if self.data_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().add(key, tensor)


def test_full_disk_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hears of it, the collective iteration is finished, and the earlier checkpoint is whole."""
    tensor = torch.arange(24.0).reshape(12, 2)
    first = save_one(tmp_path / "step_00000001", tensor)
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    drawn = [0, 0]

    class SometimesFull(FullDisk):
        def add(self, key: str, tensor: Tensor) -> list[int]:
            return (FullDisk if "rank_00001" in self.path.name else tensor_file.TensorFile).add(self, key, tensor)

    def share(rank: int) -> Iterator[Slice]:
        for row in range(rank, 12, 2):
            drawn[rank] += 1
            yield Slice("param", "w", (12, 2), (row, 0), tensor[row : row + 1])

    monkeypatch.setattr(share_module, "TensorFile", SometimesFull)
    results = on_ranks(2, lambda comm: save_sharded(tmp_path / "step_00000002", share(comm.rank), {}, comm))
    for error in results:
        assert isinstance(error, UserError)
        assert "no room" in str(error) and "step_00000002" in str(error) and "iB are free" in str(error)
        assert f"the last checkpoint is {first}" in str(error)
    assert drawn == [6, 6]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert {p.name: p.read_bytes() for p in first.iterdir()} == before


def test_a_limit_on_the_size_of_files_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Limited(tensor_file.TensorFile):
        def add(self, key: str, tensor: Tensor) -> list[int]:
            raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(share_module, "TensorFile", Limited)
    with pytest.raises(UserError, match="ulimit -f"):
        save_one(tmp_path / "step_00000001", torch.ones(2, 2))


def test_real_device_without_room() -> None:
    """/dev/full refuses with ENOSPC what a buffered write delivers late: the error comes from close, as on a disk."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    file = tensor_file.TensorFile(Path("/dev/full"))
    with pytest.raises(OSError) as caught:
        file.add("a", torch.zeros(1))
        file.close()
    assert caught.value.errno == errno.ENOSPC
    file.abandon()


def test_estimate_is_checked_before_writing(tmp_path: Path) -> None:
    def never() -> Iterator[Slice]:
        raise AssertionError("nothing may be drawn")
        yield

    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError, match=r"no room.*there is no earlier checkpoint"):
        save_sharded(tmp_path / "step_00000001", never(), {}, Alone(), needed_bytes=free * 2)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_one(tmp_path / "file" / "step_00000001")


def test_a_killed_save_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """A save that dies in the middle leaves a .tmp folder, which the next save removes."""

    def dies() -> Iterator[Slice]:
        yield Slice("param", "w", (4,), (0,), torch.zeros(2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_sharded(tmp_path / "step_00000003", dies(), {}, Alone())
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000003.tmp"]
    save_one(tmp_path / "step_00000004")
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def test_same_step_again_replaces(tmp_path: Path) -> None:
    save_one(tmp_path / "step_00000001")
    save_one(tmp_path / "step_00000001", torch.full((6, 2), 5.0))
    source = ShardedSource(tmp_path / "step_00000001")
    assert source.read("param", "w", (6, 2), (3, 1), (1, 1)).item() == 5.0
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


class Killed(BaseException):
    """What no code catches, as it catches no SIGKILL."""


class Mortal:
    """Counts the operations on folders of this process, and kills it before the `last` of them, or in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.left, self.dead = last, False
        rename, remove, sync = Path.rename, shutil.rmtree, os.fsync
        monkeypatch.setattr(Path, "rename", lambda path, target: self.live() and rename(path, target))
        monkeypatch.setattr(os, "fsync", lambda handle: self.live() and sync(handle))

        def rmtree(path: Path, ignore_errors: bool = False) -> None:
            self.live()
            for number, file in enumerate(sorted(Path(path).rglob("*.*"))):
                if number == 1:
                    self.live()
                file.unlink()
            remove(path, ignore_errors=ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", rmtree)

    def live(self) -> bool:
        self.left -= 1
        if self.left < 0 or self.dead:
            self.dead = True
            raise Killed
        return True


def test_a_kill_at_any_moment_of_a_replacement_loses_no_step(tmp_path: Path) -> None:
    """Step 2 is written again, with fives for twos: afterwards step 2 is there, and whole, whenever the kill came."""
    points = 0
    for last in itertools.count():
        root = tmp_path / str(last)
        for step in (1, 2):
            save_one(step_folder(root, step), torch.full((6, 2), float(step)))
        with pytest.MonkeyPatch.context() as patch:
            mortal = Mortal(patch, last)
            try:
                save_one(step_folder(root, 2), torch.full((6, 2), 5.0))
            except Killed:
                points += 1
        found = complete(root / "checkpoints")
        assert list(found) == [1, 2] and newest(root) == found[2], last
        assert find_checkpoint(step_folder(root, 2)) == find_checkpoint(root) == found[2]
        values = ShardedSource(found[2]).read("param", "w", (6, 2), (0, 0), (6, 2))
        assert set(values.flatten().tolist()) in ({2.0}, {5.0}), last
        if last % 3 == 0:  # what comes next finds no obstacle and leaves nothing behind
            save_one(step_folder(root, 2), torch.full((6, 2), 7.0))
        save_one(step_folder(root, 3))
        names = {path.name.removesuffix(".replaced") for path in (root / "checkpoints").iterdir()}
        assert names == {f"step_0000000{step}" for step in (1, 2, 3)} and list(complete(root / "checkpoints")) == [
            1,
            2,
            3,
        ]
        if not mortal.dead:
            break
    assert points > 8


def test_card(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors", "secret.txt"):
        (tokenizer / name).write_text(name)
    card = Card("qwen3", {"w": "BF16"}, {"head": "w"}, {"config.json": '{"a": 1}'}, tokenizer)
    folder = save_one(tmp_path / "step_00000001", card=card)
    assert sorted(p.name for p in (folder / "tokenizer").iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (folder / "config.json").read_text() == '{"a": 1}'
    again = read_card(folder)
    assert (again.family, again.stored, again.aliases, again.texts) == (
        card.family,
        card.stored,
        card.aliases,
        card.texts,
    )
    assert again.tokenizer == folder / "tokenizer"
