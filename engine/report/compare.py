"""The page that compares the runs of a sweep: curves over each other, and a table with the best run first."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from engine.cli import command_line
from engine.metrics.text import duration
from engine.metrics.writer import METRICS, read_rows
from engine.report.chart import Point, Series, line_chart, smooth, thin
from engine.report.document import command_block, document, figure_list, save
from engine.report.facts import as_typed, finite, number
from engine.report.page import REPORT, SMOOTH_FROM
from engine.schema import Sweep
from engine.sweep.rows import Row, ranked_by, ranking, text, value_of, varied

COLOURS = 8  # lines that an eye tells apart; compare.css has as many
ROOM = 1.25  # curves are drawn up to so many times the highest loss that a run began with


@dataclass(frozen=True)
class Curves:
    """(step, value) of one run."""

    loss: list[Point]
    val_loss: list[Point]


@dataclass
class Comparison:
    """The page of one sweep; the curves of runs that have ended are read once."""

    home: Path
    family: str
    settings: Sweep
    common: list[str]  # overrides of all runs
    _curves: dict[str, Curves] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.home / REPORT

    def write(self, rows: list[Row]) -> None:
        """Write the page as things stand."""
        for row in rows:
            if row.exit_status is not None and row.folder not in self._curves:
                self._curves[row.folder] = _read(Path(row.folder))
        save(self.path, self.render(rows))

    def render(self, rows: list[Row]) -> str:
        """The page. Runs are coloured by rank."""
        order = ranking(rows, self.settings)
        order += [n for n in range(len(rows)) if n not in set(order)]
        sections = [
            self._header(rows),
            self._figures(rows),
            self._best(rows),
            self._charts(rows, order),
            self._table(rows, order),
        ]
        return document(f"{self.family}: sweep {self.home.name}", sections, ("style.css", "compare.css"))

    def _header(self, rows: list[Row]) -> str:
        what = "every combination" if self.settings.name == "grid" else f"a search by {self.settings.name}"
        words = f"{what} · all runs: {' '.join(self.common)}" if self.common else what
        ended = all(row.exit_status is not None or row.status.startswith("failed") for row in rows)
        state, shown = ("done", "finished") if ended else ("unknown", "running or stopped")
        return (
            f"<header><h1>{escape(self.family)}: {len(rows)} runs compared</h1>"
            f'<span class="status {state}">{shown}</span>'
            f"<p>{escape(words)}<br>{escape(str(as_typed(self.home)))}</p></header>"
        )

    def _figures(self, rows: list[Row]) -> str:
        order, metric = ranking(rows, self.settings), ranked_by(rows, self.settings)
        values = [value_of(rows[n], metric, self.settings) for n in order]
        done, failed = sum(row.done for row in rows), sum(row.status.startswith("failed") for row in rows)
        spent = sum(row.seconds or 0.0 for row in rows)
        figures = [
            ("Finished", str(done), f"of {len(rows)} runs, {failed} failed"),
            ("Time", duration(spent), "of all runs"),
        ]
        if order:
            goal = "lowest" if self.settings.direction == "minimize" else "highest"
            figures = [
                (f"Best {metric}", number(values[0]), f"run {order[0] + 1}, the {goal}"),
                (f"Worst {metric}", number(values[-1]), f"run {order[-1] + 1}"),
                *figures,
            ]
        return figure_list(figures)

    def _best(self, rows: list[Row]) -> str:
        order = ranking(rows, self.settings)
        if not order:
            return ""
        best = rows[order[0]]
        what = f"Run {order[0] + 1}: {varied(best.overrides, self.common) or 'as it is'}"
        return f"<h2>Repeat the best run</h2>{command_block(what, command_line(self.family, best.overrides))}"

    def _charts(self, rows: list[Row], order: list[int]) -> str:
        charts = (("Validation loss", "val_loss"), ("Training loss", "loss"))
        drawn = [self._chart(title, name, rows, order) for title, name in charts]
        return f'<h2>Curves</h2><div class="charts">{"".join(drawn)}</div>'

    def _chart(self, title: str, name: str, rows: list[Row], order: list[int]) -> str:
        lines = {n: getattr(self._curves[rows[n].folder], name) for n in order if rows[n].folder in self._curves}
        lines = {n: points for n, points in lines.items() if any(y is not None for _, y in points)}
        if not lines:
            return ""
        cap, colours = _cap(list(lines.values())), self._colours(rows, order)
        series, grey, cut = [], [], False
        for n, points in lines.items():
            window = max(2, len(points) // 40)
            if name == "loss" and len(points) >= SMOOTH_FROM:
                points, title = smooth(points, window), f"Training loss, average of {window} steps"
            kept = [(x, y if y is None or y <= cap else None) for x, y in points]
            cut |= kept != points
            label = f"{n + 1}: {varied(rows[n].overrides, self.common)}"
            if n in colours:
                dots = name == "val_loss" and len(kept) <= 60
                series.append(Series(label, thin(kept), f"own c{colours[n]}", dots=dots))
            else:
                grey.append(Series(label, thin(kept), "rest", hover=False))
        notes = [f"grey: the runs after the best {COLOURS}"] if grey else []
        notes += [f"values above {number(cap)} are not drawn"] if cut else []
        note = f'<p class="note">{escape("; ".join(notes))}</p>' if notes else ""
        chart = line_chart(f"{title}, nats per token", [*grey, *series], lambda v: f"{v:.4g}", width=1080, height=320)
        return f'<div class="wide">{chart}{note}</div>'

    def _colours(self, rows: list[Row], order: list[int]) -> dict[int, int]:
        """The best runs that have curves, each with the number of its colour."""
        drawn = [n for n in order if (c := self._curves.get(rows[n].folder)) and (c.loss or c.val_loss)]
        return {n: colour for colour, n in enumerate(drawn[:COLOURS])}

    def _table(self, rows: list[Row], order: list[int]) -> str:
        names = [("Loss", "loss"), ("Validation loss", "val_loss")]
        if self.settings.metric not in ("loss", "val_loss"):
            names.append((self.settings.metric, "value"))
        heads = "".join(f'<th class="number">{escape(head)}</th>' for head, _ in names)
        best = ranking(rows, self.settings)[:1]
        colours, fields = self._colours(rows, order), [name for _, name in names]
        body = "".join(self._row(n, colours.get(n), rows[n], fields, n in best) for n in order)
        return (
            '<h2>Runs</h2><div class="box scroll"><table><thead><tr><th class="number">Run</th><th>What varied</th>'
            f'<th>Status</th>{heads}<th class="number">Time</th><th>Report</th></tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def _row(self, position: int, colour: int | None, row: Row, fields: list[str], best: bool) -> str:
        swatch = "" if colour is None else f'<span class="swatch c{colour}"></span>'
        tag = '<span class="tag">best</span>' if best else ""
        cells = "".join(f'<td class="number">{text(getattr(row, name))}</td>' for name in fields)
        report = Path(row.folder) / REPORT
        link = "-"
        if report.is_file():
            link = f'<a href="{escape(os.path.relpath(report, self.home))}">{escape(row.run_id)}</a>'
        time = duration(row.seconds) if row.seconds is not None else "-"
        return (
            f'<tr{" class=best" if best else ""}><td class="number">{position + 1}</td>'
            f'<td class="varied">{swatch}{escape(varied(row.overrides, self.common))}{tag}</td>'
            f'<td>{escape(row.status)}</td>{cells}<td class="number">{time}</td><td>{link}</td></tr>'
        )


def _read(folder: Path) -> Curves:
    rows = list(read_rows(folder / METRICS))
    return Curves(*([(r["step"], finite(r[name])) for r in rows if name in r] for name in ("loss", "val_loss")))


def _cap(lines: list[list[Point]]) -> float:
    """What is above hides everything else: a run that diverges must not flatten the others."""
    firsts = [next((y for _, y in points if y is not None), None) for points in lines]
    known = [y for y in firsts if y is not None]
    return ROOM * max(known) if known and min(known) > 0 else float("inf")
