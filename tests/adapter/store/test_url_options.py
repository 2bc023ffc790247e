"""Tests that the values of a URL's options are not shown."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from latimer.adapter.store.errors import StoreError, StoreUnavailable, in_words
from latimer.adapter.store.place import place_of
from latimer.adapter.store.store import Store
from latimer.adapter.store.url_options import without_values
from sqlalchemy import make_url
from support.servers import free_port

SECRET = "S3cretPW"


async def reason(url: str) -> str:
    """Return why a store cannot be opened."""
    place = place_of(url)
    assert place is not None
    try:
        await Store(place).look()
    except (StoreError, StoreUnavailable) as error:
        return in_words(error)
    raise AssertionError("it was opened")


@pytest.mark.parametrize(
    "option",
    [
        "sslmode", "hostaddr", "keepalives", "service", "target_session_attrs", "port",
        "sslmode=disable&port", "host=a,b&port",
    ],
)  # fmt: skip
async def test_an_invalid_option_is_not_shown(option: str) -> None:
    """A message about an option has its name, and not its value."""
    shown = await reason(f"postgresql://127.0.0.1:{free_port()}/x?{option}={SECRET}")
    assert SECRET not in shown
    assert shown


@pytest.mark.parametrize("options", [SECRET, f"-c%20{SECRET}", f"-c%20work_mem={SECRET}"])
async def test_an_option_that_the_server_refuses_is_not_shown(
    postgresql_url: str, options: str
) -> None:
    """The message of a server about its options has no value of them."""
    shown = await reason(f"{postgresql_url}?options={options}")
    assert SECRET not in shown
    assert str(urlsplit(postgresql_url).port) in shown


def test_other_words_of_a_message_stay() -> None:
    """A message keeps its host and port, and words that only begin with a value."""
    url = make_url("postgresql://h/x?sslmode=require&keepalives=1&host=/run/pg&password=")
    message = 'connection to "/run/pg", port 1 failed: SSL was required, not "require" or "1"'
    assert without_values(message, url) == (
        'connection to "/run/pg", port 1 failed: SSL was required, not "…" or "…"'
    )
    assert without_values(message, make_url("postgresql://h/x")) == message
