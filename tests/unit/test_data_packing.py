"""Rows of training data against a packer written here, and the sample counter across ranks and resumes."""

import json
import time
from itertools import pairwise

import numpy as np
import pytest

from engine.errors import UserError
from tests.unit.data_corpora import IGNORED, TEXTS, byte_tokenizer, make_run, naive_rows, open_data, steps, write_jsonl

PACKINGS = ("online", "offline")


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "docs.jsonl", TEXTS)


def encoded(tmp_path, texts):
    core = byte_tokenizer(tmp_path / "bare")
    return [[*core.encode(text).ids, 256] if text else [] for text in texts]


def expected(tmp_path, texts, seed, seq_len, window, count, epochs):
    """What the documentation of `engine.data.packing` promises, step by step."""
    orders = [np.random.default_rng([seed, 1, e]).permutation(len(texts)).tolist() for e in range(epochs)]
    whole = -(-count // window) * window
    rows = naive_rows(encoded(tmp_path, texts), orders, seq_len, whole)
    shuffled = [
        w * window + j for w in range(whole // window) for j in np.random.default_rng([seed, 2, w]).permutation(window)
    ]
    return [rows[k] for k in shuffled[:count]]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("seq_len", "window", "workers"), [(7, 5, 1), (7, 1, 3), (1, 3, 1), (64, 2, 2), (513, 4, 1)])
def test_rows_are_those_of_a_naive_packer(tmp_path, corpus, packing, seq_len, window, workers):
    run = make_run(tmp_path, corpus, packing=packing, seq_len=seq_len, shuffle_rows=window, workers=workers)
    module = open_data(run)
    tokens, labels, names = steps(module, 9)
    module.close()
    want = expected(tmp_path, TEXTS, run.seed, seq_len, window, 36, epochs=2 + 40 * seq_len // 140)
    assert names == list(range(36))
    assert tokens.tolist() == [row[0] for row in want]
    assert labels.tolist() == [row[1] for row in want]


def test_every_epoch_supervises_every_token_but_the_first_of_each_document(tmp_path, corpus):
    documents = encoded(tmp_path, TEXTS)
    total = sum(map(len, documents))
    run = make_run(tmp_path, corpus, seq_len=total, shuffle_rows=0, global_batch_size=1)
    module = open_data(run)
    for _ in range(3):  # a row is an epoch
        _, labels, _ = steps(module, 1)
        assert sorted(labels[labels != IGNORED]) == sorted(token for ids in documents for token in ids[1:])
    module.close()


def test_documents_of_a_row_do_not_see_each_other(tmp_path, corpus):
    run = make_run(tmp_path, corpus, seq_len=16, micro_batch_size=2)
    module = open_data(run)
    for batch in [b for _ in range(6) for b in module.train.next_step()]:
        starts = batch.cu_seqlens.tolist()
        tokens, labels = batch.tokens_BS.flatten().tolist(), batch.labels_BS.flatten().tolist()
        assert starts[0] == 0 and starts[-1] == 32 and 16 in starts and starts == sorted(set(starts))
        for low, high in pairwise(starts):
            assert batch.positions_BS.flatten()[low:high].tolist() == list(range(high - low))
            assert labels[low : high - 1] == tokens[low + 1 : high]
            assert 256 not in tokens[low : high - 1], "a document went on after its end"
            ends_document = tokens[high - 1] == 256
            assert (labels[high - 1] == IGNORED) == ends_document
            assert ends_document or high % 16 == 0, "a document was cut inside a row"
        assert batch.max_seqlen == max(np.diff(starts))
    module.close()


@pytest.mark.parametrize("packing", PACKINGS)
def test_ranks_share_one_order_and_resume_at_another_number_of_ranks(tmp_path, corpus, packing):
    run = make_run(tmp_path, corpus, packing=packing, global_batch_size=8)
    alone = open_data(run)
    before, after = steps(alone, 3), steps(alone, 4)
    alone.close()
    states = []
    for size in (2, 4):
        ranks = [open_data(run, rank, size) for rank in range(size)]
        shares = [[steps(rank, 1) for _ in range(3)] for rank in ranks]
        for part in (0, 1, 2):
            rows = [row for step in range(3) for share in shares for row in list(share[step][part])]
            assert np.array_equal(rows, before[part])
        states += [rank.train.state(3) for rank in ranks]
        for rank in ranks:
            rank.close()
    assert all(state == states[0] for state in states) and len(json.dumps(states[0])) < 800
    state = json.loads(json.dumps(states[0]))
    for size in (1, 2, 8):
        ranks = [open_data(run, rank, size, state=state) for rank in range(size)]
        shares = [[steps(rank, 1) for _ in range(4)] for rank in ranks]
        for part in (0, 1, 2):
            rows = [row for step in range(4) for share in shares for row in list(share[step][part])]
            assert np.array_equal(rows, after[part])
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("step", range(6))
def test_a_state_of_one_packing_serves_the_other(tmp_path, corpus, step):
    online, offline = (make_run(tmp_path, corpus, packing=packing) for packing in PACKINGS)
    one, two = open_data(online), open_data(offline)
    if step:
        steps(one, step), steps(two, step)
    following = steps(one, 2)
    for run, state in ((online, two.train.state(step)), (offline, one.train.state(step))):
        resumed = open_data(run, state=state)
        assert all(np.array_equal(a, b) for a, b in zip(steps(resumed, 2), following, strict=True))
        resumed.close()
    one.close(), two.close()


def test_less_text_than_a_batch_repeats(tmp_path):
    run = make_run(
        tmp_path, write_jsonl(tmp_path / "one.jsonl", ["abc"]), seq_len=8, global_batch_size=2, shuffle_rows=1
    )
    module = open_data(run)
    tokens, _, _ = steps(module, 1)
    module.close()
    assert module.held_out is None
    a, b, c = encoded(tmp_path, ["abc"])[0][:3]
    assert tokens.flatten().tolist() == [a, b, c, 256] * 4


def test_another_seed_gives_another_order_of_the_same_tokens(tmp_path, corpus):
    total = sum(map(len, encoded(tmp_path, TEXTS)))
    rows = []
    for seed in (1, 2):
        module = open_data(make_run(tmp_path, corpus, seed=seed, seq_len=total, global_batch_size=1, shuffle_rows=1))
        rows.append(steps(module, 1)[0][0])
        module.close()
    assert not np.array_equal(*rows) and np.array_equal(*map(np.sort, rows))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seq_len": 9}, "data.seq_len=7"),
        ({"global_batch_size": 2}, "data.global_batch_size=4"),
        ({"shuffle_rows": 6}, "data.shuffle_rows=5"),
        ({"seed": 6}, "seed=5"),
        ({"field": "other"}, "data.field=text"),
        ({"held_out": 0.5}, "data.held_out=0.0"),
    ],
)
def test_resuming_other_data_is_refused(tmp_path, corpus, change, named):
    module = open_data(make_run(tmp_path, corpus))
    steps(module, 1)
    state = module.train.state(1)
    module.close()
    with pytest.raises(UserError, match=named):
        open_data(make_run(tmp_path, corpus, **change), state=state)


