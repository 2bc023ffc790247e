"""Tests that blocks become chat messages (contract of messages, section 3)."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.messages.input import conversation_of
from latimer.adapter.messages.parts import UNSEEN
from latimer.adapter.responses.files import UnreadPdfs
from latimer.schemas.openai.messages import AssistantMessage

from .requests import (
    call,
    document,
    image,
    read,
    request_of,
    result,
    said,
    shown,
    system,
    text,
    user,
)

BILLING = "x-anthropic-billing-header: cc_version=2.1.258.abc; cch=12345;"
CALLED: list[Any] = [user("Go"), said(call())]


def roles(*messages: Any, **fields: Any) -> list[str]:
    """Return the roles of the chat messages of a request."""
    return [message["role"] for message in shown(*messages, **fields)]


def contents(*messages: Any, **fields: Any) -> list[Any]:
    """Return the contents of the chat messages of a request."""
    return [message["content"] for message in shown(*messages, **fields)]


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("Be brief.", ["Be brief."]),
        ([text("Be brief."), text("Be kind.", cache_control={"type": "ephemeral"})],
         ["Be brief.\nBe kind."]),
        ([text(BILLING), text("Be brief.")], ["Be brief."]),
        ([text(BILLING)], []),
        ([text("Be brief."), text(BILLING)], [f"Be brief.\n{BILLING}"]),
    ],
)  # fmt: skip
def test_the_system_prompt(given: Any, prompt: list[str]) -> None:
    """Blocks of the system prompt are lines; only Claude Code's first block is dropped."""
    assert contents(user("Hi"), system=given) == [*prompt, "Hi"]


def test_neighbours_of_one_role_are_one_turn() -> None:
    """Messages of one role in a row are merged, and blocks of a message are joined."""
    assert contents(user("a"), user("b"), said("c"), said("d"), user(text("e"), text("f"))) == [
        "a\n\nb", "c\n\nd", "ef",
    ]  # fmt: skip


def test_instructions_stay_at_their_place() -> None:
    """A later message with the role system stays where it is, also as the last one."""
    found = shown(user("a"), system("s"), said("b"), user("c"), system("t"))
    assert [one["role"] for one in found] == ["user", "system", "assistant", "user", "system"]
    inside = {"type": "mid_conv_system", "content": [text("s")]}
    assert contents(user(text("a"), inside, text("b"))) == ["a", "s", "b"]


def test_leading_instructions_are_the_system_prompt() -> None:
    """Messages with the role system before all others join the system prompt."""
    assert contents(system("b"), user("Hi"), system="a") == ["a\nb", "Hi"]


def test_instructions_never_separate_a_call_from_its_result() -> None:
    """Instructions between a call and its result follow the result."""
    found = shown(*CALLED, system("s"), user(result(content="r"), text("go")))
    assert [one["content"] for one in found] == ["Go", "", "r", "s", "go"]
    assert [one["role"] for one in found[2:4]] == ["tool", "system"]


@pytest.mark.parametrize("alone", [True, False])
def test_instructions_never_separate_results(alone: bool) -> None:
    """Instructions between the results of a turn follow the last one, and precede its text."""
    inside = {"type": "mid_conv_system", "content": [text("s")]}
    first, second = result("t1", content="one"), result("t2", content="two")
    answer = [user(first, inside, second, text("go"))]
    if alone:
        answer = [user(first), system("s"), user(second, text("go"))]
    found = shown(user("Go"), said(call("t1"), call("t2")), *answer)
    assert [one["content"] for one in found] == ["Go", "", "one", "two", "s", "go"]


