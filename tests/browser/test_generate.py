"""Tests of chat and text in the playground: stream, stop, versions, undo, and what is kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from latimer.backends.base import Model
from support.browser import Browser
from support.engines.echo import Echo
from support.playground import HOSTILE, Keys, Playground

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_chat_streams_and_is_kept(page: Playground) -> None:
    """A reply is shown with its tokens and numbers, and is there after the page is loaded again."""
    page.fill("#p-temperature", "0")
    page.send(QUESTION)
    question, answer = page.replies()
    assert question == QUESTION
    assert "".join(page.tokens()) == answer == "The capital of France is Paris."
    footer = page.find("article.assistant footer").text
    assert "7 tokens" in footer or "8 tokens" in footer
    assert "perplexity" in footer
    assert "finish: stop" in footer
    page.reload()
    page.click("#conversations button")
    assert page.replies() == [question, answer]


def test_a_reply_without_numbers(page: Playground) -> None:
    """Without probabilities, and without a stream, the reply is plain text."""
    page.click("#probabilities")
    page.click("#streams")
    page.fill("#p-temperature", "0")
    page.send(QUESTION)
    assert page.replies()[1] == "The capital of France is Paris."
    assert not page.all("article .tokens")
    page.view("request")
    assert '"stream"' not in page.find("#code").text


def test_regenerate_edit_and_undo(page: Playground) -> None:
    """Regenerate and Edit add versions; undo, redo and the arrows show the others."""
    page.fill("#p-temperature", "0")
    page.send(QUESTION)
    page.click("#regenerate")
    page.finished()
    assert page.find("article.assistant .versions").text.split() == ["‹", "2/2", "›"]
    page.press("‹", "article.assistant")
    assert page.find("article.assistant .versions").text.split() == ["‹", "1/2", "›"]
    page.press("Edit", "article.user")
    page.fill(".editor textarea", "Say hello.")
    page.press("Send", ".editor")
    page.finished()
    assert page.replies()[0] == "Say hello."
    page.press("Undo")
    assert page.replies() == ["Say hello."]
    page.press("Undo")
    assert page.replies()[0] == QUESTION
    page.press("Redo")
    assert page.replies() == ["Say hello."]
    page.find("body").send_keys(Keys.CONTROL, "z")
    assert page.replies()[0] == QUESTION


def test_a_reply_is_edited(page: Playground) -> None:
    """An edited reply is another version, which the next request sends."""
    page.send(QUESTION)
    page.press("Edit", "article.assistant")
    page.fill(".editor textarea", "Lyon, of course.")
    page.press("Keep", ".editor")
    assert page.replies() == [QUESTION, "Lyon, of course."]
    page.send("Really?")
    page.view("request")
    assert "Lyon, of course." in page.find("#code").text


def test_the_system_prompt_and_the_parameters_are_sent(page: Playground) -> None:
    """Parameters are sent as numbers, and empty fields are omitted."""
    page.fill("#system", "Be brief.")
    page.fill("#p-max_tokens", "3")
    page.fill("#p-top_p", "0.5")
    page.fill("#p-stop", "###\n\\n\\n")
    page.send(QUESTION)
    assert "finish: length" in page.find("article.assistant footer").text
    page.view("request")
    page.choose("#language", "curl")
    code = page.find("#code").text
    body = json.loads(code[code.index("-d '") + 4 : -1])
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["top_p"], body["stop"]) == (3, 0.5, ["###", "\n\n"])
    assert "temperature" not in body
    assert "seed" not in body


def test_stop_keeps_what_has_come(page_of: Callable[..., Playground]) -> None:
    """Stop ends the request; the text so far and its numbers stay, and can be continued."""
    engine = Echo("abcdefghij" * 40, pause=0.01)
    page = page_of(engine)
    page.open()
    page.fill("#composer", "Go")
    page.click("#send")
    page.until(lambda: len(page.all("article.assistant .t")) > 5)
    page.click("#stop")
    page.finished()
    assert page.status() == "Stopped."
    assert "finish: stopped" in page.find("article.assistant footer").text
    assert 5 < len(page.tokens()) < 400
    page.until(lambda: engine.running == 0)
    assert page.console() == []


def test_a_conversation_that_is_left_is_kept(page_of: Callable[..., Playground]) -> None:
    """New during a reply keeps the message and what has come of it; deleting keeps nothing."""
    page = page_of(Echo("abcdefghij" * 40, pause=0.01))
    page.open()

    def kept() -> list[str]:
        return [one.text for one in page.all("#conversations button[title=chat]")]

    def leave(name: str) -> None:
        page.fill("#composer", "Go")
        page.click("#send")
        page.until(lambda: len(page.all("article:last-child .t")) > 5)
        page.press(name)
        page.until(lambda: page.status() == "Stopped.")
        page.finished()
        assert page.replies() == []

    leave("New")
    page.until(lambda: kept() == ["Go"])
    page.reload()
    page.click("#conversations button")
    assert page.replies()[1].startswith("abcdef")
    leave("×")
    page.until(lambda: kept() == [])
    page.reload()
    assert kept() == []
    assert page.console() == []


def test_text_is_completed_and_continued(page: Playground) -> None:
    """A completion ends at the limit; Continue sends exactly its token ids."""
    page.choose("#mode", "text")
    page.fill("#p-max_tokens", "4")
    page.fill("#p-temperature", "0")
    page.send("The capital of France is")
    before = page.tokens()
    page.click("#continue")
    page.finished()
    assert page.tokens()[: len(before)] == before
    footer = page.find("article.completion footer").text
    assert "continued from exact token ids" in footer


@pytest.mark.parametrize("shows", [True, False])
def test_hostile_text_stays_text(page_of: Callable[..., Playground], shows: bool) -> None:
    """Markup, scripts, links and control characters of a model are shown as characters."""
    page = page_of(Echo(HOSTILE))
    page.open()
    if not shows:
        page.click("#probabilities")
    page.send(HOSTILE)
    question, answer = page.replies()
    for text in (question, answer):
        assert "<script>window.hacked = 1</script>" in text
        assert "‹U+202E›gnp.exe" in text
        assert "‹U+001B›[31mred‹U+0007›" in text
        assert "\u202e" not in text
        assert "😀" in text
    assert page.js("return window.hacked") is None
    assert not page.all("#transcript script, #transcript img, #transcript a, #transcript style")
    page.view("request")
    page.view("generate")
    assert page.console() == []


def test_markup_is_refused(page: Playground) -> None:
    """The policy of the page refuses markup from text, inline scripts, and other servers."""
    assert (
        page.js("try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name }")
        == "TypeError"
    )
    found = page.driver.execute_async_script(
        "fetch('http://127.0.0.1:9/').catch((error) => arguments[0](error.name))"
    )
    assert found == "TypeError"
    messages: list[str] = []

    def logged() -> bool:
        messages.extend(page.console())
        text = " ".join(messages)
        is_refused = "TrustedHTML" in text or "require-trusted-types-for" in text
        return is_refused and "connect-src" in text

    page.until(logged)


def test_export_and_import(page: Playground, tmp_path: Path) -> None:
    """An exported conversation is the same after its import; a wrong file is refused."""
    page.send(QUESTION)
    text = page.exported("export")
    before = page.replies()
    assert json.loads(text)["format"] == "latimer-conversation"
    file = tmp_path / "conversation.json"
    file.write_text(text)
    page.click("#new")
    assert page.replies() == []
    page.find("#import").send_keys(str(file))
    page.until(lambda: page.replies() == before)
    file.write_text('{"nodes": 1}')
    page.find("#import").send_keys(str(file))
    page.until(lambda: "not an exported conversation" in page.status())
    assert page.replies() == before


def test_an_error_is_shown(page: Playground) -> None:
    """The API's message is shown in place of the reply, and the next request has no trace of it."""
    page.fill("#p-response_format", '{"type": 5}')
    page.send(QUESTION)
    assert page.find("article.assistant .error").text
    page.fill("#p-response_format", "{oops")
    page.send(QUESTION)
    assert "JSON schema of the answer is not valid JSON" in page.status()
    page.fill("#p-response_format", "")
    page.click("#new")
    page.send(QUESTION)
    assert len(page.replies()) == 2
    # The browser notes the status 400 by itself.
    assert all("400" in one for one in page.console())


