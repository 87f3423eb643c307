"""Prompts as tokens: PaliGemma's tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.policy import prompts

STYLE = prompts.Style("PaliGemma", ("<pad>", "<eos>", "<bos>", "<unk>"), "<pad>", "<bos>", "<eos>", ends=False)


class Prompts(prompts.Prompts):
    """See `engine.policy.prompts.Prompts`."""

    def __init__(self, folder: Path, length: int, vocab_size: int) -> None:
        super().__init__(STYLE, folder, length, vocab_size)


def stand_in(tasks: Sequence[str], vocab_size: int, cache: Path, log: Callable[[str], object] = print) -> Path:
    """See `engine.policy.prompts.stand_in`."""
    numbers = " ".join(map(str, range(-1, 256)))
    return prompts.stand_in(
        STYLE, tasks, lambda task: f"Task: {task}, State: {numbers};\nAction: ", vocab_size, cache, log
    )
