"""Tests of request headers, and of addresses in messages."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from latimer.backends.errors import EngineError
from latimer.backends.http import HttpUpstream
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from latimer.backends.upstream import header_lines, shown_address
from support.servers import llama_server


def test_headers_are_utf_8() -> None:
    """Header values are sent as UTF-8, as an engine reads its key from the command line."""
    assert header_lines({"A": "schlüssel", "b-C": "ключ"}) == (
        "A: schlüssel\r\nb-C: ключ\r\n".encode()
    )


async def test_an_engine_takes_such_a_key() -> None:
    """llama-server accepts a key that is not ASCII."""
    with llama_server(DEMO_MODEL, "--api-key", "schlüssel", slots=1, context=256) as address:
        for key, refused in (("schlüssel", False), ("schlussel", True)):
            backend = LlamaServer(address, key)
            with pytest.raises(EngineError) if refused else nullcontext():
                assert (await backend.model()).context == 256
            await backend.aclose()


@pytest.mark.parametrize(
    "value", ["s3cr3t\r\nX: y", "s3cr3t\n", "\rs3cr3t", "s3cr3t\x00", "\udcff"]
)
def test_a_value_cannot_end_its_line(value: str) -> None:
    """The constructor rejects a header value with a line end, and its message does not show the
    value."""
    for make in (
        lambda: HttpUpstream("http://127.0.0.1:1", {"Authorization": value}),
        lambda: LlamaServer("http://127.0.0.1:1", value),
        lambda: KoboldCpp("http://127.0.0.1:1", value),
    ):
        with pytest.raises(ValueError, match="the value of the header Authorization") as raised:
            make()
        assert "s3cr3t" not in str(raised.value)
        assert raised.value.__context__ is None


def test_a_name_is_a_token() -> None:
    """The constructor rejects a header name that is not an ASCII token."""
    for name in ("a b", "a:", "a\r\n", "", "ü"):
        with pytest.raises(ValueError, match="not the name of an HTTP header"):
            HttpUpstream("http://127.0.0.1:1", {name: "x"})


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://127.0.0.1:8080/prefix/", "http://127.0.0.1:8080/prefix"),
        ("http://user:pass@host:1/x", "http://host:1/x"),
        ("http://user:p/a@host:1?key=s#t", "http://host:1"),
        ("http://host?a=http://b", "http://host"),
        ("user:pass@host", "host"),
    ],
)
def test_addresses_are_shown_without_secrets(address: str, shown: str) -> None:
    """Messages show an address without user, password and query."""
    assert shown_address(address) == shown
