"""Tests of the dashboard of the playground: stored chat completions and responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from support.engines.echo import Echo
from support.playground import HOSTILE, Playground

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
]


@pytest.fixture
def filled(page_of: Callable[..., Playground]) -> Iterator[tuple[Playground, httpx2.Client]]:
    """Open the dashboard of a server with four completions and two responses."""
    page = page_of(Echo("Cold."), model_names=["a", "b"])
    with httpx2.Client(base_url=page.address) as client:
        body: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "store": True}
        for number in range(4):
            metadata = {"project": "even" if number % 2 == 0 else "odd", "number": str(number)}
            more: dict[str, Any] = {"model": "a" if number < 3 else "b", "metadata": metadata}
            more |= {"logprobs": True, "top_logprobs": 2} if number == 0 else {}
            assert client.post("/v1/chat/completions", json={**body, **more}).is_success
        for number in range(2):
            body = {"model": "a", "input": "Hi", "metadata": {"number": str(number)}}
            body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            assert client.post("/v1/responses", json=body).is_success
        page.open()
        page.view("stored")
        page.until(lambda: page.status() == "4 completions.")
        yield page, client
    assert page.console() == []


def numbers(page: Playground) -> list[str]:
    """Return the numbers in the metadata of the rows."""
    texts = [one.text for one in page.all("#stored-list li i")]
    return [text.rpartition("number=")[2] for text in texts]


def test_filters(filled: tuple[Playground, httpx2.Client]) -> None:
    """The list has the newest first, and the objects of a model, of metadata, and of dates."""
    page, _ = filled
    assert numbers(page) == ["3", "2", "1", "0"]
    page.fill("#stored-metadata", "project=even")
    page.click("#stored-refresh")
    page.until(lambda: page.status() == "2 completions.")
    assert numbers(page) == ["2", "0"]
    page.fill("#stored-model", "b")
    page.until(lambda: page.status() == "0 completions.")
    page.fill("#stored-metadata", "")
    page.click("#stored-refresh")
    page.until(lambda: page.status() == "1 completion.")
    page.fill("#stored-model", "")
    page.until(lambda: page.status() == "4 completions.")
    today = page.js("return new Date(Date.now() - new Date().getTimezoneOffset() * 6e4).toJSON()")
    page.fill("#stored-until", "2020-01-01")
    page.until(lambda: page.status() == "0 completions.")
    page.fill("#stored-until", today[:10])
    page.until(lambda: page.status() == "4 completions.")
    page.fill("#stored-from", "2199-01-01")
    page.until(lambda: page.status() == "0 completions.")


def test_a_completion_is_opened(filled: tuple[Playground, httpx2.Client]) -> None:
    """An opened completion has all messages, its facts, and the log-probabilities of its tokens."""
    page, client = filled
    page.press("Open", "#stored-list li:nth-child(4)")
    page.until(lambda: page.all("#stored-open article.assistant .t"))
    texts = [one.text for one in page.all("#stored-open article")]
    assert texts[0] == "system\nBe <b>brief</b>."
    assert texts[1] == "user\nWhat is the weather?"
    assert texts[2] == "assistant\nTool call weather\n{}"
    assert "12 degrees" in texts[3]
    assert texts[4] == "assistant\nCold."
    assert "project=even, number=0" in page.find("#stored-open table").text
    name = page.find("#stored-open h2").text
    own = client.get(f"/v1/chat/completions/{name}").json()["choices"][0]["logprobs"]["content"]
    for index, entry in enumerate(own):
        page.click_token(index)
        assert f"logprob {entry['logprob']:.4f}" in page.find("#popover").text
        assert len(page.all("#popover .row")) == 2
        assert not page.all("#popover button")
    assert page.find("#legend").is_displayed()


def test_a_selection_is_exported_and_deleted(filled: tuple[Playground, httpx2.Client]) -> None:
    """The ticked objects are exported as examples or as they are, and deleted together."""
    page, client = filled
    whole = [json.loads(line) for line in page.exported("stored-export").splitlines()]
    assert len(whole) == 4
    assert page.status() == "4 completions exported."
    for row in (1, 3):
        page.click(f"#stored-list li:nth-child({row}) input")
    assert page.find("#stored-count").text == "2 completions selected"
    lines = page.exported("stored-export").splitlines()
    answer = {"role": "assistant", "content": "Cold."}
    assert [json.loads(line) for line in lines] == [
        {"messages": [*TALK, answer], "tools": TOOLS}
    ] * 2
    page.choose("#stored-format", "objects")
    objects = [json.loads(line) for line in page.exported("stored-export").splitlines()]
    assert [one["metadata"]["number"] for one in objects] == ["3", "1"]
    assert objects[0] == client.get(f"/v1/chat/completions/{objects[0]['id']}").json()
    page.click("#stored-delete")
    page.until(lambda: page.status() == "2 completions deleted.")
    assert numbers(page) == ["2", "0"]
    assert client.get(f"/v1/chat/completions/{objects[0]['id']}").status_code == 404
    page.click("#stored-all")
    page.click("#stored-delete")
    page.until(lambda: page.status() == "2 completions deleted.")
    assert numbers(page) == []
    assert client.get("/v1/chat/completions").json()["data"] == []


def test_responses(filled: tuple[Playground, httpx2.Client]) -> None:
    """Responses are listed, opened with their items and tokens, exported, and deleted."""
    page, client = filled
    page.choose("#stored-kind", "responses")
    page.until(lambda: page.status() == "2 responses.")
    assert numbers(page) == ["1", "0"]
    page.press("Open", "#stored-list li:nth-child(1)")
    page.until(lambda: page.all("#stored-open article.assistant .t"))
    assert [one.text for one in page.all("#stored-open article")] == [
        "user\nHi",
        "assistant\nCold.",
    ]
    lines = [json.loads(line) for line in page.exported("stored-export").splitlines()]
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Cold."}]
    assert lines == [{"messages": talk}] * 2
    page.press("Delete", "#stored-list li:nth-child(1)")
    page.until(lambda: page.status() == "1 response deleted.")
    assert page.find("#stored-open").text == ""
    assert len(client.get("/v1/responses").json()["data"]) == 1


def test_a_long_list_has_more(page_of: Callable[..., Playground]) -> None:
    """A list is shown in pages of 20, and an export takes all of it."""
    page = page_of(Echo("Hi"))
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "store": True}
    with httpx2.Client(base_url=page.address) as client:
        for _ in range(23):
            assert client.post("/v1/chat/completions", json=body).is_success
    page.open()
    page.view("stored")
    page.until(lambda: page.status() == "20 completions, and more.")
    assert len(page.exported("stored-export").splitlines()) == 23
    # A double click; what is hidden cannot be clicked.
    page.js(
        "const more = document.getElementById('stored-more'); more.click();"
        "if (more.checkVisibility()) more.click()"
    )
    page.until(lambda: page.status() == "23 completions.")
    assert not page.find("#stored-more").is_displayed()
    assert len(page.all("#stored-list li")) == 23
    assert len({one.get_attribute("data-id") for one in page.all("#stored-list li")}) == 23


def test_hostile_text_stays_text(page_of: Callable[..., Playground]) -> None:
    """Markup and control characters in messages, calls, metadata and replies stay characters."""
    page = page_of(Echo(HOSTILE))
    call: dict[str, Any] = {"id": HOSTILE[:40], "type": "function"}
    call["function"] = {"name": "f", "arguments": json.dumps({"a": HOSTILE})}
    messages = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": HOSTILE[:40], "content": HOSTILE},
    ]
    body: dict[str, Any] = {"model": "demo", "messages": messages, "store": True}
    body["metadata"] = {"<b>x</b>": HOSTILE}
    with httpx2.Client(base_url=page.address) as client:
        assert client.post("/v1/chat/completions", json=body).is_success
        more = {"logprobs": True, "top_logprobs": 2}
        assert client.post("/v1/chat/completions", json={**body, **more}).is_success
    page.open()
    page.view("stored")
    page.until(lambda: page.status() == "2 completions.")
    for row in (1, 2):
        page.press("Open", f"#stored-list li:nth-child({row})")
        page.until(lambda: len(page.all("#stored-open article")) == 4)
        text = page.js("return document.getElementById('stored-open').textContent")
        assert text.count("<script>window.hacked = 1</script>") >= 5
        assert "\u202e" not in text
        page.js("document.getElementById('stored-open').replaceChildren()")
    assert page.js("return window.hacked") is None
    assert not page.all("#stored script, #stored img, #stored a, #stored style")
    assert page.console() == []


def test_what_the_page_stores(page: Playground) -> None:
    """A message with the setting Store is listed by its metadata."""
    page.click("#p-store")
    page.fill("#p-metadata", '{"project": "browser"}')
    page.send("What is the capital of France?")
    page.view("stored")
    page.fill("#stored-metadata", "project=browser")
    page.click("#stored-refresh")
    page.until(lambda: page.status() == "1 completion.")
    page.press("Delete", "#stored-list")
    page.until(lambda: page.status() == "1 completion deleted.")
