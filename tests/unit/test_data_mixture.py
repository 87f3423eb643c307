"""Mixtures: whose turn it is, orders in windows, several validation sets, and any number of ranks."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from engine.data.check import check_paths
from engine.data.mixture import PERIOD, sources, turns, validation_sets
from engine.data.order import Order
from engine.data.schedule import Turns
from engine.errors import UserError
from engine.schema import Data
from tests.unit.data_corpora import make_run, open_data, write_jsonl


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [3, 1], [1, 2, 3.5], [0.7, 0.2, 0.1], [1e-3, 5, 5, 5, 5], [1 / 3] * 7]
)
def test_any_window_of_ten_thousand_rows_has_the_exact_proportions(weights):
    schedule = Turns(weights)
    rows = np.array([schedule.place(n) for n in range(2 * PERIOD)])
    seen = np.zeros(len(weights), dtype=int)
    for n, (source, number) in enumerate(rows.tolist()):
        assert number == seen[source], "a source's rows follow each other without a gap"
        if n % 997 == 0:
            assert schedule.before(n).tolist() == seen.tolist()
        seen[source] += 1
    exact = PERIOD * np.array(weights) / sum(weights)
    for begin in (0, 1, 137, 5000, PERIOD):
        counts = np.bincount(rows[begin : begin + PERIOD, 0], minlength=len(weights))
        assert np.abs(counts - exact).max() < 1 and counts.sum() == PERIOD
    prefix = np.array([schedule.before(n) for n in range(0, PERIOD, 11)])
    assert np.abs(prefix - np.arange(0, PERIOD, 11)[:, None] * exact / PERIOD).max() < len(weights)  # spread evenly
    assert schedule.place(123 * PERIOD + 5)[0] == rows[5, 0]


def test_turns_by_hand():
    assert turns([1, 1, 1]) == [3334, 3333, 3333] and turns([2, 1, 1]) == [5000, 2500, 2500]
    assert [Turns([2, 1]).place(n)[0] for n in range(6)] == [0, 1, 0, 0, 1, 0]


def test_an_order_in_windows_reads_shards_from_begin_to_end():
    shards = np.array([0, 10, 11, 40])
    ids = np.setdiff1d(np.arange(64), [3, 10, 50])
    order = Order(ids, seed=7, window=8, shards=shards)
    one, two = order.epoch(0), order.epoch(1)
    assert sorted(one) == sorted(two) == ids.tolist() and one.tolist() != two.tolist()
    assert order.epoch(0).tolist() == one.tolist()
    shard = shards.searchsorted(one, side="right") - 1
    for s in range(4):
        places = np.flatnonzero(shard == s)
        assert len(places) == 0 or np.ptp(places) < len(places) + 2 * 8  # no further apart than two windows
    streamed = np.concatenate([np.sort(one[at : at + 8]) for at in range(0, len(one), 8)])
    assert np.median(np.abs(np.diff(streamed))) == 1  # neighbours come together
    assert not np.array_equal(one, np.sort(one)) and Order(ids, 7, 0).epoch(5).tolist() == ids.tolist()


def entry(**keys):
    return {"name": "a", "kind": "jsonl", "path": "x.jsonl", "weight": 1} | keys


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (None, "data=mixture needs data.mixture"),
        ([], "data=mixture needs data.mixture"),
        ({"a": 1}, "must be a list of mappings"),
        (["a"], r"data\.mixture\[0\] must be a mapping"),
        ([entry(), entry(path="y.jsonl")], "two sources are named a"),
        ([entry(weight=0)], r"data\.mixture\[0\]: weight=0 must be a number greater than 0"),
        ([entry(weight=-1)], "weight=-1"),
        ([entry(weight=float("nan"))], "weight=nan"),
        ([entry(weight=True)], "weight=True"),
        ([entry(), entry(name="b", weight=1e-6)], "weight=1e-06 of b is less than 1 row in 10000"),
        ([entry(kind="jsonll")], "kind=jsonll is no kind of source; did you mean jsonl?"),
        ([entry(format="sharegpt")], "format=sharegpt: only kind=chat has one"),
        (
            [entry(kind="chat", format="csv")],
            "format=csv: only kind=chat has one, which is alpaca or",
        ),
        ([entry(wait=3)], "there is no key wait; did you mean weight?"),
        ([entry(name="a/b")], "name=a/b must be letters"),
        ([entry(path=3)], "path=3 must be text"),
    ],
)
def test_mixtures_that_cannot_be(entries, words):
    with pytest.raises(UserError, match=words) as caught:
        sources(Data(name="mixture", mixture=entries))
    assert "\n" not in str(caught.value)


def test_validation_sets_that_cannot_be():
    both = Data(name="mixture", mixture=[entry()], validation=[entry()])
    del both.validation[0]["weight"]
    with pytest.raises(UserError, match="a is also a source"):
        validation_sets(both)
    both.held_out = 0.0
    assert [s.name for s in validation_sets(both)] == ["a"]
    chats = {"name": "c", "kind": "chat", "path": "c.jsonl"}
    with pytest.raises(
        UserError, match=r"^data\.validation\[0\]: kind=chat takes the chat template of the training data"
    ):
        validation_sets(Data(name="stdlib", validation=[chats]))
    assert validation_sets(Data(name="chat", validation=[chats]))[0].data.name == "chat"
    with pytest.raises(UserError, match="there is no key weight"):
        validation_sets(Data(name="stdlib", validation=[entry()]))


def test_what_is_wrong_with_a_source_is_said_under_its_own_keys(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", ["x"])
    good = {"name": "good", "kind": "jsonl", "path": str(tmp_path / "x.jsonl")}
    (tmp_path / "bad.tar").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty.jsonl").write_text("")
    cases = [
        ({"name": "b", "kind": "text", "path": f"{tmp_path}/absent"}, "[1].path: '*/absent' does not exist"),
        ({"name": "b", "kind": "text"}, "[1].kind=text needs *[1].path: files, folders or globs"),
        ({"name": "b", "kind": "webdataset", "path": f"{tmp_path}/bad.tar"}, "[1].path: '*' is compressed (gzip)"),
        ({"name": "b", "kind": "jsonl", "path": f"{tmp_path}/empty.jsonl"}, "[1].path=*: every file there is empty"),
        ({"name": "b", "kind": "energon", "path": f"{tmp_path}", "split": "x"}, "[1].path: '*' is not a prepared"),
    ]
    for entry, words in cases:
        for data, key in (
            (Data(name="mixture", mixture=[good, entry], held_out=0.0), "data.mixture"),
            (Data(name="stdlib", validation=[good, entry], held_out=0.0), "data.validation"),
        ):
            with pytest.raises(UserError) as caught:
                check_paths(data)
            pattern = (key + words).replace("*[1]", f"*{key}[1]").replace("[", "[[]") + "*"
            assert fnmatch(str(caught.value), pattern), str(caught.value)


TEXTS = {
    "a": [f"alpha {i} " * (1 + i % 5) for i in range(23)],
    "b": ["", *(f"b{i}" for i in range(9))],
    "c": [f"{'γ' * (i % 11)}{i}" for i in range(17)],
}


@pytest.fixture
def mixture(tmp_path: Path):
    """A run over three sources of different kinds: JSONL, a text file, shards read in windows."""
    from tests.unit.test_data_formats import write_tar

    write_jsonl(tmp_path / "a.jsonl", TEXTS["a"])
    (tmp_path / "b").mkdir()
    for i, text in enumerate(TEXTS["b"]):
        (tmp_path / "b" / f"{i}.txt").write_text(text)
    (tmp_path / "c").mkdir()
    for s in range(3):
        write_tar(tmp_path / "c" / f"{s}.tar", [(f"{s}_{i}.txt", t.encode()) for i, t in enumerate(TEXTS["c"][s::3])])
    write_jsonl(tmp_path / "v.jsonl", ["held out", "text"])
    entries = [
        {"name": "a", "kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "weight": 5},
        {"name": "b", "kind": "text", "path": str(tmp_path / "b"), "weight": 1},
        {"name": "c", "kind": "webdataset", "path": str(tmp_path / "c"), "weight": 3},
    ]

    def build(**more):
        sets = [{"name": "v", "kind": "jsonl", "path": str(tmp_path / "v.jsonl")}]
        keys = {"global_batch_size": 12, "shuffle_documents": 4, "validation": sets, "mixture": entries} | more
        return make_run(tmp_path, "", name="mixture", **keys)

    return build


def global_rows(run, ranks: int, steps: int, state=None) -> tuple[dict[int, tuple], dict]:
    """Rows by their number as all ranks see them in some steps, and the state after these."""
    rows: dict[int, tuple] = {}
    states, first = [], 0 if state is None else state["row"] // run.data.global_batch_size
    for rank in range(ranks):
        module = open_data(run, rank, ranks, state=state)
        for _ in range(steps):
            for batch in module.train.next_step():
                for i, number in enumerate(batch.sample_ids):
                    assert number not in rows, "a row is seen once"
                    rows[number] = (batch.sources[i], batch.tokens_BS[i].tolist(), batch.labels_BS[i].tolist())
        states.append(module.train.state(first + steps))
        module.close()
    assert all(s == states[0] for s in states), "every rank says the same of the place"
    return rows, json.loads(json.dumps(states[0]))


def test_three_ranks_then_two_then_four_repeat_and_lose_nothing(mixture):
    """Over several epochs of the smaller sources, stopping in the middle of windows and of epochs."""
    run = mixture()
    whole, _ = global_rows(run, 1, 15)
    three, state = global_rows(run, 3, 4)
    two, state = global_rows(run, 2, 6, state)
    four, _ = global_rows(run, 4, 5, state)
    assert set(three) | set(two) | set(four) == set(range(15 * 12)) and not set(three) & set(two)
    assert three | two | four == whole
    assert max(place["epoch"] for place in state["sources"].values()) > 0


def test_a_source_gives_the_rows_that_it_would_give_alone(mixture, tmp_path):
    run = mixture()
    rows, _ = global_rows(run, 1, 10)
    expected = Turns([5, 1, 3])
    assert [rows[n][0] for n in range(120)] == [expected.place(n)[0] for n in range(120)]
    alone = make_run(tmp_path, run.data.mixture[0]["path"], global_batch_size=12, shuffle_documents=4)
    mine, _ = global_rows(alone, 1, 6)
    assert [r[1:] for r in rows.values() if r[0] == 0] == [
        mine[n][1:] for n in range(sum(r[0] == 0 for r in rows.values()))
    ]


def test_validation_sets_by_name(mixture):
    module = open_data(mixture(held_out=0.2))
    assert list(module.validation) == ["a", "b", "c", "v"] and module.sources == ("a", "b", "c")
    assert module.held_out is module.validation["a"]
    ids = [t for b in module.validation["v"].batches(50) for t in b.tokens_BS.flatten().tolist() if t < 256]
    assert sorted(module.tokenizer.decode(ids)) == sorted("held outtext")
    assert module.rows(10) == {"rows.a": 67, "rows.b": 13, "rows.c": 40}  # 120 rows, shares of 5, 1 and 3 ninths
    module.close()
    plain = open_data(mixture(held_out=0.0, validation=None))
    assert plain.validation == {} and plain.held_out is None
    plain.close()


def test_a_mixture_offline_is_the_same_and_another_one_is_not_resumed(mixture):
    online, state = global_rows(mixture(), 1, 5)
    offline, _ = global_rows(mixture(packing="offline"), 1, 5)
    assert online == offline
    other = mixture()
    other.data.mixture = [dict(e, weight=1) for e in other.data.mixture]
    with pytest.raises(UserError, match=r"checkpoint\.resume: .*data\.mixture"):
        open_data(other, state=state)
    run = mixture()
    (Path(run.data.mixture[1]["path"]) / "0.txt").write_text("more")
    with pytest.raises(UserError, match="other data"):
        open_data(run, state=state)


def test_a_state_of_the_first_version_goes_on(tmp_path):
    """Checkpoints that know one source, with its place at the top."""
    run = make_run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS["a"]))
    _, state = global_rows(run, 1, 3)
    old = {"version": 1, "row": state["row"], "identity": state["identity"], **state["sources"][""]}
    assert global_rows(run, 2, 2, old) == global_rows(run, 1, 2, state)
