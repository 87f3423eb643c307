"""Rows of metrics, rates, arithmetic counts and what the user sees of them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from zoo.qwen3.config import Qwen3Config

from engine.errors import UserError
from engine.llm.grouped import weight_map
from engine.metrics import text
from engine.metrics.flops import Peak, flops_per_token, matmul_parameters, peak_of
from engine.metrics.meter import TIMING_FIELDS, Meter
from engine.metrics.progress import Bar, Lines, Progress, validation_text
from engine.metrics.writer import METRICS, MetricsWriter, check_packages, read_rows
from engine.schema import JOBS, Data, Logger, Parallelism, Precision, Run, Schedule
from hardware.base import ChipSpec, Fact, MemoryStats

QWEN3_0_6B = Qwen3Config(
    name="0_6b",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def run(**logger: Any) -> Run:
    return Run(
        family="qwen3",
        run_id="r1",
        model=QWEN3_0_6B,
        job=JOBS["train"](),
        logger=Logger(name="test", **logger),
        data=Data(name="test", seq_len=4096),
        parallelism=Parallelism(name="test", dp=2),
        precision=Precision(name="bf16"),
        schedule=Schedule(name="cosine", steps=25),
    )


def write(folder: Path, steps: range, start: int = 0) -> None:
    writer = MetricsWriter(folder, run(), start)
    for step in steps:
        writer.write({"step": step, "loss": 1 / 3 + step})
    writer.close()


def test_rows_are_readable_at_once_and_exact(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, run())
    writer.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": float("inf"), "val": float("nan")})
    # Not closed: a killed run has its rows too.
    line = (tmp_path / METRICS).read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "loss": 0.30000000000000004,
        "grad_norm": None,
        "val": None,
    }
    writer.close()


def test_resume_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Rows after the checkpoint's step and a torn last line go; what stays is byte for byte what it was."""
    write(tmp_path, range(1, 6))
    before = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 6, "lo')
    write(tmp_path, range(4, 8), start=3)
    lines = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    assert lines[:5] == before
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 3, 4, 5, 6, 7]
    write(tmp_path, range(1, 2), start=0)
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1]


def test_rows_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    assert list(read_rows(path)) == []
    path.write_bytes(b'\n[1]\n{"loss": 1}\n{"step": "x"}\n\xff\xfe\n{"step": 2}\n{"step"')
    assert list(read_rows(path)) == [{"step": 2}]


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages(Logger(name="test"))
    for name in ("tensorboard", "wandb"):
        with pytest.raises(UserError, match=f"uv sync --extra {name}"):
            check_packages(Logger(name="test", **{name: True}))


