"""Rendered conversations and their masks, against transformers' own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from engine.data.chat.encode import tokenise
from engine.data.chat.records import Conversation, parse
from engine.data.chat.template import Renderer, find_templates, special_tokens
from engine.data.sources import BadSample
from engine.data.tokenizer import load_tokenizer
from tests.unit.chat_corpora import CONVERSATIONS, FORGETFUL, MARKED, PLAIN, SPECIAL, chat_tokenizer, turn


def renderer(folder: Path, template: str, **more: object) -> Renderer:
    chat_tokenizer(folder, template)
    return Renderer(find_templates(folder), special_tokens(folder), SPECIAL, **more)


def learned(folder: Path, template: str, record: dict, **more: object) -> list[str]:
    """The pieces of text that are learned."""
    rendered = renderer(folder, template, **more)(parse(record, "messages"))
    return [rendered.text[start:end] for start, end in rendered.supervised]


@pytest.mark.parametrize("record", CONVERSATIONS, ids=["two", "unicode", "tools"])
def test_text_tokens_and_masks_are_those_of_transformers(record: dict, tmp_path: Path) -> None:
    render = renderer(tmp_path, MARKED)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages, tools = record["messages"], record.get("tools")
    rendered = render(Conversation(messages, tools, (True,) * sum(m["role"] == "assistant" for m in messages)))
    assert rendered.text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    expected = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    sample = tokenise(rendered, load_tokenizer(tmp_path))
    assert sample.tokens.tolist() == expected["input_ids"]
    assert sample.supervised.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < sample.supervised.sum() < len(sample)


@pytest.mark.parametrize("record", CONVERSATIONS, ids=["two", "unicode", "tools"])
def test_a_template_without_marks_gives_the_same_mask(record: dict, tmp_path: Path) -> None:
    marked = learned(tmp_path / "a", MARKED, record)
    assert learned(tmp_path / "b", PLAIN, record) == marked


def test_an_earlier_answer_loses_its_reasoning_and_is_still_found(tmp_path: Path) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "b"), turn("assistant", "c")]
    assert learned(tmp_path, FORGETFUL, {"messages": messages}) == ["b<|stop|>", "<think>\n\n</think>\n\nc<|stop|>"]


def test_which_turns_are_learned_is_a_choice(tmp_path: Path) -> None:
    messages = [turn("user", "q"), turn("assistant", "one"), turn("user", "r"), turn("assistant", "two")]
    assert learned(tmp_path / "a", MARKED, {"messages": messages}, turns="last") == ["two<|stop|>"]
    marked = [turn("user", "q"), turn("assistant", "one"), turn("user", "r"), turn("assistant", "two", weight=0)]
    assert learned(tmp_path / "b", MARKED, {"messages": marked}) == ["one<|stop|>"]
    assert learned(tmp_path / "c", PLAIN, {"messages": marked}) == ["one<|stop|>"]
    assert learned(tmp_path / "d", MARKED, {"messages": marked}, turns="last") == []
    whole = learned(tmp_path / "e", MARKED, {"messages": marked}, train_on_prompt=True)
    assert whole[0].startswith("<|start|><|start|>user\nq<|stop|>") and whole[0].endswith("two<|stop|>\n")


def test_every_byte_of_an_answer_is_learned_also_where_a_generation_ends_within_a_character(tmp_path: Path) -> None:
    """transformers' own mask leaves out all but the first byte of the last character."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    rendered = renderer(tmp_path, template)(parse({"messages": [turn("assistant", "a🦓")]}, "messages"))
    assert tokenise(rendered, load_tokenizer(tmp_path)).supervised.tolist() == [True] * 5  # a, and the zebra's 4 bytes


def test_the_tool_template_serves_conversations_with_tools(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path, None)
    config = (tmp_path / "tokenizer_config.json").read_text()[:-1]
    templates = '[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]'
    (tmp_path / "tokenizer_config.json").write_text(f'{config}, "chat_template": {templates}}}')
    render = Renderer(find_templates(tmp_path), {}, train_on_prompt=True)
    texts = [render(parse(record, "messages")).text for record in CONVERSATIONS]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert texts == [
        theirs.apply_chat_template(r["messages"], tools=r.get("tools"), tokenize=False) for r in CONVERSATIONS
    ]
    assert texts == ["D", "D", "T"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system turn') }}", "refused by the chat template .no system turn"),
        ("{{ messages[9].content }}", "refused by the chat template"),
        ("{% if add_generation_prompt %}x{% endif %}", "renders otherwise within the conversation"),
        ("\\ud800", "half a surrogate"),
    ],
)
def test_what_a_template_cannot_render_is_a_bad_sample(template: str, message: str, tmp_path: Path) -> None:
    template = template.encode().decode("unicode_escape") if template.startswith("\\u") else template
    with pytest.raises(BadSample, match=message):
        Renderer({"default": template}, {}, SPECIAL)(parse(CONVERSATIONS[0], "messages"))


def test_a_mask_of_nothing_and_of_a_span_without_tokens(tmp_path: Path) -> None:
    template = "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}"
    rendered = renderer(tmp_path, template)(parse(CONVERSATIONS[0], "messages"))
    sample = tokenise(rendered, load_tokenizer(tmp_path))
    assert not sample.supervised.any() and isinstance(sample.tokens, np.ndarray)


def test_two_renderers_in_two_threads(tmp_path: Path) -> None:
    """Training and validation data render at the same time."""
    render = renderer(tmp_path, MARKED)
    twin = Renderer(find_templates(tmp_path), special_tokens(tmp_path), SPECIAL)
    conversation = parse(CONVERSATIONS[0], "messages")
    alone = render(conversation)
    with ThreadPoolExecutor(4) as pool:
        both = list(pool.map(lambda i: (render, twin)[i % 2](conversation), range(400)))
    assert all(one == alone for one in both)
