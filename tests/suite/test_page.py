"""Tests of the HTML report in a real browser: layout, colour schemes and filters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from latimer.conformance.reports import write
from selenium import webdriver
from selenium.webdriver.common.by import By
from suite.test_reports import RUN, verdict
from support.browser import chromium, needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Open a report in a headless Chromium, and yield its driver."""
    import dataclasses

    many = [verdict(f"echo.check-{n}", "pass") for n in range(60)]
    run = dataclasses.replace(RUN, verdicts=[*RUN.verdicts, *many])
    page = tmp_path_factory.mktemp("report") / "report.html"
    write(run, page)
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.get(page.as_uri())
        yield driver


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_and_is_quiet(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    """The page fits the window, follows the colour scheme, and logs nothing to the console."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_filters_hide_and_show(browser: webdriver.Chrome) -> None:
    """A cleared filter hides its checks, and a cell of the grid shows its check again, opened."""
    box = browser.find_element(By.CSS_SELECTOR, 'input[data-outcome="pass"]')
    passed = browser.find_elements(By.CSS_SELECTOR, 'details[data-outcome="pass"]')
    failed = browser.find_elements(By.CSS_SELECTOR, 'details[data-outcome="fail"]')
    browser.execute_script("arguments[0].click()", box)
    assert not any(one.is_displayed() for one in passed)
    assert all(one.is_displayed() for one in failed)
    cell = browser.find_element(By.CSS_SELECTOR, 'a[href="#echo.first-null"]')
    browser.execute_script("arguments[0].click()", cell)
    browser.implicitly_wait(2)
    shown = browser.find_element(By.CSS_SELECTOR, "details[id='echo.first-null'][open]")
    assert shown.is_displayed()
    browser.execute_script("arguments[0].click()", box)
    assert all(one.is_displayed() for one in passed)


def test_no_script_comes_from_a_reply(browser: webdriver.Chrome) -> None:
    """The page has exactly one script, even if a reply contains another."""
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 1