class FakeWandb:
    """The three calls that are made of wandb."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.rows: list[tuple[dict[str, Any], int]] = []
        self.finished = False

    def init(self, **settings: Any) -> FakeWandb:
        self.settings = settings
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    writer = MetricsWriter(tmp_path, run(wandb=True))
    writer.write({"step": 3, "loss": 2.0, "note": "text"})
    writer.close()
    assert fake.rows == [({"loss": 2.0}, 3)] and fake.finished
    assert fake.settings["config"]["model"]["hidden_size"] == 1024 and fake.settings["dir"] == str(tmp_path)


def test_flops_of_a_published_model() -> None:
    """By hand: a layer has 6,291,456 + 9,437,184 weights in matrices, the tied head 151,936 x 1024."""
    weights = weight_map(QWEN3_0_6B)
    products = 28 * (6_291_456 + 9_437_184) + 151_936 * 1024
    assert products == 595_984_384
    assert matmul_parameters(weights.published) == products
    attention = 12 * 28 * 16 * 128 * 4096
    assert flops_per_token(QWEN3_0_6B, weights, 4096) == 6 * products + attention == 6_394_478_592
    untied = dict(weights.published, **{"lm_head.weight": (151_936, 1024)})
    assert matmul_parameters(untied) == products


CHIP = ChipSpec(
    "chip",
    1,
    {
        "bf16": Fact(100e12, "datasheet", "vendor"),
        "tf32": Fact(50e12, "datasheet", "vendor"),
        "fp32": Fact(5e12, "datasheet", "vendor"),
    },
)
UNKNOWN = ChipSpec("cpu", 1, {"bf16": Fact(None, "nobody says", "unknown"), "fp32": Fact(None, "x", "unknown")})


def test_peak() -> None:
    assert peak_of(CHIP, "bf16", True, 2) == Peak(200e12, "2 x 100 TFLOP/s bf16, datasheet (vendor)")
    assert peak_of(CHIP, "fp32", True, 1).flops == 50e12
    assert peak_of(CHIP, "fp32", False, 1).flops == 5e12
    assert peak_of(UNKNOWN, "fp32", True, 1) is None
    assert peak_of(UNKNOWN, "fp16", True, 1) is None


def test_meter() -> None:
    meter = Meter(total_steps=10, flops_per_token=2e9, peak=Peak(10e12, "x"), window=2)
    assert meter.seconds_left(0) is None and meter.fields()["tokens_per_s"] == 0
    meter.add(1000, 100.0, 50.0)  # leaves the window
    meter.add(1000, 1.0, 0.1)
    meter.add(3000, 3.0, 0.3)
    assert meter.tokens_per_s == 1000
    assert meter.data_wait_share == pytest.approx(0.1)
    assert meter.tflops == pytest.approx(2.0)
    assert meter.mfu == pytest.approx(0.2)
    assert meter.seconds_left(3) == 14
    assert set(meter.fields()) < set(TIMING_FIELDS)
    assert set(Meter(10).fields()) == {"tokens_per_s"}


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.1234, "0.123"), (999, "999"), (999.7, "1k"), (12345, "12.3k"), (999_999, "1M"), (1.5e9, "1.5B")],
)
def test_counts(value: float, words: str) -> None:
    assert text.count(value) == words


def test_durations_and_memory() -> None:
    assert [text.duration(s) for s in (0.4, 59.4, 59.6, 3599.7, 7620, 90000, None, float("inf"))] == [
        "0s",
        "59s",
        "1m 00s",
        "1h 00m",
        "2h 07m",
        "1d 01h",
        "?",
        "?",
    ]
    assert text.memory(3 * 2**29) == "1.50 GiB" and text.memory(5 * 2**20) == "5 MiB"


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "tokens": 8192 * step,
        "step_tokens": 8192,
        "data_wait_s": 0.01,
        "step_s": 0.5,
    }


class FakeHardware:
    def __init__(self, spec: ChipSpec) -> None:
        self._spec = spec

    def spec(self) -> ChipSpec:
        return self._spec

    def memory(self) -> MemoryStats:
        return MemoryStats(1, 3 * 2**30, 2**40)


def shown(spec: ChipSpec, active: bool = True, **logger: Any) -> tuple[list[str], list[dict[str, Any]]]:
    stream, rows = io.StringIO(), [row(step) for step in range(1, 26)]
    with Progress(run(**logger), FakeHardware(spec), 0, active, stream) as progress:  # type: ignore[arg-type]
        for one in rows:
            progress.step(one)
        progress.validation({"step": 25, "val_loss": 2.25, "val_bits_per_byte": 1.75})
    return stream.getvalue().splitlines(), rows


def test_plain_lines() -> None:
    lines, rows = shown(CHIP)
    assert lines[0] == "MFU is model FLOP/s over 2 x 100 TFLOP/s bf16, datasheet (vendor)"
    assert lines[1].split()[0] == "step" and "MFU" in lines[1]
    assert [line.split()[0] for line in lines[2:-1]] == ["1", "10", "20", "25"]
    # 16384 tokens a second at 6.39 GFLOP each are 104.8 TFLOP/s, 52.4% of two chips.
    assert lines[2].split() == [
        "1",
        "2.5000",
        "0.750",
        "1.00e-03",
        "16.4k",
        "105",
        "52.4%",
        "3.00",
        "GiB",
        "2.0%",
        "12s",
    ]
    assert lines[-1] == "step 25: validation loss 2.2500, 1.750 bits per byte"
    assert rows[0]["mfu"] == pytest.approx(0.5238, abs=1e-4) and rows[0]["mem_bytes"] == 3 * 2**30


def test_no_column_without_a_source() -> None:
    lines, rows = shown(UNKNOWN)
    assert "MFU" not in "".join(lines) and "TFLOP/s" in lines[0]
    assert "mfu" not in rows[0]


def test_only_the_active_rank_speaks() -> None:
    lines, rows = shown(CHIP, active=False)
    assert lines == [] and rows[0] == row(1)


def test_bar() -> None:
    lines, _ = shown(CHIP, progress=True)
    everything = "\n".join(lines)
    for words in ("step 25/25", "100%", "loss", "2.5000", "16.4k", "52.4%", "3.00 GiB", "bits per byte"):
        assert words in everything


def test_validation_without_bytes() -> None:
    assert validation_text({"step": 5, "val_loss": 3.0}) == "step 5: validation loss 3.0000"


def test_views_take_odd_values() -> None:
    meter = Meter(1)
    odd = row(1) | {"loss": float("nan"), "grad_norm": float("inf"), "tokens_per_s": 0.0, "mem_bytes": 0}
    stream = io.StringIO()
    Lines(1, 0, 10, False, False, stream).step(odd, meter)
    assert "nan" in stream.getvalue() and "inf" in stream.getvalue()
    bar = Bar(1, io.StringIO())
    bar.step(odd, meter)
    bar.close()
