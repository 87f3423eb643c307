"""Caches: complete or absent, made once, safe against kills and full disks; and job=prepare on top of them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from engine.data.cache import cached
from engine.data.token_cache import TokenCache
from engine.errors import UserError
from engine.jobs import prepare
from tests.unit.data_corpora import TEXTS, byte_tokenizer, make_run, open_data, steps, write_jsonl


def _append_and_wait(folder, log):
    def build(temporary):
        with log.open("a") as out:
            out.write("built\n")
        time.sleep(0.3)
        (temporary / "file").write_text("whole")

    cached(folder, build)
    assert (folder / "file").read_text() == "whole"


def test_processes_at_the_same_time_build_once(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_append_and_wait, args=(tmp_path / "made", tmp_path / "log")) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_build_leaves_nothing_that_counts(tmp_path):
    code = (
        "import pathlib, sys, time; from engine.data.cache import cached\n"
        "def build(temporary):\n"
        "    (temporary / 'file').write_text('half'); print('in it', flush=True); time.sleep(60)\n"
        "cached(pathlib.Path(sys.argv[1]) / 'made', build)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "in it\n"
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert not (tmp_path / "made").exists() and len(list(tmp_path.glob(".made.tmp-*"))) == 1
    assert not cached(tmp_path / "made", lambda temporary: (temporary / "file").write_text("whole") and None)
    assert (tmp_path / "made" / "file").read_text() == "whole" and not list(tmp_path.glob(".made.tmp-*"))
    assert cached(tmp_path / "made", lambda temporary: pytest.fail("built again"))


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(temporary):
        (temporary / "file").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"made' \(No space left on device\); name another place with data\.cache_dir"):
        cached(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        cached(tmp_path / "file" / "made", lambda temporary: None)


def job(run, rank=0):
    lines = []
    ctx = SimpleNamespace(run=run, log=lines.append, rank=rank, result={})
    prepare.run(ctx)
    return ctx.result, " ".join(lines)


def test_prepare_makes_the_cache_that_training_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "PROGRESS_SECONDS", 0.0)
    run = make_run(tmp_path, write_jsonl(tmp_path / "docs.jsonl", TEXTS), held_out=0.2)
    assert job(run, rank=1) == ({}, "")
    result, said = job(run)
    again, said_again = job(run)
    core = byte_tokenizer(tmp_path / "bare")
    encoded = [[*core.encode(text).ids, 256] if text else [] for text in TEXTS]
    assert (result["cached"], again["cached"]) == (False, True)
    assert result["tokens"] == again["tokens"] == sum(map(len, encoded)) and result["documents"] == len(TEXTS)
    assert result["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert result["cache"] in said and "cached already" in said_again and "bytes a token" in said
    assert f"{len(TEXTS)} of {len(TEXTS)} documents (100%)" in said and "of " not in said_again.partition("cached")[0]
    made = TokenCache(tmp_path / "out" / "cache" / result["cache"].split("/")[-1])
    assert made.tokens.dtype == np.uint16
    assert [tokens.tolist() for tokens in made.stream(iter(range(len(TEXTS))))] == encoded
    run.data.packing = "offline"
    before = set((tmp_path / "out" / "cache").iterdir())
    module = open_data(run)
    steps(module, 2)
    module.close()
    assert set((tmp_path / "out" / "cache").iterdir()) == before


@pytest.mark.parametrize("change", ["text", "field", "tokenizer"])
def test_other_content_or_settings_get_a_cache_of_their_own(tmp_path, change):
    path = write_jsonl(tmp_path / "docs.jsonl", TEXTS)
    run = make_run(tmp_path, path, field="text")
    first, _ = job(run)
    if change == "text":
        write_jsonl(path, ["b" if text == "a" else text for text in TEXTS])  # as long as before
        os.utime(path, ns=(1, 1))
    elif change == "field":
        write_jsonl(path, TEXTS, "body")
        run.data.field = "body"
    else:
        core = byte_tokenizer(tmp_path / "tokenizer")
        core.add_special_tokens(["<new>"])
        core.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    second, _ = job(run)
    assert not second["cached"] and second["cache"] != first["cache"]


def test_bad_samples_count_again_when_the_cache_is_used(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text('{"text": "good"}\nbad\n{"text": "good"}\n')
    run = make_run(tmp_path, path, max_bad_samples=1)
    first, said = job(run)
    second, said_again = job(run)
    assert first["bad_samples"] == second["bad_samples"] == 1 and first["documents"] == 3
    assert "docs.jsonl:2: is not JSON" in said and "docs.jsonl:2: is not JSON" in said_again
    run.data.max_bad_samples = 0
    with pytest.raises(UserError, match=r"docs\.jsonl:2: is not JSON"):
        job(run)


def test_a_damaged_cache_is_named(tmp_path):
    run = make_run(tmp_path, write_jsonl(tmp_path / "docs.jsonl", TEXTS))
    result, _ = job(run)
    tokens = tmp_path / result["cache"] / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match="is damaged"):
        job(run)