@pytest.mark.parametrize("part", ["corpus", "tokenizer"])
def test_resuming_with_another_corpus_or_tokenizer_is_refused(tmp_path, corpus, part):
    run = make_run(tmp_path, corpus)
    module = open_data(run)
    state = module.train.state(0)
    module.close()
    if part == "corpus":
        write_jsonl(corpus, [*TEXTS, "more"])
    else:
        core = byte_tokenizer(tmp_path / "tokenizer")
        core.add_special_tokens(["<new>"])
        core.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    with pytest.raises(UserError, match="other data" if part == "corpus" else "another tokenizer"):
        open_data(run, state=state)
    write_jsonl(corpus, TEXTS)  # the same again, later: times of change do not count
    resumed = open_data(run, state=state, tokenizer_dir=byte_tokenizer(tmp_path / "saved") and tmp_path / "saved")
    steps(resumed, 1)
    resumed.close()


def test_what_goes_wrong_in_the_threads_reaches_the_loop(tmp_path):
    path = tmp_path / "docs.jsonl"
    write_jsonl(path, TEXTS)
    with path.open("a") as out:
        out.write("{broken\n")
    module = open_data(make_run(tmp_path, path))
    for _ in range(2):
        with pytest.raises(UserError, match=rf"docs.jsonl:{len(TEXTS) + 1}: is not JSON"):
            steps(module, 30)
    module.close()


def test_skipped_samples_are_skipped_at_the_same_place_again(tmp_path):
    path = tmp_path / "docs.jsonl"
    write_jsonl(path, ["one", "two", "three"])
    path.write_text(path.read_text() + '{"text": 3}\n')
    lines = []
    run = make_run(tmp_path, path, max_bad_samples=1)
    from engine.data.loader import build_data

    module = build_data(run, 0, 1, log=lines.append)
    tokens, _, _ = steps(module, 5)
    module.close()
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == 1 and "docs.jsonl:4" in warnings[0], "once, not in every epoch"
    want = expected(tmp_path, ["one", "two", "three", ""], run.seed, 7, 5, 20, epochs=15)
    assert tokens.tolist() == [row[0] for row in want]


def test_rows_that_never_come_can_be_given_up(tmp_path):
    """One document of two tokens among 20,000 bad samples: a window of 7 x 10,000 tokens would take 700 million."""
    path = write_jsonl(tmp_path / "docs.jsonl", ["a"])
    path.write_text(path.read_text() + "{broken\n" * 20_000)
    module = open_data(make_run(tmp_path, path, max_bad_samples=20_000, shuffle_rows=10_000))
    begin = time.monotonic()
    assert not module.train.ready(0.5) and 0.5 <= time.monotonic() - begin < 2.5
    begin = time.monotonic()
    assert module.train.state(0)["sources"][""] == {"window": 0, "epoch": 0, "position": 0, "offset": 0}
    module.close()
    assert time.monotonic() - begin < 2


def test_batches_that_are_there_are_ready(tmp_path):
    module = open_data(make_run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)))
    again = open_data(make_run(tmp_path, tmp_path / "a.jsonl"))
    for _ in range(5):
        assert module.train.ready(60) and module.train.ready(0)
        assert [b.tokens_BS.tolist() for b in module.train.next_step()] == [
            b.tokens_BS.tolist() for b in again.train.next_step()
        ]
    module.close(), again.close()


def test_data_without_any_text(tmp_path):
    module = open_data(make_run(tmp_path, write_jsonl(tmp_path / "none.jsonl", ["", "", ""])))
    with pytest.raises(UserError, match="no text"):
        steps(module, 1)
    module.close()
    with pytest.raises(UserError, match="no text"):
        open_data(make_run(tmp_path, tmp_path / "none.jsonl", packing="offline"))
