"""Cancel requests over a koboldcpp in each phase, among requests whose answers are known."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2
from latimer.backends.embeddings import unit
from support.engines.koboldcpp import FakeKoboldcpp

from chaos.case import CHAT, COMPLETIONS
from chaos.client import Reply, Request, ask, post
from chaos.judge import judge
from chaos.process import Latimer

GENERATE, PERF, TOKENS = "/api/v1/generate", "/api/extra/perf", "/api/extra/tokencount"
EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/tokenize"
# Seconds after which cancelled streams are closed, and their number for each.
CLOSED_AFTER, STREAMS = (0.03, 0.1, 0.2, 0.4), 20
# The numbers of requests that are cancelled while they wait, and of those that wait with them.
WAITING, OTHERS = 60, 5
# Seconds within which koboldcpp must be idle after the last request has left.
IDLE = 1.0
# The share of cancelled requests, and the number of clients, each with one request at a time.
PART, CLIENTS = 0.3, 8
# The seconds of the longest reply, and between two requests of a client.
LONGEST, GAP = 120.0, 0.02
# Samplers of koboldcpp that choose the most likely token, without changes to its text.
GREEDY: dict[str, Any] = {
    "temperature": 0, "top_k": 1, "rep_pen": 1, "trim_stop": False, "bypass_eos": False,
    "use_default_badwordsids": False, "replace_instruct_placeholders": False,
}  # fmt: skip
# The number of failures that are printed.
SHOWN = 20
LENGTHS = (1, 4, 8, 24)
# The text that is embedded.
TEXT = "a cat"
MESSAGE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = (
    "What is the capital of France?", "What is the capital of Italy?", "Count to 12.", "Hello!",
    "What is 3 + 4?",
)  # fmt: skip
STORY = MESSAGE.format("Tell me a story.")


@dataclass(frozen=True)
class Known:
    """A prompt with its answer of at most some tokens; as a question, it is a chat's message."""

    prompt: str
    question: str
    length: int
    text: str
    tokens: int


@dataclass(frozen=True)
class Engine:
    """A koboldcpp, and what is known of it.

    Args:
        endless: the fields of a request that runs until it is cancelled.
        vector: the embedding of a text, or None without an embedding model.
    """

    url: str
    endless: dict[str, Any]
    known: list[Known]
    ids: dict[str, list[int]]
    vector: array[float] | None

    async def seconds_to_idle(self, limit: float = 30.0) -> float:
        """Return the seconds until nothing runs or waits there."""
        begin = time.monotonic()
        async with httpx2.AsyncClient() as client:
            while time.monotonic() - begin < limit:
                perf = (await client.get(self.url + PERF)).json()
                if perf["idle"] and not perf["queue"]:
                    break
                await asyncio.sleep(0.01)
        return time.monotonic() - begin


async def _known(client: httpx2.AsyncClient, prompt: str, question: str, length: int) -> Known:
    asked = {**GREEDY, "prompt": prompt, "max_length": length}
    result = (await client.post(GENERATE, json=asked)).json()["results"][0]
    tokens = result["completion_tokens"] - (result["finish_reason"] == "stop")
    return Known(prompt, question, length, result["text"], tokens)


async def _ids(client: httpx2.AsyncClient, text: str) -> list[int]:
    reply = await client.post(TOKENS, json={"prompt": text, "special": False})
    ids: list[int] = reply.json()["ids"]
    return ids


async def _vector(client: httpx2.AsyncClient) -> array[float] | None:
    """Return the embedding of a text, or None without an embedding model."""
    version = (await client.get("/api/extra/version")).json()
    if not version.get("embeddings"):
        return None
    asked = {"input": [TEXT], "truncate": False, "encoding_format": "base64"}
    reply = await client.post("/api/extra/embeddings", json=asked)
    return unit(array("f", b64decode(reply.json()["data"][0]["embedding"])))


def _embedded(texts: Sequence[str]) -> bytes:
    """Return the double's response to texts, with a vector of the beginning of each."""
    vectors = [array("f", [*one[:8].encode().ljust(8)]) for one in texts]
    data = [
        {"index": index, "embedding": b64encode(vector.tobytes()).decode()}
        for index, vector in enumerate(vectors)
    ]
    return json.dumps({"data": data, "usage": {"prompt_tokens": len(texts)}}).encode()


