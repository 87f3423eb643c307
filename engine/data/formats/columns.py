"""What is said of a table without the column that should hold the text. Free of torch and numpy."""

from __future__ import annotations

from pathlib import Path

from engine.errors import UserError


def no_column(path: Path | str, field: str, columns: list[str]) -> UserError:
    return UserError(
        f"data.path: '{path}' has no column '{field}' (its columns: {', '.join(columns[:12]) or 'none'}); "
        "data.field names the one that holds the text"
    )
