"""Headless browsers for tests, those that the machine has."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from selenium import webdriver

from .firefox import PROGRAM, Firefox

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs chromium and chromedriver",
)
needs_firefox = pytest.mark.skipif(PROGRAM is None, reason="needs firefox-esr or firefox")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Chromium(webdriver.Chrome):
    """A Chromium, with a size and a console."""

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def console(self) -> list[str]:
        """Return what the console has logged since the last call."""
        return [one["message"] for one in self.get_log("browser")]  # type: ignore[no-untyped-call]


Browser: TypeAlias = Chromium | Firefox


@contextlib.contextmanager
def chromium(profile: Path, *flags: str) -> Iterator[Chromium]:
    """Run a headless Chromium with an empty profile and a console log.

    Args:
        profile: a folder for the profile.
        flags: additional command line flags.
    """
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = Chromium(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
