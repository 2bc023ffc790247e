"""The server that is judged: requests to it, its replies, and what they have in common."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from .check import Fail, Skip, Unsupported, expect
from .published import chunk_problem, problem

# What no server of this kind can be without.
BASIC = {"/completions", "/chat/completions"}
ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its reply, as they were sent; keys are never in it."""

    method: str
    path: str
    request: bytes
    status: int
    headers: Sequence[tuple[str, str]]
    reply: bytes


class Reply:
    """What a server answered."""

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

    def json(self) -> Any:
        """The body as JSON without NaN and its kin; anything else breaks the promise."""

        def refuse(word: str) -> None:
            raise Fail(f"the body has {word}, which is no JSON")

        try:
            return json.loads(self.body, parse_constant=refuse)
        except ValueError:
            raise Fail(f"expected a JSON body, but got {self.body[:200]!r}") from None

    def error(self, *statuses: int) -> dict[str, Any]:
        """The error object under one of some statuses; keys that it lacks are null here."""
        expect(
            self.status in statuses,
            f"expected status {' or '.join(map(str, statuses))}, but got {self.status}: "
            f"{self.text[:200]}",
        )
        body = self.json()
        error = body.get("error") if isinstance(body, dict) else None
        expect(isinstance(error, dict), f"expected an 'error' object, but got {self.text[:200]}")
        assert isinstance(error, dict)
        expect(isinstance(error.get("message"), str), f"the error has no message: {error}")
        return {**dict.fromkeys(ERROR_KEYS), **error}

    def ok(self) -> Any:
        """The body of a request that was served; a clean refusal is `Unsupported`."""
        if self.status == 200:
            return self.json()
        refusal = self._refusal()
        if refusal is not None:
            raise Unsupported(refusal)
        raise Fail(f"expected status 200, but got {self.status}: {self.text[:300]}")

    def _refusal(self) -> str | None:
        """What the server says it lacks, if it says so by an error object that names it.

        An endpoint that is not there needs no object: what unknown paths are answered is judged
        by a check of its own.
        """
        absent = self.status in (404, 405, 501)
        if not absent and self.status not in (400, 422):
            return None
        try:
            error = json.loads(self.body)["error"]
            message, code, param = str(error["message"]), error.get("code"), error.get("param")
        except (ValueError, KeyError, TypeError):
            where = f"there is no such endpoint: {self.status} for {self._path}"
            return where if absent and self._path not in BASIC else None
        unsupported = isinstance(code, str) and code.startswith("unsupported")
        named = isinstance(param, str) and re.split(r"[.\[]", param)[0] in self._sent
        words = set(re.findall(r"\w+", message))
        told = "support" in message and not words.isdisjoint(self._sent)
        lacking = unsupported or named or told or (absent and code != "model_not_found")
        return message if lacking else None


class Api:
    """One check's way to the server; keeps what went over it.

    Args:
        client: shared by all checks; its base URL ends in `/v1/`.
        model: what requests name.
        hint: `demo` where the demo model answers, so that what it says can be counted on.
        wrong: what of any body of the run is not of OpenAI's published types, by endpoint.
        breaks: a command that ends the engine behind the server, and has it started again.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        model: str,
        hint: str | None = None,
        wrong: dict[str, str] | None = None,
        breaks: str | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self.hint = hint
        self.wrong = {} if wrong is None else wrong
        self.breaks = breaks
        self.exchanges: list[Exchange] = []

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port and path prefix, for raw connections."""
        parts = urlsplit(str(self.client.base_url))
        return parts.hostname or "", parts.port or 80, parts.path.rstrip("/")

    def demo(self) -> None:
        """Go on only where the demo model answers."""
        if self.hint != "demo":
            raise Skip("needs a model that answers surely: --model-hint demo")

    def sure(self, prompt: str, question: str = "Count to 12.") -> str:
        """A prompt whose greedy answer does not turn with what else the engine computes.

        The demo model's answers to questions do not; of another nothing is known.
        """
        turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return turn if self.hint == "demo" else prompt

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        sent: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Send bytes as they are."""
        given = {"content-type": "application/json", **(headers or {})} if body is not None else {}
        all_headers = {**given, **(headers or {})}
        where = path.lstrip("/")
        try:
            reply = await self.client.request(method, where, content=body, headers=all_headers)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            # A connection that was kept may be closed just now; clients send once more, too.
            reply = await self.client.request(method, where, content=body, headers=all_headers)
        data = reply.content
        self.exchanges.append(
            Exchange(
                method, path, body or b"", reply.status_code, reply.headers.multi_items(), data
            )
        )
        return Reply(reply.status_code, reply.headers, data, path, sent or {})

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send JSON; whether what comes back is of OpenAI's published types is noted."""
        reply = await self.send("POST", path, json.dumps(body).encode(), sent=body)
        if reply.status == 200 and not body.get("stream"):
            # Those who look into a body that is no JSON say so.
            with contextlib.suppress(ValueError):
                self._note(path, problem(path, json.loads(reply.body), body))
        return reply

    def _note(self, path: str, wrong: str | None) -> None:
        if wrong is not None:
            self.wrong.setdefault(path, wrong)

    async def get(self, path: str) -> Reply:
        """Ask for something."""
        return await self.send("GET", path)

    async def complete(self, prompt: Any = "Hello", **body: Any) -> Any:
        """The body of a completion that must be served."""
        full = {"model": self.model, "prompt": prompt, **body}
        return (await self.post("/completions", full)).ok()

    async def chat(self, messages: Any = "Hello", **body: Any) -> Any:
        """The body of a chat completion that must be served."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        full = {"model": self.model, "messages": messages, **body}
        return (await self.post("/chat/completions", full)).ok()

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The chunks of a stream that must be served, and be whole."""
        full = {"model": self.model, "stream": True, **body}
        reply = await self.send("POST", path, json.dumps(full).encode(), sent=full)
        if reply.status != 200:
            reply.ok()
        chunks = events(reply)
        for chunk in chunks:
            self._note(f"stream of {path}", chunk_problem(path, chunk))
        return chunks

    async def complete_stream(self, prompt: Any = "Hello", **body: Any) -> list[Any]:
        """The chunks of a streamed completion."""
        return await self.stream("/completions", {"prompt": prompt, **body})

    async def chat_stream(self, messages: Any = "Hello", **body: Any) -> list[Any]:
        """The chunks of a streamed chat completion."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.stream("/chat/completions", {"messages": messages, **body})


def events(reply: Reply) -> list[Any]:
    """The JSON of a stream's events; the stream must end in `[DONE]`."""
    kind = reply.headers.get("content-type", "")
    expect(kind.startswith("text/event-stream"), f"expected an event stream, but got {kind!r}")
    datas = [
        line.removeprefix("data:").strip()
        for line in reply.text.replace("\r\n", "\n").split("\n")
        if line.startswith("data:")
    ]
    expect(datas[-1:] == ["[DONE]"], f"the stream ends in {datas[-1:]} instead of [DONE]")
    chunks = []
    for data in datas[:-1]:
        try:
            chunks.append(json.loads(data))
        except ValueError:
            raise Fail(f"an event is no JSON: {data[:200]}") from None
    return chunks


def only(items: Sequence[Any], what: str) -> Any:
    """The one item of a list that must have one."""
    expect(len(items) == 1, f"expected one of {what}, but got {len(items)}")
    return items[0]
