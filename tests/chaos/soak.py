"""Serve at 80 % of capacity with random faults for a long time, and check that nothing grows."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.texts import CAPITALS

from chaos.case import CHAT, COMPLETIONS, EDITED_SERVER, INSIDE, REAL
from chaos.client import Request, ask
from chaos.judge import FAILING, WELL, error_of, judge
from chaos.process import Latimer, Sample
from chaos.samples import HEADS, LINES, random_edits
from chaos.stage import Stage

# Latimer's arguments for each engine.
CONTEXT = 512
WORDS: dict[str, tuple[str, ...]] = {
    INSIDE: ("--context", "2048", "--parallel", "8", "--cache-memory", "64"),
    REAL: ("--engine-timeout", "10"),
    EDITED_SERVER: ("--backend", "llama-server", "--engine-timeout", "5"),
}
PART = 0.8
# Seconds of the measurement of capacity.
MEASURE = 60.0
# Limits by which the median of the last third can exceed that of the second; for memory also
# 5 %, if that is more. A short run does not judge memory.
MORE = {"memory, MiB": 16.0, "threads": 4.0, "files": 8.0, "to the engine": 8.0, "tasks": 8.0}
MINUTES_FOR_MEMORY = 3.0
# Seconds between the last reply and a measurement, and for the release of what the load used.
SETTLE, QUIET = 0.5, 20.0
# Seconds after an engine's return during which requests can still fail.
GRACE = 15.0
# Time limit of a reply in seconds: a stopped engine, its silence, and the work.
LONGEST = 60.0
# Maximum of concurrent requests; further ones are skipped.
MOST = 48
FAILURES = 20


class Trouble:
    """The faults of an engine under load, and a record of their times."""

    def __init__(self, stage: Stage, rng: random.Random, seconds: float) -> None:
        self._stage, self._rng, self._seconds = stage, rng, seconds
        self._spans: list[list[float]] = []
        self.counts: Counter[str] = Counter()

    def excuses(self, start: float, end: float) -> bool:
        """Return True if a request between two times can have failed."""
        # An engine with edited responses has faults at any time.
        return self._stage.front is not None or any(
            start < last and first < end for first, last in self._spans
        )

    async def make(self) -> None:
        """Make faults for ever: edits, or ends and pauses of the engine's process."""
        if self._stage.front is not None:
            edits = random_edits(300, self._rng.randrange(2**30))
            while True:
                self._stage.front.arm([{**self._rng.choice(edits), "at": self._rng.randrange(12)}])
                await asyncio.sleep(self._rng.uniform(0.05, 0.6))
        while self._stage.server is not None:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._seconds)
            what = self._rng.choice(("SIGKILL", "SIGTERM", "SIGSTOP"))
            self.counts[what] += 1
            self._spans.append([time.monotonic(), float("inf")])
            await self._stage.fail(what, self._rng.uniform(0.2, 12.0))
            self._spans[-1][1] = time.monotonic() + GRACE


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
        (prompt, COMPLETIONS, None),
        ({**prompt, "n": 3, "seed": number, "logprobs": 2}, COMPLETIONS, None),
        ({**prompt, "echo": True, "logprobs": 1, "stop": [" the", "\n"]}, COMPLETIONS, None),
        ({**prompt, "prompt": [marker, "a b c", "1, 2"]}, COMPLETIONS, None),
        ({**body, "prompt": "a", "regex": marker}, COMPLETIONS, marker),
        ({**body, "prompt": "a", "grammar": f'root ::= "{marker}"'}, COMPLETIONS, marker),
        (chat, CHAT, None),
        ({**chat, "logprobs": True, "top_logprobs": 2, "n": 2}, CHAT, None),
        ({**chat, "max_tokens": 60, "response_format": _schema(marker)}, CHAT,
        marker),
        ({**chat, "max_tokens": 60, "tools": _tools(), "tool_choice": "required"},
         CHAT, None),
    ]  # fmt: skip
    made, path, right = rng.choice(forms)
    return made, path, right


def _schema(marker: str) -> dict[str, Any]:
    own = {"type": "object", "properties": {"is": {"const": marker}}, "required": ["is"],
           "additionalProperties": False}  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": own, "strict": True}}


def _tools() -> list[dict[str, Any]]:
    own = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
           "additionalProperties": False}  # fmt: skip
    return [{"type": "function", "function": {"name": "f", "parameters": own, "strict": True}}]


