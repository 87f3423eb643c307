"""What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from engine.metrics.flops import flops_of_run, peak_of
from engine.metrics.meter import Meter
from engine.metrics.text import count, duration, memory, percent
from engine.schema import Run
from hardware.base import Hardware


class View(Protocol):
    """One way of showing a run."""

    def step(self, row: dict[str, Any], meter: Meter) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Measures a run's rates and shows them. Only the rank with `active` does anything."""

    def __init__(
        self,
        run: Run,
        hardware: Hardware,
        first_step: int,
        active: bool,
        stream: TextIO | None = None,
        unit: str = "tokens",
    ) -> None:
        self._active, self._unit = active, unit
        if not active:
            return
        layout = run.parallelism
        devices = layout.tp * layout.pp * layout.cp * (layout.dp or 1)
        peak = peak_of(hardware.spec(), run.precision.name, run.precision.tf32, devices)
        flops = flops_of_run(run)
        self._hardware = hardware
        self._meter = Meter(run.schedule.steps, flops, peak, unit=unit)
        stream = stream or sys.stdout
        bar = stream.isatty() if run.logger.progress is None else run.logger.progress
        self._view: View = (
            Bar(run.schedule.steps, stream)
            if bar
            else Lines(run.schedule.steps, first_step, run.logger.interval, flops is not None, peak is not None, stream)
        )
        if peak is not None and flops is not None:
            self._view.line(f"MFU is model FLOP/s over {peak.source}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._active:
            self._view.close()

    def step(self, row: dict[str, Any]) -> None:
        """Show a step's row, and add what is measured here: tokens_per_s or samples_per_s, tflops, mfu, mem_bytes."""
        if not self._active:
            return
        self._meter.add(row[f"step_{self._unit}"], row["step_s"], row["data_wait_s"])
        row |= self._meter.fields() | {"mem_bytes": self._hardware.memory().peak}
        self._view.step(row, self._meter)

    def validation(self, row: dict[str, Any]) -> None:
        if self._active:
            self._view.line(validation_text(row))

    def message(self, text: str) -> None:
        if self._active:
            self._view.line(text)


def validation_text(row: dict[str, Any]) -> str:
    """`step 50: validation loss 3.3012, 2.412 bits per byte`, and the loss of each set that has a name."""
    text = f"step {row['step']}: validation loss {row['val_loss']:.4f}"
    if (bits := row.get("val_bits_per_byte")) is not None:
        text += f", {bits:.3f} bits per byte"
    if (error := row.get("action_error")) is not None:
        text += f", actions off by {error:.4g} on average"
    named = [f"{k.partition('.')[2]} {v:.4f}" for k, v in row.items() if k.startswith("val_loss.")]
    return f"{text} ({', '.join(named)})" if named else text


class Lines:
    """A table that grows by one line every `interval` steps. Columns that nobody can fill are left out."""

    def __init__(
        self, total: int, first_step: int, interval: int, has_flops: bool, has_peak: bool, stream: TextIO
    ) -> None:
        self._total, self._first, self._interval, self._stream = total, first_step + 1, max(1, interval), stream
        self._has_flops, self._has_mfu, self._header = has_flops, has_flops and has_peak, False

    def step(self, row: dict[str, Any], meter: Meter) -> None:
        step = row["step"]
        if step % self._interval and step not in (self._first, self._total):
            return
        cells = self._cells(row, meter)
        if not self._header:
            self._header = True
            self.line("  ".join(f"{name:>{width}}" for name, width, _ in cells))
        self.line("  ".join(f"{value:>{width}}" for _, width, value in cells))

    def _cells(self, row: dict[str, Any], meter: Meter) -> list[tuple[str, int, str]]:
        """(heading, width, value) of each column."""
        tflops, mfu = row.get("tflops"), row.get("mfu")
        return [
            ("step", 7, str(row["step"])),
            ("loss", 8, f"{row['loss']:.4f}"),
            ("grad norm", 9, f"{row['grad_norm']:.3f}"),
            ("lr", 9, f"{row['lr']:.2e}"),
            (f"{meter.unit}/s", len(meter.unit) + 2, count(row[meter.rate])),
            *([("TFLOP/s", 8, f"{tflops:.3g}" if tflops is not None else "")] if self._has_flops else []),
            *([("MFU", 6, percent(mfu) if mfu is not None else "")] if self._has_mfu else []),
            ("memory", 10, memory(row["mem_bytes"])),
            ("data wait", 9, percent(meter.data_wait_share)),
            ("time left", 9, duration(meter.seconds_left(row["step"]))),
        ]

    def line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        return None


class Bar:
    """A bar and two lines of figures that stay in place; messages scroll above them."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._console = Console(file=stream)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, row: dict[str, Any], meter: Meter) -> None:
        self._live.update(self.render(row, meter))

    def render(self, row: dict[str, Any], meter: Meter) -> Group:
        step = row["step"]
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        left = duration(meter.seconds_left(step))
        head.add_row(
            f"step {step}/{self._total}",
            ProgressBar(total=self._total, completed=step),
            f"{100 * step // self._total}%  {left} left",
        )
        rates = {f"{meter.unit}/s": count(row[meter.rate])}
        if row.get("tflops") is not None:
            rates["TFLOP/s"] = f"{row['tflops']:.3g}"
        if row.get("mfu") is not None:
            rates["MFU"] = percent(row["mfu"])
        learning = {"loss": f"{row['loss']:.4f}", "grad norm": f"{row['grad_norm']:.3f}", "lr": f"{row['lr']:.2e}"}
        machine = {"memory": memory(row["mem_bytes"]), "data wait": percent(meter.data_wait_share)}
        return Group(head, _figures(learning), _figures(rates | machine))

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def _figures(values: dict[str, str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, value in values.items():
        text.append(f"{name} ", style="dim").append(value, style="bold").append("   ")
    return text
