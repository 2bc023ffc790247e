"""Fuzz cases: concurrent requests, and edits of the engine's responses."""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fuzz.bodies import body
from fuzz.edits import edit
from fuzz.mutations import places
from hypothesis import strategies as st

JSON = "application/json"


@dataclass(frozen=True)
class Request:
    """A request, and the behaviour of its client.

    Args:
        head: a request line and headers to send instead of the right ones, before the body. The
            expected response is then unknown.
        leave: seconds after which the client disconnects, None to stay.
        pieces: the number of pieces in which the request is sent.
        slow: True if the client reads slowly, in small pieces.
    """

    path: str
    body: bytes
    head: bytes | None = None
    leave: float | None = None
    pieces: int = 1
    slow: bool = False

    @property
    def data(self) -> bytes:
        """The bytes to send."""
        if self.head is not None:
            return self.head + self.body
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {JSON}\r\n"
            f"Content-Length: {len(self.body)}\r\n\r\n"
        ).encode() + self.body


@dataclass(frozen=True)
class Case:
    """Concurrent requests.

    Args:
        edits: edits of the engine's responses, for engines behind a `Front`.
        fresh: True to read the engine's facts again, so that the edits apply to them too.
    """

    requests: tuple[Request, ...]
    edits: tuple[dict[str, Any], ...] = field(default=())
    fresh: bool = False


def to_json(case: Case) -> dict[str, Any]:
    """Return a case in the JSON form of its file."""
    made = asdict(case)
    for request in made["requests"]:
        for name in ("body", "head"):
            request.update(_as_text(name, request.pop(name)))
    return made


def from_json(made: dict[str, Any]) -> Case:
    """Return the case of a file's JSON."""
    requests = []
    for one in made["requests"]:
        values = {name: value for name, value in one.items() if not name.endswith("_base64")}
        for name in ("body", "head"):
            if name + "_base64" in one:
                values[name] = base64.b64decode(one[name + "_base64"])
            elif isinstance(one.get(name), str):
                values[name] = one[name].encode()
        if isinstance(values["body"], dict):
            values["body"] = json.dumps(values["body"]).encode()
        requests.append(Request(**values))
    return Case(tuple(requests), tuple(made.get("edits", ())), made.get("fresh", False))


def _as_text(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name + "_base64": base64.b64encode(data).decode()}


HEADS = (
    "Host: 127.0.0.1", "Host: evil.example", "Host:", "Content-Type: application/json",
    "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Content-Type:",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Length: {size}",
    "Content-Length: 0", "Content-Length: -1", "Content-Length: 99999999999", "Content-Length: 1e3",
    "Content-Length: {size}, {size}", "Content-Length: 12345678901234567890123",
    "Content-Length: ٣",
    "Expect: 100-continue", "Connection: close", "Connection: upgrade", "Upgrade: websocket",
    "Upgrade: h2c", "Origin: null", "Origin: http://127.0.0.1", "Origin: app://x", "Origin: é",
    "Authorization: Bearer x", "Authorization: \x80", "X-A: " + "a" * 70_000, "Cookie: a=b", "é: x",
    "Access-Control-Request-Method: POST", "X-Request-Id: a\tb", ": x", "A B: x",
    "Content-Encoding: gzip",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13",
)  # fmt: skip
LINES = (
    "POST {path} HTTP/1.1", "GET {path} HTTP/1.1", "PUT {path} HTTP/1.0", "OPTIONS {path} HTTP/1.1",
    "HEAD {path} HTTP/1.1", "POST {path}?a=b&%00=%ff HTTP/1.1",
    "POST http://127.0.0.1{path} HTTP/1.1",
    "POST /v1//completions HTTP/1.1", "GET /v1/models/%2e%2e%2f%ff HTTP/1.1",
    "GET /v1/models HTTP/1.1",
    "GET /v1/models/m HTTP/1.1", "GET /health HTTP/1.1", "GET /tokenizer_info HTTP/1.1",
    "DELETE /v1/models/m HTTP/1.1", "CONNECT 127.0.0.1:80 HTTP/1.1", "POST * HTTP/1.1",
    "POST {path} HTTP/2.0", "post {path} HTTP/1.1", "\r\nPOST {path} HTTP/1.1", "POST {path}",
    "GET /" + "a" * 70_000 + " HTTP/1.1", "PRI * HTTP/2.0\r\n\r\nSM", "GET /%00/é HTTP/1.1", "",
)  # fmt: skip
_leaving = st.sampled_from((None,) * 12 + (0.0, 0.005, 0.05, 0.3))


