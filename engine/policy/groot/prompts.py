"""Prompts as tokens: a chat message of some images and an instruction, by the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.data.chat.template import find_templates
from engine.data.tokenizer import all_cores, load_tokenizer
from engine.errors import UserError
from engine.policy.stand_in import Form

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "<|video_pad|>",
)
DEFAULT = "Perform the task."  # what an empty instruction says
QWEN = (  # what Qwen3-VL's template makes of one user's message
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}"
    "{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
)


def formal(task: str, formalise: bool) -> str:
    """The instruction as GR00T reads it: in small letters, without punctuation but `_`."""
    task = task or DEFAULT
    return "".join(c for c in task.lower() if c.isalnum() or c.isspace() or c == "_") if formalise else task


@dataclass(frozen=True)
class Chat:
    """How a model is spoken to."""

    form: Form  # of its tokenizer
    image: str  # the token that stands for each of an image's tokens
    template: str  # of a message of images and a text
    own: bool  # whether a tokenizer's own template goes before it


FORM = Form(
    of="Qwen3-VL's",
    special=SPECIAL,
    named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    prompt=lambda task: f"user\n{formal(task, True)}\n",
    more={"chat_template": QWEN},
)
QWEN_CHAT = Chat(FORM, "<|image_pad|>", QWEN, own=True)


class Prompts:
    """Instructions and numbers of images to tokens [B, S], filled up on the right to the batch's longest."""

    def __init__(self, folder: Path, vocab_size: int, image_token: int, image_tokens: int, chat: Chat) -> None:
        """`image_tokens` stand for one image. UserError for a directory without such a tokenizer."""
        self.folder, self._tokens = folder, image_tokens
        self._core = load_tokenizer(folder, vocab_size).core
        if (found := self._core.token_to_id(chat.image)) != image_token:
            raise UserError(
                f"data.tokenizer: in '{folder}' {chat.image} is token {found}, and model.image_token_id={image_token}; "
                "the tokenizer of these weights would be right"
            )
        self._image = image_token
        own = find_templates(folder) if chat.own else {}
        self._template = next(iter(own.values()), chat.template)
        self._known: dict[tuple[str, int], Tensor] = {}

    def __call__(self, texts: Sequence[str], images: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(int64 [B, S], bool [B, S]): each text after that many images."""
        rows = [self._ids(text, count) for text, count in zip(texts, images, strict=True)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]

    def _ids(self, text: str, images: int) -> Tensor:
        if (text, images) not in self._known:
            with all_cores(False):
                encoded = torch.tensor(self._core.encode(self._render(text, images), add_special_tokens=False).ids)
            repeats = torch.where(encoded == self._image, self._tokens, 1)
            self._known[text, images] = encoded.repeat_interleave(repeats)
        return self._known[text, images]

    def _render(self, text: str, images: int) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        said = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
        rendered, _ = render_jinja_template([[{"role": "user", "content": said}]], chat_template=self._template)
        return rendered[0]
