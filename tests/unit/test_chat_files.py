"""Chat files of three formats, and what is wrong with some of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import prepare
from engine.data.chat.records import detect, parse
from engine.data.sources import BadSample
from engine.errors import UserError
from tests.unit.chat_corpora import WEATHER, call, chat_tokenizer, turn, write_lines

ALPACA = {
    "instruction": "Add",
    "input": "1 and 2",
    "output": "3",
    "system": "Count.",
    "history": [["Hello", "Hi"], ["Who?", "Me"]],
}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
SHAREGPT = {
    "system": "S",
    "tools": json.dumps([FUNCTION]),
    "conversations": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"place": "Łódź"}}'},
        {"from": "observation", "value": "7°C"},
        {"from": "gpt", "value": "7°C", "weight": 0},
    ],
}
OPENAI = {
    "tools": [WEATHER],
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Łódź"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "7°C"},
        {"role": "assistant", "content": "7°C"},
    ],
}


def test_alpaca_with_history() -> None:
    conversation = parse(ALPACA, "alpaca")
    assert conversation.messages == [
        turn("system", "Count."),
        turn("user", "Hello"),
        turn("assistant", "Hi"),
        turn("user", "Who?"),
        turn("assistant", "Me"),
        turn("user", "Add\n1 and 2"),
        turn("assistant", "3"),
    ]
    assert conversation.tools is None and conversation.supervised == (True, True, True)
    assert parse({"instruction": "A", "input": "", "output": "b"}, "alpaca").messages[0] == turn("user", "A")


def test_sharegpt_with_tools() -> None:
    conversation = parse(SHAREGPT, "sharegpt")
    assert conversation.messages == [
        turn("system", "S"),
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[call("weather", place="Łódź")]),
        turn("tool", "7°C"),
        turn("assistant", "7°C"),
    ]
    assert conversation.tools == [{"type": "function", "function": FUNCTION}]
    assert conversation.supervised == (True, False)


def test_openai_messages_with_tools() -> None:
    conversation = parse(OPENAI, "messages")
    assert conversation.messages == [
        turn("developer", "ST"),
        turn("user", "Weather?"),
        turn("assistant", "", tool_calls=[{"id": "1", **call("weather", place="Łódź")}]),
        turn("tool", "7°C", tool_call_id="1"),
        turn("assistant", "7°C"),
    ]
    assert conversation.tools == [WEATHER]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (ALPACA, "alpaca"),
        (SHAREGPT, "sharegpt"),
        (OPENAI, "messages"),
        ({"conversations": OPENAI["messages"]}, "messages"),
        ({"messages": []}, "messages"),
        ({"conversations": []}, "sharegpt"),
        ({"text": "x"}, None),
        ({"instruction": "x"}, None),
        (["x"], None),
        ({"messages": ["x"]}, None),
    ],
)
def test_formats_are_told_apart(record: Any, kind: str | None) -> None:
    assert detect(record) == kind


def calling(arguments: Any) -> dict[str, Any]:
    return turn("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


QUESTION, CALL = turn("user", "q"), turn("assistant", "", tool_calls=[call("f")])
RESULT, ANSWER = turn("tool", "r"), turn("assistant", "a")
BAD = [
    ([], "an empty conversation"),
    ([QUESTION], "no assistant turn"),
    ([QUESTION, turn("assistant", "")], "an empty assistant turn, turn 2"),
    ([QUESTION, CALL, ANSWER], "a tool call without its result before turn 3"),
    ([QUESTION, CALL], "ends with a tool call without its result; data.final_tool_calls=true"),
    ([QUESTION, CALL, RESULT, RESULT, ANSWER], "a tool result in turn 4 that no tool call asked for"),
    ([turn("king", "q"), ANSWER], "the role 'king' in turn 1"),
    ([turn("user", 7), ANSWER], "a number under turn 1, not a string"),
    ([turn("user", [{"type": "image"}]), ANSWER], "content of type image in turn 1"),
    ([QUESTION, turn("assistant", "a", weight=0.5)], "a turn of weight 0.5"),
    ([QUESTION, turn("assistant", "", tool_calls=[{"x": 1}])], "a tool call in turn 2 without a function"),
    ([QUESTION, calling("{place: x}"), RESULT, ANSWER], "arguments of a tool call in turn 2 that are not JSON"),
    ([QUESTION, calling("[" * 200000), RESULT, ANSWER], "arguments of a tool call in turn 2 that are not JSON"),
    ([QUESTION, calling("[1]"), RESULT, ANSWER], "arguments of a tool call in turn 2 that are a list, not an object"),
    ([QUESTION, calling(3), RESULT, ANSWER], "arguments of a tool call in turn 2 that are a number, not an object"),
    ([QUESTION, "a"], "no 'role' in turn 2"),
]


@pytest.mark.parametrize(("messages", "why"), BAD, ids=[why for _, why in BAD])
def test_what_is_no_conversation(messages: list[Any], why: str) -> None:
    with pytest.raises(BadSample, match=why):
        parse({"messages": messages}, "messages")


def test_a_call_may_have_no_arguments() -> None:
    for nothing in ("", " ", None, {}, "{}"):
        messages = parse({"messages": [QUESTION, calling(nothing), RESULT, ANSWER]}, "messages").messages
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"conversations": "hello"}, "has a string under 'conversations', which must be a list of turns"),
        ({"messages": {"role": "user"}}, "has an object under 'messages', which must be a list of turns"),
        ({"messages": None}, "has null under 'messages', which must be a list of turns"),
        ({"messages": ["hi", "ho"]}, "has strings under 'messages'; each turn must be an object"),
        ({"text": "x"}, "is none of the chat formats alpaca, sharegpt, messages (its keys: text)"),
        (["x"], "is a string, not an object"),  # a whole file that is an array
    ],
)
def test_what_is_no_list_of_turns_is_said_before_anything_starts(record: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert refused(tmp_path, f"data.path={path}").startswith(f"{path}:1: {why}")


def test_arguments_that_are_no_json_are_counted_before_anything_starts(tmp_path: Path) -> None:
    broken = {"messages": [QUESTION, calling('{"place": '), RESULT, ANSWER]}
    path = write_lines(tmp_path / "a.jsonl", [OPENAI, broken, OPENAI])
    assert refused(tmp_path, f"data.path={path}").startswith(f"{path}:2: has arguments of a tool call in turn 2")
    prepare("qwen3", ["hardware=cpu", "task=sft", f"data.path={path}", "data.max_bad_samples=1"])


def test_a_last_tool_call_is_a_choice() -> None:
    assert len(parse({"messages": [QUESTION, CALL]}, "messages", final_tool_calls=True).messages) == 2
    with pytest.raises(BadSample, match="without its result before turn 3"):
        parse({"messages": [QUESTION, CALL, ANSWER]}, "messages", final_tool_calls=True)


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare("qwen3", ["hardware=cpu", "task=sft", f"output_dir={folder}", *overrides])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_of_mixed_formats_is_refused_with_its_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mixed.jsonl", [ALPACA, ALPACA, SHAREGPT, ALPACA, OPENAI])
    message = refused(tmp_path, f"data.path={path}", "data.max_bad_samples=9")
    assert message.startswith(f"{path}: mixes the formats alpaca (line 1, 2, 4), sharegpt (line 3), messages (line 5)")
    good = [write_lines(tmp_path / f"{i}.jsonl", [one] * 2) for i, one in enumerate((ALPACA, SHAREGPT, OPENAI))]
    prepare("qwen3", ["task=sft", f"data.path={','.join(map(str, good))}"])
    assert "data.format=sharegpt" in refused(tmp_path, f"data.path={good[0]}", "data.format=sharegpt")


def test_bad_samples_are_named_and_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [OPENAI, {"messages": []}, {"x": 1}, {"messages": [QUESTION, CALL]}])
    message = refused(tmp_path, f"data.path={path}", "data.max_bad_samples=2")
    assert message.startswith(f"{path}:4: ends with a tool call without its result")
    prepare("qwen3", ["task=sft", f"data.path={path}", "data.max_bad_samples=3"])
    assert refused(tmp_path, f"data.path={path}").startswith(f"{path}:2: is an empty conversation")
    array = tmp_path / "b.json"
    array.write_text(json.dumps([OPENAI, {"messages": []}], indent=2))
    assert refused(tmp_path, f"data.path={array}").startswith(f"{array}:2: is an empty conversation")
    array.write_text("[{")
    assert refused(tmp_path, f"data.path={array}").startswith(f"{array}: begins like a JSON array and is none")


def test_templates_and_tokenizers_belong_together(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ALPACA] * 3)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    chat_tokenizer(tmp_path / "without", template=None)
    template = f"data.chat_template={tmp_path / 't.jinja'}"
    assert "a template without a tokenizer" in refused(tmp_path, f"data.path={path}", template)
    tokenizer = f"data.tokenizer={tmp_path / 'without'}"
    assert "has no chat template" in refused(tmp_path, f"data.path={path}", tokenizer)
    prepare("qwen3", ["task=sft", f"data.path={path}", tokenizer, template])
    assert "cannot be read as a chat template" in refused(
        tmp_path, f"data.path={path}", tokenizer, "data.chat_template=/nowhere"
    )


def test_a_mixture_may_hold_conversations(tmp_path: Path) -> None:
    good, bad = write_lines(tmp_path / "a.jsonl", [OPENAI]), write_lines(tmp_path / "b.jsonl", [{"messages": []}])
    entries = f"{{name: a, kind: chat, path: {good}, weight: 3}}"
    words = ["hardware=cpu", "task=sft", "data=mixture", "data.train_turns=last"]
    run = prepare("qwen3", [*words, f"data.mixture=[{entries}, {{name: s, kind: stdlib}}]"])
    assert (run.task.name, run.data.name) == ("sft", "mixture")
    more = f"{{name: b, kind: chat, path: {bad}}}"
    assert f"{bad}:1: is an empty" in refused(tmp_path, "data=mixture", f"data.mixture=[{entries}, {more}]")
    absent = "{name: b, kind: chat, path: /absent}"
    message = refused(tmp_path, "data=mixture", f"data.mixture=[{entries}, {absent}]")
    assert message.startswith("data.mixture[1].path: '/absent' does not exist")
    for task in ("pretrain", "midtrain"):
        with pytest.raises(UserError, match=rf"^task={task} learns all tokens.*kind=chat; task=sft learns") as caught:
            prepare("qwen3", [*words[:-1], f"task={task}", f"data.mixture=[{entries}, {{name: s, kind: stdlib}}]"])
    assert "midtrain goes on from trained weights" in str(caught.value), "all mistakes at once"
    with pytest.raises(UserError, match=r"^task=pretrain .*, and this is data=chat; task=sft"):
        prepare("qwen3", ["hardware=cpu", "data=chat", f"data.path={good}"])
    plain = "data.mixture=[{name: s, kind: stdlib}]"
    assert "this is a mixture without kind=chat" in refused(tmp_path, "data=mixture", plain)
    offline = ("data.packing=offline", f"data.mixture=[{entries}]")
    assert "leave job=prepare and data.packing=offline out" in refused(tmp_path, "data=mixture", *offline)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data=stdlib",), "task=sft learns from conversations, and this is data=stdlib"),
        (("data.packing=offline", "data.path=x"), "leave job=prepare and data.packing=offline out"),
        (("data.train_on_prompt=true", "data.train_turns=last"), "data.train_turns has no effect"),
        (("data.format=csv",), "data.format=csv: there is no such choice"),
        (("task.lora.r=3",), "task.lora.r has no effect: only task=lora has adapters"),
        (("task=midtrain",), "task=midtrain goes on from trained weights, and model.weights is missing"),
        (("task=lora", "data.path=x"), "task=lora adapts trained weights, and model.weights is missing"),
        (("task=pretrain", "data.train_turns=last"), "it is for conversations, and this is data=stdlib"),
        ((), "data=chat needs data.path"),
    ],
)
def test_settings_that_do_not_go_together(overrides: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, *overrides)
