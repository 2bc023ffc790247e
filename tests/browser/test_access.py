"""Tests that axe finds nothing wrong in any view of the playground."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
from support.playground import Playground

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which has axe-core"),
]

VERSION = "4.14.1"
VIEWS = ("generate", "analysis", "request", "stored", "fleet")


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Download axe-core; it is never part of the project."""
    folder = tmp_path_factory.mktemp("axe")
    package = f"axe-core@{VERSION}"
    flags = ["--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    command = ["npm", "install", *flags, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot get {package}: {done.stderr[-200:]}")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


def filled(page: Playground) -> None:
    """Put something into every view: a reply with a version, a call, a stored reply, scores."""
    page.click("#p-store")
    page.fill("#p-max_tokens", "8")
    page.send("What is the capital of France?")
    page.click("#regenerate")
    page.finished()
    page.view("analysis")
    page.fill("#text-a", "The capital of France is Paris.")
    page.fill("#text-b", "Hello")
    page.click("#analyse")
    page.until(lambda: len(page.all("#analysis table")) == 2)
    page.view("stored")
    page.until(lambda: page.all("#stored-list li"))
    page.press("Open", "#stored-list li:nth-child(1)")
    page.until(lambda: page.all("#stored-open article"))
    page.view("fleet")
    page.until(lambda: page.all("#fleet-charts svg"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_axe_finds_nothing(page: Playground, axe: str, width: int, scheme: str) -> None:
    """No view breaks a rule of axe, also with open alternatives, settings and an editor."""
    filled(page)
    page.size(width)
    page.choose("#scheme", scheme)
    page.js(axe)
    for view in VIEWS:
        page.view(view)
        assert problems(page) == [], view
    page.view("generate")
    page.js("document.getElementById('settings').open = true")
    page.press("Edit", "article.user")
    page.until(lambda: page.all(".editor textarea"))
    page.click_token(1)
    page.until(lambda: page.find("#popover").is_displayed())
    page.click("#key-button")
    assert problems(page) == []


def problems(page: Playground) -> list[str]:
    """Return the rules that are broken, each with the first element that breaks it."""
    found: list[Any] = page.driver.execute_async_script(
        "const done = arguments[0];"
        "axe.run({resultTypes: ['violations']}).then((one) => done(one.violations))"
    )
    return [f"{one['id']}: {json.dumps(one['nodes'][0]['html'])}" for one in found]
