"""Tests of the other views of the playground: requests as code, and metrics."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.engines.echo import Echo
from support.playground import Playground

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("streams", [True, False])
def test_curl_waits_for_streams_only(page: Playground, streams: bool) -> None:
    """The command of curl has the flag for streams only if the request has a stream."""
    if not streams:
        page.click("#streams")
    page.fill("#p-max_tokens", "1")
    page.send("Hello")
    page.view("request")
    assert page.find("#code").text.startswith("curl -N " if streams else "curl 'http")


def test_metrics_are_live(page: Playground) -> None:
    """The view Live has a row for each engine and three charts, and follows new requests."""
    page.view("fleet")
    page.until(lambda: page.all("#fleet-rows tr"))
    row = page.find("#fleet-rows tr").text
    assert row.startswith("demo llama_cpp ready 0 0 ")
    assert not page.find("#legend").is_displayed()
    names = [one.get_attribute("aria-label") or "" for one in page.all("#fleet-charts svg")]
    assert [name.partition(":")[0] for name in names] == ["running", "waiting", "tokens/s"]
    page.driver.execute_async_script(
        "const done = arguments[0];"
        "fetch('v1/completions', {method: 'POST', headers: {'content-type': 'application/json'},"
        " body: JSON.stringify({model: 'demo', prompt: 'Hi', max_tokens: 40, ignore_eos: true})})"
        ".then((one) => one.text()).then(done)"
    )
    page.until(lambda: "tokens/s: now 0.0, at most 0.0" not in page.find("#fleet-charts").text)
    assert "× 200" in page.find("#fleet-requests").text
    page.view("generate")
    assert page.find("#legend").is_displayed()


def test_a_server_without_metrics(page_of: Callable[..., Playground]) -> None:
    """Without metrics, the view Live says so."""
    page = page_of(Echo(), metrics=False)
    page.open()
    page.view("fleet")
    page.until(lambda: "no metrics" in page.find("#fleet-error").text)


def test_the_status_ends_with_its_action(page: Playground) -> None:
    """The status line of an action is empty after the next one."""
    page.fill("#p-max_tokens", "1")
    page.send("Hello")
    assert page.status() == "The reply is complete."
    assert "1 token " in page.find("article.assistant footer").text
    page.press("Undo")
    assert page.status() == ""
    page.view("request")
    page.click("#copy")
    page.until(lambda: page.status() != "")
    page.view("analysis")
    assert page.status() == ""


def test_panels_are_folded_on_a_phone(page: Playground) -> None:
    """The settings and the conversations are open on a desktop, and folded on a phone."""
    assert page.find("#settings").get_attribute("open") is not None
    page.size(400)
    page.until(lambda: page.find("#settings").get_attribute("open") is None)
    page.reload()
    for panel in ("#settings", "#history"):
        assert page.find(panel).get_attribute("open") is None
    assert page.find("#composer").rect["y"] < 900


def test_tabs_by_keyboard(page: Playground) -> None:
    """Arrow keys move between the views."""
    page.find("#tab-generate").send_keys(page.js("return '\\uE014'"))
    page.until(lambda: page.find("#analysis").is_displayed())
    assert page.find("#tab-analysis").get_attribute("aria-selected") == "true"
