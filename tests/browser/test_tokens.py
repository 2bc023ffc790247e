"""Tests of the heat map in the playground: numbers, alternatives, and other continuations."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.model_entry import ModelEntry
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.remote.webelement import WebElement
from support.browser import Chromium, needs_chromium
from support.engines.echo import Echo
from support.playground import Keys, Playground

pytestmark = pytest.mark.slow

PICTURE = Path(__file__).parents[2] / "docs" / "playground.png"


def completed(page: Playground, text: str = "The capital of France is", most: str = "6") -> None:
    """Complete a text."""
    page.choose("#mode", "text")
    page.fill("#p-max_tokens", most)
    page.fill("#p-seed", "7")
    page.send(text)


def raw(page: Playground) -> list[Any]:
    """Return the events of the last response."""
    text = page.js("return document.getElementById('raw').textContent")
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_the_numbers_are_those_of_the_reply(page: Playground, mode: str) -> None:
    """Each token shows the log-probability, the id, the bytes and the alternatives of its reply."""
    page.choose("#mode", mode)
    page.fill("#p-max_tokens", "6")
    page.fill("#p-seed", "7")
    page.send("The capital of France is" if mode == "text" else "What is the capital of France?")
    entries = [entry for event in raw(page) for entry in entries_of(event, mode)]
    assert len(entries) == len(page.tokens()) >= 3
    for index, (text, logprob, token, top) in enumerate(entries):
        page.click_token(index)
        shown = page.find("#popover").text
        assert f"logprob {logprob:.4f}" in shown
        assert f"{-logprob / math.log(2):.2f} bits" in shown
        assert f"id {token}" in shown
        assert f"bytes {text.encode().hex(' ')}" in shown
        rows = page.all("#popover .row")
        # Those of completions have the token itself, too, if it is less likely than all of them.
        assert len(rows) == min(len(top), 5)
        for row in rows:
            value = top[row.get_attribute("data-text") or ""]
            assert row.get_attribute("title") == f"logprob {value:.4f}"
            share = row.find_element("css selector", ".number").text
            assert share == ("< 0.01 %" if math.exp(value) < 0.0001 else percent(value))
        page.key(Keys.ESCAPE)
        assert not page.find("#popover").is_displayed()
    values = [logprob for _, logprob, _, _ in entries]
    mean = sum(values) / len(values)
    footer = page.find("article footer").text
    assert f"mean logprob {mean:.3f}, perplexity {math.exp(-mean):.2f}" in footer


def percent(logprob: float) -> str:
    """Return a probability as the page writes it."""
    share = math.exp(logprob)
    return f"{100 * share:.{2 if share < 0.1 else 1}f} %"


def entries_of(event: Any, mode: str) -> list[tuple[str, float, int, dict[str, float]]]:
    """Return text, log-probability, id and alternatives of each token in an event."""
    found = []
    for choice in event["choices"]:
        own = choice["logprobs"] or {}
        for entry in own.get("content") or []:
            top = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            found.append((entry["token"], entry["logprob"], entry["id"], top))
        if mode == "text":
            found += zip(
                own["tokens"], own["token_logprobs"], own["token_ids"], own["top_logprobs"],
                strict=True,
            )  # fmt: skip
    return found


def test_measures_colour_the_same_tokens(page: Playground) -> None:
    """Every measure gives each token a class and words, and Off gives none."""
    completed(page, most="8")
    for name in ("probability", "surprise", "entropy", "rank"):
        page.choose("#measure", name)
        classes = [one.get_attribute("class") or "" for one in page.all("article .t")]
        assert all(" h" in one for one in classes), name
        assert page.find("#legend").text
    page.choose("#measure", "off")
    assert not any(" h" in (one.get_attribute("class") or "") for one in page.all("article .t"))
    page.choose("#measure", "probability")


@needs_chromium
def test_a_list_that_was_drawn_again_takes_no_memory(
    chromium_driver: Chromium, demo_address: str
) -> None:
    """The tokens of a message are not kept when the transcript is drawn again."""
    page = Playground(chromium_driver, demo_address)
    page.open()
    page.send("Hi")
    page.js("window.seen = new WeakRef(document.querySelector('.tokens'))")
    page.click("#new")

    def is_gone() -> bool:
        chromium_driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        return bool(page.js("return window.seen.deref() === undefined"))

    page.until(is_gone)


def test_another_token_in_a_text(page: Playground) -> None:
    """The chosen token follows exactly the ids before it, in a version of its own."""
    completed(page)
    before = page.tokens()
    page.click_token(2)
    other = page.find("#popover button.row")
    text = other.get_attribute("data-text") or ""
    page.click_on(other)
    page.finished()
    after = page.tokens()
    assert after[:2] == before[:2]
    assert after[2].replace("↵\n", "\n") == text
    assert page.find("article.completion .t.chosen").text == text.strip() or text.strip() == ""
    assert "continued from exact token ids" in page.find("article.completion footer").text
    page.view("request")
    code = page.find("#code").text
    ids = json.loads(code[code.index("-d '") + 4 : -1])["prompt"]
    assert all(isinstance(one, int) for one in ids)
    page.view("generate")
    page.press("Undo")
    assert page.tokens() == before


def test_another_token_in_a_chat(page: Playground) -> None:
    """In chat, too, the reply continues from exact ids, and the page says so."""
    page.fill("#p-temperature", "0")
    page.send("What is the capital of France?")
    page.click_token(1)
    assert "exactly these token ids" in page.find("#popover").text
    other = page.find("#popover button.row")
    text = other.get_attribute("data-text") or ""
    page.click_on(other)
    page.finished()
    assert page.tokens()[:2] == ["The", text]
    assert "continued from exact token ids" in page.find("article.assistant footer").text


def test_a_conversation_without_ids_continues_from_its_text(page: Playground) -> None:
    """An imported reply without ids is continued from its text, and the page says so."""
    page.send("What is the capital of France?")
    text = page.exported("export")
    kept = json.loads(text)
    for node in kept["nodes"].values():
        for token in node.get("tokens", []):
            for one in (token, *token["top"]):
                one["id"] = None
    page.js(
        "const file = new File([arguments[0]], 'c.json'), transfer = new DataTransfer();"
        "transfer.items.add(file);"
        "const field = document.getElementById('import'); field.files = transfer.files;"
        "field.dispatchEvent(new Event('change'))",
        json.dumps(kept),
    )
    page.until(lambda: page.status() == "Imported.")
    page.click_token(1)
    assert "may split the text" in page.find("#popover").text
    page.click("#popover button.row")
    page.finished()
    assert "continued from text" in page.find("article.assistant footer").text


def test_the_keyboard_alone(page: Playground) -> None:
    """Arrows move over tokens, Enter opens the alternatives and chooses one, Escape goes back."""
    completed(page)
    before = page.tokens()
    page.js("arguments[0].focus()", page.token(0))
    page.key(Keys.ARROW_RIGHT)
    page.key(Keys.ARROW_RIGHT)
    assert page.js("return document.activeElement.dataset.index") == "2"
    page.key(Keys.ENTER)
    assert page.js("return document.activeElement.matches('#popover button')")
    page.key(Keys.ARROW_DOWN)
    assert page.js("return document.activeElement.matches('#popover button')")
    page.key(Keys.ESCAPE)
    assert page.js("return document.activeElement.dataset.index") == "2"
    page.key(Keys.ENTER)
    page.key(Keys.ENTER)
    page.finished()
    assert page.tokens()[:2] == before[:2]
    assert page.tokens()[2] != before[2]


def test_a_mouse_shows_and_hides(page: Playground) -> None:
    """The alternatives appear under the mouse, stay while it is over them, and disappear after."""
    completed(page)
    chain = ActionChains(page.driver)
    chain.move_to_element(page.token(1)).perform()
    page.until(lambda: page.find("#popover").is_displayed())
    ActionChains(page.driver).move_to_element(page.find("#popover ol")).pause(0.5).perform()
    assert page.find("#popover").is_displayed()
    ActionChains(page.driver).move_to_element(page.find("h1")).perform()
    page.until(lambda: not page.find("#popover").is_displayed())


def test_a_finger_opens_the_alternatives(page: Playground) -> None:
    """A tap on a token opens its alternatives, which stay until a tap elsewhere."""
    completed(page)
    page.size(400)
    finger = PointerInput("touch", "finger")  # type: ignore[no-untyped-call]

    def tap(element: WebElement) -> None:
        page.js("arguments[0].scrollIntoView({block: 'center'})", element)
        actions = ActionBuilder(page.driver, mouse=finger)
        actions.pointer_action.move_to(element)  # type: ignore[no-untyped-call]
        actions.pointer_action.pointer_down().pointer_up()  # type: ignore[no-untyped-call]
        actions.perform()

    tap(page.token(1))
    page.until(lambda: page.find("#popover").is_displayed())
    box = page.find("#popover").rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 400
    tap(page.find("#composer"))
    page.until(lambda: not page.find("#popover").is_displayed())


def test_parts_of_characters(page_of: Callable[..., Playground]) -> None:
    """The bytes of a character are separate tokens, and their character is shown once."""
    page = page_of(Echo("a😀é"))
    page.open()
    page.send("Hi")
    assert page.tokens()[:7] == ["a", "·", "·", "·", "😀", "·", "é"]
    page.click_token(2)
    assert "bytes 9f" in page.find("#popover").text
    assert page.console() == []


def test_two_models_are_compared(page_of: Callable[..., Playground]) -> None:
    """With another model of B, an empty text B is text A, and each side names its model."""
    entries = [ModelEntry(Echo(), ("one",)), ModelEntry(Echo(), ("two",))]
    page = page_of(entries)
    page.open()
    page.view("analysis")
    page.fill("#text-a", "Paris")
    page.choose("#model-b", "two")
    page.click("#analyse")
    page.until(lambda: len(page.all("#analysis table")) == 2)
    assert [one.text for one in page.all("#analysis caption")] == ["one", "two"]
    texts = page.js(
        "return [...document.querySelectorAll('#analysis .tokens')].map((one) => one.textContent)"
    )
    assert texts == ["Paris", "Paris"]
    assert page.status() == "The analysis is complete."
    assert page.console() == []


def test_a_text_is_analysed(page: Playground) -> None:
    """Two texts are scored side by side with the API's own numbers, and nothing is generated."""
    page.view("analysis")
    page.fill("#text-a", "The capital of France is Paris.")
    page.fill("#text-b", "Paris France the of is capital.")
    page.click("#analyse")
    page.until(lambda: len(page.all("#analysis table")) == 2)
    values = [one.text for one in page.all("#analysis tr:nth-of-type(2) td")]
    assert float(values[0]) < float(values[1])
    page.view("request")
    reply = json.loads(page.js("return document.getElementById('raw').textContent"))
    own = [one for one in reply["choices"][0]["logprobs"]["token_logprobs"] if one is not None]
    assert reply["usage"].get("completion_tokens", 0) == 0
    assert abs(math.exp(-sum(own) / len(own)) - float(values[1])) < 0.01
    page.view("analysis")
    shown = page.js("return document.querySelector('#scores-a .tokens').textContent")
    assert shown == "The capital of France is Paris."


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits(page: Playground, width: int, scheme: str) -> None:
    """Every view fits a phone and a desktop, and text has a contrast of 4.5 on every colour."""
    completed(page)
    page.size(width)
    page.choose("#scheme", scheme)
    for view in ("generate", "analysis", "request", "stored", "fleet"):
        page.js("location.hash = arguments[0]", view)
        page.until(page.find(f"#{view}").is_displayed)
        assert page.js("return document.documentElement.scrollWidth") <= width, view
    page.js("location.hash = 'generate'")
    ratios = page.js(
        "const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);"
        "const light = (text) => rgb(text).map((one) => one / 255)"
        "  .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)"
        "  .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);"
        "return [...document.querySelectorAll('#legend i')].slice(1).map((one) => {"
        "  const style = getComputedStyle(one);"
        "  const [a, b] = [light(style.color), light(style.backgroundColor)];"
        "  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) })"
    )
    assert len(ratios) == 7
    assert min(ratios) >= 4.5


def test_the_picture_of_the_readme(page: Playground) -> None:
    """The heat map is drawn; LATIMER_PICTURE=1 writes it to docs/playground.png."""
    page.size(1000, 760)
    page.fill("#p-seed", "3")
    page.js("document.getElementById('settings').open = false")
    page.js("document.getElementById('history').open = false")
    page.fill("#p-temperature", "1.3")
    page.send("Tell me a story.")
    page.choose("#measure", "surprise")
    levels = [one.get_attribute("class") or "" for one in page.all("article .t")]
    page.click_token(next(index for index, one in enumerate(levels) if "h5" in one))
    page.js("scrollTo(0, 0)")
    data = page.driver.get_screenshot_as_png()
    assert len(data) > 10_000
    if os.environ.get("LATIMER_PICTURE"):
        PICTURE.write_bytes(data)