def test_results_precede_the_rest_of_a_turn() -> None:
    """Results become messages of their own in the order of the calls, for any order of blocks."""
    calls = said(text("ok"), call("t1", a=1), call("t2"))
    answer = user(text("go"), result("t2", content="two"), result("t1", content=[text("one")]))
    found = shown(user("Go"), calls, answer)
    assert [one.get("tool_call_id") for one in found[2:]] == ["t1", "t2", None]
    assert [one["content"] for one in found] == ["Go", "ok", "one", "two", "go"]
    functions = [one["function"] for one in found[1]["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "f", "arguments": "{}"}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_result_may_be_empty(content: dict[str, Any]) -> None:
    """A result without content is an empty message."""
    assert contents(*CALLED, user(result(**content))) == ["Go", "", ""]


@pytest.mark.parametrize(
    ("content", "told"),
    [("no", "Error: no"), ("Error: no", "Error: no"), (None, "Error: "),
     ([text("a"), text("b")], "Error: ab")],
)  # fmt: skip
def test_the_model_reads_that_a_call_has_failed(content: Any, told: str) -> None:
    """The text of a result with `is_error` begins with a word that says so."""
    assert contents(*CALLED, user(result(content=content, is_error=True)))[-1] == told


def test_empty_answers_are_dropped() -> None:
    """An empty message of the assistant in the history has no effect, also as the last one."""
    empties: tuple[Any, ...] = ("", [])
    for empty in empties:
        message = {"role": "assistant", "content": empty}
        assert contents(user("a"), message, user("b"), message) == ["a", "b"]
    assert contents(user("a"), said(text("")), user("b")) == ["a", "b"]


def test_reasoning_is_read_from_its_text_or_its_signature() -> None:
    """Reasoning counts by its text, or else by what its signature has; other is listed."""
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "sealed"},
        {"type": "thinking", "thinking": "", "signature": "sealed"},
        {"type": "thinking", "thinking": "", "signature": "foreign"},
        {"type": "redacted_thinking", "data": "x"},
        text("Yes"),
    ]
    request = request_of(messages=[user("a"), said(*blocks), user("b")])
    found = conversation_of(request, {"sealed": "Aha."}.get)
    message = found.messages[1]
    assert isinstance(message, AssistantMessage)
    assert (message.reasoning_content, message.content) == ("Hm.\n\nAha.", "Yes")
    assert found.ignored == ["messages[1].content[2]", "messages[1].content[3]"]


def test_blocks_of_anthropics_own_tools_are_listed() -> None:
    """Blocks about tools that Anthropic runs are dropped and listed; a summary stays as text."""
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "compaction", "content": "So far: nothing."},
    ]
    found = read(user("a"), said(*blocks), user("b"))
    assert found.messages[1].content == "So far: nothing."
    assert found.ignored == [f"messages[1].content[{index}]" for index in range(3)]


def test_the_state_of_a_browser_is_listed() -> None:
    """The state of a browser in the result of a call is dropped and listed; its text stays."""
    call = {"type": "tool_use", "id": "t", "name": "find", "input": {}, "toolset_name": "browser"}
    state = {"type": "browser_state", "tabs": []}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("Found."), state]}
    found = read(user("a"), said(call), user(result))
    assert found.messages[-1].content == "Found."
    assert found.ignored == ["messages[2].content[0].content[1]"]


def test_documents_are_text() -> None:
    """Texts of documents and search results are in the prompt, with titles and sources."""
    plain = {**document(type="text", media_type="text/plain", data="One.\n"), "title": "T"}
    inner = {**document(type="content", content=[text("Two.")]), "context": "C"}
    hit = {"type": "search_result", "title": "H", "source": "http://h", "content": [text("Three")]}
    (content,) = contents(user(plain, inner, hit, document(type="content", content="Four.")))
    assert content == (
        "Document 'T':\nOne.\nDocument:\nC\nTwo.\nH\nhttp://h\nThree\nDocument:\nFour.\n"
    )


def test_citations_are_listed() -> None:
    """A document whose citations are asked for is read, and the request for them is listed."""
    block = {**document(type="text", data="One."), "citations": {"enabled": True}}
    assert read(user(block)).ignored == ["messages[0].content[0].citations"]
    block["citations"] = {"enabled": False}
    assert read(user(block)).ignored == []


def test_pdf_files_are_read_first() -> None:
    """PDF files without known texts are asked for; with these, they are text and inexact."""
    data = base64.b64encode(b"%PDF-1.4").decode()
    request = request_of(messages=[user(document(type="base64", data=data))])
    with pytest.raises(UnreadPdfs) as unread:
        conversation_of(request)
    (pdf,) = unread.value.pdfs
    assert pdf.path == "messages[0].content[0].source.data"
    found = conversation_of(request, pdf_texts={data: "Page one."})
    assert found.messages[0].content == "Document:\nPage one.\n"
    assert found.inexact == ["messages[0].content[0]"]


