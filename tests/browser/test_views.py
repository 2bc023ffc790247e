"""Tests of the other views of the playground: requests as code, stored completions, metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from support.browser import needs_chromium
from support.playground import Playground

pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.mark.parametrize("language", ["curl", "python", "javascript"])
def test_the_code_runs(page: Playground, language: str) -> None:
    """The request as curl, Python and JavaScript is accepted by the server, and streams."""
    page.fill("#p-max_tokens", "3")
    page.fill("#p-top_k", "5")
    page.send('It\'s "quoted" \\ and 😀 true')
    page.view("request")
    page.choose("#language", language)
    code = page.find("#code").text
    command = {
        "curl": ["sh", "-c", code],
        "python": [sys.executable, "-c", code],
        "javascript": ["node", "--input-type=module", "-e", code],
    }[language]
    program = {"curl": "curl", "python": sys.executable, "javascript": "node"}[language]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "chat.completion.chunk" in done.stdout
    assert "error" not in done.stdout


def test_the_raw_stream(page: Playground) -> None:
    """The raw response is shown to its end, with the id of the request."""
    page.send("Hello")
    page.view("request")
    text = page.js("return document.getElementById('raw').textContent")
    assert text.startswith("data: {")
    assert text.rstrip().endswith("data: [DONE]")
    assert page.find("#request-id").text.startswith("req_")


def test_stored_completions(page: Playground) -> None:
    """A stored completion is listed by its metadata, opened, exported, and deleted."""
    page.click("#p-store")
    page.fill("#p-metadata", '{"project": "browser"}')
    page.send("What is the capital of France?")
    page.view("stored")
    page.fill("#stored-metadata", "project=browser")
    page.click("#stored-refresh")
    page.until(lambda: page.status() == "1 completions.")
    page.press("Open", "#stored-list")
    page.until(lambda: page.find("#stored-open h3").text.startswith("chatcmpl-"))
    assert "What is the capital of France?" in page.find("#stored-open").text
    text = page.driver.execute_async_script(
        "const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { blob.text().then(arguments[0]); return make(blob) };"
        "document.getElementById('stored-export').click()"
    )
    assert [json.loads(line)["metadata"] for line in text.splitlines()] == [{"project": "browser"}]
    page.press("Delete", "#stored-list")
    page.until(lambda: page.status() == "Deleted.")
    page.fill("#stored-metadata", "project=other")
    page.click("#stored-refresh")
    page.until(lambda: page.status() == "0 completions.")


def test_a_response_by_its_id(page: Playground) -> None:
    """A stored response is opened by its id, and deleted."""
    name = page.driver.execute_async_script(
        "fetch('v1/responses', {method: 'POST', headers: {'content-type': 'application/json'},"
        " body: JSON.stringify({model: 'demo', input: 'Hello!'})})"
        ".then((one) => one.json()).then((one) => arguments[0](one.id))"
    )
    page.view("stored")
    page.fill("#response-id", name)
    page.click("#response-open")
    page.until(lambda: page.find("#stored-open h3").text == name)
    page.click("#response-delete")
    page.until(lambda: page.status() == "Deleted.")
    page.click("#response-open")
    page.until(lambda: "not found" in page.status())
    assert all("404" in one for one in page.console())


def test_metrics_are_live(page: Playground) -> None:
    """The view of metrics shows engines and counts, and follows new requests."""
    page.view("fleet")
    page.until(lambda: page.all("#fleet-rows tr"))
    rows = [one.text for one in page.all("#fleet-rows tr")]
    assert any(one.startswith("engine_state") and "state=ready 1" in one for one in rows)
    assert any("requests" in one for one in rows)


def test_tabs_by_keyboard(page: Playground) -> None:
    """Arrow keys move between the views."""
    page.find("#tab-generate").send_keys(page.js("return '\\uE014'"))
    page.until(lambda: page.find("#analysis").is_displayed())
    assert page.find("#tab-analysis").get_attribute("aria-selected") == "true"
