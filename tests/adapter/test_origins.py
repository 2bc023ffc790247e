"""Tests that a server without a key answers only local pages and apps, on non-public host names."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli.serve import local_rules
from latimer.adapter.origins import LocalRules, OriginMiddleware
from latimer.adapter.settings import Settings
from starlette.routing import Router
from support.browser import chromium, needs_chromium
from support.clients import client_of
from support.engines.echo import Echo
from support.servers import canned, command

BODY = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
APPS = (
    "app://obsidian.md", "app://-", "capacitor://localhost", "tauri://localhost", "file://",
    "vscode-webview://0ab1c2-d3", "chrome-extension://abcdefgh", "moz-extension://1-2-3",
)  # fmt: skip
LOCAL = (
    "http://localhost", "https://localhost:3000", "http://LOCALHOST:1", "http://localhost.",
    "http://tauri.localhost", "http://a.b.localhost:80", "http://127.0.0.1:5173",
    "http://127.9.8.7", "https://[::1]:8443", "http://[::ffff:127.0.0.1]",
)  # fmt: skip
PRIVATE = (
    "http://10.1.2.3", "http://172.16.0.1:80", "https://192.168.1.7:8443", "http://169.254.1.1",
    "http://[fd00::1]:3000", "http://[fe80::1]",
)  # fmt: skip
FOREIGN = (
    "https://evil.example", "http://evil.example:8000", "HTTPS://evil.example", "null", "Null", "",
    "http://localhost.evil.example", "http://127.0.0.1.evil.example", "http://evillocalhost",
    "http://evil.example#.localhost", "http://evil.example/.localhost", "http://u@localhost",
    "http://localhost@evil.example", "http://localhost:80.evil.example", "http://localhost:x",
    "http://localhost/", "http://localhost:3000, https://evil.example", "http://",
    "app://x https://evil.example", "app://x, https://evil.example", "app:x", "://localhost",
    "http://8.8.8.8", "http://172.32.0.1", "http://100.64.0.1", "http://0.0.0.0", "http://[::]",
    "http://[2001:db8::1]", "http://[::1", "http://[evil.example]", "http://[::1]evil.example",
    "http://.localhost", "http://\xe9.localhost", "http://127.1", "http://0x7f.0.0.1", "*",
)  # fmt: skip
KNOWN_HOSTS = (
    "127.0.0.1:8000", "8.8.8.8", "[::1]", "[::1]:8000", "[2001:db8::1]:80", "[fe80::1%eth0]:80",
    "localhost", "localhost:", "LocalHost:8000", "localhost.", "api.localhost:1", "nas", "my_box:8",
    "host.docker.internal:8000", "host.containers.internal", "Box.local:8000", "box.lan.",
    "box.lan:80",
)  # fmt: skip
UNKNOWN_HOSTS = (
    "evil.example", "evil.example:8000", "evil.example.", "EVIL.example", "evil.", "", ":8000", ".",
    "localhost.evil.example", "evil.example:80:80", "evil.example@localhost", "localhost@x",
    "u:p@localhost", "localhost,evil.example", "localhost evil.example", "localhost/x",
    "127.0.0.1.evil.example", "127.0.0.1.", "[::1", "::1", "[evil]", "[evil.example]:80", "[]",
    "[::1]evil.example", "[::1].evil.example", "localhost:x", "localhost:123456", "a..localhost",
    ".localhost", "evil%2eexample", "evil\xe3\x80\x82example", "\x00", "other.local", "1.2.3",
)  # fmt: skip


@pytest.mark.parametrize("origin", [*APPS, *LOCAL])
def test_local_pages_and_apps_may_call(origin: str) -> None:
    """Pages and apps on this machine are allowed without an option."""
    assert LocalRules().allows_origin(origin, "http", "localhost:8000")


@pytest.mark.parametrize("origin", FOREIGN)
def test_other_pages_may_not_call(origin: str) -> None:
    """Websites, opaque and malformed origins are rejected, also beyond the loopback interface."""
    rules = LocalRules(beyond_loopback=True)
    assert not rules.allows_origin(origin, "http", "localhost:8000")


@pytest.mark.parametrize("origin", PRIVATE)
def test_pages_of_the_network_may_call_where_it_is_served(origin: str) -> None:
    """An origin with a private address is allowed only if other machines can reach the server."""
    assert LocalRules(beyond_loopback=True).allows_origin(origin, "http", None)
    assert not LocalRules().allows_origin(origin, "http", "localhost")


@pytest.mark.parametrize(
    ("origin", "scheme", "host", "allowed"),
    [
        ("http://nas:8000", "http", "nas:8000", True),
        ("http://nas", "http", "NAS:80", True),
        ("https://nas", "https", "nas", True),
        ("http://nas:8001", "http", "nas:8000", False),
        ("https://nas", "http", "nas", False),
        ("http://nas", "http", None, False),
        ("http://8.8.8.8:8000", "http", "8.8.8.8:8000", True),
        ("http://nas", "http", "nas@x", False),
    ],
)
def test_the_servers_own_pages_may_call(
    origin: str, scheme: str, host: str | None, allowed: bool
) -> None:
    """An origin with the request's own scheme, host and port is allowed."""
    assert LocalRules().allows_origin(origin, scheme, host) is allowed


