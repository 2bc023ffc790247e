"""The server under test: requests to it, its replies, and tests that many checks share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from .check import Diverges, Fail, Skip, Unsupported, expect
from .published import chunk_problem, problem

# The endpoints that every server must have, and the one of them that newer servers lack.
BASIC = {"/completions", "/chat/completions"}
LEGACY = "/completions"
# Servers do the requests to these endpoints one after the other. The suite sends one at a time, so
# that a wait for a turn does not count as a slow reply.
IN_TURN = {"/audio/transcriptions", "/audio/translations"}
# The seconds for which a stream may send nothing, by default: proxies often end it after 30.
SILENCE = 20.0
# How often a request is sent again after status 429, and the longest wait, as in OpenAI's client.
AGAIN, LONGEST = 5, 60.0
# The statuses of an endpoint that a server does not have.
ABSENT = (404, 405, 501)
JSON = {"content-type": "application/json"}
# The least Unix time that cannot be in seconds.
MILLISECONDS = 10_000_000_000
ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its reply, as sent. API keys are not recorded."""

    method: str
    path: str
    request: bytes
    status: int
    headers: Sequence[tuple[str, str]]
    reply: bytes


class Reply:
    """A reply of the server."""

    def __init__(
        self, status: int, headers: httpx2.Headers, body: bytes, path: str, sent: Mapping[str, Any]
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self._path = path
        self._sent = sent

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")

    @property
    def kind(self) -> str:
        """The media type, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def words(self, name: str) -> list[str]:
        """Return the words of a header that is a list."""
        return [word.strip() for word in self.headers.get(name, "").split(",")]

    def json(self) -> Any:
        """Return the body as JSON; raise `Fail` if it is invalid or contains NaN or infinity."""

        def reject(word: str) -> None:
            raise Fail(f"expected valid JSON, but the body has {word}")

        try:
            return json.loads(self.body, parse_constant=reject)
        except ValueError:
            raise Fail(f"expected a JSON body, but got {self.body[:200]!r}") from None

    def error(self, *statuses: int) -> dict[str, Any]:
        """Return the error object of a reply with one of the statuses; missing keys are None.

        Raise `Unsupported` if the endpoint does not exist.
        """
        missing = self._missing()
        if missing and self.status not in statuses:
            raise Unsupported(missing)
        expect(
            self.status in statuses,
            f"expected status {' or '.join(map(str, statuses))}, but got {self.status}: "
            f"{self.text[:200]}",
        )
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        expect(isinstance(error, dict), f"expected an 'error' object, but got {self.text[:200]}")
        assert isinstance(error, dict)
        expect(
            isinstance(error.get("message"), str), f"expected a string in message, but got {error}"
        )
        return {**dict.fromkeys(ERROR_KEYS), **error}

    def ok(self) -> Any:
        """Return the body of a successful reply; raise `Unsupported` for a clean rejection."""
        if self.status == 200:
            return self.json()
        rejection = self._rejection()
        if rejection is not None:
            raise Unsupported(rejection)
        raise Fail(f"expected status 200, but got {self.status}: {self.text[:300]}")

    def _rejection(self) -> str | None:
        """Return what an error object says is missing, a feature or the endpoint, or None.

        A missing endpoint needs no error object: a separate check covers unknown paths.
        """
        absent = self.status in ABSENT
        if not absent and self.status not in (400, 422):
            return None
        try:
            error = json.loads(self.body)["error"]
            message, code, param = str(error["message"]), error.get("code"), error.get("param")
        except (ValueError, KeyError, TypeError):
            return self._missing()
        unsupported = isinstance(code, str) and code.startswith("unsupported")
        named = isinstance(param, str) and re.split(r"[.\[]", param)[0] in self._sent
        words = set(re.findall(r"\w+", message))
        says_so = "support" in message or "must be one of" in message
        described = says_so and not words.isdisjoint(self._sent)
        if named or described:
            return message
        if absent and code != "model_not_found":
            return f"{self._absence}, {message!r}"
        return message if unsupported else None

    def _missing(self) -> str | None:
        """Return that an endpoint that a server may lack does not exist, or None.

        Such a reply has no error object.
        """
        if self.status not in ABSENT or self._path in BASIC:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            json.loads(self.body)["error"]["message"]
            return None
        return self._absence

    @property
    def _absence(self) -> str:
        return f"the endpoint {self._path} does not exist: status {self.status}"


class Api:
    """The access of one check to the server, with a record of its requests and replies.

    Args:
        client: shared by all checks; its base URL ends in `/v1/`.
        model: the model that requests name.
        hint: `demo` if the demo model answers, whose answers are known.
        wrong: the first violation of OpenAI's published types in the run, by endpoint.
        breaks: a command that stops and restarts the engine behind the server.
        silence: the seconds for which a stream may send nothing.
        hosted: True if the server must have the limits of OpenAI's service.
        turn: held by the request of a run that is at an endpoint `IN_TURN`.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        model: str,
        hint: str | None = None,
        wrong: dict[str, str] | None = None,
        breaks: str | None = None,
        silence: float = SILENCE,
        hosted: bool = False,
        turn: asyncio.Semaphore | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self.hint = hint
        self.wrong = {} if wrong is None else wrong
        self.breaks = breaks
        self.silence = silence
        self.hosted = hosted
        self.exchanges: list[Exchange] = []
        # The time limit of the check, without its waits for a rate limit and for its turn.
        self.clock: asyncio.Timeout | None = None
        self._turn = turn or asyncio.Semaphore()

    @property
    def address(self) -> tuple[str, int, str]:
        """The host, port and path prefix, for raw connections."""
        parts = urlsplit(str(self.client.base_url))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return parts.hostname or "", port, parts.path.rstrip("/")

    def demo(self) -> None:
        """Skip the check unless the demo model answers."""
        if self.hint != "demo":
            raise Skip("this check needs the demo model: --model-hint demo")

    def needs_break(self) -> None:
        """Skip the check unless a command stops the engine."""
        if self.breaks is None:
            raise Skip("this check needs a command that stops the engine: --break COMMAND")

    def stable(self, prompt: str, question: str = "Count to 12.") -> str:
        """Return a prompt whose greedy completion does not depend on concurrent requests.

        This is known only of the demo model's answers to questions. Other models get `prompt`.
        """
        formatted = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return formatted if self.hint == "demo" else prompt

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        sent: Mapping[str, Any] | None = None,
        waits: bool = True,
    ) -> Reply:
        """Send bytes unchanged; raise `Unsupported` if the server has no legacy completions.

        Args:
            waits: send again after a rejection that names a `retry-after`.
        """
        all_headers = {**(JSON if body is not None else {}), **(headers or {})}
        for number in range(AGAIN + 1):
            if path in IN_TURN:
                async with self._in_turn():
                    reply = await self._sent(method, path, body, all_headers)
            else:
                reply = await self._sent(method, path, body, all_headers)
            pause = _pause(reply.headers) if reply.status_code == 429 and waits else None
            if pause is None or number == AGAIN:
                break
            if self.clock is not None and (end := self.clock.when()) is not None:
                self.clock.reschedule(end + pause)
            await asyncio.sleep(pause)
        if path == LEGACY and reply.status_code in ABSENT and await self._lacks_legacy():
            raise Unsupported(f"the endpoint {path} does not exist: status {reply.status_code}")
        return Reply(reply.status_code, reply.headers, reply.content, path, sent or {})

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a request; the time limit of the check has a pause meanwhile."""
        end = None if self.clock is None else self.clock.when()
        if self.clock is None or end is None:
            async with self._turn:
                yield
            return
        loop = asyncio.get_running_loop()
        left = end - loop.time()
        self.clock.reschedule(None)
        async with self._turn:
            self.clock.reschedule(loop.time() + left)
            yield

    async def _lacks_legacy(self) -> bool:
        """Return True if a request that is right is rejected as one for an unknown path, too."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1}
        reply = await self.client.request(
            "POST", LEGACY.lstrip("/"), content=json.dumps(body).encode(), headers=JSON
        )
        return reply.status_code in ABSENT and b"model_not_found" not in reply.content

    async def _sent(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """Send a request, and record it with its reply."""
        where = path.lstrip("/")
        try:
            reply = await self.client.request(method, where, content=body, headers=headers)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            # The server may just have closed a kept-alive connection. Clients retry once, too.
            reply = await self.client.request(method, where, content=body, headers=headers)
        self.exchanges.append(
            Exchange(
                method, path, body or b"", reply.status_code, reply.headers.multi_items(),
                reply.content,
            )
        )  # fmt: skip
        return reply

    async def post(self, path: str, body: Mapping[str, Any], waits: bool = True) -> Reply:
        """Send JSON, and record a reply that violates OpenAI's published types."""
        reply = await self.send("POST", path, json.dumps(body).encode(), sent=body, waits=waits)
        if reply.status == 200 and not body.get("stream"):
            # A check that reads a body reports invalid JSON itself.
            with contextlib.suppress(ValueError):
                self.note(path, problem(path, json.loads(reply.body), body))
        return reply

    def note(self, path: str, wrong: str | None) -> None:
        """Record the first violation of a published type at an endpoint."""
        if wrong is not None:
            self.wrong.setdefault(path, wrong)

    async def get(self, path: str) -> Reply:
        """Send a GET request."""
        return await self.send("GET", path)

    async def complete(self, prompt: Any = "Hello", **body: Any) -> Any:
        """Return the body of a completion that the server must support."""
        full = {"model": self.model, "prompt": prompt, **body}
        return (await self.post("/completions", full)).ok()

    async def chat(self, messages: Any = "Hello", **body: Any) -> Any:
        """Return the body of a chat completion that the server must support."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        full = {"model": self.model, "messages": messages, **body}
        return (await self.post("/chat/completions", full)).ok()

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Return the chunks of a stream that the server must support and complete."""
        full = {"model": self.model, "stream": True, **body}
        reply = await self.send("POST", path, json.dumps(full).encode(), sent=full)
        if reply.status != 200:
            reply.ok()
        chunks = events(reply)
        for chunk in chunks:
            self.note(f"stream of {path}", chunk_problem(path, chunk))
        return chunks

    async def complete_stream(self, prompt: Any = "Hello", **body: Any) -> list[Any]:
        """Return the chunks of a streamed completion."""
        return await self.stream("/completions", {"prompt": prompt, **body})

    async def chat_stream(self, messages: Any = "Hello", **body: Any) -> list[Any]:
        """Return the chunks of a streamed chat completion."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream("/chat/completions", {"messages": messages, **body})


def _pause(headers: httpx2.Headers) -> float | None:
    """Return the seconds after which a rejected request may come again, or None if too many."""
    try:
        after = headers.get("retry-after-ms")
        seconds = float(after) / 1000 if after else float(headers.get("retry-after", "nan"))
    except ValueError:
        return None
    return seconds if 0 < seconds <= LONGEST else None


def datas_in(text: str) -> list[str]:
    """Return the data of each event in the text of a stream."""
    return [
        line.removeprefix("data:").strip()
        for line in text.replace("\r\n", "\n").split("\n")
        if line.startswith("data:")
    ]


def events(reply: Reply, needs_done: bool = True) -> list[Any]:
    """Return the JSON of a stream's events; raise `Fail` unless the stream ends in `[DONE]`.

    Args:
        needs_done: False for a stream that may also end without it.
    """
    kind = reply.kind
    expect(kind == "text/event-stream", f"expected an event stream, but got {kind!r}")
    datas = datas_in(reply.text)
    done = datas[-1:] == ["[DONE]"]
    expect(done or not needs_done, f"expected [DONE] as the last event, but got {datas[-1:]}")
    chunks = []
    for data in datas[:-1] if done else datas:
        try:
            chunks.append(json.loads(data))
        except ValueError:
            raise Fail(f"expected JSON in an event, but got {data[:200]}") from None
    return chunks


def only(items: Sequence[Any], what: str) -> Any:
    """Return the only item of a list; raise `Fail` if it has more items or none."""
    expect(len(items) == 1, f"expected one {what}, but got {len(items)}")
    return items[0]


def expect_usage(counts: Any) -> None:
    """Raise `Fail` unless a usage has integers that add up to its total."""
    expect(isinstance(counts, dict), f"expected usage, but got {counts!r}")
    values = [counts.get(f"{kind}_tokens") for kind in ("prompt", "completion", "total")]
    expect(all(type(value) is int for value in values), f"expected integers, but got {counts}")
    valid = values[0] + values[1] == values[2]
    expect(valid, f"expected a total_tokens that adds up, but got {counts}")


def expect_model(api: Api, name: Any) -> None:
    """Raise `Fail` unless a reply names the model: as the request does, or a version of it."""
    wanted = api.model.partition(":")[0]
    named = isinstance(name, str) and name.startswith(wanted)
    expect(named, f"expected the model {api.model!r}, but got {name!r}")


def expect_seconds(value: Any) -> None:
    """Raise `Fail` unless a value is a Unix time in whole seconds."""
    valid = type(value) is int and 1_500_000_000 < value < MILLISECONDS
    expect(valid, f"expected integer seconds since 1970, but got {value!r}")


def expect_finite(values: Sequence[Any]) -> None:
    """Raise `Fail` unless all log-probabilities are finite and not greater than 0."""
    wrong = [one for one in values if not isinstance(one, int | float) or not -1e4 < one <= 1e-6]
    expect(not wrong, f"expected log-probabilities above -10000 and at most 0, but got {wrong}")


def expect_too_long(reply: Reply, *words: str) -> None:
    """Raise `Fail` unless a reply rejects what exceeds the context, with words in its message."""
    if reply.status == 413:
        raise Diverges("the server rejects the body before it counts the tokens")
    error = reply.error(400)
    code, text = error["code"], error["message"]
    expect(code == "context_length_exceeded", f"expected context_length_exceeded, but got {error}")
    for one in words:
        expect(one in text, f"expected {one!r} in the message, but got {text!r}")
