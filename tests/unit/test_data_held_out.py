"""Held-out rows: shares of ranks, padding, and the bytes that bits per byte are counted in."""

import numpy as np
import pytest

from tests.unit.data_corpora import IGNORED, byte_tokenizer, make_run, open_data, write_jsonl

TEXTS = [f"document {i} " + "é" * (i % 5) for i in range(40)] + ["", "z"]


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "docs.jsonl", TEXTS)


def held_out(tmp_path, corpus, rank=0, size=1, **data):
    run = make_run(
        tmp_path, corpus, held_out=0.4, **({"seq_len": 16, "micro_batch_size": 2, "global_batch_size": 24} | data)
    )
    module = open_data(run, rank, size)
    module.close()
    return module.held_out


def labelled_rows(batches):
    """sample id -> (tokens, labels)."""
    rows = {}
    for batch in batches:
        for name, tokens, labels in zip(
            batch.sample_ids, batch.tokens_BS.tolist(), batch.labels_BS.tolist(), strict=True
        ):
            if name >= 0:
                assert name not in rows
                rows[name] = (tokens, labels)
            else:
                assert set(labels) == {IGNORED}
    return rows


@pytest.mark.parametrize("packing", ["online", "offline"])
@pytest.mark.parametrize(("rows", "size"), [(5, 1), (5, 2), (5, 3), (1, 4), (1000, 1), (1000, 3)])
def test_ranks_split_the_same_rows_into_equally_many_batches(tmp_path, corpus, rows, size, packing):
    alone = labelled_rows(held_out(tmp_path, corpus).batches(rows))
    shares = [held_out(tmp_path, corpus, rank, size, packing=packing).batches(rows) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    assert all(batch.tokens_BS.shape == (2, 16) for share in shares for batch in share)
    assert labelled_rows([batch for share in shares for batch in share]) == alone
    assert sorted(alone) == list(range(len(alone))) and len(alone) == min(rows, len(alone))


def test_all_rows_hold_every_held_out_document_once_whatever_the_seed(tmp_path, corpus):
    core = byte_tokenizer(tmp_path / "bare")
    both = [held_out(tmp_path, corpus, seed=seed) for seed in (1, 2)]
    batches, others = (labelled_rows(side.batches(1000)) for side in both)
    assert batches == others
    tokens = [token for name in sorted(batches) for token in batches[name][0]]
    ends = [i for i, token in enumerate(tokens) if token == 256]
    used = next(i for i in range(len(tokens), 0, -1) if tokens[i - 1] != 256) + 1  # the rest pads the last row
    texts = core.decode(tokens[:used], skip_special_tokens=False).split("<|endoftext|>")[:-1]
    assert ends and set(texts) <= set(TEXTS) and len(set(texts)) == len(texts) and 5 < len(texts) < 30
    labels = [label for name in sorted(batches) for label in batches[name][1] if label != IGNORED]
    # Every byte is predicted but the first of each document; ends of text are predicted and stand for none.
    assert both[0].label_bytes(1000) == sum(len(text.encode()) - 1 for text in texts)
    assert len(labels) == sum(len(text.encode()) for text in texts)


def test_bytes_are_counted_over_the_rows_of_all_ranks(tmp_path, corpus):
    counts = {held_out(tmp_path, corpus, rank, 3).label_bytes(4) for rank in range(3)}
    rows = labelled_rows(held_out(tmp_path, corpus).batches(4))
    assert counts == {sum(label not in (IGNORED, 256) for _, labels in rows.values() for label in labels)}


def test_held_out_documents_are_not_trained_on(tmp_path, corpus):
    run = make_run(tmp_path, corpus, held_out=0.4, seq_len=4096, global_batch_size=1, shuffle_rows=1)
    module = open_data(run)
    core = byte_tokenizer(tmp_path / "bare")
    seen = set(
        core.decode(module.train.next_step()[0].tokens_BS[0].tolist(), skip_special_tokens=False).split(
            "<|endoftext|>"
        )[:-1]
    )
    kept = labelled_rows(module.held_out.batches(9))
    module.close()
    away = set(
        core.decode([t for tokens, _ in kept.values() for t in tokens], skip_special_tokens=False).split(
            "<|endoftext|>"
        )
    )
    assert not (seen & away - {""}) and len(seen) > 10
    assert seen | away >= {text for text in TEXTS if text}


def test_a_single_document_is_cut(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    module = open_data(
        make_run(tmp_path, write_jsonl(tmp_path / "one.jsonl", [text]), held_out=0.1, shuffle_rows=1, seq_len=600)
    )
    core = byte_tokenizer(tmp_path / "bare")
    batch = module.train.next_step()[0]
    tail = module.held_out.batches(1)[0]
    module.close()
    head = core.decode(batch.tokens_BS[0].tolist(), skip_special_tokens=False)
    rest = core.decode(tail.tokens_BS[0].tolist(), skip_special_tokens=False).split("<|endoftext|>")[0]
    assert text.endswith(rest) and text.startswith(head[: len(text) - len(rest)]) and rest.startswith("line 9")
    assert 0.05 < len(rest) / len(text) < 0.15


def test_nothing_held_out(tmp_path, corpus):
    module = open_data(make_run(tmp_path, corpus, held_out=0.0))
    module.close()
    assert module.held_out is None


def test_unequal_rows_at_the_end_are_padded_as_a_document_of_their_own(tmp_path, corpus):
    last = held_out(tmp_path, corpus).batches(1000)[-1]
    flat = last.labels_BS.flatten().numpy()
    padding = len(flat) - (
        np.flatnonzero(flat != IGNORED).max() + 2
    )  # after the end of text, which has no label either
    assert padding > 0 and last.cu_seqlens[-1] == len(flat)
    assert (len(flat) - padding) in last.cu_seqlens.tolist()


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_few_rows_are_spread_over_all_that_is_held_out(tmp_path, corpus, rows):
    """Row i of n is row floor(i * m / n) of all m."""
    everything = labelled_rows(held_out(tmp_path, corpus).batches(1000))
    total = len(everything)
    assert total > 8
    side = held_out(tmp_path, corpus)
    few = labelled_rows(side.batches(rows))
    assert side.coverage(1000) == (total, total, True)
    expected = {i: everything[i * total // rows] for i in range(rows)} if rows * 8 >= total else None
    if expected is not None:
        assert few == expected and side.coverage(rows) == (rows, total, True)
    else:  # from the first eight times as many
        assert few == {i: everything[i * 8] for i in range(rows)} and side.coverage(rows) == (rows, 8 * rows, False)


def test_the_text_that_rows_are_picked_from_is_bounded(tmp_path, corpus, monkeypatch):
    """Every rank tokenises it. What is asked for is there in any case."""
    everything = labelled_rows(held_out(tmp_path, corpus).batches(1000))
    monkeypatch.setattr("engine.data.held_out.POOL_TOKENS", 6 * 16)
    side = held_out(tmp_path, corpus)
    assert labelled_rows(side.batches(3)) == {i: everything[2 * i] for i in range(3)}
    assert side.coverage(3) == (3, 6, False)
    assert labelled_rows(side.batches(7)) == {i: everything[i] for i in range(7)}
