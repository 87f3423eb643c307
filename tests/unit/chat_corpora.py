"""Small chat files, tokenizers and templates for tests, written here and by no code of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.schema import Data, Run
from tests.unit.data_corpora import byte_tokenizer

SPECIAL = ("<|start|>", "<|stop|>", "<think>", "</think>")

# Turns, tools, calls and results; what an assistant says is a generation, its end included.
MARKED = """\
{{- bos_token }}{% if tools %}<|start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|stop|>
{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}
{%- generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL {{ call.function.name }}
{{- call.function.arguments | tojson }}{% endfor -%}
<|stop|>{% endgeneration %}
{%- else %}{{ message.content }}<|stop|>{% endif %}

{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
PLAIN = MARKED.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: only the last answer shows its reasoning, and an empty one where it has none.
FORGETFUL = """\
{% for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}
{%- if loop.last %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}{{ message.content }}<|stop|>
{% else %}{{ message.content }}<|stop|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def chat_tokenizer(folder: Path, template: str | None = MARKED) -> Tokenizer:
    """A directory with a tokenizer of single bytes, the special tokens above, and a template."""
    core = byte_tokenizer(folder)
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|stop|>", "bos_token": "<|start|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return core


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chat_run(folder: Path, path: Path, template: str | None = MARKED, **data: Any) -> Run:
    """A run over `path` with the tokenizer above."""
    if "tokenizer" not in data:
        chat_tokenizer(folder / "tokenizer", template)
        data["tokenizer"] = str(folder / "tokenizer")
    defaults = {"held_out": 0.0, "seq_len": 64, "global_batch_size": 2, "micro_batch_size": 1, "shuffle_rows": 3}
    return Run(
        family="none",
        output_dir=str(folder / "out"),
        seed=5,
        data=Data(name="chat", path=str(path), **(defaults | data)),
        model=SimpleNamespace(vocab_size=300),
    )


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [turn("user", "hi"), turn("assistant", "hello")]},
    {
        "messages": [
            turn("system", "Be brief."),
            turn("user", "Ünïcode? 🦓🏳️‍🌈 日本語 e\u0301 \u200b"),
            turn("assistant", "Ja: 🦓 \ud7ff\U0001f9ff ﷽"),
            turn("user", ""),
            turn("assistant", " leading and trailing \n\n"),
        ]
    },
    {
        "messages": [
            turn("user", "Weather in Zürich and Łódź?"),
            turn("assistant", "", tool_calls=[call("weather", place="Zürich"), call("weather", place="Łódź")]),
            turn("tool", "7°C"),
            turn("tool", "☁"),
            turn("assistant", "7°C and ☁"),
        ],
        "tools": [WEATHER],
    },
]
