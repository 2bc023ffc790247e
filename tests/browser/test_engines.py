"""Tests of the playground over real engines: reasoning, calls and images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.playground import Playground
from support.projector import png, projector
from support.scripted import HERMES, MAY_THINK, WIDTH, scripted
from support.servers import llama_server

pytestmark = pytest.mark.slow

ENGINES = ["llama_cpp", "llama_server"]
MARKS = ("<think>", "</think>")
THOUGHT = ("<think>", "Let me", " see", ".", "</think>", "Par", "is", "!")
CALL = ("<tool_call>", '{"name": "', "weather", '", "arguments": {"city": "', "Paris", '"}}',
        "</tool_call>")  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Backend]]:
    """Return a function that makes a backend of an engine with a model file."""
    with ExitStack() as stack:

        def make(engine: str, model: Path, *options: str) -> Backend:
            if engine == "llama_cpp":
                return LlamaCpp(model, context=512)
            return LlamaServer(stack.enter_context(llama_server(model, *options, context=512)))

        yield make


@pytest.mark.parametrize("engine", ENGINES)
def test_reasoning(
    page_of: Callable[..., Playground], engine_of: Any, engine: str, tmp_path: Path
) -> None:
    """Reasoning is folded, has no tokens in the heat map, and is kept by another token."""
    model = scripted(tmp_path / "model.gguf", THOUGHT, MAY_THINK, MARKS)
    page = page_of(engine_of(engine, model))
    page.open()
    page.fill("#p-temperature", "0")
    page.send("Where?")
    details = page.find("details.reasoning")
    assert details.get_attribute("open") is None
    assert "Let me see." in (page.find("details.reasoning pre").get_attribute("textContent") or "")
    assert page.tokens() == ["Par", "is", "!"]
    page.click_token(1)
    other = page.find("#popover button.row")
    text = other.get_attribute("data-text") or ""
    page.click_on(other)
    page.finished()
    assert page.status() == "The reply is complete."
    assert page.tokens()[:2] == ["Par", text.replace("\n", "↵\n")]
    assert page.find("#popover").is_displayed() is False
    assert "Let me see." in (page.find("details.reasoning pre").get_attribute("textContent") or "")
    assert "continued from exact token ids" in page.find("article.assistant footer").text
    assert page.console() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tool_call(
    page_of: Callable[..., Playground], engine_of: Any, engine: str, tmp_path: Path
) -> None:
    """A call is shown with its arguments, and the next message is its result."""
    page = page_of(engine_of(engine, scripted(tmp_path / "model.gguf", CALL, HERMES)))
    page.open()
    page.fill("#p-temperature", "0")
    page.fill("#p-tools", json.dumps([TOOL]))
    page.send("What is the weather in Paris?")
    assert page.find("article .call").text == 'Tool call weather\n{\n  "city": "Paris"\n}'
    assert page.find("#composer-label").text == "Result of weather"
    page.send("12 degrees")
    assert page.find("article.tool .plain").text == "12 degrees"
    page.press("Undo")
    page.press("Undo")
    assert page.find("#composer-label").text == "Result of weather"
    assert page.console() == []


def test_llama_server(
    page_of: Callable[..., Playground], llama_server_url: str, tmp_path: Path
) -> None:
    """Chat, text, versions, a schema and an analysis work over a real llama-server, too."""
    page = page_of(LlamaServer(llama_server_url))
    page.open()
    page.fill("#p-temperature", "0")
    page.send("What is the capital of France?")
    assert "".join(page.tokens()) == page.replies()[1] == "The capital of France is Paris."
    page.click("#regenerate")
    page.finished()
    assert page.find("article.assistant .versions").text.split() == ["‹", "2/2", "›"]
    page.press("Undo")
    assert page.find("article.assistant .versions").text.split() == ["‹", "1/2", "›"]
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    page.fill("#p-response_format", json.dumps(schema))
    page.click("#new")
    page.send("Where?")
    assert json.loads(page.replies()[1])["city"] == "Rome"
    page.click_token(1)
    page.click("#popover button.row")
    page.finished()
    assert "not bound to the JSON schema" in page.find("article.assistant footer").text
    page.fill("#p-response_format", "")
    page.choose("#mode", "text")
    page.fill("#p-max_tokens", "4")
    page.send("The capital of France is")
    page.click("#continue")
    page.finished()
    assert "continued from exact token ids" in page.find("article.completion footer").text
    page.view("analysis")
    page.fill("#text-a", "The capital of France is Paris.")
    page.click("#analyse")
    page.until(lambda: page.all("#scores-a table"))
    assert page.console() == []


def test_an_image(page_of: Callable[..., Playground], engine_of: Any, tmp_path: Path) -> None:
    """A real llama-server with a projector sees an image, and another token keeps it.

    It takes no ids next to images, so some tokens continue from their text.
    """
    mmproj = projector(tmp_path / "mmproj.gguf", WIDTH)
    model = scripted(tmp_path / "model.gguf", ("A", " red", " dot", "."))
    page = page_of(engine_of("llama_server", model, "--mmproj", str(mmproj)))
    page.open()
    file = tmp_path / "red.png"
    file.write_bytes(png(255, 0, 0))
    page.find("#image").send_keys(str(file))
    page.until(lambda: page.all("#thumbnails img"))
    page.fill("#p-max_tokens", "6")
    page.fill("#p-temperature", "0")
    page.send("What is it?")
    assert page.find("article.user img").is_displayed()
    assert page.tokens() == ["A", " red", " dot", "."]
    page.click_token(1)
    page.click("#popover button.row")
    page.finished()
    assert page.status() == "The reply is complete."
    assert page.tokens()[0] == "A"
    assert page.tokens()[1] != " red"
    assert "continued from" in page.find("article.assistant footer").text
    page.view("request")
    page.choose("#language", "curl")
    assert "data:image/png;base64," in page.find("#code").text
    # The browser notes the status 400 of a refusal of ids by itself.
    assert all("400" in one for one in page.console())
