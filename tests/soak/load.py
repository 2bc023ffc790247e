"""Requests of every kind, each with its own marker, from clients of every kind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from fuzz.cases import HEADS, LINES, Request
from fuzz.client import Answer, ask
from fuzz.judge import problem
from soak.engines import Trouble
from support.texts import CAPITALS

# Time limit of a response in seconds: a stopped engine, its silence, and the work.
LONGEST = 60.0
# Maximum of concurrent requests; further ones are skipped.
MOST = 48
FAILURES = 20


def request(number: int, rng: random.Random) -> tuple[Request, str | None]:
    """Return a request, and the text that its response must contain, if known.

    One client in five disconnects, reads or sends slowly, or sends garbage.
    """
    body, path, right = _body(number, rng)
    made = Request(path, json.dumps(body).encode())
    chance = rng.random()
    if chance > 0.2:
        return made, right
    if chance < 0.08:
        return replace(made, leave=rng.choice((0.0, 0.01, rng.uniform(0, 0.5)))), None
    if chance < 0.12:
        return replace(made, slow=True), right
    if chance < 0.15:
        return replace(made, pieces=rng.randrange(2, 9)), right
    if chance < 0.17:
        return replace(made, head=made.data[: -len(made.body)], body=made.body + made.data), None
    lines = [rng.choice(LINES), *rng.sample(HEADS, rng.randrange(5)), "", ""]
    head = "\r\n".join(lines).replace("{path}", path).replace("{size}", str(len(made.body)))
    return replace(made, head=head.encode(), leave=1.0), None


def _body(number: int, rng: random.Random) -> tuple[dict[str, Any], str, str | None]:
    """Return a body, its path, and the text of the response, if known."""
    marker = f"marker-{number}"
    body: dict[str, Any] = {"model": marker, "stream": rng.random() < 0.5, "max_tokens": 24}
    country = rng.choice(list(CAPITALS))
    messages = [{"role": "user", "content": f"What is the capital of {country}? ({marker})"}]
    chat = {**body, "messages": messages}
    prompt = {**body, "prompt": f"One day, a cat {marker}", "max_tokens": rng.randrange(1, 40)}
    forms: list[tuple[dict[str, Any], str, str | None]] = [
        (prompt, "completions", None),
        ({**prompt, "n": 3, "seed": number, "logprobs": 2}, "completions", None),
        ({**prompt, "echo": True, "logprobs": 1, "stop": [" the", "\n"]}, "completions", None),
        ({**prompt, "prompt": [marker, "a b c", "1, 2"]}, "completions", None),
        ({**body, "prompt": "a", "regex": marker}, "completions", marker),
        ({**body, "prompt": "a", "grammar": f'root ::= "{marker}"'}, "completions", marker),
        (chat, "chat/completions", None),
        ({**chat, "logprobs": True, "top_logprobs": 2, "n": 2}, "chat/completions", None),
        ({**chat, "max_tokens": 60, "response_format": _schema(marker)}, "chat/completions",
        marker),
        ({**chat, "max_tokens": 60, "tools": _tools(), "tool_choice": "required"},
         "chat/completions", None),
    ]  # fmt: skip
    made, path, right = rng.choice(forms)
    return made, f"/v1/{path}", right


def _schema(marker: str) -> dict[str, Any]:
    own = {"type": "object", "properties": {"is": {"const": marker}}, "required": ["is"],
           "additionalProperties": False}  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": own, "strict": True}}


def _tools() -> list[dict[str, Any]]:
    own = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
           "additionalProperties": False}  # fmt: skip
    return [{"type": "function", "function": {"name": "f", "parameters": own, "strict": True}}]


class Load:
    """Requests to a server, and the failures of its responses."""

    def __init__(self, port: int, trouble: Trouble, rng: random.Random) -> None:
        self._port, self._trouble, self._rng = port, trouble, rng
        self._number = 0
        self._running: set[asyncio.Task[None]] = set()
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self.left_out = 0
        self.slowest = 0.0

    async def one(self) -> None:
        """Send a request, and check its response."""
        self._number += 1
        sent, right = request(self._number, self._rng)
        marker, start = f"marker-{self._number}", time.monotonic()
        try:
            answer = await ask(self._port, sent, LONGEST)
        except OSError as error:
            self._fail(f"no connection: {error!r}")
            return
        excused = self._trouble.excuses(start, time.monotonic())
        if answer.ended == "whole":
            self.slowest = max(self.slowest, answer.seconds)
        self.statuses[str(answer.status or answer.ended)] += 1
        wrong = problem(sent, answer, excused) or self._crossed(sent, answer, marker)
        if wrong is None and right is not None and not excused and not _is_error(answer):
            wrong = None if right.encode() in _text(answer) else f"its marker {right} is missing"
        if wrong is not None:
            self._fail(f"{wrong}: {sent.body[:300]!r}: {answer.body[-300:]!r}")

    def _crossed(self, sent: Request, answer: Answer, marker: str) -> str | None:
        """Return a failure if the response's model is not the marker of its own request."""
        if sent.head is not None or answer.status != 200 or answer.ended != "whole":
            return None
        if f'"model":"{marker}"'.encode() in answer.body or _is_error(answer):
            return None
        return "the answer of another request"

    def _fail(self, what: str) -> None:
        if len(self.failures) < FAILURES:
            print(f"  {what}", flush=True)
        self.failures.append(what)

    async def closed(self, seconds: float, width: int = 8) -> float:
        """Return the requests per second of clients that each wait for their response.

        The clients have the same faults as in `open`, so that the capacity includes their cost.
        Responses with 503 do not count, because an absent engine allows any number of them.
        """
        end, before = time.monotonic() + seconds, self._number - self.statuses["503"]

        async def client() -> None:
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(client() for _ in range(width)))
        return (self._number - self.statuses["503"] - before) / seconds

    async def open(self, seconds: float, rate: float) -> None:
        """Send requests at a rate per second, without waiting for responses.

        Return when all have a response.
        """
        end = due = time.monotonic()
        end += seconds
        while (now := time.monotonic()) < end:
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(due - now, 0))
            if len(self._running) >= MOST:
                self.left_out += 1
                continue
            task = asyncio.create_task(self.one())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)


def _is_error(answer: Answer) -> bool:
    return answer.status != 200 or b'data: {"error"' in answer.body


def _text(answer: Answer) -> bytes:
    """Return the text of a response, joined if it is a stream."""
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return answer.body
    events = [one for one in answer.body.split(b"\n\n") if one.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event[6:])["choices"]]
    texts = [one.get("text") or (one.get("delta") or {}).get("content") or "" for one in choices]
    return "".join(texts).encode()
