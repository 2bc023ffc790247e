"""Tests of the messages that instructions and items make."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.responses.input import conversation_of
from latimer.adapter.validation import unknown_fields
from latimer.schemas import limits

from .requests import ITEMS, call, output, read, request_of, said, shown, thought, user

URL = "data:image/png;base64,aGk="
IMAGE = {"type": "input_image", "image_url": URL}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": URL}}


def text(value: str) -> dict[str, Any]:
    """Return a text part of the user."""
    return {"type": "input_text", "text": value}


def message(role: str, content: Any, **members: Any) -> dict[str, Any]:
    """Return a message of chat."""
    return {"role": role, "content": content, **members}


def calling(*ids: str, name: str = "f", **members: Any) -> dict[str, Any]:
    """Return chat's message with calls."""
    calls = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for one in ids
    ]
    return {"role": "assistant", **members, "tool_calls": calls}


def result(call_id: str, content: Any = "out") -> dict[str, Any]:
    """Return chat's message with the result of a call."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


U = message("user", "Hi")


def test_a_string_is_a_message_of_the_user() -> None:
    """An input of text is one message of the user."""
    conversation, _ = read(input="Hello")
    assert [one.model_dump(exclude_none=True) for one in conversation.messages] == [
        message("user", "Hello")
    ]


@pytest.mark.parametrize("instructions", [None, "", "Be brief."])
@pytest.mark.parametrize(
    "items",
    [
        "Hello",
        [user("a")],
        [user("a"), user(""), user("b")],
        [user("a"), message("assistant", "b"), message("assistant", ""), user("c")],
    ],
)
def test_plain_texts_need_no_history(instructions: str | None, items: Any) -> None:
    """Texts make the same messages by the short way as by that of all items."""
    request = request_of(input=items, instructions=instructions)
    plain = conversation_of(request)
    # Items that are dropped rule out the short way; there is none at this place.
    whole = conversation_of(request, dropped=(-1,))
    assert (plain.is_plain, whole.is_plain) == (True, False)
    assert plain.messages == whole.messages


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        # The text parts of a message join without a separator.
        ([user([text("a"), text("b")])], [message("user", "ab")]),
        ([user([])], [message("user", "")]),
        ([{"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}],
         [message("assistant", "ab")]),
        # Members of replayed items and null members have no effect.
        ([user("Hi", id="msg_1", status="completed", phase=None, type=None)], [U]),
        ([said("a", phase="final_answer")], [message("assistant", "a")]),
        ([{"role": "assistant", "content": "a"}], [message("assistant", "a")]),
        # One message for contiguous items of the assistant.
        ([thought("t"), said("a")], [message("assistant", "a", reasoning_content="t")]),
        ([thought("t"), call("1"), output("1")],
         [calling("1", reasoning_content="t"), result("1")]),
        ([said("a"), call("1"), call("2"), output("1"), output("2")],
         [calling("1", "2", content="a"), result("1"), result("2")]),
        ([call("1"), said("a"), output("1")], [calling("1", content="a"), result("1")]),
        ([call("1"), thought("t"), output("1")],
         [calling("1", reasoning_content="t"), result("1")]),
        ([thought("t"), thought("u"), said("a")],
         [message("assistant", "a", reasoning_content="t\n\nu")]),
        # Content begins a new message, and so does reasoning after content without a call.
        ([said("a"), said("b")], [message("assistant", "a"), message("assistant", "b")]),
        ([said("a"), thought("t"), said("b")],
         [message("assistant", "a"), message("assistant", "b", reasoning_content="t")]),
        # Outputs follow their calls, in the order of the calls.
        ([call("1"), call("2"), output("2", "two"), output("1", "one")],
         [calling("1", "2"), result("1", "one"), result("2", "two")]),
        ([call("1"), user(), output("1")], [calling("1"), result("1"), U]),
        ([output("1"), user(), call("1")], [U, calling("1"), result("1")]),
        ([call("1"), output("1"), call("2"), output("2")],
         [calling("1"), result("1"), calling("2"), result("2")]),
        # Calls with one id get one output each; a further output joins the last call.
        ([call("1"), output("1", "a"), call("1"), output("1", "b"), output("1", "c")],
         [calling("1"), result("1", "a"), calling("1"), result("1", "b"), result("1", "c")]),
        # An output without an id belongs to the oldest open call of its function.
        ([call("1", "g"), call("2"), call("3"), output("2"), output("1"),
          output(None, "x", name="f")],
         [{**calling("1", "2", "3"), "tool_calls": [
             *calling("1", name="g")["tool_calls"], *calling("2", "3")["tool_calls"]]},
          result("1"), result("2"), result("3", "x")]),
        # An output of parts.
        ([call("1"), output("1", [text("a"), text("b")])], [calling("1"), result("1", "ab")]),
        ([call("1"), output("1", [text("a"), IMAGE])],
         [calling("1"), result("1", [{"type": "text", "text": "a"}, CHAT_IMAGE])]),
        # The model sees a function of a namespace under one name.
        ([call("1", namespace="mcp__a"), output("1")], [calling("1", name="mcp__a__f"),
                                                        result("1")]),
        # A call that the limit of tokens cut.
        ([said("a"), call("1", arguments='{"a', status="incomplete"), user()],
         [message("assistant", "a"), U]),
        ([said("a"), call("1", arguments="", status="incomplete"), user()],
         [message("assistant", "a"), U]),
        ([call("1", status="incomplete"), output("1")], [calling("1"), result("1")]),
        # Items that only others can read do not separate those around them.
        ([thought("t"), {"type": "web_search_call", "id": "ws_1"}, said("a")],
         [message("assistant", "a", reasoning_content="t")]),
        # Reasoning with a summary only, with more than that, or without what it leads to.
        ([SUMMARY, said("a")], [message("assistant", "a", reasoning_content="s")]),
        ([{**SUMMARY, **thought("t"), "summary": SUMMARY["summary"]}, said("a")],
         [message("assistant", "a", reasoning_content="t")]),
        ([thought("t"), user()], [{"role": "assistant", "reasoning_content": "t"}, U]),
        # The first system and developer texts are one message; others are not.
        ([{"role": "developer", "content": "d"}, user()], [message("developer", "d"), U]),
        ([{"role": "developer", "content": "d"}, {"role": "system", "content": [text("s")]},
          user(), {"role": "developer", "content": "e"}],
         [message("system", "d\n\ns"), U, message("developer", "e")]),
        # Images and audio.
        ([user([text("a"), {**IMAGE, "detail": "original"}])],
         [message("user", [{"type": "text", "text": "a"},
                           {"type": "image_url", "image_url": {"url": URL,
                                                               "detail": "original"}}])]),
        ([user([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}])],
         [message("user", [{"type": "input_audio",
                            "input_audio": {"data": "aGk=", "format": "wav"}}])]),
        ([user([{"type": "input_audio", "audio_url": "data:audio/mpeg;base64,aGk="}])],
         [message("user", [{"type": "input_audio",
                            "input_audio": {"data": "aGk=", "format": "mp3"}}])]),
        # Text files, in base64, as a data: URL, and percent-encoded.
        *(
            ([user([{"type": "input_file", "filename": "a.txt", "file_data": data}])],
             [message("user", [{"type": "text", "text": "File 'a.txt':\nhi\n"}])])
            for data in ("aGkK", "data:text/plain;base64,aGkK", "data:text/plain,hi%0A")
        ),
    ],
)  # fmt: skip
def test_items_become_messages(items: list[Any], expected: list[Any]) -> None:
    """Items become the messages that chat would have."""
    assert shown(*items) == expected


def test_a_custom_call_is_a_call_with_its_input() -> None:
    """A custom tool call and its output become chat's custom tool call and its result."""
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "p", "input": "x", "id": "ctc_1"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "out"},
    ]
    custom = {"id": "1", "type": "custom", "custom": {"name": "p", "input": "x"}}
    assert shown(*items) == [{"role": "assistant", "tool_calls": [custom]}, result("1")]


