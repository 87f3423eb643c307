"""Instructions as tokens: BART's tokenizer from a directory, or a stand-in that is trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.policy import prompts

STYLE = prompts.Style("BART", ("<s>", "<pad>", "</s>", "<unk>"), "<pad>", "<s>", "</s>", ends=True)


class Prompts(prompts.Prompts):
    """See `engine.policy.prompts.Prompts`."""

    def __init__(self, folder: Path, length: int, vocab_size: int) -> None:
        super().__init__(STYLE, folder, length, vocab_size)


def stand_in(tasks: Sequence[str], vocab_size: int, cache: Path, log: Callable[[str], object] = print) -> Path:
    """See `engine.policy.prompts.stand_in`."""
    return prompts.stand_in(STYLE, tasks, str, vocab_size, cache, log)
