"""Putting `report.html` together. Everything that comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from engine.metrics.text import count, memory
from engine.report.chart import Point, Series, line_chart, smooth
from engine.report.conversations import conversations
from engine.report.document import command_block, document, figure_list, save
from engine.report.facts import Facts, continue_command, figures, finite, gather, number, sample_command

REPORT = "report.html"
STATUS = {
    "done": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
    "unknown": "running or killed",
}
SHOWN = 20  # loss spikes that are listed
SMOOTH_FROM = 60  # rows; below, the raw line is as easy to read


def write_report(run_dir: Path, result: dict[str, Any] | None = None) -> Path:
    """Write `report.html` into a run folder, whatever state the run is in.

    `result` stands for a result.json that is still to be written.
    """
    return save(run_dir / REPORT, render(gather(run_dir, result)))


def render(facts: Facts) -> str:
    """The page."""
    title = f"{facts.family} {facts.value('model.name', '')}".strip()
    sections = [
        _header(facts, title),
        _message(facts),
        figure_list(figures(facts)),
        _charts(facts),
        _troubles(facts),
        conversations(facts.result),
        _sample(facts),
        _commands(facts),
        _checkpoints(facts),
        _config(facts),
    ]
    return document(f"{title}: {facts.folder.name}", sections)


def _header(facts: Facts, title: str) -> str:
    layout = {k: facts.value(f"parallelism.{k}", 1) for k in ("tp", "pp", "cp", "ep", "dp")}
    sizes = " ".join(f"{name}{size}" for name, size in layout.items() if size != 1)
    layout_name = str(facts.value("parallelism.name", ""))
    if sizes and sizes.replace(" ", "_") not in layout_name:
        layout_name += f" ({sizes})"
    words = [
        f"{facts.value('task.name', 'training')} on {facts.value('data.name', 'unknown data')}",
        f"{facts.value('backend', 'unknown')} backend, {layout_name}",
        f"{facts.value('precision.name', 'unknown precision')} on {facts.value('hardware.name', 'unknown hardware')}",
    ]
    status = facts.status
    shown = escape(STATUS.get(status, status))
    return (
        f'<header><h1>{escape(title)}</h1><span class="status {escape(status)}">{shown}</span>'
        f"<p>{escape(' · '.join(' '.join(w.split()) for w in words))}<br>{escape(str(facts.folder))}</p></header>"
    )


def _message(facts: Facts) -> str:
    message = facts.result.get("message")
    return f'<p class="message {escape(facts.status)}">{escape(str(message))}</p>' if message else ""


def _charts(facts: Facts) -> str:
    charts: list[tuple[str, str, Callable[[float], str], float]] = [
        ("Learning rate", "lr", lambda v: f"{v:.3g}", 1),
        ("Gradient norm", "grad_norm", lambda v: f"{v:.3g}", 1),
        ("Tokens per second", "tokens_per_s", count, 1),
        ("Samples per second", "samples_per_s", count, 1),
        ("Memory, GiB", "mem_bytes", lambda v: f"{v:.3g}", 2**30),
        ("MFU, percent", "mfu", lambda v: f"{v:.3g}", 0.01),
    ]
    drawn = [
        line_chart(title, [Series(title.lower(), _scaled(facts.column(field), unit))], show, zero=True)
        for title, field, show, unit in charts
        if any(field in row for row in facts.train)
    ]
    return f'<h2>Curves</h2><div class="charts"><div class="wide">{_loss_chart(facts)}</div>{"".join(drawn)}</div>'


def _scaled(points: list[Point], unit: float) -> list[Point]:
    return [(x, None if y is None else y / unit) for x, y in points]


def _loss_chart(facts: Facts) -> str:
    loss = facts.column("loss")
    validation = [(row["step"], finite(row["val_loss"])) for row in facts.validation]
    window = max(2, len(loss) // 40)
    if len(loss) >= SMOOTH_FROM:
        lines = [
            Series("each step", loss, "raw", hover=False),
            Series(f"training, average of {window} steps", smooth(loss, window)),
        ]
    else:
        lines = [Series("training", loss)]
    if validation:
        lines.append(Series("validation", validation, "two", dots=len(validation) <= 60))
    return line_chart("Loss, nats per token", lines, lambda v: f"{v:.4g}", width=1080, height=320)


def _troubles(facts: Facts) -> str:
    """Loss spikes, skipped samples and reads that were tried again: nothing of that kind goes unsaid."""
    lines = []
    spikes = [row for row in facts.train if "spike_limit" in row]
    for row in spikes[-SHOWN:]:
        samples = " to ".join(map(str, row.get("samples") or ["unknown"]))
        done = "skipped" if row.get("skipped") else "learned all the same"
        limit = number(finite(row["spike_limit"]))
        lines.append(
            f"Step {row['step']:,}: a loss of {number(finite(row['loss']))}, above {limit}; samples {samples}, {done}"
        )
    if len(spikes) > SHOWN:
        lines.insert(0, f"{len(spikes):,} loss spikes, the last {SHOWN} of them:")
    skipped = facts.result.get("skipped_samples")
    bad = facts.result.get("bad_samples", 0)
    if isinstance(skipped, dict) and skipped:
        more = f", the first {len(skipped)}" if isinstance(bad, int) and bad > len(skipped) else ""
        lines.append(f"{bad} samples could not be used and were skipped{more}:")
        lines += [f"{where}: {why}" for where, why in skipped.items()]
    if retries := facts.result.get("read_retries"):
        lines.append(f"{retries} reads of files failed and were tried again (rank 0)")
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>Troubles</h2><div class="box"><ul>{items}</ul></div>' if lines else ""


def _sample(facts: Facts) -> str:
    sample = facts.result.get("sample")
    if not isinstance(sample, dict):
        return ""
    return (
        f'<h2>A text sample</h2><div class="box"><pre class="sample"><b>{escape(str(sample.get("prompt", "")))}</b>'
        f"{escape(str(sample.get('text', '')))}</pre></div>"
        '<p class="note">The prompt is set in colour; the model wrote the rest.</p>'
    )


def _commands(facts: Facts) -> str:
    commands = [
        ("Let the model speak", sample_command(facts)),
        ("Continue this run", continue_command(facts)),
    ]
    blocks = "".join(command_block(what, command) for what, command in commands if command)
    return f"<h2>What next</h2>{blocks}" if blocks else ""


def _checkpoints(facts: Facts) -> str:
    rows = [
        (
            f"step {saved.step:,}",
            saved.path,
            number(saved.val_loss),
            memory(saved.size),
            _tags(saved.best, saved.newest),
        )
        for saved in reversed(facts.checkpoints)
    ]
    if facts.hf is not None:
        rows.insert(0, ("Hugging Face directory", facts.hf, "", "", ""))
    rows += [(what, path, "", "", "") for what, path in facts.looks]
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{escape(what)}{tags}</td><td><code>{escape(str(path))}</code></td>"
        f'<td class="number">{escape(loss)}</td><td class="number">{escape(size)}</td></tr>'
        for what, path, loss, size, tags in rows
    )
    return (
        '<h2>Where the model is</h2><div class="box scroll"><table><thead><tr><th>What</th><th>Path</th>'
        '<th class="number">Validation loss</th><th class="number">Size</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _tags(best: bool, newest: bool) -> str:
    return "".join(f'<span class="tag">{name}</span>' for name, on in (("newest", newest), ("best", best)) if on)


def _config(facts: Facts) -> str:
    if not facts.config_text:
        return ""
    return (
        '<h2>Settings</h2><div class="box"><details><summary>The full frozen config</summary>'
        f"<pre>{escape(facts.config_text)}</pre></details></div>"
    )
