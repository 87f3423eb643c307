"""The conversations of a run: corpus, tokenizer with its chat template, and the samples that packing reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import tokenizers

from engine.data.bpe import trained_bpe
from engine.data.cache import cached
from engine.data.chat.encode import ChatEncoder
from engine.data.chat.template import FILE, Renderer, chat_templates, find_templates, special_tokens
from engine.data.files import digest
from engine.data.resources import Log, cache_dir
from engine.data.sources import BadSamples
from engine.data.split import Numbered
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.schema import Run

STAND_IN = Path(__file__).parent / "standin.jinja"
STAND_IN_TOKENS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Chats:
    """What `engine.data.loader` needs of a run on conversations."""

    tokenizer: Tokenizer
    renderer: Renderer
    encoder: ChatEncoder
    identity: dict[str, Any]


def open_chats(
    run: Run, corpus: Numbered, bad: BadSamples, log: Log = print, tokenizer_dir: Optional[Path] = None
) -> Chats:
    """How the conversations of a run become samples; without a tokenizer one is trained on `corpus`, all of its data.
    `tokenizer_dir`, of a checkpoint, goes before the run's own tokenizer.

    Raises UserError for data that cannot be used, a tokenizer without a template, or one that does not fit the model.
    """
    data = run.data
    given = tokenizer_dir or data.tokenizer
    folder = _with_template(run, Path(given)) if given else _stand_in(run, corpus, bad, log)
    tokenizer, templates = load_tokenizer(folder, run.model.vocab_size), find_templates(folder)
    ends = tuple(token.content for token in tokenizer.core.get_added_tokens_decoder().values())
    renderer = Renderer(templates, special_tokens(folder), ends, data.train_on_prompt, data.train_turns)
    encoder = ChatEncoder(renderer, data.seq_len)
    return Chats(tokenizer, renderer, encoder, {"chat_template": digest(templates)})


def _with_template(run: Run, folder: Path) -> Path:
    """The tokenizer's directory, or a copy of it with the template that the run names instead of its own.

    Checkpoints and exports take the directory along, so that a model is used with the template that it was trained on.
    """
    templates = chat_templates(run.data, folder)
    if run.data.chat_template is None:
        return folder
    original = load_tokenizer(folder)

    def build(place: Path) -> None:
        original.save(place)
        for leftover in place.glob("chat_template*"):
            leftover.unlink()
        (place / FILE).write_text(templates["default"], encoding="utf-8")

    copy = cache_dir(run) / f"tokenizer-{digest(original.fingerprint, templates)}"
    cached(copy, build)
    return copy


def _stand_in(run: Run, corpus: Numbered, bad: BadSamples, log: Log) -> Path:
    """A tokenizer trained on what is said in the conversations, with ChatML's tokens and a template of that shape."""
    size = run.data.vocab_size or run.model.vocab_size
    plain = trained_bpe(corpus, size - len(STAND_IN_TOKENS), cache_dir(run), bad)

    def build(place: Path) -> None:
        shutil.copytree(plain, place, dirs_exist_ok=True)
        core = tokenizers.Tokenizer.from_file(str(plain / "tokenizer.json"))
        core.add_special_tokens(list(STAND_IN_TOKENS))
        core.save(str(place / "tokenizer.json"))
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            content = json.loads((place / name).read_text()) | {"eos_token": STAND_IN_TOKENS[1]}
            (place / name).write_text(json.dumps(content, indent=2) + "\n")
        shutil.copyfile(STAND_IN, place / FILE)

    folder = cache_dir(run) / f"{plain.name}-chat-{digest(STAND_IN.read_text())}"
    cached(folder, build)
    log(f"tokenizer: a stand-in, byte-level BPE trained on the conversations with a ChatML template, in {folder}")
    return folder
