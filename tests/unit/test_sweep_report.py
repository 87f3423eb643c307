"""The page that compares the runs of a sweep."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine.report.compare import COLOURS, Comparison
from engine.schema import Sweep
from engine.sweep.rows import Row, ranking, read_summary, reported, write_summary


def make(folder: Path, name: str, losses: list[float | None], val: list[float | None], status: str = "done") -> Row:
    """A run with a row of metrics for each step, validated at every second one."""
    run = folder / name
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        for number, loss in enumerate(val, 1):
            file.write(json.dumps({"step": 2 * number, "val_loss": loss}) + "\n")
    (run / "report.html").write_text("a report")
    row = Row(["data=text", f"optim.lr={name}"], str(run), status, 0 if status == "done" else 1, seconds=61.0)
    row.take(reported(run), "val_loss")
    return row


def page(tmp_path: Path, rows: list[Row], **settings) -> str:
    home = tmp_path / "sweeps" / "one"
    home.mkdir(parents=True)
    comparison = Comparison(home, "qwen3", Sweep(**settings), ["data=text"])
    comparison.write(rows)
    return comparison.path.read_text()


def cells(text: str) -> list[list[str]]:
    """The texts of the table's rows."""
    rows = re.findall(r"<tr.*?</tr>", text[text.index("<tbody>") :])
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows]


def test_runs_by_rank_with_their_curves(tmp_path):
    rows = [
        make(tmp_path, "1", [4.0, 3.0, 2.0, 1.5], [3.5, 2.5]),
        make(tmp_path, "2", [4.0, 2.0, 1.0, 0.5], [3.0, 1.25]),
        make(tmp_path, "3", [], [], status="failed (1)"),
    ]
    text = page(tmp_path, rows)
    assert cells(text) == [
        ["2", "optim.lr=2best", "done", "0.5000", "1.2500", "1m 01s", "2"],
        ["1", "optim.lr=1", "done", "1.5000", "2.5000", "1m 01s", "1"],
        ["3", "optim.lr=3", "failed (1)", "-", "-", "1m 01s", "3"],
    ]
    assert 'href="../../2/report.html"' in text
    validation, training = (json.loads(data) for data in re.findall(r'"application/json">(.*?)</script>', text))
    assert [line["name"] for line in validation] == ["2: optim.lr=2", "1: optim.lr=1"]
    assert [[point[0], point[3]] for point in validation[0]["points"]] == [[2, "3"], [4, "1.25"]]
    assert [point[3] for point in training[1]["points"]] == ["4", "3", "2", "1.5"]
    assert "python" in text and "zoo.qwen3 data=text optim.lr=2</pre>" in text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)  # nothing from elsewhere


def test_a_run_that_diverges_leaves_the_others_room(tmp_path):
    rows = [make(tmp_path, "1", [4.0, 3.0, 2.0], [3.5]), make(tmp_path, "2", [4.0, 9e9, None], [None])]
    text = page(tmp_path, rows)
    (_, training) = re.findall(r"<svg.*?</svg>", text)
    assert max(float(v) for v in re.findall(r'class="tick y"[^>]*>([\d.]+)<', training)) <= 5  # 1.25 x the first loss
    assert "values above 5 are not drawn" in text


def test_more_runs_than_colours(tmp_path):
    rows = [make(tmp_path, str(n), [4.0, float(n)], [float(n)]) for n in range(1, COLOURS + 3)]
    text = page(tmp_path, rows)
    assert text.count('class="line rest"') == 2 * 2 and text.count('class="line own') == 2 * COLOURS
    assert f"grey: the runs after the best {COLOURS}" in text


def test_markup_in_overrides_is_text(tmp_path):
    row = make(tmp_path, "1", [1.0], [1.0])
    row.overrides = ["data=text", "prompt=<script>alert(1)</script>"]
    text = page(tmp_path, [row, make(tmp_path, "2", [2.0], [2.0])])
    assert "<script>alert" not in text

    class Balanced(HTMLParser):
        open: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br", "path", "circle", "line"):
                self.open.append(tag)

        def handle_endtag(self, tag):
            if tag not in ("path", "circle", "line"):
                assert self.open.pop() == tag

    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


def test_nothing_to_show_yet(tmp_path):
    text = page(tmp_path, [Row(["seed=1"], str(tmp_path / "gone"))])
    assert cells(text) == [["1", "seed=1", "not started", "-", "-", "-", "-"]] and "running or stopped" in text


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({}, [1, 0]),
        ({"direction": "maximize"}, [0, 1]),
        ({"name": "optuna", "metric": "tokens_per_s"}, []),
    ],
)
def test_ranking(settings, order):
    values = [2.0, 1.0, None] if settings.get("metric") is None else [None] * 3
    rows = [Row([], "", "done", 0, loss=9.0, val_loss=v, value=v) for v in values]
    rows += [Row([], "", "interrupted", 75, value=0.5)]
    assert ranking(rows, Sweep(**settings)) == order


def test_what_a_run_reports(tmp_path):
    make(tmp_path, "1", [2.0, None], [1.0])
    (tmp_path / "1" / "result.json").write_text('{"status": "done", "val_loss": 0.5, "flag": true, "hf": null}')
    found = reported(tmp_path / "1")
    assert found == {"step": 2, "loss": None, "val_loss": 0.5}
    assert reported(tmp_path / "gone") == {}


def test_summary_round_trip(tmp_path):
    rows = [Row(["a=1"], "x", "done", 0, 1.0, 2.0, 3.0, 4.0), Row(["a=2"], "y")]
    write_summary(tmp_path, rows)
    assert read_summary(tmp_path) == rows
    (tmp_path / "summary.json").write_text('{"runs": [1]}')
    assert read_summary(tmp_path) == []