def test_instructions_come_first() -> None:
    """Instructions precede the chain, and are joined with the system texts that follow them."""
    request = request_of(instructions="I", input=[user("b")])
    before = ITEMS.validate_python([{"role": "developer", "content": "d"}, user("a"), said("c")])
    messages = conversation_of(request, before).messages
    assert [(one.role, one.content) for one in messages] == [
        ("system", "I\n\nd"), ("user", "a"), ("assistant", "c"), ("user", "b"),
    ]  # fmt: skip


def test_an_output_answers_a_call_of_the_chain() -> None:
    """The output of a call in the chain is enough as an input, and its input may be empty."""
    before = ITEMS.validate_python([user(), call("1")])
    messages = conversation_of(request_of(input=[output("1")]), before).messages
    assert [one.role for one in messages] == ["user", "assistant", "tool"]
    assert conversation_of(request_of(input=""), before[:1]).messages[-1].content == "Hi"


def test_references_are_replaced_by_stored_items() -> None:
    """A reference is replaced by the stored item; an item with only an id is a reference."""
    (stored,) = ITEMS.validate_python([said("a")])
    items = [user(), {"type": "item_reference", "id": "msg_1"}, {"id": "msg_1", "type": None}]
    conversation = conversation_of(request_of(input=items), (), {"msg_1": stored}.get)
    assert [one.content for one in conversation.messages] == ["Hi", "a", "a"]
    with pytest.raises(InvalidRequest) as caught:
        conversation_of(request_of(input=items), (), {"msg_2": stored}.get)
    assert (caught.value.status, caught.value.param) == (404, "input")