def test_a_wrong_setting_keeps_the_message(page: Playground) -> None:
    """A message that a wrong setting holds back stays in its field, and is sent once."""
    page.fill("#p-tools", "[oops")
    page.send(QUESTION)
    assert "Tools (JSON array) is not valid JSON" in page.status()
    assert page.js("return document.getElementById('composer').value") == QUESTION
    page.fill("#p-tools", "")
    page.click("#send")
    page.finished()
    question, _answer = page.replies()
    assert question == QUESTION


def test_a_schema_and_a_tool_call(page: Playground) -> None:
    """An answer follows a JSON schema, and a call of a tool is shown and gets its result."""
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    page.fill("#p-response_format", json.dumps(schema))
    page.send(QUESTION)
    assert json.loads(page.replies()[1])["city"] in ("Paris", "Rome")
    page.fill("#p-response_format", "")
    page.click("#new")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    page.fill("#p-tools", json.dumps([tool]))
    for _ in range(8):
        page.send("What is the weather in Paris?")
        if page.all("article .call"):
            break
        page.click("#new")
    assert "weather" in page.find("article .call").text
    assert page.find("#composer-label").text == "Result of weather"
    page.send("12 degrees")
    assert page.find("article.tool .plain").text == "12 degrees"
    assert len(page.all("article.assistant")) == 2


