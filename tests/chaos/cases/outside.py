"""Cases of other origins, host names, API keys, and numbers beyond a machine's range."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

from chaos.acts import raw
from chaos.case import ALL, ANSWERED, CHAT, FAKE_SERVER, FAKES, INSIDE, RIGHT, Case, judged
from chaos.client import Client, Reply, ask, get, post
from chaos.process import Latimer
from chaos.stage import Stage

ORIGIN, NUMBERS = "origin", "numbers"
FORBIDDEN = frozenset({403})

ALLOWED = (
    "app://obsidian.md", "capacitor://localhost", "tauri://localhost", "vscode-webview://abc",
    "chrome-extension://abcdef", "moz-extension://abc-def", "http://localhost:3000",
    "https://localhost", "http://a.localhost:8080", "http://127.0.0.1:5173", "http://127.8.8.8",
    "http://[::1]:3000", "http://localhost",
)  # fmt: skip
NOT_ALLOWED = (
    "https://evil.example", "http://evil.example:8000", "null", "http://localhost.evil.example",
    "http://127.0.0.1.evil.example", "http://evil.example#localhost", "http://192.168.1.5",
    "http://10.0.0.1:3000", "https://user@evil.example", "http://localhost@evil.example",
    "http://evil.example/localhost", "http://notlocalhost", "http://[2001:db8::1]",
    "HTTPS://EVIL.EXAMPLE", "http://", "https://evil.example, http://localhost",
)  # fmt: skip
HOSTS = (
    "localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "mybox", "mybox:80",
    "host.docker.internal", "host.containers.internal:8000", f"{socket.gethostname()}.local",
)  # fmt: skip
NO_HOSTS = (
    "evil.example", "evil.example:8000", "a.localhost.evil.example", "127.0.0.1.evil.example",
    "localhost@evil.example", "evil.example#localhost",
)  # fmt: skip


def _case(name: str, **fields: Any) -> Case:
    return Case(name=name, kind=ORIGIN, **{"engines": (FAKE_SERVER,), **fields})


def _origins() -> Iterator[Case]:
    for origin in ALLOWED:
        headers, short = {"Origin": origin}, origin.startswith("app")
        yield _case(f"allowed {origin}", headers=headers, check=_allows, short=short)
        short = origin.endswith("3000")
        yield _preflight(f"allowed preflight {origin}", origin, RIGHT, short=short)
    for origin in NOT_ALLOWED:
        yield _case(
            f"refused {origin}", headers={"Origin": origin}, expect=FORBIDDEN,
            says="origin_not_allowed", short=origin == "null",
        )  # fmt: skip
        yield _preflight(f"refused preflight {origin}", origin, FORBIDDEN | {400})
    plain = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    yield _case(
        "refused as a plain request", engines=(FAKE_SERVER, INSIDE), headers=plain,
        expect=FORBIDDEN, says="--cors-origin", short=True,
    )  # fmt: skip
    yield _case("refused before the body is read", act=_no_body)
    for host in HOSTS:
        yield _case(f"host {host}", headers={"Host": host})
    for host in NO_HOSTS:
        yield _case(
            f"refused host {host}", headers={"Host": host}, expect=FORBIDDEN | {400, 421},
            short=host == "evil.example",
        )  # fmt: skip
    yield _case("keys", act=_keys, alone=True, short=True)


def _allows(reply: Reply) -> list[str]:
    allowed = reply.headers.get("access-control-allow-origin")
    return [] if allowed else ["an allowed origin is not told so"]


def _preflight(name: str, origin: str, expect: frozenset[int], short: bool = False) -> Case:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }

    async def act(stage: Stage, case: Case) -> list[str]:
        reply = await ask(stage.latimer.port, get(case.path, "OPTIONS", headers))
        if expect != RIGHT:
            return judged(reply, case)
        found = [] if reply.status in (200, 204) else [f"a preflight is refused: {reply}"]
        if reply.headers.get("access-control-allow-private-network") != "true":
            found.append(f"a preflight does not allow the private network: {reply.headers}")
        return found

    return _case(name, act=act, expect=expect, short=short)


async def _no_body(stage: Stage, case: Case) -> list[str]:
    """Send only the head of a large request from another site."""
    headers = {"Origin": "https://evil.example", "Content-Length": "1000000"}
    request = get(case.path, "POST", headers)
    client = await Client.to(stage.latimer.port, request)
    client.send(request.data)
    try:
        async with asyncio.timeout(3):
            line = await client.reader.readuntil(b"\r\n")
        return [] if b" 403 " in line else [f"answered {line!r}"]
    except TimeoutError:
        return ["it waits for the body"]
    finally:
        client.leave()


async def _keys(stage: Stage, case: Case) -> list[str]:
    """Check that a key of any UTF-8 grants access, for every origin and host, and that no other
    does."""
    key = "schlüssel-漢-" + "k" * 20
    latimer = Latimer([stage.url, "--any-model"], LATIMER_API_KEY=key)
    await latimer.start()
    found = []
    try:
        for name, sent, status, more in (
            ("the key", key, 200, {}),
            ("no key", None, 401, {}),
            ("another", key + "x", 401, {}),
            ("an empty one", "", 401, {}),
            ("another site with the key", key, 200, {"Origin": "https://evil.example"}),
            ("another host with the key", key, 200, {"Host": "evil.example"}),
            ("a long one", "k" * 60_000, 401, {}),
            ("bytes", "\x80\xff", 401, {}),
        ):
            headers = dict(more)
            if sent is not None:
                # Header values are sent as Latin-1; a client sends the bytes of UTF-8.
                headers["Authorization"] = f"Bearer {sent}"
            body = {"model": "m", "prompt": "echo:a", "max_tokens": 4}
            head = post("/v1/completions", body, headers=headers)
            reply = await ask(latimer.port, head)
            if reply.status not in ((status, 431, 400) if name == "a long one" else (status,)):
                found.append(f"{name}: expected {status}, got {reply}")
            if key.encode() in reply.body:
                found.append(f"{name}: the reply has the key: {reply}")
        if key.encode() in latimer.output() or b"schl" in latimer.output():
            found.append("the key is in the log")
        found += latimer.fresh_problems()
    finally:
        await latimer.stop()
    return found


LARGE = 10**30
FIELDS: dict[str, Any] = {
    "prompt of ids beyond 64 bits": {"prompt": [2**64]},
    "prompt of ids beyond 32 bits": {"prompt": [2**31]},
    "prompt of negative ids": {"prompt": [-1]},
    "prompt of ids beyond the vocabulary": {"prompt": [10**6]},
    "prompt of large ids": {"prompt": [LARGE]},
    "prompts of large ids": {"prompt": [[1], [2**63]]},
    "max_tokens large": {"max_tokens": LARGE},
    "max_tokens beyond 64 bits": {"max_tokens": 2**64},
    "n large": {"n": LARGE},
    "seed beyond 64 bits": {"seed": 2**64},
    "seed large": {"seed": -LARGE},
    "logprobs large": {"logprobs": LARGE},
    "best_of large": {"best_of": LARGE},
    "temperature large": {"temperature": LARGE},
    "top_k large": {"top_k": 2**64},
    "repeat_last_n large": {"repeat_last_n": 2**31},
    "mirostat large": {"mirostat": LARGE},
    "logit_bias of 5,000 digits": {"logit_bias": {"9" * 5000: 1}},
    "logit_bias beyond 64 bits": {"logit_bias": {str(2**64): 1}},
    "logit_bias of other digits": {"logit_bias": {"٣": 1}},
    "logit_bias beyond the vocabulary": {"logit_bias": {"9999999999": 1}},
    "$schema a number": {"json_schema": {"$schema": 5}},
    "$ref a number": {"json_schema": {"$ref": 5}},
    "$id a list": {"json_schema": {"$id": [], "type": "object"}},
    "type a number": {"json_schema": {"type": 5}},
    "minLength large": {"json_schema": {"type": "string", "minLength": LARGE}},
    "minLength negative": {"json_schema": {"type": "string", "minLength": -1}},
    "maxItems a float": {"json_schema": {"type": "array", "maxItems": 1.5}},
    "multipleOf zero": {"json_schema": {"type": "integer", "multipleOf": 0}},
    "multipleOf tiny": {"json_schema": {"type": "number", "multipleOf": 1e-300}},
    "minimum large": {"json_schema": {"type": "integer", "minimum": LARGE * LARGE}},
    "required a string": {"json_schema": {"type": "object", "required": "a"}},
    "enum empty": {"json_schema": {"enum": []}},
    "properties a list": {"json_schema": {"type": "object", "properties": []}},
    "items a number": {"json_schema": {"type": "array", "items": 5}},
    "pattern a number": {"json_schema": {"type": "string", "pattern": 5}},
    "pattern broken": {"json_schema": {"type": "string", "pattern": "("}},
    "property name of 1,500": {"json_schema": {"type": "object", "properties": {"p" * 1500: {}}}},
    "property name of 1,500, required": {
        "json_schema": {
            "type": "object",
            "properties": {"p" * 1500: {"type": "integer"}},
            "required": ["p" * 1500],
        }
    },
    "deep regex": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "deep pattern": {"json_schema": {"type": "string", "pattern": "(" * 3000 + "a" + ")" * 3000}},
    "regex quantifier of 5,000 digits": {"regex": "a{" + "9" * 5000 + "}"},
    "regex escape": {"regex": r"\x{110000000000}"},
    "grammar repetition of 5,000 digits": {"grammar": 'root ::= "a"{' + "9" * 5000 + "}"},
    "grammar token of 5,000 digits": {"grammar": "root ::= <[" + "9" * 5000 + "]>"},
    "stop of a surrogate": {"stop": ["\ud800"]},
    "prompt of a surrogate": {"prompt": "\ud800"},
    "prompt of zeros": {"prompt": "\x00" * 10},
    "suffix": {"suffix": "\x00"},
    "stream_options a list": {"stream": True, "stream_options": [1]},
}
BODIES = {
    "max_tokens 1e999": b'{"model":"m","prompt":"a","max_tokens":1e999}',
    "temperature 1e999": b'{"model":"m","prompt":"a","temperature":1e999}',
    "NaN": b'{"model":"m","prompt":"a","temperature":NaN}',
    "a number of 100,000 digits": b'{"model":"m","prompt":"a","seed":' + b"9" * 100_000 + b"}",
    "an exponent of 5,000 digits": b'{"model":"m","prompt":"a","top_p":1e' + b"9" * 5000 + b"}",
    "a fraction of 100,000 digits": b'{"model":"m","prompt":"a","top_p":0.' + b"1" * 100_000 + b"}",
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"a"',
    "a number": b"5",
    "BOM": b'\xef\xbb\xbf{"model":"m","prompt":"a"}',
    "UTF-16": '{"model":"m","prompt":"a"}'.encode("utf-16"),
    "broken UTF-8": b'{"model":"m","prompt":"\xff\xfe"}',
    "a broken surrogate": b'{"model":"m","prompt":"\\ud800"}',
    "half": b'{"model":"m","prom',
    "nothing but brackets": b"[" * 200_000,
    "objects without end": b'{"a":' * 200_000,
    "nul": b'{"model":"m","prompt":"a"}\x00',
    "model a number": b'{"model":5,"prompt":"a"}',
    "keys twice": b'{"model":"m","prompt":"a","max_tokens":1,"max_tokens":2}',
}
REQUESTS = {
    "no HTTP": b"hello\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nabcdef",
    "bad chunks": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"zz\r\n",
    "a head of 1 MB": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 2**20 + b"\r\n\r\n",
    "a path of 60 KB": b"GET /v1/"
    + b"a" * 60_000
    + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "a path of bytes": b"GET /v1/models/%ff%00%0a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n",
}


def _numbers() -> Iterator[Case]:
    for name, body in FIELDS.items():
        yield Case(
            name=name, kind=NUMBERS, body={"prompt": "a", "max_tokens": 4, **body},
            engines=ALL if "ids" in name or "logit" in name else (*FAKES, INSIDE),
            expect=ANSWERED, seconds=15,
            short=("5,000 digits" in name and "logit" in name) or "beyond 64 bits" in name,
        )  # fmt: skip
    for name, data in BODIES.items():
        right = RIGHT if name in ("keys twice", "a fraction of 100,000 digits") else frozenset()
        yield Case(
            name=f"body {name}", kind=NUMBERS, body=data, engines=(FAKE_SERVER, INSIDE),
            expect=right | {400}, short=name == "broken UTF-8",
        )  # fmt: skip
        yield Case(
            name=f"chat body {name}", kind=NUMBERS, body=data.replace(b'"prompt"', b'"messages"'),
            engines=(FAKE_SERVER,), path=CHAT, expect=frozenset({400}),
        )  # fmt: skip
    for name, data in REQUESTS.items():
        engines = (FAKE_SERVER,)
        yield Case(name=f"request {name}", kind=NUMBERS, body=data, engines=engines, act=_survives)


async def _survives(stage: Stage, case: Case) -> list[str]:
    """Send bytes that are barely a request, and check that the reply is not a 500."""
    found = await raw(stage, case)
    return [one for one in found if " 500 " in one or "unhandled" in one]


CASES = [*_origins(), *_numbers()]
