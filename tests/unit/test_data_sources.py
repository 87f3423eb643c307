"""Which files are read, what is said of bad ones, and which documents are held out."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.data import files as files_module
from engine.data.check import check_paths
from engine.data.corpus import Corpus, open_corpus
from engine.data.sources import BadSample, BadSamples, list_files
from engine.errors import UserError
from engine.schema import Data


def texts(data, cache):
    corpus = open_corpus(data, cache)
    return [corpus.read(i) for i in range(len(corpus))]


def test_the_standard_library_is_sorted_and_without_tests():
    files = list_files(Data(name="stdlib"))
    names = [file.identity for file in files]
    assert names == sorted(names, key=Path) and len(names) > 300
    assert {"json/decoder.py", "dataclasses.py", "asyncio/tasks.py"} <= set(names)
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "idle_test"}
    assert not any(skipped & set(Path(name).parts) for name in names)


def test_the_controller_checks_without_torch_or_numpy():
    code = (
        "import sys; from engine.data.check import check_paths; from engine.schema import Data\n"
        "check_paths(Data(name='stdlib')); print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "data"
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/.hidden", ".git/d.txt", "empty.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name == "empty.txt" else name)
    return folder


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("{}", ["a.txt", "b.txt", "sub/c.md"]),
        ("{}/b.txt", ["b.txt"]),
        ("{0}/b.txt, {0}/sub/", ["b.txt", "c.md"]),
        ("{}/*.txt", ["a.txt", "b.txt"]),
        ("{}/**/*.md,{}/a.txt", ["sub/c.md", "a.txt"]),
        ("{0}/a.txt,{0}", ["a.txt", "b.txt", "sub/c.md"]),
    ],
)
def test_files_folders_globs_and_lists(tree, tmp_path, path, found):
    data = Data(name="text", path=path.format(tree, tree), held_out=0.0)
    check_paths(data)
    assert [file.identity for file in list_files(data)] == found
    assert [text.split("/")[-1] for text in texts(data, tmp_path)] == [name.split("/")[-1] for name in found]


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("text", None, "data=text needs data.path"),
        ("text", " ", "data=text needs data.path"),
        ("stdlib", "x", "data=stdlib takes no data.path"),
        ("parket", "x", "is not a source; one of stdlib, text, jsonl"),
        ("text", "{}/nothing", "nothing' does not exist"),
        ("text", "{}/*.rst", "no file matches"),
        ("text", "{}/empty.txt", "every file there is empty"),
        ("text", "{}/void", "void' holds no files"),
        ("jsonl", "{}", r"holds no files ending in \.jsonl"),
        ("jsonl", "{}/blank.jsonl", "there is no text"),
    ],
)
def test_missing_and_empty_data(tree, name, path, message):
    (tree / "void").mkdir()
    (tree / "void" / ".keep").write_text("x")
    data = Data(name=name, path=path and path.format(tree))
    if name == "jsonl" and "blank" in path:
        (tree / "blank.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(UserError, match=message) as caught:
        check_paths(data)
    assert "\n" not in str(caught.value)


def test_all_paths_that_are_wrong_are_named(tree):
    data = Data(name="text", path=f"{tree}/a.txt,{tree}/no,{tree}/*.rst,/dev/zero")
    with pytest.raises(UserError) as caught:
        check_paths(data)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(
        word in line for word, line in zip(("/no' does not", "*.rst'", "'/dev/zero' is a device"), lines, strict=True)
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["text", "jsonl"])
def test_wide_text_is_called_so(tmp_path, name, encoding):
    (tmp_path / "wide.jsonl").write_bytes('{"text": "plain words"}\n'.encode(encoding))
    data = Data(name=name, path=str(tmp_path / "wide.jsonl"), held_out=0.0)
    with pytest.raises(UserError, match="is UTF-16 or UTF-32 text; convert the file to UTF-8"):
        check_paths(data)
    with pytest.raises(BadSample, match="UTF-16"):
        open_corpus(data, tmp_path / "cache").read(0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 7])
def test_shares_that_are_none(share):
    with pytest.raises(UserError, match=r"0 <= data\.held_out < 1"):
        check_paths(Data(name="stdlib", held_out=share))


BAD_LINES = {
    b'{"text": "cut': "is not JSON",
    b'["text"]': "is not a JSON object",
    b'{"txt": "a", "id": 1}': r"has no key 'text' \(its keys: id, txt; data.field",
    b'{"text": null}': "has null under 'text', not a string",
    b'{"text": "\xff"}': "is not UTF-8 .byte 10",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b"[" * 100_000: "is not JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: BAD_LINES[line][:12])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "last"}')
    data = Data(name="jsonl", path=str(path), held_out=0.0)
    with pytest.raises(UserError, match=r"docs\.jsonl:3: .*" + BAD_LINES[line]) as caught:
        check_paths(data)
    assert "\n" not in str(caught.value) and "data.max_bad_samples=1" in str(caught.value)
    data.max_bad_samples = 1
    check_paths(data)
    corpus = open_corpus(data, tmp_path / "cache")
    assert len(corpus) == 4 and corpus.where(2) == f"{path}:3" and corpus.read(3) == "last" and corpus.read(1) == ""
    with pytest.raises(BadSample, match=BAD_LINES[line]):
        corpus.read(2)


def test_lines_of_every_kind(tmp_path):
    lines = ["first", "tab\tand \u2028 and \x85 inside", "né 漢字 \U0001f600", "", "windows"]
    raw = b"\xef\xbb\xbf" + b"".join(json.dumps({"text": text}).encode() + b"\n" for text in lines[:4])
    raw += json.dumps({"text": lines[4]}, ensure_ascii=False).encode() + b"\r\n\r\n"
    raw += json.dumps({"text": lines[2]}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "b.jsonl").write_text('{"text": "other file"}')
    data = Data(name="jsonl", path=str(tmp_path), held_out=0.0)
    check_paths(data)
    assert texts(data, tmp_path / "cache") == [*lines, "", lines[2], "other file"]


def test_line_index_over_block_borders(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "BLOCK", 16)
    lines = ["x" * n for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"t":"{line}"}}\n' for line in lines))
    data = Data(name="jsonl", path=str(tmp_path / "a.jsonl"), field="t", held_out=0.0)
    assert texts(data, tmp_path / "cache") == lines


@pytest.mark.parametrize("line_end", ["\n", ""])
def test_long_text_files_are_cut_without_loss(tmp_path, monkeypatch, line_end):
    monkeypatch.setattr(files_module, "PIECE", 50)
    monkeypatch.setattr(files_module, "CUT_SEARCH", 20)
    text = "".join(f"漢字 {i} \U0001f600{line_end}" for i in range(60))
    (tmp_path / "a.txt").write_text(text)
    corpus = Corpus(list_files(Data(name="text", path=str(tmp_path / "a.txt"))), "text", "", 0.3, tmp_path)
    pieces = [corpus.read(i) for i in range(len(corpus))]
    assert "".join(pieces) == text and len(pieces) > 10 and max(map(len, pieces)) < 60
    assert not line_end or all(piece.endswith("\n") for piece in pieces)
    assert 0 < corpus.held_out.sum() < len(pieces)


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    data = Data(name="text", path=str(tmp_path), held_out=0.0)
    with pytest.raises(UserError, match=r"latin\.txt: is not UTF-8 text \(byte 1\)"):
        check_paths(data)
    corpus = open_corpus(data, tmp_path)
    with pytest.raises(BadSample, match="byte 1"):
        corpus.read(1)


def test_a_file_that_shrinks_or_goes(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text")
    corpus = open_corpus(Data(name="text", path=str(tmp_path)), tmp_path)
    (tmp_path / "a.txt").write_text("some")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match="became shorter"):
        corpus.read(0)
    with pytest.raises(UserError, match=r"b\.txt' cannot be read"):
        corpus.read(1)


def test_bad_samples_are_counted_once():
    lines = []
    bad = BadSamples(2, lines.append)
    for where in ("a:1", "a:2", "a:1"):
        bad.add(where, "is odd")
    assert len(lines) == 2
    with pytest.raises(UserError, match=r"a:3: is odd after 2 that were skipped; .*data\.max_bad_samples=4"):
        bad.add("a:3", "is odd")


def jsonl(folder, count, start=0):
    path = folder / f"{count}-{start}" / "docs.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(start, start + count)))
    return path


@pytest.mark.parametrize("share", [0.03, 0.5, 0.97])
def test_the_held_out_share_is_what_was_asked_for(tmp_path, share):
    held_out = open_corpus(Data(name="jsonl", path=str(jsonl(tmp_path, 20_000)), held_out=share), tmp_path).held_out
    # Five standard deviations of a binomial count.
    assert abs(held_out.sum() - 20_000 * share) < 5 * np.sqrt(20_000 * share * (1 - share))
    assert abs(held_out[:10_000].sum() - 10_000 * share) < 5 * np.sqrt(10_000 * share * (1 - share))


def test_a_document_stays_on_its_side(tmp_path):
    """Whatever else the corpus holds, wherever it lies, and also for a larger share."""
    few = open_corpus(Data(name="jsonl", path=str(jsonl(tmp_path, 500)), held_out=0.2), tmp_path).held_out
    more = open_corpus(Data(name="jsonl", path=str(jsonl(tmp_path, 900)), held_out=0.2), tmp_path).held_out
    larger = open_corpus(
        Data(name="jsonl", path=str(tmp_path / "500-0" / "docs.jsonl"), held_out=0.3), tmp_path
    ).held_out
    assert np.array_equal(few, more[:500]) and (larger >= few).all() and larger.sum() > few.sum()


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3])
def test_two_documents_are_one_on_each_side(tmp_path, share, count):
    corpus = open_corpus(Data(name="jsonl", path=str(jsonl(tmp_path, count)), held_out=share), tmp_path)
    assert 0 < corpus.held_out.sum() < count == len(corpus)
    assert sorted([*corpus.side(True), *corpus.side(False)]) == list(range(count))


def test_blank_lines_do_not_make_a_side(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n\n" + '{"text": "one"}\n\n{"text": "two"}\n' + "\n" * 20)
    for share in (1e-9, 1 - 1e-9):
        corpus = open_corpus(Data(name="jsonl", path=str(path), held_out=share), tmp_path)
        assert corpus.held_out[2] != corpus.held_out[4]


@pytest.mark.parametrize("text", ["ab", "word " * 50, "line\n" * 50])
def test_a_single_document_is_cut_by_its_length(tmp_path, text):
    (tmp_path / "one.txt").write_text(text)
    corpus = open_corpus(Data(name="text", path=str(tmp_path / "one.txt"), held_out=0.1), tmp_path)
    assert corpus.held_out.tolist() == [False, True]
    head, tail = corpus.read(0), corpus.read(1)
    assert head + tail == text and head and tail and (len(tail) == 1 or 0.05 < len(tail) / len(text) < 0.15)
    assert "\n" not in text or head.endswith("\n")


def test_a_single_character_is_not_cut(tmp_path):
    (tmp_path / "one.txt").write_text("a")
    corpus = open_corpus(Data(name="text", path=str(tmp_path / "one.txt"), held_out=0.1), tmp_path)
    assert corpus.held_out.tolist() == [False]
