"""Record formats give the samples that their own libraries read, in that order, and say what is wrong with bad ones."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from engine.data.braces import braces, named_paths
from engine.data.check import check_paths
from engine.data.corpus import open_corpus
from engine.data.sources import BadSample, BadSamples
from engine.errors import UserError
from engine.schema import Data

TEXTS = ["", "a", "né \U0001f600", "line one\nline two\n", "x" * 200, "b", "  ", "0123", "漢字", "last"]


def texts(data: Data, tmp_path: Path) -> list[str]:
    check_paths(data)
    corpus = open_corpus(data, tmp_path / "cache")
    return [corpus.read(i) for i in range(len(corpus))]


def settings(kind: str, path: Path | str, **more) -> Data:
    return Data(name=kind, path=str(path), **({"held_out": 0.0} | more))


# Parquet


def write_parquet(path: Path, values: list, groups: int = 3, column: str = "text") -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": range(len(values)), column: values}), path, row_group_size=groups)
    return path


def test_parquet_is_read_as_pyarrow_reads_it(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "data"
    folder.mkdir()
    for name, part in (("b", TEXTS[:7]), ("a", TEXTS[7:8]), ("c", TEXTS[8:])):  # groups of 3, 3, 1; 1; 2
        write_parquet(folder / f"{name}.parquet", part)
    theirs = [v for f in sorted(folder.iterdir()) for v in pq.read_table(f).column("text").to_pylist()]
    assert texts(settings("parquet", folder), tmp_path) == theirs
    corpus = open_corpus(settings("parquet", folder), tmp_path)
    assert corpus.shards.tolist() == [0, 1, 4, 7, 8]
    assert [corpus.read(i) for i in (9, 0, 5, 9)] == [theirs[i] for i in (9, 0, 5, 9)]


def test_parquet_values_that_are_no_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["good", None])
    corpus = open_corpus(settings("parquet", path), tmp_path)
    with pytest.raises(BadSample, match="null under 'text'"):
        corpus.read(1)
    assert corpus.where(1) == f"{path}: sample 1"


# datasets folders


def test_a_datasets_folder_is_read_as_datasets_reads_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    table.save_to_disk(str(tmp_path / "plain"), num_shards=3)
    table.shuffle(seed=3).select(range(7)).save_to_disk(str(tmp_path / "mixed"))
    parts = datasets.DatasetDict({"train": table.select([1, 2]), "test": table.select([3])})
    parts.save_to_disk(str(tmp_path / "parts"))
    for name in ("plain", "mixed"):
        theirs = list(datasets.load_from_disk(str(tmp_path / name))["text"])
        assert texts(settings("datasets", tmp_path / name), tmp_path) == theirs
    assert texts(settings("datasets", tmp_path / "parts"), tmp_path) == TEXTS[1:3]
    assert texts(settings("datasets", tmp_path / "parts", split="test"), tmp_path) == TEXTS[3:4]
    assert texts(settings("datasets", f"{tmp_path}/parts,{tmp_path}/plain"), tmp_path) == [*TEXTS[1:3], *TEXTS]
    with pytest.raises(UserError, match=r"data\.split=dev.*its splits are test, train"):
        check_paths(settings("datasets", tmp_path / "parts", split="dev"))
    with pytest.raises(UserError, match=r"no column 'txt' \(its columns: text, id\)"):
        check_paths(settings("datasets", tmp_path / "plain", field="txt"))
    with pytest.raises(UserError, match=r"holds no state\.json"):
        check_paths(settings("datasets", tmp_path))


# WebDataset


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def shard(number: int, values: list[str]) -> list[tuple[str, bytes]]:
    members: list[tuple[str, bytes]] = []
    for i, text in enumerate(values):
        key = f"dir.{number}/k{number}_{i}"  # a dot in a folder's name splits nothing
        members += [(f"{key}.json", json.dumps({"caption": text}).encode()), (f"{key}.TXT", text.encode())]
    return members


def test_shards_are_read_as_webdataset_reads_them(tmp_path):
    wds = pytest.importorskip("webdataset")
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(folder / "s-000.tar", [("__meta__", b"x"), *shard(0, TEXTS[:4]), ("name_without_extension", b"x")])
    write_tar(folder / "s-001.tar", shard(1, TEXTS[4:5]))
    write_tar(folder / "s-002.tar", [*shard(2, TEXTS[5:]), ("long/" + "n" * 150 + ".a.txt", b"dots"), ("z.txt", b"z")])
    library = wds.WebDataset([str(p) for p in sorted(folder.iterdir())], shardshuffle=False, empty_check=False)
    samples = list(library)
    data = settings("webdataset", folder, field="txt", max_bad_samples=2)
    corpus = open_corpus(data, tmp_path / "cache")
    mine = []
    for i in range(len(corpus)):
        try:
            mine.append(corpus.read(i).encode())
        except BadSample as why:
            assert "no part 'txt'" in str(why)
            mine.append(None)
    assert mine == [sample.get("txt") for sample in samples] and mine.count(None) == 1 and mine[-1] == b"z"
    assert texts(settings("webdataset", folder / "s-{000..001}.tar", field="json:caption"), tmp_path) == TEXTS[:5]
    assert corpus.shards.tolist() == [0, 4, 5]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", ["a"]),
        ("s-{08..11}.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}-{00..01}-{x,y}", [f"{a}-0{n}-{x}" for a in "ab" for n in "01" for x in "xy"]),
        ("s{a,b{0..1}}", ["sa", "sb0", "sb1"]),
        ("{{a,b},c}{,d}", ["a", "ad", "b", "bd", "c", "cd"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{a}", ["{a}"]),
        ("../up/s-{7..7}", ["../up/s-7"]),
    ],
)
def test_braces(pattern, names):
    assert braces(pattern) == names
    braceexpand = pytest.importorskip("braceexpand")
    assert braces(pattern) == list(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("s-{000..003.tar", "a '{' without its '}'"),
        ("s-000..003}.tar", "a '}' without its '{'"),
        ("{a,b}{c", "a '{' without its '}'"),
        ("s-{0..x}", "{0..x}, which counts no whole numbers"),
        ("s-{0...3}", "{0...3}, which counts no whole numbers"),
        ("{0..9..0}", "a step of 0"),
        ("{0..99999}{0..99999}", "more than 1000000 files"),
    ],
)
@pytest.mark.parametrize("kind", ["webdataset", "jsonl", "datasets"])
def test_malformed_braces_are_one_line(kind, pattern, words, tmp_path):
    with pytest.raises(UserError) as caught:
        check_paths(settings(kind, tmp_path / pattern))
    assert words in str(caught.value) and "\n" not in str(caught.value) and pattern in str(caught.value)


def test_lists_and_braces_of_any_kind_of_file(tmp_path):
    for name in ("a0", "a1", "b0", "c,d", "{x}"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert texts(settings("text", f"{tmp_path}/{{a,b}}0.txt, {tmp_path}/a1.txt"), tmp_path) == ["a0", "b0", "a1"]
    assert texts(settings("text", f"{tmp_path}/c,d.txt"), tmp_path) == ["c,d"]  # under its literal name
    assert texts(settings("text", f"{tmp_path}/{{x}}.txt"), tmp_path) == ["{x}"]
    assert named_paths("~nobody{1,2}/x") == ["~nobody1/x", "~nobody2/x"]


# Energon


@pytest.mark.slow
def test_a_prepared_dataset_is_read_as_energon_reads_it(tmp_path):
    energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed (extra energon)")
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    folder = tmp_path / "data"
    folder.mkdir()
    for number, part in enumerate((TEXTS[1:4], TEXTS[4:5], TEXTS[5:])):
        write_tar(folder / f"s_{number}.tar", [(n.lower().replace("dir.", "d"), c) for n, c in shard(number, part)])
    WebdatasetPreparator.prepare_dataset(
        folder, ["s_{0..2}.tar"], split_parts_ratio=[("train", 1.0)], shuffle_seed=3, workers=1
    )
    kind = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(f"{kind}field_map:\n  text: txt\n")
    split = folder / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("exclude: []", "exclude:\n- s_0.tar/d0/k0_1"))
    worker = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    theirs = energon.get_loader(energon.get_val_dataset(folder, split_part="train", batch_size=1, worker_config=worker))
    expected = [text for batch in theirs for text in batch.text]
    assert sorted(expected) == sorted(TEXTS[1:2] + TEXTS[3:])
    assert texts(settings("energon", folder), tmp_path) == expected
    with pytest.raises(UserError, match=r"data\.split=test.*its splits are train"):
        check_paths(settings("energon", folder, split="test"))


# What is wrong with data


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


BAD_SHARDS = {
    "no bytes": (lambda p: cut(write_tar(p, shard(0, ["a"])), 0), r"is empty \(0 bytes\)"),
    "no sample": (lambda p: write_tar(p, []), "holds no sample; name webdataset data that has some"),
    "cut in a header": (lambda p: cut(write_tar(p, shard(0, ["a", "b"])), 1024 + 200), "is cut off after 0 whole"),
    "cut in a part": (
        lambda p: cut(write_tar(p, shard(0, ["a", "y" * 900])), 512 * 8 + 100),
        "is cut off after 1 whole",
    ),
    "cut between parts": (lambda p: cut(write_tar(p, shard(0, ["a", "b"])), 512 * 4), "is cut off after"),
    "garbage behind": (
        lambda p: p.write_bytes(write_tar(p, shard(0, ["a"])).read_bytes()[:2048] + b"x" * 512),
        "damaged",
    ),
    "a part twice": (lambda p: write_tar(p, [("a.txt", b"1"), ("a.txt", b"2")]), "names 'a.txt' twice"),
    "no tar": (lambda p: p.write_bytes(b"hello" * 300), "is not a tar file"),
    "less than a header": (lambda p: cut(write_tar(p, shard(0, ["a"])), 100), "or is cut off .*mend it, or skip more"),
    "packed": (lambda p: p.write_bytes(b"\x1f\x8b" + bytes(600)), r"is compressed \(gzip\)"),
    "another part": (lambda p: write_tar(p, [("a.jpg", b"1")]), r"have no part 'txt' \(their parts: jpg\)"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_a_bad_shard_is_one_line(case, tmp_path):
    make, words = BAD_SHARDS[case]
    make(tmp_path / "s.tar")
    data = settings("webdataset", tmp_path / "s.tar", field="txt")
    with pytest.raises(UserError, match=words) as caught:
        check_paths(data)
    assert "\n" not in str(caught.value) and str(tmp_path / "s.tar") in str(caught.value)


def test_what_is_whole_of_a_cut_shard_can_be_used(tmp_path):
    write_tar(tmp_path / "s0.tar", shard(0, ["first", "second"]))
    cut(write_tar(tmp_path / "s1.tar", shard(1, ["third", "y" * 900])), 512 * 8 + 100)
    data = settings("webdataset", tmp_path, field="txt", max_bad_samples=1)
    assert texts(data, tmp_path) == ["first", "second", "third"]
    bad = BadSamples(0)
    with pytest.raises(UserError, match=r"s1\.tar: is cut off after 1 whole samples; mend it, or skip"):
        open_corpus(data, tmp_path / "cache", bad)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.write_bytes(b""), r"is empty \(0 bytes\)"),
        (lambda p: p.write_bytes(b"hello"), "is not a Parquet file"),
        (lambda p: cut(write_parquet(p, TEXTS), 300), "it is cut off"),
        (lambda p: write_parquet(p, TEXTS, column="body"), r"no column 'text' \(its columns: id, body\)"),
        (lambda p: write_parquet(p, []), r"^data\.path=.*: holds no row; name parquet data that has some"),
    ],
)
def test_a_bad_table_is_one_line(make, words, tmp_path):
    make(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=words) as caught:
        check_paths(settings("parquet", tmp_path))
    assert "\n" not in str(caught.value)


def half(path: Path) -> Path:
    return cut(path, path.stat().st_size // 2)


def half_a_folder(path: Path) -> None:
    full_folder(path)
    half(next(path.glob("*.arrow")))
    (path / "dataset_info.json").write_text("{")


@pytest.mark.parametrize(
    ("kind", "damaged", "full"),
    [
        ("parquet", lambda p: half(write_parquet(p, ["x", "y"])), lambda p: write_parquet(p, ["a", "b"])),
        ("datasets", half_a_folder, lambda p: full_folder(p)),
        ("webdataset", lambda p: cut(write_tar(p, [("x.text", b"x")]), 300), None),
        ("webdataset", lambda p: cut(write_tar(p, [("x.text", b"x" * 700)]), 900), None),
    ],
)
def test_a_damaged_file_is_a_bad_sample_in_every_format(kind, damaged, full, tmp_path):
    a, b = (tmp_path / name for name in ("a.tar", "b.tar"))
    damaged(a)
    (full or (lambda p: write_tar(p, [("a.text", b"a"), ("b.text", b"b")])))(b)
    both = settings(kind, f"{a},{b}")
    with pytest.raises(UserError, match=f"^{a}: is .*; mend it, or skip more of them with data.max_bad_samples=1, say"):
        check_paths(both)
    both.max_bad_samples = 1
    check_paths(both)
    assert texts(both, tmp_path) == ["a", "b"]
    alone = settings(kind, a, max_bad_samples=9)
    with pytest.raises(UserError, match=rf"holds no (row|sample); .*; 1 bad sample skipped: .* no use .*{a}: is"):
        check_paths(alone)


def test_a_damaged_row_group_is_skipped_row_by_row(tmp_path):
    """Two row groups of one row; the second one's bytes are overwritten, and its checksum tells."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a" * 99, "b" * 99]}), path, row_group_size=1, compression="zstd")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    begin, raw = column.dictionary_page_offset or column.data_page_offset, bytearray(path.read_bytes())
    raw[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(raw)
    corpus = open_corpus(settings("parquet", path), tmp_path / "cache")
    assert corpus.read(0) == "a" * 99
    with pytest.raises(BadSample, match="lies in a damaged part of its file"):
        corpus.read(1)


def empty_folder(path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": []}, features=datasets.Features(text=datasets.Value("string"))).save_to_disk(
        path
    )


def full_folder(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(path)


@pytest.mark.parametrize(
    ("kind", "empty", "full", "what"),
    [
        ("parquet", lambda p: write_parquet(p, []), lambda p: write_parquet(p, ["a", "b"]), "row"),
        ("datasets", empty_folder, full_folder, "row"),
        (
            "webdataset",
            lambda p: write_tar(p, []),
            lambda p: write_tar(p, [("a.text", b"a"), ("b.text", b"b")]),
            "sample",
        ),
    ],
)
def test_an_empty_file_among_others_is_a_bad_sample_and_alone_it_is_no_data(kind, empty, full, what, tmp_path):
    a, b = (tmp_path / name for name in ("a.tar", "b.tar"))
    empty(a)
    full(b)
    with pytest.raises(UserError, match=f"^data\\.path={a}: holds no {what}; name {kind} data that has some"):
        check_paths(settings(kind, a, max_bad_samples=9))
    both = settings(kind, f"{a},{b}")
    with pytest.raises(UserError, match=f"^{a}: holds no {what}; mend it, or skip more of them"):
        check_paths(both)
    both.max_bad_samples = 1
    assert texts(both, tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda p: None, r"not a prepared Energon dataset \(it has no \.nv-meta\)"),
        (lambda p: (p / ".nv-meta").mkdir(), r"has no \.info\.json"),
        (
            lambda p: [
                (p / ".nv-meta").mkdir(),
                (p / ".nv-meta" / ".info.json").write_text("{}"),
                (p / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [s.tar]}\n"),
                (p / ".nv-meta" / "dataset.yaml").write_text("sample_loader: sample_loader.py:load\n"),
                write_tar(p / "s.tar", [("a.txt", b"1")]),
            ],
            "names Python code .sample_loader., which is not run",
        ),
    ],
)
def test_folders_that_are_no_energon_dataset(prepare, words, tmp_path):
    (tmp_path / "d").mkdir()
    prepare(tmp_path / "d")
    with pytest.raises(UserError, match=words):
        check_paths(settings("energon", tmp_path / "d"))


def test_the_split_is_the_same_whatever_holds_the_documents(tmp_path):
    """By the file's name and the number in it, so that a corpus that grows keeps what it held out."""
    many = [f"document {i}" for i in range(500)]
    few = open_corpus(settings("parquet", write_parquet(tmp_path / "a.parquet", many[:300], 7), held_out=0.1), tmp_path)
    more = open_corpus(settings("parquet", write_parquet(tmp_path / "a.parquet", many, 50), held_out=0.1), tmp_path)
    assert np.array_equal(few.held_out, more.held_out[:300]) and 10 < few.held_out.sum() < 60
