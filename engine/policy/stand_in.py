"""A tokenizer for prompts, learned from a dataset's own instructions, where the model's real one is not at hand.

It is not the model's tokenizer, and weights that were trained with the one mean nothing with the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from engine.data.cache import cached
from engine.data.tokenizer import all_cores
from engine.errors import UserError

VERSION = 2  # part of the cache's key


@dataclass(frozen=True)
class Form:
    """What the real tokenizer has, and the stand-in then has too."""

    of: str  # whose tokenizer it stands for
    special: tuple[str, ...]  # tokens 0, 1, 2, ...
    named: Mapping[str, str]  # bos_token, eos_token, pad_token, unk_token
    prompt: Callable[[str], str]  # from an instruction to a text to learn from
    begin: str | None = None  # the token that a text begins with
    end: str | None = None  # and ends with
    more: Mapping[str, str] = field(default_factory=dict)  # of tokenizer_config.json


def stand_in(form: Form, tasks: Sequence[str], size: int, cache: Path, log: Callable[[str], object] = print) -> Path:
    """A directory with a byte-level BPE of at most `size` tokens. UserError if that is too few."""
    smallest = len(form.special) + 256
    if size < smallest:
        raise UserError(f"model.vocab_size={size}: the stand-in tokenizer needs {smallest}; raise it")
    texts = [form.prompt(task) for task in sorted(set(tasks))]
    key = json.dumps([texts, size, form.special, dict(form.named), form.begin, form.end, dict(form.more)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = cache / f"prompts-{digest}-{VERSION}-{tokenizers.__version__}"
    cached(folder, lambda temporary: _train(form, texts, size, temporary))
    log(f"tokenizer: a stand-in for {form.of} (data.tokenizer=DIR names the real one), trained on the tasks: {folder}")
    return folder


def _train(form: Form, texts: Sequence[str], size: int, folder: Path) -> None:
    unknown = form.named.get("unk_token")
    core = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(form.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with all_cores(False):
        core.train_from_iterator(texts, trainer)
    if marks := [mark for mark in (form.begin, form.end) if mark]:
        template = " ".join(mark for mark in (form.begin, "$A", form.end) if mark)
        places = [(mark, form.special.index(mark)) for mark in marks]
        core.post_processor = processors.TemplateProcessing(template, special_tokens=places)
    core.save(str(folder / "tokenizer.json"))
    config = {**form.named, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | dict(form.more), indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(dict(form.named), indent=2) + "\n")
