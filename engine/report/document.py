"""What all pages have in common: one file each, which loads nothing from elsewhere."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent


def document(title: str, sections: Iterable[str], styles: Sequence[str] = ("style.css",)) -> str:
    """A page of these sections of HTML; empty ones are left out."""
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    style = "".join(_file(name) for name in styles)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body><main>\n{chr(10).join(s for s in sections if s)}\n"
        f"<footer>Written by Zooforge on {escape(made)}.</footer>\n"
        f"</main>\n<script>\n{_file('page.js')}</script></body></html>\n"
    )


def save(path: Path, page: str) -> Path:
    """Write a page in one move."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def figure_list(figures: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (name, value, detail) of each."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for name, value, detail in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def command_block(what: str, command: str) -> str:
    """A command with a button that copies it."""
    return (
        f'<div class="command"><p>{escape(what)}</p><div><pre>{escape(command)}</pre>'
        '<button type="button">Copy</button></div></div>'
    )


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