def test_sealed_reasoning_is_opened() -> None:
    """Reasoning of our own comes back from its sealed text; that of others is listed."""
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "own"}
    items = [sealed, said("a"), {**sealed, "encrypted_content": "foreign"}, said("b")]
    conversation = conversation_of(request_of(input=items), (), unseal={"own": "t"}.get)
    assert [getattr(one, "reasoning_content", None) for one in conversation.messages] == ["t", None]
    assert conversation.ignored == ["input[2]"]
    conversation = conversation_of(request_of(input=[{**sealed, **thought("u")}, said("a")]))
    assert conversation.messages[0].reasoning_content == "u"  # type: ignore[union-attr]
    assert not conversation.ignored


def test_items_of_others_are_listed() -> None:
    """Items of tools that nobody runs here are listed with their place, and are no error."""
    items: list[Any] = [
        user(),
        {"type": "local_shell_call", "call_id": "1", "action": {}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "1", "output": "x"},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "a", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "computer_call_output_v2", "output": None},
        {"type": "additional_tools", "role": "developer", "tools": []},
    ]
    request = request_of(input=items)
    assert conversation_of(request).ignored == [f"input[{index}]" for index in range(1, 6)]
    assert unknown_fields(request) == []
    assert conversation_of(request_of(), ITEMS.validate_python(items)).ignored == []


def test_unknown_members_are_listed() -> None:
    """Unknown members of items and of their parts are listed with their path."""
    items = [
        user("Hi", bogus=1),
        user([{**text("a"), "bogus": 1}]),
        call("1", bogus=1),
        output("1", [{**text("a"), "bogus": 1}]),
    ]
    assert sorted(unknown_fields(request_of(input=items, text={"bogus": 1}))) == [
        "input[0].bogus", "input[1].content[0].bogus", "input[2].bogus",
        "input[3].output[0].bogus", "text.bogus",
    ]  # fmt: skip


def test_paths_in_messages_have_names_in_the_request() -> None:
    """The path of an image in the messages is that of its part in the request, for errors."""
    items = [call("1"), user([text("a"), IMAGE]), output("1", [IMAGE])]
    conversation = conversation_of(request_of(instructions="I", input=items))
    assert conversation.names == {
        "messages[2].content[0].image_url.url": "input[2].output[0].image_url",
        "messages[2].content[0]": "input[2].output[0]",
        "messages[3].content[1].image_url.url": "input[1].content[1].image_url",
        "messages[3].content[1]": "input[1].content[1]",
    }
    before = ITEMS.validate_python([user([IMAGE])])
    names = conversation_of(request_of(), before).names
    assert names["messages[0].content[0]"].startswith("previous_response_id")


def test_parts_are_counted() -> None:
    """More content parts than chat allows are rejected, also if all are text."""
    part = text("")
    with pytest.raises(InvalidRequest) as caught:
        read(input=[user([part] * limits.PARTS.maximum), user([part])])
    assert (caught.value.param, caught.value.code) == ("input", "array_above_max_length")


def test_null_is_the_same_as_no_field() -> None:
    """Every field but the model and the input may be null, and then changes nothing."""
    nulls = dict.fromkeys(type(request_of()).model_fields.keys() - {"model", "input"})
    assert request_of(**nulls) == request_of()
    assert request_of(**nulls).__pydantic_fields_set__ == {"model", "input"}
    assert request_of(text={"format": None, "verbosity": None}, reasoning={"effort": None}) == (
        request_of(text={}, reasoning={})
    )