class Load:
    """Requests to a server, and the failures of its replies."""

    def __init__(self, port: int, trouble: Trouble, rng: random.Random) -> None:
        self._port, self._trouble, self._rng = port, trouble, rng
        self._number = 0
        self._running: set[asyncio.Task[None]] = set()
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self.skipped = 0
        self.slowest = 0.0

    async def send(self) -> None:
        """Send a request, and check its reply."""
        self._number += 1
        sent, right = request(self._number, self._rng)
        marker, start = f"marker-{self._number}", time.monotonic()
        reply = await ask(self._port, sent, LONGEST)
        excused = self._trouble.excuses(start, time.monotonic())
        if not reply.problem:
            self.slowest = max(self.slowest, reply.seconds)
        self.statuses[str(reply.status or reply.problem)] += 1
        found = judge(reply, FAILING if excused else WELL)
        if sent.head is None and not found and not reply.problem and error_of(reply) is None:
            if f'"model":"{marker}"'.encode() not in reply.body:
                found = ["the answer of another request"]
            elif right is not None and not excused and right not in "".join(reply.texts().values()):
                found = [f"its marker {right} is missing"]
        if found:
            self._fail(f"{found[0]}: {sent.body[:300]!r}: {reply.body[-300:]!r}")

    def _fail(self, what: str) -> None:
        if len(self.failures) < FAILURES:
            print(f"  {what}", flush=True)
        self.failures.append(what)

    async def closed(self, seconds: float, width: int = 8) -> float:
        """Return the requests per second of clients that each wait for their reply.

        The clients have the same faults as in `open`, so that the capacity includes their cost.
        Replies with 503 do not count, because an absent engine allows any number of them.
        """
        end, before = time.monotonic() + seconds, self._number - self.statuses["503"]

        async def client() -> None:
            while time.monotonic() < end:
                await self.send()

        await asyncio.gather(*(client() for _ in range(width)))
        return (self._number - self.statuses["503"] - before) / seconds

    async def open(self, seconds: float, rate: float) -> None:
        """Send requests at a rate per second, without waiting for replies.

        Return when all have a reply.
        """
        end = due = time.monotonic()
        end += seconds
        while (now := time.monotonic()) < end:
            due += self._rng.expovariate(rate)
            await asyncio.sleep(max(due - now, 0))
            if len(self._running) >= MOST:
                self.skipped += 1
                continue
            task = asyncio.create_task(self.send())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)


Growth = list[tuple[str, float, float, bool]]


def growth(samples: Sequence[Sample], minutes: float) -> Growth:
    """Return each number's name, its medians in the second and last third, and True if it grew."""
    third = max(len(samples) // 3, 1)
    rows = []
    for index, (name, more) in enumerate(MORE.items()):
        before = statistics.median(
            sample[index] for sample in samples[third : 2 * third] or samples
        )
        after = statistics.median(sample[index] for sample in samples[-third:])
        bound = max(more, before * 0.05) if index == 0 else more
        judged = index > 0 or minutes >= MINUTES_FOR_MEMORY
        rows.append((name, before, after, judged and after - before > bound))
    return rows


async def soak(name: str, minutes: float, seed: int, measure: float = MEASURE) -> list[str]:
    """Soak one engine and return the failures.

    Args:
        measure: the seconds for which its capacity is measured.
    """
    rng, seconds = random.Random(seed), minutes * 60
    every = min(20.0, seconds / 30)
    samples: list[Sample] = []
    stage = Stage(name, *WORDS[name], context=CONTEXT, inside="counted")
    trouble = Trouble(stage, rng, min(90.0, seconds / 4))
    try:
        await stage.start()
        latimer = stage.latimer
        start = await latimer.sample(stage.port)
        load = Load(latimer.port, trouble, rng)
        # Faults already run while the capacity is measured, because they reduce it.
        making = asyncio.create_task(trouble.make())
        rate = await load.closed(measure)
        print(f"{name}: {rate:.1f} requests a second; {PART:.0%} of it from here on", flush=True)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await load.open(min(every, left), rate * PART)
            # Requests in flight would add resources by chance.
            await asyncio.sleep(SETTLE)
            samples.append(await latimer.sample(stage.port))
        making.cancel()
        ended = (await asyncio.gather(making, return_exceptions=True))[0]
        wrong = [repr(ended)] if isinstance(ended, Exception) else []
        wrong += await _quiet(latimer, start, stage.port)
        wrong += latimer.fresh_problems(strict=True)
    finally:
        code = await stage.stop()
    if code != 0:
        wrong.append(f"latimer serve ended with {code}")
    rows = growth(samples, minutes)
    wrong += [
        f"{what} grew from {before:g} to {after:g}" for what, before, after, bad in rows if bad
    ]
    _show(name, load, rows, trouble.counts)
    return wrong + load.failures


async def _quiet(latimer: Latimer, start: Sample, port: int) -> list[str]:
    """Wait until the resources of the load are released, and return those that are not."""
    end = time.monotonic() + QUIET
    while True:
        now = await latimer.sample(port)
        left = [
            f"{field} is {getattr(now, field)} after the load, {getattr(start, field)} before it"
            for field in ("files", "connections", "tasks")
            if getattr(now, field) > getattr(start, field) + 8
        ]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)


def _show(name: str, load: Load, rows: Growth, troubles: Counter[str]) -> None:
    statuses = ", ".join(f"{count} × {status}" for status, count in load.statuses.most_common())
    print(f"{name}: {statuses}; {load.skipped} skipped; the slowest took {load.slowest:.1f} s")
    faults = dict(troubles) or "none"
    print(f"{name}: faults of the engine: {faults}; wrong answers: {len(load.failures)}")
    print("| | second third | last third | |\n|---|--:|--:|---|")
    for what, before, after, bad in rows:
        print(f"| {what} | {before:.1f} | {after:.1f} | {'grew' if bad else ''} |", flush=True)