@asynccontextmanager
async def engine(url: str | None) -> AsyncIterator[Engine]:
    """Return a running koboldcpp, or without a URL its double, and ask it for its answers."""
    double = None
    questions, endless = list(QUESTIONS), {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True}
    if url is None:
        # The time for which koboldcpp sleeps after each generation.
        facts = {"embeddings": True, "embeddingModel": "small"}
        double = FakeKoboldcpp(lag=0.05, embed=_embedded, version=facts)
        await double.start()
        url = double.url
        questions = [f"slow:{3 * n} echo:{'abcdefgh'[n:] * 4}" for n in range(5)]
        endless = {"prompt": "endless slow:5", "max_tokens": 4000}
    prompts = {MESSAGE.format(one): one for one in questions}
    # A prompt that takes time to count and to evaluate.
    prompts["One day, a cat saw a dog. " * 100 + "\n" + next(iter(prompts))] = ""
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
            known = [
                await _known(client, prompt, question, length)
                for prompt, question in prompts.items()
                for length in LENGTHS
            ]
            ids = {
                one: (await client.post(TOKENS, json={"prompt": one, "special": False})).json()[
                    "ids"
                ]
                for one in questions
            }
            vector = await _vector(client)
        yield Engine(url, endless, known, ids, vector)
    finally:
        if double is not None:
            await double.stop()


