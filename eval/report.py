"""`report.html` of an evaluation: one file that loads nothing but the videos and the image beside it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from engine.report.document import document, figure_list, save
from eval.results import VIDEOS, read_header, read_lines, summarise

REPORT = "report.html"
MOST_VIDEOS = 60


def write_report(folder: Path) -> Path:
    """Write the page from what the folder holds now."""
    header = read_header(folder)
    lines = list(read_lines(folder).values())
    return save(folder / REPORT, render(folder, header, lines))


def percent(values: dict[str, Any]) -> str:
    """A rate and its interval, in words."""
    if values["rate"] is None:
        return "no episode"
    return f"{100 * values['rate']:.1f}% ({100 * values['low']:.1f} to {100 * values['high']:.1f})"


def render(folder: Path, header: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """The page."""
    summary = summarise(header, lines)
    title = f"{header['policy']} on {header['suite']}"
    figures = [
        ("success", percent(summary), f"{summary['successes']} of {summary['episodes']} episodes; 95% Wilson"),
        ("protocol", str(header["preset"]), str(header.get("source", ""))),
        ("episodes", f"{summary['episodes']} / {summary['planned']}", f"{summary['repeated']} repeated"),
        ("latency", f"{summary['latency_ms'] or 0:.1f} ms", "median of an inference, with the way there and back"),
    ]
    sections = [
        f"<header><h1>{escape(title)}</h1></header>",
        figure_list(figures),
        _tasks(summary),
        _reasons(summary),
        _seen(folder),
        _videos(folder, lines),
        _protocol(header),
    ]
    return document(f"{title}: {folder.name}", sections)


def _tasks(summary: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(number)}</td><td>{escape(values['prompt'])}</td><td>{values['successes']} of "
        f"{values['episodes']}</td><td>{escape(percent(values))}</td></tr>"
        for number, values in summary["tasks"].items()
    )
    head = "<tr><th>task</th><th>instruction</th><th>successes</th><th>rate, 95% interval</th></tr>"
    return f"<section><h2>Tasks</h2><table>{head}{rows}</table></section>"


def _reasons(summary: dict[str, Any]) -> str:
    if not summary["reasons"]:
        return ""
    rows = "".join(f"<tr><td>{escape(why)}</td><td>{count}</td></tr>" for why, count in summary["reasons"].items())
    return f"<section><h2>Failures</h2><table><tr><th>reason</th><th>episodes</th></tr>{rows}</table></section>"


def _seen(folder: Path) -> str:
    from eval.runner import CHECK, IMAGE

    parts = []
    if (folder / CHECK).is_file():
        check = json.loads((folder / CHECK).read_bytes())
        how = "succeeded" if check["success"] else "failed"
        parts.append(f"<p>A recorded demonstration {how} through the adapter in {int(check['steps'])} steps.</p>")
    if (folder / IMAGE).is_file():
        parts.append(f'<p>What the policy sees:</p><img src="{IMAGE}" alt="the images of an observation">')
    return f"<section><h2>Conventions</h2>{''.join(parts)}</section>" if parts else ""


def _videos(folder: Path, lines: list[dict[str, Any]]) -> str:
    shown = [line for line in lines if line.get("video") and (folder / VIDEOS / line["video"]).is_file()]
    items = "".join(
        f'<figure><video controls muted preload="metadata" src="{VIDEOS}/{escape(line["video"])}"></video>'
        f"<figcaption>task {line['task']}, episode {line['episode']}: "
        f"{'success' if line['success'] else escape(str(line['reason']))}</figcaption></figure>"
        for line in shown[:MOST_VIDEOS]
    )
    more = f"<p>{len(shown) - MOST_VIDEOS} more are in {VIDEOS}/.</p>" if len(shown) > MOST_VIDEOS else ""
    return f"<section><h2>Videos</h2>{items}{more}</section>" if items else ""


def _protocol(header: dict[str, Any]) -> str:
    return f"<section><h2>Protocol</h2><pre>{escape(json.dumps(header, indent=1))}</pre></section>"
