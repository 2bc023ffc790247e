"""A headless Firefox for tests, if the machine has one.

Debian has no geckodriver. It only passes the commands of WebDriver on to Firefox's own protocol,
Marionette: JSON messages over a socket. Here Selenium sends them itself.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.remote.client_config import ClientConfig
from selenium.webdriver.remote.command import Command
from selenium.webdriver.remote.remote_connection import RemoteConnection
from typing_extensions import override

SECONDS = 60
PROGRAM = shutil.which("firefox-esr") or shutil.which("firefox")
# Nothing is looked up or sent, and windows may be narrow.
PREFERENCES: Mapping[str, object] = {
    "app.normandy.enabled": False,
    "app.update.enabled": False,
    "browser.cache.check_doc_frequency": 1,
    "browser.safebrowsing.downloads.remote.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "browser.startup.homepage_override.mstone": "ignore",
    "browser.startup.page": 0,
    "datareporting.policy.dataSubmissionEnabled": False,
    "devtools.console.stdout.content": False,
    "extensions.update.enabled": False,
    "marionette.port": 0,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "toolkit.telemetry.reportingpolicy.firstRun": False,
    "ui.prefersReducedMotion": 1,
}
# The commands of Marionette for those of Selenium.
COMMANDS = {
    Command.CLEAR_ELEMENT: "ElementClear",
    Command.CLICK_ELEMENT: "ElementClick",
    Command.FIND_CHILD_ELEMENT: "FindElement",
    Command.FIND_CHILD_ELEMENTS: "FindElements",
    Command.FIND_ELEMENT: "FindElement",
    Command.FIND_ELEMENTS: "FindElements",
    Command.GET: "Navigate",
    Command.GET_CURRENT_URL: "GetCurrentURL",
    Command.GET_ELEMENT_ATTRIBUTE: "GetElementAttribute",
    Command.GET_ELEMENT_PROPERTY: "GetElementProperty",
    Command.GET_ELEMENT_RECT: "GetElementRect",
    Command.GET_ELEMENT_TAG_NAME: "GetElementTagName",
    Command.GET_ELEMENT_TEXT: "GetElementText",
    Command.IS_ELEMENT_ENABLED: "IsElementEnabled",
    Command.IS_ELEMENT_SELECTED: "IsElementSelected",
    Command.NEW_SESSION: "NewSession",
    Command.QUIT: "DeleteSession",
    Command.REFRESH: "Refresh",
    Command.SCREENSHOT: "TakeScreenshot",
    Command.SEND_KEYS_TO_ELEMENT: "ElementSendKeys",
    Command.SET_TIMEOUTS: "SetTimeouts",
    Command.W3C_ACTIONS: "PerformActions",
    Command.W3C_CLEAR_ACTIONS: "ReleaseActions",
    Command.W3C_EXECUTE_SCRIPT: "ExecuteScript",
    Command.W3C_EXECUTE_SCRIPT_ASYNC: "ExecuteAsyncScript",
    Command.W3C_GET_ACTIVE_ELEMENT: "GetActiveElement",
}


class Marionette(RemoteConnection):
    """A connection of Selenium to a running Firefox.

    Args:
        port: its port on the loopback.
    """

    def __init__(self, port: int) -> None:
        super().__init__(client_config=ClientConfig(f"http://127.0.0.1:{port}"))
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._file = self._socket.makefile("rb")
        self._count = 0
        # Firefox introduces itself.
        self._read()

    @override
    def execute(self, command: str, params: Any) -> dict[str, Any]:
        """Run a command of Selenium."""
        given = {name: value for name, value in params.items() if name != "sessionId"}
        if command == Command.NEW_SESSION:
            given = given["capabilities"]["alwaysMatch"]
        elif command == Command.SCREENSHOT:
            given = {"full": False, "hash": False}
        elif "id" in given and "using" in given:
            given["element"] = given.pop("id")
        error, value = self.send(f"WebDriver:{COMMANDS[command]}", given)
        if error is not None:
            return {"status": 500, "value": json.dumps({"value": error})}
        if isinstance(value, dict) and value.keys() == {"value"}:
            value = value["value"]
        return {"status": 0, "value": value}

    def send(self, name: str, params: Mapping[str, Any]) -> tuple[dict[str, str] | None, Any]:
        """Run a command of Marionette; return its error and its value."""
        self._count += 1
        data = json.dumps([0, self._count, name, params]).encode()
        self._socket.sendall(b"%d:%s" % (len(data), data))
        _, number, error, value = self._read()
        assert number == self._count
        return error, value

    def in_browser(self, script: str, *arguments: Any) -> Any:
        """Run a script in the browser's own window, not in the page, and return its value."""
        self.send("Marionette:SetContext", {"value": "chrome"})
        try:
            error, value = self.send(
                "WebDriver:ExecuteScript", {"script": script, "args": arguments}
            )
        finally:
            self.send("Marionette:SetContext", {"value": "content"})
        assert error is None, error
        return value["value"]

    @override
    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self) -> Any:
        size = b""
        while not size.endswith(b":"):
            byte = self._file.read(1)
            assert byte, "Firefox has ended."
            size += byte
        return json.loads(self._file.read(int(size[:-1])))


