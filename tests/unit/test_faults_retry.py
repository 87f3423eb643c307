"""Reads that fail for a moment, for good, or that never can succeed."""

from __future__ import annotations

import errno
import os

import pytest

from engine.data.files import FileReader
from engine.errors import UserError
from engine.faults import retry


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made, without making them."""
    made = []
    monkeypatch.setattr(retry.time, "sleep", made.append)
    return made


@pytest.fixture
def reads(monkeypatch):
    said = []
    retry.READS.begin(3, said.append)
    yield said
    retry.READS.begin(4)


def flaky(monkeypatch, failures, number=errno.EIO):
    """os.pread fails the first `failures` times."""
    real, left = os.pread, [failures]

    def pread(*args):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, "pread", pread)


def test_trouble_that_passes_is_counted_and_said(tmp_path, monkeypatch, pauses, reads):
    (tmp_path / "a").write_bytes(b"0123456789")
    reader = FileReader()
    assert reader.read(tmp_path / "a", 0, 3) == b"012" and retry.READS.count == 0
    flaky(monkeypatch, 3)
    assert reader.read(tmp_path / "a", 2, 7) == b"23456"
    assert pauses == [0.25, 0.5, 1.0] and retry.READS.count == 3
    assert len(reads) == 3 and str(tmp_path / "a") in reads[0] and "Input/output error" in reads[0]


def test_trouble_that_stays_ends_in_one_line(tmp_path, monkeypatch, pauses, reads):
    (tmp_path / "a").write_bytes(b"0123456789")
    flaky(monkeypatch, 100, errno.ESTALE)
    with pytest.raises(UserError, match=r"a' cannot be read \(Stale file handle\) after 3 more tries"):
        FileReader().read(tmp_path / "a", 0, 3)
    assert len(pauses) == 3


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR])
def test_what_never_passes_is_not_tried_again(tmp_path, monkeypatch, pauses, reads, number):
    (tmp_path / "a").write_bytes(b"0123456789")
    flaky(monkeypatch, 1, number)
    with pytest.raises(UserError, match=r"cannot be read \([^)]*\)$"):
        FileReader().read(tmp_path / "a", 0, 3)
    assert pauses == [] and retry.READS.count == 0


def test_a_file_handle_gone_stale_is_opened_anew(tmp_path, monkeypatch, pauses, reads):
    """As a network file system has it when the file was replaced by the same content."""
    (tmp_path / "a").write_bytes(b"old")
    reader = FileReader()
    reader.read(tmp_path / "a", 0, 1)
    (tmp_path / "b").write_bytes(b"new")
    (tmp_path / "b").replace(tmp_path / "a")
    flaky(monkeypatch, 1, errno.ESTALE)
    assert reader.read(tmp_path / "a", 0, 3) == b"new"


def test_no_retries(tmp_path, monkeypatch, pauses):
    (tmp_path / "a").write_bytes(b"0123456789")
    retry.READS.begin(0)
    flaky(monkeypatch, 1)
    with pytest.raises(UserError, match=r"\(Input/output error\)$"):
        FileReader().read(tmp_path / "a", 0, 3)
    retry.READS.begin(4)
