"""Conversations as packed rows: never cut, never mixed, and the same loss however they are packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.backends.native import build
from engine.backends.native.backend import NativeBackend
from engine.checkpoint.sources import InitSource
from engine.data.chat.load import open_chats
from engine.data.chat.preview import previews
from engine.data.corpus import open_corpus
from engine.data.documents import OnlineDocuments
from engine.data.sources import BadSamples
from engine.errors import UserError
from engine.family import load_family
from hardware import registry
from tests.parallel.native_steps import model_config, run_of
from tests.unit.chat_corpora import SPECIAL, chat_run, turn, write_lines
from tests.unit.data_corpora import open_data, steps

IGNORED = -100
SHORT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    "{% generation %}~{% endgeneration %}{% endif %}{% endfor %}"
)


def record(question: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [turn("user", question), turn("assistant", answer, **more)]}


def test_a_conversation_lies_whole_in_one_row(tmp_path: Path) -> None:
    """Lengths 3, 7 (a whole row), 5, 2, 6 in rows of 7: each of them once an epoch, whatever the order."""
    records = [record("a", "b"), record("c" * 3, "d" * 3), record("e" * 3, "f"), record("", "g"), record("h" * 4, "i")]
    run = chat_run(tmp_path, write_lines(tmp_path / "a.jsonl", records), SHORT, seq_len=7, shuffle_rows=1)
    data = open_data(run)
    tokens, labels, _ = steps(data, 10)
    data.close()
    core = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    whole = {"ab~", "cccddd~", "eeef~", "g~", "hhhhi~"}
    seen = []
    for row, wanted in zip(tokens, labels, strict=True):
        text = core.decode(row.tolist(), skip_special_tokens=False)
        pieces = [piece + "~" for piece in text.split("~")[:-1]]
        assert set(pieces) <= whole, text
        seen += pieces
        # The only token that is learned is "~", predicted by the one before it.
        expected = [t if t == core.token_to_id("~") else IGNORED for t in row.tolist()[1:]]
        assert wanted.tolist()[:-1] == expected and wanted[-1] == IGNORED
    epochs = len(seen) // len(whole)
    assert epochs >= 2
    assert all(set(seen[i * 5 : i * 5 + 5]) == whole for i in range(epochs))


def test_resuming_repeats_and_loses_nothing(tmp_path: Path) -> None:
    records = [record("q" * (i % 5), "a" * (1 + i % 3)) for i in range(23)]
    run = chat_run(tmp_path, write_lines(tmp_path / "a.jsonl", records), SHORT, seq_len=11, shuffle_rows=4)
    data = open_data(run)
    whole, _, _ = steps(data, 12)
    state = data.train.state(5)
    data.close()
    rest = open_data(run, state=json.loads(json.dumps(state)))
    tokens, _, _ = steps(rest, 7)
    rest.close()
    assert np.array_equal(tokens, whole[5 * run.data.global_batch_size :])
    run.data.train_turns = "last"
    with pytest.raises(UserError, match=r"data.train_turns=all, and this run has last"):
        open_data(run, state=state)


def test_a_mixture_of_chats_and_text_gives_each_source_as_it_would_be_alone(tmp_path: Path) -> None:
    """Two chat files of two formats and a text file, with weights 2, 1 and 1; one set of chats to validate with."""
    a = write_lines(tmp_path / "a.jsonl", [record("q" * (i % 5), "a" * (1 + i % 3)) for i in range(23)])
    pairs = [{"instruction": "i" * (1 + i % 4), "input": "", "output": "o" * (1 + i % 2)} for i in range(9)]
    b, text = write_lines(tmp_path / "b.jsonl", pairs), tmp_path / "t.txt"
    text.write_text("plain text that is learned whole " * 9)
    v = write_lines(tmp_path / "v.jsonl", [record("why", "so")])
    run = chat_run(tmp_path, a, SHORT, seq_len=13, shuffle_rows=2, global_batch_size=4)
    alone = {}
    for name, path, kind in (("a", a, "chat"), ("b", b, "chat"), ("t", text, "text")):
        run.data.name, run.data.path = kind, str(path)
        data = open_data(run)
        tokens, labels, _ = steps(data, 8)
        data.close()
        alone[name] = [(t.tolist(), x.tolist()) for t, x in zip(tokens, labels, strict=True)]
    run.data.name, run.data.path = "mixture", None
    run.data.mixture = [
        {"name": "a", "kind": "chat", "path": str(a), "weight": 2},
        {"name": "b", "kind": "chat", "path": str(b), "format": "alpaca", "weight": 1},
        {"name": "t", "kind": "text", "path": str(text), "weight": 1},
    ]
    run.data.validation = [{"name": "v", "kind": "chat", "path": str(v)}]
    data = open_data(run)
    seen: dict[str, list[Any]] = {"a": [], "b": [], "t": []}
    for _ in range(8):
        for batch in data.train.next_step():
            for row, source in enumerate(batch.sources):
                seen[data.sources[source]].append((batch.tokens_BS[row].tolist(), batch.labels_BS[row].tolist()))
    assert {name: len(rows) for name, rows in seen.items()} == {"a": 16, "b": 8, "t": 8}
    assert all(rows == alone[name][: len(rows)] for name, rows in seen.items())
    assert [Path(one.where).name for one in data.previews] == ["a.jsonl:1", "b.jsonl:1"]
    assert [len(held_out.batches(9)) for held_out in data.validation.values()] == [1] and list(data.validation) == ["v"]
    state = json.loads(json.dumps(data.train.state(3)))
    data.close()
    again = open_data(run, state=state)
    first = again.train.next_step()[0]
    again.close()
    assert (first.tokens_BS[0].tolist(), first.labels_BS[0].tolist()) in [row for rows in seen.values() for row in rows]
    run.data.train_turns = "last"
    with pytest.raises(UserError, match=r"data.train_turns=all, and this run has last"):
        open_data(run, state=state)


def test_a_sample_longer_than_a_row_is_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [record("q", "a" * n) for n in (3, 40, 4)])
    run = chat_run(tmp_path, path, SHORT, seq_len=16, max_bad_samples=1)
    tokens, _, _ = steps(open_data(run), 2)
    assert tokens.shape == (4, 16)
    run.data.max_bad_samples = 0
    data = open_data(run)
    with pytest.raises(
        UserError, match=r":2: is longer than a row: it has 42 tokens, more than data.seq_len=16;"
    ) as caught:
        steps(data, 2)
    assert str(caught.value).endswith(
        "raise data.seq_len to 42, shorten it, or skip more of them with data.max_bad_samples=1, say"
    )


def test_where_nothing_is_left_the_message_says_what_was_dropped_and_what_helps(tmp_path: Path) -> None:
    """Of the test above a conversation with an answer of 40 letters has 42 tokens; so one with 50 has 52."""
    path = write_lines(tmp_path / "a.jsonl", [record("q", "a" * n) for n in (40, 50)])
    path.write_text(path.read_text() + "{broken\n")
    data = open_data(chat_run(tmp_path, path, SHORT, seq_len=16, max_bad_samples=9))
    with pytest.raises(UserError, match="the 3 training documents hold no text to learn from") as caught:
        steps(data, 1)
    data.close()
    assert "; 3 bad samples skipped: 2 longer than a row (42 to 52 tokens; data.seq_len=52 would hold them) and 1" in (
        said := str(caught.value)
    )
    assert f"1 that is no use (the first, {path}:3: is not JSON" in said and "\n" not in said
    mixed = chat_run(tmp_path, path, SHORT, seq_len=16, max_bad_samples=9)
    mixed.data.name, mixed.data.path = "mixture", None
    mixed.data.mixture = [{"name": "a", "kind": "chat", "path": str(path)}]
    data = open_data(mixed)
    with pytest.raises(UserError, match=r"^data\.mixture\[0\]\.path: the 3 training .*data\.seq_len=52 would hold"):
        steps(data, 1)
    data.close()
    both = chat_run(tmp_path, write_lines(tmp_path / "b.jsonl", [record("q", "a")]), SHORT, seq_len=16)
    both.data.max_bad_samples = 9
    both.data.validation = [{"name": "v", "kind": "chat", "path": str(path)}]
    with pytest.raises(UserError, match=r"^data\.validation\[0\]\.path=.*: holds no text.*data\.seq_len=52 would hold"):
        open_data(both)


def backend_with_weights() -> NativeBackend:
    run = run_of("ddp", model=model_config(vocab_size=300, max_position_embeddings=128))
    backend = build(run, load_family("qwen3"), registry.get("cpu"), "train")
    backend.load_state(InitSource(3, 0.3), ("param",))
    return backend


def test_the_loss_is_the_same_for_any_packing_and_micro_batch(tmp_path: Path) -> None:
    """All held-out conversations, in rows of three lengths and micro-batches of 1, 2 and 4."""
    records = [record("q" * (3 + 5 * i % 17), "ab" * (1 + i % 7), weight=i % 4 and 1) for i in range(40)]
    path = write_lines(tmp_path / "a.jsonl", records)
    backend = backend_with_weights()
    sums = []
    for seq_len, size in ((56, 1), (64, 2), (128, 4)):
        run = chat_run(tmp_path / str(size), path, held_out=0.9, seq_len=seq_len, micro_batch_size=size)
        run.data.global_batch_size = size
        data = open_data(run)
        sums.append(backend.evaluate(data.held_out.batches(200)))
        data.close()
    assert len({tokens for _, tokens in sums}) == 1 and sums[0][1] > 100
    assert [loss for loss, _ in sums] == pytest.approx([sums[0][0]] * 3, rel=1e-5)


def test_micro_batches_without_labels_change_nothing(tmp_path: Path) -> None:
    """One global batch of which half the rows are conversations that nobody learns."""
    records = [record("q" * 20, "a" * (9 + i % 2), weight=i % 2) for i in range(12)]
    path = write_lines(tmp_path / "a.jsonl", records)
    results = []
    for size in (1, 2, 4):
        run = chat_run(tmp_path / str(size), path, seq_len=56, micro_batch_size=size)
        run.data.global_batch_size = 4
        data = open_data(run)
        batches = data.train.next_step()
        data.close()
        if size == 1:
            assert {batch.num_tokens for batch in batches} >= {0}
        backend = backend_with_weights()
        first = backend.train_step(batches, 1e-3)
        results.append((first.num_tokens, first.loss_sum, first.grad_norm, *backend.evaluate(batches)))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_the_stand_in_tokenizer_says_so_and_works_elsewhere(tmp_path: Path) -> None:
    records = [record(f"What is {i}?", f"It is {i}.") for i in range(30)]
    run = chat_run(tmp_path, write_lines(tmp_path / "a.jsonl", records), tokenizer=None)
    lines: list[str] = []
    corpus = open_corpus(run.data, tmp_path / "cache")
    chats = open_chats(run, corpus, BadSamples(0), lines.append)
    assert "a stand-in" in lines[0]
    assert chats.tokenizer.vocab_size <= 300
    theirs = AutoTokenizer.from_pretrained(chats.tokenizer.folder)
    expected = theirs.apply_chat_template(
        records[0]["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = next(OnlineDocuments(corpus, chats.tokenizer, BadSamples(0), encode=chats.encoder).stream(iter([0])))
    assert sample.tokens.tolist() == expected["input_ids"]
    assert sample.supervised.astype(int).tolist() == expected["assistant_masks"]
    assert theirs.decode(sample.tokens[sample.supervised]) == "It is 0.<|im_end|>"


def test_another_template_travels_with_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(SHORT)
    run = chat_run(tmp_path, write_lines(tmp_path / "a.jsonl", [record("q", "a")]))
    run.data.chat_template = str(tmp_path / "t.jinja")
    chats = open_chats(run, open_corpus(run.data, tmp_path / "cache"), BadSamples(0))
    chats.tokenizer.save(tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs.apply_chat_template(record("q", "a")["messages"], tokenize=False) == "qa~"


def test_the_preview_shows_what_is_learned(tmp_path: Path) -> None:
    records = [record("q", "a"), {"messages": []}, record("long", "b" * 9000)]
    run = chat_run(tmp_path, write_lines(tmp_path / "a.jsonl", records), max_bad_samples=1)
    corpus = open_corpus(run.data, tmp_path / "cache")
    chats = open_chats(run, corpus, BadSamples(1))
    first, second = previews(chats, corpus, np.arange(3))
    start, stop = SPECIAL[:2]
    assert first.text(colour=False) == (
        f"sample {tmp_path}/a.jsonl:1: 2 of 24 tokens are learned\n"
        f"{start}{start}user\nq{stop}\n{start}assistant\n⟦a{stop}⟧"
    )
    assert f"\033[32ma{stop}\033[0m" in first.text(colour=True)
    assert second.where.endswith(":3") and len(second.text(colour=False)) < 5000