def test_named_origins_are_allowed_besides() -> None:
    """`--cors-origin` allows exactly its origins, and `*` allows all but `null`."""
    rules = LocalRules(["https://Chat.example:443", "http://[2001:db8::1]:3000"])
    for origin in ("https://chat.example", "http://[2001:db8::1]:3000", "app://x"):
        assert rules.allows_origin(origin, "http", None)
    for origin in ("http://chat.example", "https://chat.example:444", "null"):
        assert not rules.allows_origin(origin, "http", None)
    assert LocalRules(["null"]).allows_origin("null", "http", None)
    assert not LocalRules(["null"]).allows_origin("https://evil.example", "http", None)
    assert LocalRules(["*"]).allows_origin("https://evil.example", "http", None)
    assert not LocalRules(["*"]).allows_origin("null", "http", None)
    assert LocalRules(["*", "null"]).allows_origin("null", "http", None)


@pytest.mark.parametrize("host", KNOWN_HOSTS)
def test_known_hosts(host: str) -> None:
    """Addresses, single-label names, container hosts and the machine's own name are known hosts."""
    assert LocalRules(machine="box.lan").allows_host(host)


@pytest.mark.parametrize("host", UNKNOWN_HOSTS)
def test_unknown_hosts(host: str) -> None:
    """A host name that a website can have is not known, in any notation."""
    assert not LocalRules(machine="box.lan").allows_host(host)
    assert LocalRules(hosts=["*"]).allows_host(host)


def test_named_hosts_are_known() -> None:
    """`--allowed-host` names a host or all hosts below a name, on any port."""
    rules = LocalRules(hosts=["LLM.example.", "*.lan"])
    for host in ("llm.example:8000", "LLM.example.", "a.lan", "b.a.lan:1"):
        assert rules.allows_host(host), host
    for host in ("a.llm.example", "example", "evil.example", "evillan.example"):
        assert rules.allows_host(host) is ("." not in host), host


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("cors_origin", ("example.com", "https://a.example/", "https://a.example/path", "", "a b")),
        ("allowed_host", ("http://a.example", "a.example:80", "", "a b", "*.*.example", "*a")),
    ],
)
def test_what_cannot_match_is_refused_at_the_start(setting: str, values: tuple[str, ...]) -> None:
    """An origin or host that can never match is rejected at the start."""
    for value in values:
        with pytest.raises(ValueError, match=r"is not a(n origin| host name)\. Write it"):
            Settings.load(None, **{setting: [value]})


