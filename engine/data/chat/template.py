"""Chat templates: where a tokenizer directory keeps them, and what they make of a conversation."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from engine.data.chat.records import ASSISTANT, Conversation, Message
from engine.data.sources import BadSample, checked_text
from engine.errors import UserError
from engine.schema import Data

FILE = "chat_template.jinja"
GENERATION = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Spans = list[tuple[int, int]]  # characters [start, end)


def find_templates(folder: Path) -> dict[str, str]:
    """The chat templates of a tokenizer directory by name, in the order in which transformers looks for them."""
    if (folder / FILE).is_file():
        return {"default": _text(folder / FILE)}
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _json(folder / name).get("chat_template")
        if isinstance(template, str):
            return {"default": template}
        if isinstance(template, list):
            return {str(item["name"]): str(item["template"]) for item in template}
    return {}


def chat_templates(data: Data, folder: Path) -> dict[str, str]:
    """The templates of a run: `data.chat_template`, or those of its tokenizer. UserError if there is none."""
    if data.chat_template is not None:
        return {"default": _text(Path(data.chat_template).expanduser())}
    if not (found := find_templates(folder.expanduser())):
        raise UserError(
            f"data.tokenizer: '{folder}' has no chat template; name one with data.chat_template=FILE.jinja, or a "
            "tokenizer that brings one"
        )
    return found


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that templates may name."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _json(folder / name)
        for key in SPECIAL:
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a chat template ({error})") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return content if isinstance(content, dict) else {}


# transformers keeps the marks of a template in one place for all threads and renderers of a process.
_TRANSFORMERS = threading.Lock()


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters that are learned."""

    text: str
    supervised: Spans


class Renderer:
    """Renders conversations as `transformers.PreTrainedTokenizerBase.apply_chat_template` does, and masks them.

    Assistant turns are found by the template's `{% generation %}` marks. A template without them is rendered turn by
    turn: what follows the generation prompt of a turn is the turn.
    `ends` are the tokens that may end a turn: white space behind one of them is not learned.
    """

    def __init__(
        self,
        templates: dict[str, str],
        special: dict[str, str],
        ends: tuple[str, ...] = (),
        train_on_prompt: bool = False,
        turns: str = "all",
    ):
        self._templates, self._special, self._ends = templates, special, ends
        self._everything, self._turns = train_on_prompt, turns

    def __call__(self, conversation: Conversation) -> Rendered:
        """Raises BadSample for a conversation that the template refuses, or whose turns cannot be told apart in it."""
        template = self._template(conversation.tools)
        marked = GENERATION.search(template) is not None
        text, spans = self._render(template, conversation.messages, conversation.tools, marks=marked)
        checked_text(text)
        if self._everything:
            return Rendered(text, [(0, len(text))])
        wanted = self._wanted(conversation)
        if not marked:
            spans = list(self._turn_spans(template, conversation, text))
        if len(spans) != len(wanted):
            if all(wanted):
                return Rendered(text, spans)
            raise BadSample(
                f"has {len(wanted)} assistant turns, and the chat template marks {len(spans)} generations, so turns "
                "cannot be left out one by one"
            )
        return Rendered(text, [span for span, learn in zip(spans, wanted, strict=True) if learn])

    def _wanted(self, conversation: Conversation) -> list[bool]:
        last = len(conversation.supervised) - 1
        return [mark and (self._turns == "all" or i == last) for i, mark in enumerate(conversation.supervised)]

    def _template(self, tools: Optional[list[Any]]) -> str:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _render(
        self, template: str, messages: list[Message], tools: Optional[list[Any]], marks: bool = False, ask: bool = False
    ) -> tuple[str, Spans]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _TRANSFORMERS:
                texts, found = render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=template,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=ask,
                    **self._special,
                )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise BadSample(f"is refused by the chat template ({error})") from None
        return texts[0], found[0] if marks else []

    def _turn_spans(self, template: str, conversation: Conversation, whole: str) -> Any:
        messages, tools = conversation.messages, conversation.tools
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            head = self._render(template, messages[:number], tools, ask=True)[0] if number else ""
            turn = self._render(template, messages[: number + 1], tools)[0].removeprefix(head)
            # Templates may drop the beginning of an earlier turn (its reasoning), never its end.
            rest = whole[len(head) :]
            drop = next((k for k in range(len(turn)) if rest.startswith(turn[k:])), len(turn))
            if not whole.startswith(head) or not turn[drop:].strip():
                raise BadSample(
                    f"has an assistant turn, turn {number + 1}, that the chat template renders otherwise within the "
                    "conversation; a template with {% generation %} marks would say which part is learned"
                )
            yield len(head), len(head) + len(self._ended(turn[drop:]))

    def _ended(self, turn: str) -> str:
        stripped = turn.rstrip()
        return stripped if stripped.endswith(self._ends) else turn