class Firefox(webdriver.Remote):
    """A Firefox, with a size and a console."""

    def __init__(self, port: int) -> None:
        self.marionette = Marionette(port)
        super().__init__(self.marionette, options=webdriver.FirefoxOptions())
        # Files are on this machine.
        self._is_remote = False

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in CSS pixels; windows cannot be as narrow as a phone."""
        self.marionette.in_browser(
            "const { style } = gBrowser.selectedBrowser;"
            "style.minWidth = style.maxWidth = style.width = `${arguments[0]}px`;"
            "style.minHeight = style.maxHeight = style.height = `${arguments[1]}px`;",
            width,
            height,
        )
        for _ in range(200):
            if self.execute_script("return innerWidth") == width:
                return
            time.sleep(0.01)
        raise AssertionError(f"The page is not {width} pixels wide.")

    def console(self) -> list[str]:
        """Return what the console has logged since the last call."""
        found: list[str] = self.marionette.in_browser(
            "const storage = Cc['@mozilla.org/consoleAPI-storage;1']"
            "  .getService(Ci.nsIConsoleAPIStorage);"
            "const own = (one) => /^https?:/.test(one.sourceName ?? '');"
            "const found = Services.console.getMessageArray()"
            "  .filter((one) => one instanceof Ci.nsIScriptError && own(one))"
            "  .map((one) => `${one.errorMessage} (${one.sourceName}:${one.lineNumber})`);"
            "for (const one of storage.getEvents())"
            "  if (/^https?:/.test(one.filename)) found.push(one.arguments.map(String).join(' '));"
            "Services.console.reset();"
            "storage.clearEvents();"
            "return found;"
        )
        return found


@contextlib.contextmanager
def firefox(profile: Path) -> Iterator[Firefox]:
    """Run a headless Firefox.

    Args:
        profile: an empty folder for the profile.
    """
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(v)});" for name, v in PREFERENCES.items()]
    (profile / "user.js").write_text("\n".join(lines))
    flags = ["--headless", "--marionette", "--no-remote", "--remote-allow-system-access"]
    process = subprocess.Popen(
        [PROGRAM or "", *flags, "--profile", str(profile)],
        env={"HOME": str(profile), "MOZ_HEADLESS_WIDTH": "1600", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        place = profile / "MarionetteActivePort"
        end = time.monotonic() + SECONDS
        while not (place.exists() and place.read_text()):
            assert process.poll() is None, "Firefox has ended."
            assert time.monotonic() < end, "Firefox does not start."
            time.sleep(0.05)
        driver = Firefox(int(place.read_text()))
        try:
            yield driver
        finally:
            driver.quit()
    finally:
        process.terminate()
        process.wait(SECONDS)
