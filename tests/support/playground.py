"""A driver of the playground in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from .browser import Browser

SECONDS = 20
# The tokens of the last message that is shown.
_LAST = (
    "[...document.querySelectorAll('article .tokens')]"
    ".filter((one) => one.checkVisibility()).at(-1)"
)
# A text that would do harm if it became markup, or if its controls were obeyed.
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    "<a href='javascript:hacked=1'>x</a> ![i](http://evil.example/i.png) "
    "\x1b[31mred\x07 \u202egnp.exe\u202c \u200b 😀 </pre></article><style>*{display:none}</style>"
)


class Playground:
    """The page of a server, in a browser.

    Args:
        driver: the browser.
        address: the address of the page.
    """

    def __init__(self, driver: Browser, address: str) -> None:
        self.driver, self.address = driver, address

    def open(self) -> None:
        """Open the page, without what it has kept in the browser."""
        self.driver.get(f"{self.address}/playground/style.css")
        self.driver.execute_async_script(
            "localStorage.clear(); sessionStorage.clear();"
            "const request = indexedDB.deleteDatabase('latimer');"
            "request.onsuccess = request.onerror = request.onblocked = () => arguments[0]();"
        )
        self.size(1400)
        self.reload()

    def reload(self) -> None:
        """Load the page, and wait until it has the models."""
        self.driver.get(f"{self.address}/")
        self.until(lambda: self.js("return document.documentElement.dataset.ready"))

    def size(self, width: int, height: int = 900) -> None:
        """Set the width and the height of the page in CSS pixels."""
        self.driver.resize(width, height)

    def js(self, script: str, *arguments: Any) -> Any:
        """Run a script and return its value."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], message: str = "") -> Any:
        """Wait for a true value and return it; an element that is replaced has none yet."""
        waiting = WebDriverWait(self.driver, SECONDS, 0.02, [StaleElementReferenceException])
        return waiting.until(lambda _: condition(), message)

    def find(self, selector: str) -> WebElement:
        """Return the first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Return all elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click an element by a real pointer, in the middle of the page."""
        self.click_on(self.find(selector))

    def click_on(self, element: WebElement) -> None:
        """Click an element as `click` does.

        Firefox can handle a click after the driver has returned. So the status is emptied before,
        and not by the click alone.
        """
        self.js(
            "document.getElementById('status').textContent = '';"
            "arguments[0].scrollIntoView({block: 'center'})",
            element,
        )
        element.click()

    def click_token(self, index: int) -> None:
        """Click a token of the last message.

        A token can be on two lines. The pointer moves to its larger part.
        """
        element = self.token(index)
        x, y = self.js(
            "arguments[0].scrollIntoView({block: 'center'});"
            "const [most] = [...arguments[0].getClientRects()]"
            "  .sort((a, b) => b.width * b.height - a.width * a.height);"
            "return [most.x + most.width / 2, most.y + most.height / 2].map(Math.round)",
            element,
        )
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(x, y)  # type: ignore[no-untyped-call]
        actions.pointer_action.click()
        actions.perform()
        # The page may have replaced it meanwhile.
        self.until(lambda: "open" in (self.token(index).get_attribute("class") or ""))

    def press(self, name: str, within: str = "") -> None:
        """Click the button with this text.

        The page can replace a button until the pointer is on it, so a stale one is looked up again.
        """
        self.until(lambda: self._press(name, within))

    def _press(self, name: str, within: str) -> bool:
        """Return False if there is no such button now."""
        found = self.js(
            "return [...document.querySelectorAll(`${arguments[1]} button`)]"
            "  .find((one) => one.checkVisibility() && one.innerText.trim() === arguments[0])",
            name,
            within,
        )
        if found is None:
            return False
        self.click_on(found)
        return True

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field as typing does."""
        field = self.find(selector)
        self.js(
            "arguments[0].value = arguments[1];"
            "for (const one of ['input', 'change'])"
            "  arguments[0].dispatchEvent(new Event(one, {bubbles: true}))",
            field,
            text,
        )

    def choose(self, selector: str, value: str) -> None:
        """Choose an option."""
        Select(self.find(selector)).select_by_value(value)

    def send(self, text: str) -> None:
        """Send a message, or complete a text, and wait for the whole reply."""
        self.fill("#composer", text)
        self.click("#send")
        self.finished()

    def finished(self) -> None:
        """Wait for the end of a reply, which a click has begun."""
        self.until(lambda: self.status() not in ("", "The model generates …"))
        self.until(lambda: self.js("return document.getElementById('stop').hidden"))

    def status(self) -> str:
        """Return the line of the page's status."""
        return self.find("#status").text

    def replies(self) -> list[str]:
        """Return the text of each message that is shown, as the API returned it."""
        return self.js(  # type: ignore[no-any-return]
            "return [...document.querySelectorAll('article')].map((one) =>"
            " [...one.querySelectorAll(':scope > .tokens, :scope > .plain')]"
            ".map((part) => part.textContent).join(''))"
        )

    def tokens(self) -> list[str]:
        """Return the tokens of the last message."""
        return self.js(  # type: ignore[no-any-return]
            f"return [...{_LAST}.children].map((one) => one.textContent)"
        )

    def token(self, index: int) -> WebElement:
        """Return a token of the last message."""
        return self.js(  # type: ignore[no-any-return]
            f"return {_LAST}.children[arguments[0]]", index
        )

    def alternatives(self) -> list[str]:
        """Return the texts of the alternatives in the pop-over, most likely first."""
        return [one.get_attribute("data-text") or "" for one in self.all("#popover .row")]

    def exported(self, button: str) -> str:
        """Click a button, by its id, that gives the user a file; return its text."""
        return self.driver.execute_async_script(  # type: ignore[no-any-return]
            "const done = arguments[1], make = URL.createObjectURL;"
            "URL.createObjectURL = (blob) => {"
            "  URL.createObjectURL = make; blob.text().then(done); return make(blob) };"
            "document.getElementById(arguments[0]).click()",
            button,
        )

    def view(self, name: str) -> None:
        """Show one of the views."""
        self.click(f"#tab-{name}")
        self.until(lambda: self.find(f"#{name}").is_displayed())

    def key(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def console(self) -> list[str]:
        """Return what the console has logged since the last call."""
        # `open` visits a style sheet, which has no icon. A browser may look for one, and log later.
        return [one for one in self.driver.console() if "/favicon.ico" not in one]


__all__ = ["HOSTILE", "Keys", "Playground"]