@pytest.mark.parametrize(
    ("host", "beyond"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True)],  # noqa: S104
)
def test_where_it_listens_decides_about_private_addresses(host: str, beyond: bool) -> None:
    """Private addresses are allowed only if the server listens beyond the loopback interface."""
    rules = local_rules(host, (), ())
    assert rules.allows_origin("http://10.0.0.1", "http", None) is beyond
    assert rules.allows_host(f"{socket.gethostname().partition('.')[0]}.local")


NAMES = [b"host", b"origin", b"access-control-request-method", b"access-control-request-headers"]


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.binary() | st.from_regex(rb"[-a-z0-9.:/\[\]@%]+"))
    )
)
def test_no_header_raises(headers: list[tuple[bytes, bytes]]) -> None:
    """No combination of header values raises an exception."""
    for origins, rules in ((["*"], None), (["https://a.example"], None), ([], LocalRules())):
        access = OriginMiddleware(Router(), origins, rules)
        for method in ("GET", "OPTIONS"):
            access.judge(method, "http", headers)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Run `latimer serve` without a key."""
    with command("--allowed-host", "llm.example", LATIMER_CORS_ORIGIN="https://chat.example") as (
        _,
        address,
    ):
        yield address


def port_of(address: str) -> int:
    """Return the port of a URL."""
    return int(address.rpartition(":")[2])


def error_of(reply: httpx2.Response) -> Any:
    """Return the error object of a 403."""
    assert reply.status_code == 403
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    return error


def test_serve_has_the_rules(address: str) -> None:
    """Allowed origins can read replies and errors, and others get a 403 that names the option."""
    port = port_of(address)
    allowed = ("app://obsidian.md", "https://chat.example", f"http://127.0.0.1:{port}")
    with httpx2.Client(base_url=address) as client:
        for origin in allowed:
            headers = {"origin": origin}
            for reply, status in (
                (client.post("/v1/completions", json=BODY, headers=headers), 200),
                (client.post("/v1/completions", json={}, headers=headers), 400),
                (client.get("/v1/nothing", headers=headers), 404),
            ):
                assert reply.status_code == status
                assert reply.headers["access-control-allow-origin"] == origin
                assert reply.headers["vary"] == "Origin"
                exposed = reply.headers["access-control-expose-headers"].split(", ")
                assert {"x-request-id", "x-latimer-engine", "retry-after"} <= {*exposed}
        for origin in ("https://evil.example", "null", "http://10.0.0.1"):
            reply = client.post("/v1/completions", json=BODY, headers={"origin": origin})
            error = error_of(reply)
            assert error["code"] == "origin_not_allowed"
            assert f"--cors-origin {origin}," in error["message"]
            assert reply.headers["vary"] == "Origin"
            assert "access-control-allow-origin" not in reply.headers
        for host in ("evil.example", f"evil.example:{port}"):
            reply = client.get("/v1/models", headers={"host": host, "origin": f"http://{host}"})
            error = error_of(reply)
            assert error["code"] == "host_not_allowed"
            assert "--allowed-host evil.example," in error["message"]
        for host in ("llm.example", "nas:1"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200
        # A host that was rejected is not cached as known.
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403


def test_preflights_of_a_keyless_server(address: str) -> None:
    """A preflight allows a page on a public network, and a rejected one gets an error object."""
    asked = {
        "origin": "app://obsidian.md",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
        "access-control-request-private-network": "true",
    }
    with httpx2.Client(base_url=address) as client:
        reply = client.options("/v1/completions", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "app://obsidian.md"
        assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert reply.headers["access-control-allow-private-network"] == "true"
        assert "access-control-allow-local-network" not in reply.headers
        assert "Origin" in reply.headers["vary"]
        for change, status, code in (
            ({"origin": "https://evil.example"}, 403, "origin_not_allowed"),
            ({"host": "evil.example"}, 403, "host_not_allowed"),
            ({"access-control-request-method": "PUT"}, 400, "method_not_allowed"),
            ({"access-control-request-headers": "a b;"}, 400, "header_not_allowed"),
        ):
            reply = client.options("/v1/completions", headers={**asked, **change})
            assert reply.status_code == status
            assert reply.json()["error"]["code"] == code
            assert "access-control-allow-private-network" not in reply.headers


def said(address: str, request: bytes) -> bytes:
    """Return the first bytes that the server sends in response to raw bytes."""
    with socket.create_connection(("127.0.0.1", port_of(address)), 5) as connection:
        connection.sendall(request)
        return connection.recv(65536)


def test_a_page_is_refused_before_its_body_is_read(address: str) -> None:
    """A page is rejected before its request's body is complete."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: https://evil.example\r\n"
    reply = said(address, head + b"content-length: 1000000\r\n\r\n{")
    assert reply.startswith(b"HTTP/1.1 403 ")
    assert b"origin_not_allowed" in reply


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: evil.example\r\nhost: localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost:\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: \xff\xfe\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\norigin: \xff\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\norigin:\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: a\r\norigin: app://x\r\norigin: http://evil.y\r\n", 403),
    ],
)
def test_odd_heads(address: str, head: bytes, status: int) -> None:
    """Repeated, empty and non-ASCII host and origin headers are rejected; missing ones are not."""
    assert said(address, head + b"\r\n").split()[1] == str(status).encode()


