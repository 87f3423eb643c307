"""Chat records of three formats as conversations in OpenAI's shape. Free of torch and numpy.

- alpaca: instruction, input, output, and optionally system and history ([[question, answer], ...])
- sharegpt: conversations of turns {"from": "human" | "gpt" | ..., "value": text}, and optionally system and tools
- messages: messages of {"role": ..., "content": ...} as OpenAI's API takes them, and optionally tools

A turn's `weight` (0 or 1) or `train` (false or true) says whether an assistant turn is supervised; the default is yes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

from engine.data.sources import BadSample
from engine.words import kind_of

FORMATS = ("alpaca", "sharegpt", "messages")
ASSISTANT, TOOL = "assistant", "tool"
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), TOOL),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    "system": "system",
    "developer": "developer",
}
MARKS = ("weight", "train")

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them; `supervised` has one entry for each assistant message."""

    messages: list[Message]
    tools: Optional[list[Any]]
    supervised: tuple[bool, ...]


def detect(record: Any) -> Optional[str]:
    """The format of a record, or None if it has none of them."""
    if not isinstance(record, dict):
        return None
    for key in ("messages", "conversations"):
        turns = record.get(key)
        if isinstance(turns, list):
            first = next((turn for turn in turns if isinstance(turn, dict)), {})
            if not turns:
                return "messages" if key == "messages" else "sharegpt"
            return "messages" if "role" in first else "sharegpt" if "from" in first else None
    return "alpaca" if "instruction" in record and "output" in record else None


def parse(record: dict[str, Any], kind: str, final_tool_calls: bool = False) -> Conversation:
    """The conversation in a record of this format. Raises BadSample for one that cannot be trained on."""
    messages = list({"alpaca": _alpaca, "sharegpt": _sharegpt, "messages": _openai}[kind](record))
    marks = tuple(_mark(message) for message in messages if message["role"] == ASSISTANT)
    _check(messages, final_tool_calls)
    return Conversation(messages, _tools(record.get("tools")), marks)


def _alpaca(record: dict[str, Any]) -> Iterator[Message]:
    if system := record.get("system"):
        yield {"role": "system", "content": _text(system, "system")}
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadSample("has a history that is not a list of [question, answer]")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadSample("has a history entry that is not [question, answer]")
        yield {"role": "user", "content": _text(pair[0], "history")}
        yield {"role": ASSISTANT, "content": _text(pair[1], "history")}
    asked = [_text(record.get(key), key) for key in ("instruction", "input")]
    yield {"role": "user", "content": "\n".join(part for part in asked if part)}
    yield {"role": ASSISTANT, "content": _text(record.get("output"), "output")}


def _sharegpt(record: dict[str, Any]) -> Iterator[Message]:
    if system := record.get("system"):
        yield {"role": "system", "content": _text(system, "system")}
    for number, turn in enumerate(_turns(record), 1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise BadSample(f"has no 'from' and 'value' in turn {number}")
        role = _role(turn["from"], number)
        marks = {key: turn[key] for key in MARKS if key in turn}
        if role == "call":
            yield {"role": ASSISTANT, "content": "", "tool_calls": _calls(turn["value"], number)} | marks
        else:
            yield {"role": role, "content": _text(turn["value"], f"turn {number}")} | marks


def _openai(record: dict[str, Any]) -> Iterator[Message]:
    for number, turn in enumerate(_turns(record), 1):
        if not isinstance(turn, dict) or "role" not in turn:
            raise BadSample(f"has no 'role' in turn {number}")
        message = {**turn, "role": _role(turn["role"], number), "content": _content(turn.get("content"), number)}
        if message["role"] == "call":
            raise BadSample(f"has the role '{turn['role']}' in turn {number}; tool calls belong to an assistant turn")
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, number) for call in _list(turn["tool_calls"], number)]
        else:
            message.pop("tool_calls", None)
        yield message


def _turns(record: dict[str, Any]) -> list[Any]:
    turns = record["messages"] if "messages" in record else record["conversations"]
    if not turns:
        raise BadSample("is an empty conversation")
    return turns


def _role(name: Any, number: int) -> str:
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadSample(f"has the role {name!r} in turn {number}; the roles are {', '.join(ROLES)}")
    return role


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadSample(f"has {kind_of(value)} under {where}, not a string")
    return value


def _content(value: Any, number: int) -> str:
    """Plain text, also where it comes in OpenAI's list of parts."""
    if not isinstance(value, list):
        return _text(value, f"turn {number}")
    kinds = {part.get("type") if isinstance(part, dict) else None for part in value}
    if kinds - {"text"}:
        raise BadSample(f"has content of type {sorted(map(str, kinds - {'text'}))[0]} in turn {number}; only text is")
    return "".join(_text(part.get("text"), f"turn {number}") for part in value)


def _list(value: Any, number: int) -> list[Any]:
    if not isinstance(value, list):
        raise BadSample(f"has tool_calls in turn {number} that are not a list")
    return value


def _call(call: Any, number: int) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI spells them as a string, which templates would quote again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadSample(f"has a tool call in turn {number} without a function and its name")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), number)}}


def _arguments(value: Any, number: int) -> dict[str, Any]:
    """The arguments of a call; none may be spelled as null or as an empty text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadSample(f"has arguments of a tool call in turn {number} that are not JSON ({error})") from None
    if value is not None and not isinstance(value, dict):
        raise BadSample(f"has arguments of a tool call in turn {number} that are {kind_of(value)}, not an object")
    return value or {}


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """The calls of a sharegpt turn: a JSON object {"name", "arguments"}, or a list of them, as text or as it is."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadSample(f"has a tool call in turn {number} that is not JSON ({error})") from None
    return [_call({"type": "function", "function": c}, number) for c in (calls if isinstance(calls, list) else [calls])]


def _tools(value: Any) -> Optional[list[Any]]:
    """Tools as templates take them: {"type": "function", "function": {...}}; sharegpt spells them as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadSample(f"has tools that are not JSON ({error})") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadSample("has tools that are not a list of objects")
    return [tool if "function" in tool or "type" in tool else {"type": "function", "function": tool} for tool in value]


def _mark(message: Message) -> bool:
    """Take the marks out of a message; whether it is to be learned."""
    marks = [message.pop(key) for key in MARKS if key in message]
    if bad := [mark for mark in marks if mark not in (0, 1)]:
        raise BadSample(f"has a turn of weight {bad[0]!r}; 0 and 1 are")
    return all(marks)


def _check(messages: list[Message], final_tool_calls: bool) -> None:
    if not messages:
        raise BadSample("is an empty conversation")
    if all(message["role"] != ASSISTANT for message in messages):
        raise BadSample("holds no assistant turn, so there is nothing to learn in it")
    open_calls = 0
    for number, message in enumerate(messages, 1):
        if message["role"] == TOOL:
            open_calls -= 1
            if open_calls < 0:
                raise BadSample(f"has a tool result in turn {number} that no tool call asked for")
            continue
        if open_calls:
            raise BadSample(f"has a tool call without its result before turn {number}")
        open_calls = len(message.get("tool_calls", ()))
        if message["role"] == ASSISTANT and not message["content"] and not open_calls:
            raise BadSample(f"has an empty assistant turn, turn {number}")
    if open_calls and not (final_tool_calls and messages[-1]["role"] == ASSISTANT):
        raise BadSample("ends with a tool call without its result; data.final_tool_calls=true allows that")
