"""The first conversations of a run, with what is learned of them."""

from __future__ import annotations

from html import escape
from typing import Any


def conversations(result: dict[str, Any]) -> str:
    """A section of the report; empty for a run that learned from something else."""
    shown = result.get("conversations")
    if not isinstance(shown, list) or not shown:
        return ""
    boxes = "".join(
        f'<p class="note">{escape(str(one["where"]))}: {one["supervised"]} of {one["tokens"]} tokens are learned</p>'
        f'<div class="box"><pre class="sample">{_pieces(one["pieces"])}</pre></div>'
        for one in shown
    )
    return f"<h2>The first conversations</h2>{boxes}" + '<p class="note">What is learned is set in colour.</p>'


def _pieces(pieces: list[tuple[bool, str]]) -> str:
    return "".join(f"<b>{escape(text)}</b>" if learned else escape(text) for learned, text in pieces)