def test_reasoning_is_folded(page_of: Callable[..., Playground]) -> None:
    """Reasoning is in a closed part, apart from the reply, and a later request has it."""
    engine = Echo("<think>Hmm.</think>Paris")
    engine.facts = Model(
        "demo", 4096, "{{ messages[-1].content }}{# <think> </think> #}", "", "<|e|>", False, "f", 7
    )
    page = page_of(engine)
    page.open()
    page.click("#probabilities")
    page.send(QUESTION)
    assert page.replies()[1].strip() == "Paris"
    details = page.find("details.reasoning")
    assert details.get_attribute("open") is None
    assert "Hmm." in (page.find("details.reasoning pre").get_attribute("textContent") or "")
    page.send("And?")
    page.view("request")
    assert '"content":"Paris","reasoning_content":"Hmm."' in page.find("#code").text


def test_an_image_is_sent(page_of: Callable[..., Playground], tmp_path: Path) -> None:
    """An image is shown, sent as a data URL to a model that sees, and kept with its message."""
    engine = Echo("A dot.")
    engine.facts = Model(
        "demo", 4096, "{{ messages[-1].content }}", "", "<|e|>", False, "f", 7,
        media=frozenset({"image"}),
    )  # fmt: skip
    page = page_of(engine)
    page.open()
    file = tmp_path / "dot.png"
    file.write_bytes(PIXEL)
    page.find("#image").send_keys(str(file))
    page.until(lambda: page.all("#thumbnails img"))
    page.send("What is it?")
    assert page.find("article.user img").is_displayed()
    assert not page.all("#thumbnails img")
    page.view("request")
    page.choose("#language", "curl")
    code = page.find("#code").text
    parts = json.loads(code[code.index("-d '") + 4 : -1])["messages"][0]["content"]
    assert parts[0] == {"type": "text", "text": "What is it?"}
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_models_without_sight_get_no_images(page: Playground) -> None:
    """The demo model reads text only, so there is no button for images."""
    assert not page.find("#attach").is_displayed()


def test_a_key_is_asked_for(page_of: Callable[..., Playground], driver: Browser) -> None:
    """With keys, the page asks for one, keeps it in this tab only, and never shows it in code."""
    page = page_of(Echo("Hi"), api_keys=["secret-key"])
    page.open()
    assert page.find("#key").is_displayed()
    page.console()
    page.fill("#key", "secret-key")
    page.until(lambda: page.status() == "Ready.")
    page.send("Hello")
    assert page.replies() == ["Hello", "Hi"]
    page.view("request")
    for language in ("curl", "python", "javascript"):
        page.choose("#language", language)
        assert "secret-key" not in page.find("#code").text
        assert "LATIMER_KEY" in page.find("#code").text
    kept = page.js("return JSON.stringify(localStorage)")
    assert "secret-key" not in kept
    assert page.console() == []