def test_images_keep_their_places_in_errors() -> None:
    """Images are parts of the message, with the path of their block for errors."""
    found = read(user(text("a"), image(), text("b")))
    content = found.messages[0].content
    assert isinstance(content, list)
    assert [part.type for part in content] == ["text", "image_url", "text"]
    assert found.names == {
        "messages[0].content[1].image_url.url": "messages.0.content.1.source",
        "messages[0].content[1]": "messages.0.content.1",
    }


def test_an_unseen_image_of_a_result_is_a_line() -> None:
    """A model without images reads a line for the image of a result, which is inexact."""
    turns = [*CALLED, user(result(content=[text("a"), image()]))]
    found = read(*turns, sees=False)
    assert found.messages[-1].content == f"a{UNSEEN}"
    assert found.inexact == ["messages[2].content[0].content[1]"]
    assert isinstance(read(*turns).messages[-1].content, list)


def test_an_unseen_image_of_an_earlier_message_is_a_line() -> None:
    """A model without images reads a line for an image that is not in a new message."""
    found = read(user(image(), text("a")), user("b"), sees=False)
    assert found.messages[0].content == f"{UNSEEN}a\n\nb"
    assert found.inexact == ["messages[0].content[0]"]
    found = read(*CALLED, user(result(content="r"), image()), sees=False)
    assert found.messages[-1].content == UNSEEN
    assert found.inexact == ["messages[2].content[1]"]
    found = read(user("a"), user(image()), sees=False)
    assert found.inexact == []
    assert isinstance(found.messages[0].content, list)


ORPHAN = (
    "messages.0.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_1. Each "
    "`tool_result` block must have a corresponding `tool_use` block in the previous message."
)
OPEN = (
    "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: "
    "toolu_1. Each `tool_use` block must have a corresponding `tool_result` block in the next "
    "message."
)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: at least one message is required"),
        ([system("s")], "messages: at least one message is required"),
        ([said("")], "messages: all messages must have non-empty content except for the optional "
         "final assistant message"),
        ([user("")], "messages.0: user messages must have non-empty content"),
        ([user("a"), said("b"), {"role": "user", "content": []}],
         "messages.2: user messages must have non-empty content"),
        ([user(text("a"), text(""))], "messages: text content blocks must be non-empty"),
        ([user(result(content="r"))], ORPHAN),
        (CALLED, OPEN),
        ([*CALLED, user("no")], OPEN),
        ([user("a"), said(call(), call())], "messages.1.content.1: `tool_use` ids must be unique"),
        ([*CALLED, said(call())], "messages.2.content.0: `tool_use` ids must be unique"),
        ([*CALLED, user(result(content="r"), result(content="s"))],
         "messages.2.content.1: each tool_use must have a single result. Found multiple "
         "`tool_result` blocks with id: toolu_1"),
        ([*CALLED, system("s")], OPEN),
        ([*CALLED, user(result("t2", content="r"))],
         ORPHAN.replace("messages.0", "messages.2").replace("toolu_1", "t2")),
        ([user("a"), said("b ")],
         "messages: final assistant content cannot end with trailing whitespace"),
        ([user(call())], "messages.0.content.0: `tool_use` blocks can only be in assistant "
         "messages"),
        ([said(result())], "messages.0.content.0: `tool_result` blocks can only be in user "
         "messages"),
        ([user({"type": "image", "source": {"type": "file", "file_id": "f"}})], None),
        ([user(document(type="url", url="http://a"))], None),
        ([user(document(type="base64", media_type="text/csv", data="YQ=="))], None),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(messages: list[Any], message: str | None) -> None:
    """A conversation that no model can answer is an error in Anthropic's words."""
    with pytest.raises(InvalidRequest) as refused:
        read(*messages)
    assert refused.value.status == 400
    if message is None:
        param = refused.value.param or ""
        assert param.startswith("messages[0].content[0].source")
    else:
        assert refused.value.message == message