def test_with_a_key_everybody_may() -> None:
    """A server with a key accepts every origin and host, and answers with `*`."""
    odd = {"origin": "null", "host": "evil.example"}
    with command("--api-key", "k") as (_, address), httpx2.Client(base_url=address) as client:
        for headers, status in ((odd, 401), ({**odd, "authorization": "Bearer k"}, 200)):
            reply = client.get("/v1/models", headers=headers)
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == "*"
        asked = {**odd, "access-control-request-method": "POST"}
        asked["access-control-request-private-network"] = "true"
        reply = client.options("/v1/models", headers=asked)
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["access-control-allow-private-network"] == "true"


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    """Return the port of a web server with an empty page."""
    with canned({"*": (200, b"<!doctype html><title>page</title>")}) as (address, _):
        yield port_of(address)


ASK = """
const [address, body, done] = arguments
fetch(address + '/v1/completions', {method: 'POST', body: new Blob([body])})
  .then(async (reply) => done([reply.status, await reply.text()]))
  .catch(() => done(null))
"""


@pytest.mark.slow
@needs_chromium
def test_a_real_website_gets_nothing(address: str, page: int, tmp_path: Path) -> None:
    """In a browser a local page gets a response and a website none, even by DNS rebinding."""
    port, body = port_of(address), json.dumps(BODY)
    with chromium(tmp_path, "--host-resolver-rules=MAP *.example 127.0.0.1") as browser:
        browser.set_script_timeout(10)

        def ask(origin: str, target: str) -> Any:
            browser.get(f"http://{origin}:{page}/")
            return browser.execute_async_script(ASK, target, body)

        status, text = ask("localhost", address)
        assert status == 200
        assert json.loads(text)["choices"]
        assert ask("evil.example", address) is None
        browser.get(f"http://evil.example:{port}/v1/models")
        status, text = browser.execute_async_script(ASK, "", body)
        assert status == 403
        assert json.loads(text)["error"]["code"] == "host_not_allowed"


async def test_the_log_says_once_what_a_browser_hides(caplog: pytest.LogCaptureFixture) -> None:
    """A refused page is in the log once, with the option that allows it; its user sees nothing."""
    app = OpenAIAdapter(Echo(), local_rules=local_rules("127.0.0.1", (), ()))
    async with client_of(app) as client:
        for origin in ("https://a.example", "https://a.example", "https://b.example"):
            reply = await client.get("http://localhost/v1/models", headers={"origin": origin})
            assert reply.status_code == 403
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == 2
    assert "--cors-origin https://a.example" in lines[0]
    assert "--cors-origin https://b.example" in lines[1]
