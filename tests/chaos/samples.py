"""Random requests and random edits of an engine's responses: drawn, made smaller, and as JSON."""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.engines.mistakes import places
from support.mutants import STRANGE as WRONG_VALUES

from chaos.bodies import body
from chaos.client import Request


@dataclass(frozen=True)
class Sample:
    """Concurrent requests.

    Args:
        edits: edits of the engine's responses, for engines behind a `Front`.
        fresh: True to read the engine's facts again, so that the edits apply to them too.
    """

    requests: tuple[Request, ...]
    edits: tuple[dict[str, Any], ...] = field(default=())
    fresh: bool = False


def to_json(sample: Sample) -> dict[str, Any]:
    """Return a sample in the JSON form of its file."""
    made = asdict(sample)
    for request in made["requests"]:
        for name in ("body", "head"):
            request.update(_as_text(name, request.pop(name)))
    return made


def from_json(made: dict[str, Any]) -> Sample:
    """Return the sample of a file's JSON."""
    requests = []
    for request in made["requests"]:
        values = {name: value for name, value in request.items() if not name.endswith("_base64")}
        for name in ("body", "head"):
            if name + "_base64" in request:
                values[name] = base64.b64decode(request[name + "_base64"])
            elif isinstance(request.get(name), dict):
                values[name] = json.dumps(request[name]).encode()
            elif isinstance(request.get(name), str):
                values[name] = request[name].encode()
        requests.append(Request(**values))
    return Sample(tuple(requests), tuple(made.get("edits", ())), made.get("fresh", False))


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


# The edits of responses.
_fraction = st.floats(0, 0.999)
EVENTS = (
    ": a comment\n\n", "event: x\n\n", "data: [DONE]\n\n", "data:\n\n", "data: {}\n\n", "\n\n\n",
    "data: null\n\n", "data: [1]\n\n", 'data: {"error": {"message": "x", "code": 500}}\n\n',
    'data: {"error": 5}\n\n', 'error: {"message": "x"}\n\n', "id: 1\nretry: x\n\n", "data: {",
    'data: {"content": "a"\ndata: , "stop": false}\n\n', "data: " + "x" * 300_000 + "\n\n",
    "data: " + "[" * 5_000 + "\n\n", "\ufeff", "\r\r", "x" * 2_000_000, 'data: {"stop": true}\n\n',
)  # fmt: skip
BYTES = ("", "\x00", "\n", "\r\n\r\n", "0\r\n\r\n", "data: ", "}", "HTTP/1.1 200 OK\r\n\r\n", "é")
STATUS_LINES = (
    "HTTP/1.1 500 Internal Server Error", "HTTP/1.1 503 Loading", "HTTP/1.1 404 Not Found",
    "HTTP/1.1 400 Bad", "HTTP/1.1 401 No", "HTTP/1.1 204 No Content", "HTTP/1.1 304 Same",
    "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/", "HTTP/1.1 299 OK", "HTTP/1.1 999 X",
    "HTTP/1.1 101 Switching", "HTTP/1.1 100 Continue", "HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 000 Z", "HTTP/2 200", "HTTP/0.9 200 OK", "ICY 200 OK", "", "garbage",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "HTTP/1.1 200 OK\r\nContent-Length: 5",
    "HTTP/1.1 200 OK\r\nContent-Length: 999999", "HTTP/1.1 200 OK\r\nContent-Length: -1",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: x", "HTTP/1.1 200 OK\r\nContent-Type: text/html",
    "HTTP/1.1 200 OK\r\nContent-Encoding: gzip", "HTTP/1.1 200 OK\r\nX: " + "x" * 300_000,
    "HTTP/1.1 200 OK\r\n" + "\r\n".join(f"X{n}: y" for n in range(5_000)),
    "HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.1 200 OK\r\nno colon",
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\xff",
)  # fmt: skip

# A response behind another one, and sizes of chunks.
SECOND = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
SIZES = ("-1", "zz", "fffffffffffffffff", "", "5;x=y", " 5", "0")
_at = st.sampled_from((None, 0, 0, 0, 1, 2, 3))
_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(WRONG_VALUES),
    st.sampled_from(("\ud800", "\x00", "a" * 100_000, -(2**63), 1e308, "<|im_end|>", [[]] * 50,
                     "\x1dNaN\x1d", "\x1d1e999\x1d", "\x1d" + "9" * 5_000 + "\x1d", 0.0, 1023,
                     1024)),
)  # fmt: skip


def _edits(*kinds: str, **places: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"do": st.sampled_from(kinds), "at": _at, **places})


_edit: st.SearchStrategy[dict[str, Any]] = st.one_of(
    *[_edits("set", line=_fraction, place=_fraction, value=_values)] * 3,
    _edits("delete", line=_fraction, place=_fraction),
    _edits("again", line=_fraction, place=_fraction, value=_values),
    _edits("drop", "repeat", "swap", line=_fraction),
    _edits("event", line=_fraction, value=st.sampled_from(EVENTS)),
    _edits("cut", "flip", "hang", "pause", "reset", place=_fraction),
    _edits("bytes", place=_fraction, value=st.sampled_from(BYTES)),
    _edits("after", value=st.sampled_from((*BYTES, SECOND))),
    _edits("head", value=st.sampled_from(STATUS_LINES)),
    _edits("sizes", value=st.sampled_from((1, 2, 7))),
    _edits("chunk", value=st.sampled_from(SIZES)),
)


def random_edits(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random edits."""
    found: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(_edit)
    def take(one: dict[str, Any]) -> None:
        found.append(one)

    take()
    return found


@st.composite
def samples(draw: st.DrawFn, edited: bool) -> Sample:
    """Draw a case, with edits if the engine's responses can be edited."""
    requests = draw(st.lists(_request, min_size=1, max_size=draw(st.sampled_from((1, 1, 2, 5)))))
    edits = draw(st.lists(_edit, min_size=1, max_size=3)) if edited else []
    if edited:
        # A request that is rejected before it reaches the engine would not test the edits.
        path, sent = draw(_asking)
        requests = [Request(path, sent, leave=draw(_leaving)), *requests[1:]]
    return Sample(tuple(requests), tuple(edits), edited and draw(st.integers(0, 3)) == 0)


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


def smaller(sample: Sample) -> Iterator[Sample]:
    """Yield samples that are one step smaller, by a request, an edit or a part of a body."""
    for n in range(len(sample.requests) if len(sample.requests) > 1 else 0):
        yield replace(sample, requests=sample.requests[:n] + sample.requests[n + 1 :])
    for n in range(len(sample.edits)):
        yield replace(sample, edits=sample.edits[:n] + sample.edits[n + 1 :])
    if sample.fresh:
        yield replace(sample, fresh=False)
    for n, one in enumerate(sample.requests):
        for less in _smaller_requests(one):
            yield replace(sample, requests=(*sample.requests[:n], less, *sample.requests[n + 1 :]))


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
