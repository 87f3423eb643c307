"""Judging weights by held-out rows: one loss for each validation set, and one over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

from engine.backends.base import Backend, unit_of
from engine.comm import Comm
from engine.data.held_out import HeldOut


def validate(backend: Backend, sets: Mapping[str, HeldOut], rows: int, comm: Optional[Comm] = None) -> dict[str, Any]:
    """Fields of a metrics row, {} without sets. Collective.

    `val_loss` in nats per token and `val_bits_per_byte` are over all sets together, `val_loss.<name>` over one; up to
    `rows` rows of each are read. `val_rows` of `val_rows_of` says how many that were. Sets with `measures` of their
    own (robot policies) add what those say, under the set's name where it has one.
    """
    if not sets:
        return {}
    loss, tokens, label_bytes, read, there, whole = 0.0, 0, 0, 0, 0, True
    fields: dict[str, Any] = {}
    for name, held_out in sets.items():
        set_loss, set_tokens = backend.evaluate(held_out.batches(rows))
        loss, tokens = loss + set_loss, tokens + set_tokens
        size, (used, of, all_of_it) = held_out.label_bytes(rows), held_out.coverage(rows)
        label_bytes = label_bytes + size if size and label_bytes is not None else None
        read, there, whole = read + used, there + of, whole and all_of_it
        if name:
            fields[f"val_loss.{name}"] = set_loss / max(1, set_tokens)
        if hasattr(held_out, "measures"):
            own = held_out.measures(backend, rows, comm or Comm())
            fields |= {f"{key}.{name}" if name else key: value for key, value in own.items()}
    total = {"val_loss": loss / max(1, tokens), f"val_{unit_of(backend)}": tokens}
    total |= {"val_rows": read, "val_rows_of": there, "val_rows_whole": whole}
    if label_bytes:
        total["val_bits_per_byte"] = loss / math.log(2) / label_bytes
    return total | fields


def unusable(fields: dict[str, Any]) -> str | None:
    """The first loss that is not finite, as `val_loss.code=nan`."""
    losses = {k: v for k, v in fields.items() if k.startswith("val_loss")}
    named = sorted(losses, reverse=True)  # those of one set say more than that of all
    return next((f"{name}={losses[name]}" for name in named if not math.isfinite(losses[name])), None)