@st.composite
def _plain(draw: st.DrawFn) -> Request:
    path, data = draw(body())
    pieces = draw(st.sampled_from((1,) * 10 + (2, 5)))
    return Request(path, data, None, draw(_leaving), pieces, draw(st.integers(0, 19)) == 0)


@st.composite
def _raw(draw: st.DrawFn) -> Request:
    path, data = draw(body())
    data = data[:20_000]
    line = draw(st.sampled_from(LINES)).replace("{path}", path)
    heads = draw(st.lists(st.sampled_from(HEADS), max_size=6))
    if "Transfer-Encoding: chunked" in heads and draw(st.booleans()):
        sizes = draw(st.sampled_from((b"%x", b"%X;a=b", b"-%x", b"%x\r", b"0x%x", b"ffffffffff%x")))
        data = sizes % len(data) + b"\r\n" + data + b"\r\n0\r\n\r\n"
    text = "\r\n".join([line, *heads, "", ""]).replace("{size}", str(len(data)))
    head = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, min(len(head), 300)))
        head = head[:at] + draw(st.binary(max_size=6)) + head[at + draw(st.integers(0, 3)) :]
    second = draw(
        st.sampled_from((b"", b"", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00"))
    )
    return Request(path, data + second, head, draw(_leaving), draw(st.sampled_from((1, 1, 3))))


_request: st.SearchStrategy[Request] = st.one_of(*[_plain()] * 9, _raw())


@st.composite
def cases(draw: st.DrawFn, edited: bool) -> Case:
    """Draw a case, with edits if the engine's responses can be edited."""
    requests = draw(st.lists(_request, min_size=1, max_size=draw(st.sampled_from((1, 1, 2, 5)))))
    edits = draw(st.lists(edit, min_size=1, max_size=3)) if edited else []
    if edited:
        # A request that is rejected before it reaches the engine would not test the edits.
        path, sent = draw(_asking)
        requests = [Request(path, sent, leave=draw(_leaving)), *requests[1:]]
    return Case(tuple(requests), tuple(edits), edited and draw(st.integers(0, 3)) == 0)


_ASKING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "One day, a cat", "max_tokens": 12}),
    ("/v1/completions", {"prompt": "One day, a cat", "max_tokens": 12, "logprobs": 3}),
    ("/v1/completions", {"prompt": "One day", "max_tokens": 4, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "One day", "max_tokens": 9, "stop": [" is", "Paris"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5, "best_of": 3}),
    ("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 5}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5, "regex": "[a-z]+"}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5, "oai_compat": False}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9,
                              "logprobs": True, "top_logprobs": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30,
                              "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30,
                              "response_format": {"type": "json_object"}}),
    ("/tokenize", {"prompt": "One day, a cat"}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)  # fmt: skip


def _asks(one: tuple[str, dict[str, Any]], stream: bool) -> tuple[str, bytes]:
    path, values = one
    own = {"stream": stream} if path.startswith("/v1") else {}
    return path, json.dumps({"model": "m", **values, **own}).encode()


_asking = st.builds(_asks, st.sampled_from(_ASKING), st.booleans())


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are one step smaller, by a request, an edit or a part of a body."""
    for n in range(len(case.requests) if len(case.requests) > 1 else 0):
        yield replace(case, requests=case.requests[:n] + case.requests[n + 1 :])
    for n in range(len(case.edits)):
        yield replace(case, edits=case.edits[:n] + case.edits[n + 1 :])
    if case.fresh:
        yield replace(case, fresh=False)
    for n, one in enumerate(case.requests):
        for less in _smaller_requests(one):
            yield replace(case, requests=(*case.requests[:n], less, *case.requests[n + 1 :]))


def _smaller_requests(one: Request) -> Iterator[Request]:
    if one.leave is not None:
        yield replace(one, leave=None)
    if one.pieces > 1 or one.slow:
        yield replace(one, pieces=1, slow=False)
    try:
        value = json.loads(one.body)
    except (ValueError, RecursionError):
        return
    if one.head is None and isinstance(value, dict):
        for less in _smaller_values(value):
            yield replace(one, body=json.dumps(less).encode())


def _smaller_values(value: Any) -> Iterator[Any]:
    """Yield copies of a value, each with one part removed or halved."""
    for number, (holder, key) in enumerate(places(value)):
        inner = holder[key]
        half = inner[: len(inner) // 2] if isinstance(inner, list | str) and inner else None
        copied = copy.deepcopy(value)
        same, name = next(itertools.islice(places(copied), number, None))
        del same[name]
        yield copied
        if half is not None:
            for part in (half, inner[len(inner) // 2 :]):
                copied = copy.deepcopy(value)
                same, name = next(itertools.islice(places(copied), number, None))
                same[name] = part
                if part != inner:
                    yield copied
