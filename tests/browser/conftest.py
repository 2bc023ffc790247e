"""Headless browsers, and the playground of `latimer serve` with the demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from support.browser import Browser, chromium, needs_chromium, needs_firefox
from support.firefox import firefox
from support.playground import Playground
from support.servers import command, serving

BROWSERS = [
    pytest.param("chromium_driver", marks=needs_chromium, id="chromium"),
    pytest.param("firefox_driver", marks=needs_firefox, id="firefox"),
]


@pytest.fixture(scope="session")
def chromium_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run a Chromium."""
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="session")
def firefox_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run a Firefox."""
    with firefox(tmp_path_factory.mktemp("firefox")) as driver:
        yield driver


@pytest.fixture(params=BROWSERS)
def driver(request: pytest.FixtureRequest) -> Browser:
    """Return each browser; both run to the end, in any order of tests."""
    found: Browser = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def demo_address() -> Iterator[str]:
    """Run `latimer serve` with the demo model."""
    with command() as (_, address):
        yield address


@pytest.fixture
def page(driver: Browser, demo_address: str) -> Iterator[Playground]:
    """Open the page of the demo model; at the end the console must be empty."""
    page = Playground(driver, demo_address)
    page.console()
    page.open()
    yield page
    assert page.console() == []


@pytest.fixture
def page_of(driver: Browser) -> Iterator[Callable[..., Playground]]:
    """Return a function that serves a backend and opens its page."""
    with ExitStack() as stack:

        def open_page(backend: Backend, **options: Any) -> Playground:
            def app() -> OpenAIAdapter:
                return OpenAIAdapter(backend, **{"playground": True, **options})

            page = Playground(driver, stack.enter_context(serving(app)))
            page.console()
            return page

        yield open_page