class Load:
    """Requests to a Latimer, and what was wrong with their replies."""

    def __init__(self, engine: Engine, port: int, rng: random.Random) -> None:
        self._engine, self._port, self._rng = engine, port, rng
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def known(self, leave: float | None = None) -> None:
        """Send a request whose answer is known, and check the reply.

        Args:
            leave: seconds after which the client disconnects.
        """
        request, known, expected = self._request()
        reply = await ask(self._port, replace(request, leave=leave), LONGEST)
        if reply.problem == "left":
            self.counts["cancelled"] += 1
            return
        self.counts[str(reply.status or reply.problem)] += 1
        wrong = judge(reply, frozenset({200})) or self._differences(reply, known, expected)
        if wrong:
            self.fail(f"{wrong[0]}: {request.path} {request.body[-300:]!r}: {reply.body[-300:]!r}")

    async def endless(self, leave: float, **fields: Any) -> None:
        """Send a request that would run for a minute, and leave it after some seconds."""
        body = {"model": "m", "temperature": 0, **self._engine.endless, **fields}
        reply = await ask(self._port, replace(post(COMPLETIONS, body), leave=leave), LONGEST)
        self.counts["cancelled" if reply.problem == "left" else str(reply.status)] += 1
        if reply.problem != "left" or reply.status not in (0, 200):
            self.fail(f"an endless request was not there to leave: {reply}")

    async def check_idle(self) -> float:
        """Return the seconds until the engine is idle; note if they are too many."""
        seconds = await self._engine.seconds_to_idle()
        if seconds > IDLE:
            self.fail(f"the engine was idle {seconds:.2f} s after the last request had left")
        return seconds

    def fail(self, what: str) -> None:
        """Note a failure."""
        self.wrong.append(what)
        if len(self.wrong) <= SHOWN:
            print(f"  {what}", flush=True)

    def _request(self) -> tuple[Request, Known | None, Any]:
        """Return a request, and its answer: a known completion with its texts, ids or a vector."""
        rng, chance = self._rng, self._rng.random()
        if chance < 0.05:
            text = rng.choice(list(self._engine.ids))
            body = {"prompt": text, "add_special_tokens": False}
            return post(TOKENIZE, body), None, self._engine.ids[text]
        if chance < 0.15 and self._engine.vector is not None:
            body = {"model": "m", "input": ["a dog"] * rng.randrange(8) + [TEXT]}
            return post(EMBEDDINGS, body), None, self._engine.vector
        known = rng.choice(self._engine.known)
        asked: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": known.length}
        asked["stream"] = rng.random() < 0.4
        if asked["stream"]:
            asked["stream_options"] = {"include_usage": True}
        asked["n"] = rng.choice((1, 1, 1, 3))
        text = known.text
        if len(text) > 3 and rng.random() < 0.2:
            asked["stop"] = text[len(text) // 2 :][:2]
            text = text[: text.index(asked["stop"])]
        if known.question and rng.random() < 0.5:
            asked["messages"] = [{"role": "user", "content": known.question}]
            return post(CHAT, asked), known, [text] * asked["n"]
        return post(COMPLETIONS, {**asked, "prompt": known.prompt}), known, [text] * asked["n"]

    @staticmethod
    def _differences(reply: Reply, known: Known | None, expected: Any) -> list[str]:
        """Return what is wrong with an answer."""
        if known is None:
            body = reply.json()
            if "tokens" in body:
                return [] if body["tokens"] == expected else [f"not the ids {expected}"]
            found = body["data"][-1]["embedding"]
            pairs = zip(found, expected, strict=True)
            return [] if all(abs(a - b) < 1e-3 for a, b in pairs) else ["another vector"]
        asked = reply.request.fields()
        texts = [reply.texts().get(index, "") for index in range(asked["n"])]
        if texts != expected:
            return [f"{texts} instead of {expected}"]
        last = reply.chunks()[-1] if reply.streamed else reply.json()
        counted, right = last["usage"]["completion_tokens"], known.tokens * asked["n"]
        if "stop" in asked:
            return [] if counted <= right else [f"{counted} tokens of at most {right}"]
        return [] if counted == right else [f"{counted} tokens instead of {right}"]


async def streams(load: Load) -> list[str]:
    """Cancel streams one after the other; the next request must be answered at once."""
    lines = []
    for seconds in CLOSED_AFTER:
        for _ in range(STREAMS):
            await load.endless(seconds, stream=True)
        idle = await load.check_idle()
        begin = time.monotonic()
        await load.known()
        took = time.monotonic() - begin
        lines.append(f"{STREAMS} streams closed after {seconds} s: idle in {idle:.2f} s, "
                     f"the next answer after {took:.2f} s")  # fmt: skip
    return lines


async def waiting(load: Load) -> list[str]:
    """Cancel waiting requests among others that wait."""
    lines = []
    for name, fields in (("plain", {}), ("streamed", {"stream": True}), ("n: 3", {"n": 3})):
        running = asyncio.create_task(load.endless(1.5, stream=True))
        await asyncio.sleep(0.3)
        others = [asyncio.create_task(load.known()) for _ in range(OTHERS)]
        left = [
            asyncio.create_task(load.endless(0.1 + 0.016 * number, **fields))
            for number in range(WAITING)
        ]
        await asyncio.gather(running, *left, *others)
        idle = await load.check_idle()
        lines.append(f"{WAITING} waiting requests left ({name}): idle in {idle:.2f} s")
    return lines


async def mixed(load: Load, seconds: float, rng: random.Random) -> list[str]:
    """Send requests of all kinds, and cancel some of them."""
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            leave = rng.choice((0.0, *CLOSED_AFTER, rng.random())) if rng.random() < PART else None
            await load.known(leave)
            await asyncio.sleep(GAP)

    before = load.counts.copy()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    idle = await load.check_idle()
    counts = json.dumps(dict(load.counts - before))
    return [f"{seconds:.0f} s of mixed load: {counts}; idle in {idle:.2f} s"]


async def cancels(url: str | None, minutes: float, seed: int) -> list[str]:
    """Cancel requests over a koboldcpp, or its double, and return what was wrong."""
    rng = random.Random(seed)
    async with engine(url) as found:
        latimer = Latimer([found.url, "--any-model", "--keepalive", "600"])
        await latimer.start()
        try:
            load = Load(found, latimer.port, rng)
            for line in (
                *await streams(load),
                *await waiting(load),
                *await mixed(load, minutes * 60, rng),
            ):
                print(line, flush=True)
            wrong = load.wrong + latimer.fresh_problems(strict=True)
        finally:
            code = await latimer.stop()
        if code != 0:
            wrong.append(f"latimer serve ended with {code}")
    print(f"{len(wrong)} failures; {json.dumps(dict(load.counts))}")
    return wrong
