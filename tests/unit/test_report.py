"""The report: complete and safe for any state of a run folder."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from engine.report import write_report
from engine.report.chart import Series, line_chart, nice_ticks, scale, smooth, thin
from engine.report.facts import continue_command, gather, sample_command

CONFIG = """\
family: qwen3
backend: megatron
model: {name: tiny, vocab_size: 13, hidden_size: 6, intermediate_size: 10, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, head_dim: 4, tie_word_embeddings: true}
schedule: {steps: 20}
task: {name: pretrain}
data: {name: stdlib}
parallelism: {name: tp2, tp: 2, dp: 1}
job: {name: train, sample_prompt: "import "}
"""
NASTY = '<script>alert("x")</script>&\'</pre>'


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what a test asks for."""

    VOID = {"meta", "br"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        self.links += [v or "" for k, v in attributes if k in ("src", "href")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def row(step: int, **more: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 3.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * step, "mem_bytes": 2**30}
    return base | {"tokens_per_s": 50.0, "step_s": 2.0, "data_wait_s": 0.02} | more


def folder(root: Path, rows: list[dict[str, Any]], result: dict[str, Any] | None, config: str = CONFIG) -> Path:
    run = root / "qwen3" / "run1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config)
    (run / "command.txt").write_text("python -m zoo.qwen3 optim.lr=1e-3 schedule.steps=20 run_id=run1\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if result is not None:
        (run / "result.json").write_text(json.dumps(result))
    return run


def checkpoint(run: Path, step: int, val_loss: float | None) -> Path:
    path = run / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "index.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"step": step, "val_loss": val_loss}))
    return path


def page(run: Path) -> tuple[Page, str]:
    text = write_report(run).read_text(encoding="utf-8")
    return Page(text), text


def test_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row(s) for s in range(1, 21)] + [{"step": 20, "val_loss": 2.5, "val_bits_per_byte": 1.25}]
    result = {"status": "done", "sample": {"prompt": "import ", "text": "os\n"}}
    run = folder(tmp_path, rows, result)
    checkpoint(run, 10, 2.25), checkpoint(run, 20, 2.5)
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    shown, text = page(run)
    # By hand: embeddings 13*6, q 8*6, k and v 4*6 each, o 6*8, norms 2*6 + 2*4 + 6, feed-forward 3*10*6.
    assert 78 + 48 + 24 + 24 + 48 + 26 + 180 == 428
    assert "Parameters428tiny" in shown.text
    for words in ("qwen3 tiny", "finished", "2.5", "1.25", "of 20", "40s", "1.0% waiting", "1.00 GiB", "import os"):
        assert words in shown.text, words
    assert 'python -m zoo.qwen3 job=sample model.weights=qwen3/run1/hf prompt="import "' in shown.text
    assert "python -m zoo.qwen3 checkpoint.resume=qwen3/run1 schedule.steps=40" in shown.text
    assert "step 20newestqwen3/run1/checkpoints/step_00000020" in shown.text
    assert "step 10bestqwen3/run1/checkpoints/step_00000010" in shown.text
    assert text.count('<figure class="chart">') == 5


def test_troubles_and_held_out_rows_are_told(tmp_path: Path) -> None:
    spikes = [
        row(s) | {"loss": 9.5, "spike_limit": 4.25, "skipped": s % 2 == 0, "samples": [8, 15]} for s in range(2, 27)
    ]
    rows = [
        row(1),
        *spikes,
        {"step": 20, "val_loss": 2.5, "val_rows": 384, "val_rows_of": 1022, "val_rows_whole": True},
    ]
    skipped = {f"{NASTY}:{i}": "is not JSON" for i in range(3)}
    result = {"status": "done", "bad_samples": 5, "skipped_samples": skipped, "read_retries": 7}
    shown, text = page(folder(tmp_path, rows, result))
    words = (
        "25 loss spikes, the last 20",
        "Step 26: a loss of 9.5, above 4.25; samples 8 to 15, skipped",
        "learned all",
    )
    more = (
        "5 samples could not be used and were skipped, the first 3",
        "7 reads of files",
        "384 of 1,022 held-out rows",
    )
    for part in (*words, *more):
        assert part in shown.text, part
    assert "Step 6:" not in shown.text and "<script>alert" not in text
    assert "Troubles" not in page(folder(tmp_path / "none", [row(1)], {"status": "done"}))[0].text


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    shown, text = page(folder(tmp_path, [row(1), row(2)], {"status": "done"}))
    assert shown.links == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_everything_is_escaped(tmp_path: Path) -> None:
    config = CONFIG.replace("name: stdlib", f"name: {json.dumps(NASTY)}").replace(
        "name: tiny", f"name: {json.dumps(NASTY)}"
    )
    result = {"status": NASTY, "message": NASTY, "sample": {"prompt": NASTY, "text": NASTY}}
    run = folder(tmp_path, [row(1)], result, config)
    plain, _ = page(folder(tmp_path / "plain", [row(1)], {"status": "done"}))
    shown, text = page(run)
    assert shown.scripts == plain.scripts
    assert "alert(" in shown.text and "<script>alert" not in text


@pytest.mark.parametrize("status", ["interrupted", "failed", None])
def test_no_rows(tmp_path: Path, status: str | None) -> None:
    result = None if status is None else {"status": status, "message": "why it stopped"}
    shown, _ = page(folder(tmp_path, [], result))
    assert "no values yet" in shown.text and "What next" not in shown.text
    assert ("why it stopped" in shown.text) == (status is not None)


def test_one_row_is_a_dot(tmp_path: Path) -> None:
    _, text = page(folder(tmp_path, [row(1)], None))
    assert text.count("<circle cx") == 5


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    rows = [row(s, loss=None if s == 3 else float("inf") if s == 6 else 1.0 * s) for s in range(1, 9)]
    _, text = page(folder(tmp_path, rows, {"status": "failed", "message": "the loss is nan"}))
    loss = re.search(r'<g class="line one"><path d="([^"]*)"', text)
    assert loss and loss.group(1).count("M") == 3
    assert "nan" not in loss.group(1) and "Infinity" not in text


def test_damaged_files(tmp_path: Path) -> None:
    run = folder(tmp_path, [], None, config="a: [")
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n\xff\n{"step": 2, "lo')
    (run / "result.json").write_text("{")
    shown, _ = page(run)
    assert "Steps1" in shown.text.replace("\n", "")
    empty = tmp_path / "empty"
    empty.mkdir()
    page(empty)


def test_result_that_is_still_to_be_written(tmp_path: Path) -> None:
    run = folder(tmp_path, [row(1)], {"status": "failed", "message": "of an earlier attempt"})
    text = write_report(run, {"status": "done"}).read_text()
    assert "finished" in text and "earlier attempt" not in text


def test_thousands_of_steps_stay_small(tmp_path: Path) -> None:
    rows = [row(s, loss=3 + math.sin(s), grad_norm=random.random()) for s in range(1, 20001)]
    _, text = page(folder(tmp_path, rows, {"status": "done"}))
    assert len(text) < 300_000


def test_thin_keeps_extremes() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[1234], points[7000], points[42] = (1234.0, 9.0), (7000.0, -9.0), (42.0, None)
    kept = thin(points, 100)
    assert len(kept) <= 110
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert (1234.0, 9.0) in kept and (7000.0, -9.0) in kept
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert thin(points[:100], 100) == points[:100]


def test_smooth() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, None), (4.0, 9.0), (5.0, 1.0)]
    # Windows of three where there is room, one at the ends; what is missing counts for nothing and stays missing.
    assert smooth(points, 3) == [(1.0, 2.0), (2.0, 3.0), (3.0, None), (4.0, 5.0), (5.0, 1.0)]


def test_ticks_and_scales() -> None:
    assert nice_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(1, 3, 8, whole=True) == [1, 2, 3]
    assert nice_ticks(0.0012, 0.0031, 4) == pytest.approx([0.0015, 0.002, 0.0025, 0.003])
    flat = scale([5.0, 5.0], 0, 100, 4)
    assert flat.low < 5 < flat.high and 0 < flat(5.0) < 100
    assert scale([0.0], 0, 100, 4, zero=True)(0.0) == 50
    assert scale([2.0, 4.0], 0, 100, 4, zero=True).low == 0


def test_chart_of_nothing() -> None:
    assert "no values yet" in line_chart("x", [Series("x", [(1, None)])], str)


def test_commands_survive_the_shell(tmp_path: Path) -> None:
    config = CONFIG.replace('"import "', json.dumps("a \"$b\" `c` \\ 'd'"))
    run = folder(tmp_path / "a b", [row(5)], None, config)
    checkpoint(run, 5, None)
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    facts = gather(run)
    words = shlex.split(sample_command(facts))
    assert words[-1] == "prompt=a \"$b\" `c` \\ 'd'" and words[-2] == f"model.weights={run}/hf"
    words = shlex.split(continue_command(facts))
    # Not finished: the steps stay as they were.
    assert words == ["python", "-m", "zoo.qwen3", f"checkpoint.resume={run}"]
