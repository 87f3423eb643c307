"""Which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def decays(shape: tuple[int, ...]) -> bool:
    """Matrices and embeddings decay; norms and biases, whose tensors have one dimension, do not.

    `shape` is the whole tensor's: a shard's own shape may differ.
    """
    return len(shape) >= 2


def split(items: Iterable[tuple[tuple[int, ...], T]]) -> tuple[list[T], list[T]]:
    """(those that decay, those that do not) of (whole shape, item) pairs, in their order."""
    parts: tuple[list[T], list[T]] = ([], [])
    for shape, item in items:
        parts[0 if decays(shape) else 1].append(item)
    return parts
