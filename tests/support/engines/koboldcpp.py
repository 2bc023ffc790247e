"""Fakes of koboldcpp 1.115 with valid responses of recorded shapes, and faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2
from latimer.backends.koboldcpp import KoboldCpp

from support.engines import mistakes
from support.engines.model import BOS, CONTROL, EOS, Model, Task
from support.engines.wire import Answer, Engine, Request, Send, one, replied


@dataclass
class Generated:
    """A generation, which does not end with its client, as in koboldcpp.

    Args:
        key: the client's `genkey`.
        tokens: the ids and spellings of its tokens.
        pieces: its texts, and at last an empty one with the finish reason.
    """

    key: str
    tokens: list[tuple[int, str]] = field(default_factory=list)
    pieces: list[tuple[str, str]] = field(default_factory=list)
    is_aborted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(text for text, _ in self.pieces)

    def add(self, text: str, reason: str) -> None:
        """Add a text, and wake the reader."""
        self.pieces.append((text, reason))
        self.changed.set()

    async def read(self) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the pieces as they appear."""
        count = 0
        while not count or not self.pieces[count - 1][1]:
            if count == len(self.pieces):
                self.changed.clear()
                await self.changed.wait()
            count += 1
            yield self.pieces[count - 1]


# The largest number of calls that wait (`--multiuser`), and the seconds between two looks at the
# connection of a stream.
MOST_WAITING, LOOK = 9, 0.5


@dataclass
class FakeKoboldcpp(Engine):
    """A server that runs one generation at a time, each response on its own connection.

    A generation continues without its client: a whole one to its end, a streamed one until the
    connection is looked at. An abort counts only for the running generation, or for one of those
    that wait.

    Args:
        script: the text that follows every prompt; None for the text that the prompt asks for.
        others: further texts, by the character at the end of the prompts that they follow.
        version: further facts about the engine.
        embed: returns the response to texts to embed; None without an embedding model.
        may_embed: unset to delay responses with embeddings.
        wav: the reply to texts to speak; `refusals` is the number of 503s before it.
        voices: the names of its voices.
        may_speak: unset to delay speech.
        hears: the texts of the recordings to transcribe, one after the other; None for a failure,
            which is an empty text.
        may_hear: unset to delay transcriptions.
        late: the seconds by which a generation begins later than its stream, which then sends the
            text of the generation before it.
        lag: the seconds between a response and the next generation.
        quiet: True to omit the final event of streams, which then end after the lag.
        media: the tokens that each image or audio file takes; 0 if it can read none.
        batches: True to batch generations with the default order of samplers, of which no record
            is kept.

    Attributes:
        prompts: the prompts of all generations of a script.
        rooms: the largest numbers of tokens that the generations of a script may have.
        embedded: the texts of each call that embeds.
        spoken: the body of each call that speaks.
        heard: the body of each call that transcribes.
        batched: the prompts of batched generations.
    """

    model: Model = field(default_factory=lambda: Model("koboldcpp/fake"))
    generations: tuple[str, ...] = ("/api/extra/generate/stream", "/api/v1/generate")
    script: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    version: dict[str, Any] = field(default_factory=dict)
    embed: Callable[[Sequence[str]], bytes] | None = None
    may_embed: asyncio.Event = field(default_factory=asyncio.Event)
    late: float = 0.0
    lag: float = 0.0
    quiet: bool = False
    batches: bool = False
    media: int = 0
    prompts: list[str] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    embedded: list[list[str]] = field(default_factory=list)
    spoken: list[dict[str, Any]] = field(default_factory=list)
    wav: bytes = b""
    voices: Sequence[str] = ("kobo", "cheery", "sleepy", "shouty", "chatty", "random", "instruct")
    refusals: int = 0
    may_speak: asyncio.Event = field(default_factory=asyncio.Event)
    hears: Sequence[str | None] = ()
    may_hear: asyncio.Event = field(default_factory=asyncio.Event)
    heard: list[dict[str, Any]] = field(default_factory=list)
    transcribed: int = 0
    batched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_embed.set()
        self.may_speak.set()
        self.may_hear.set()
        self._one = asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        # The last generation that began, and the key of a waiting one that is to be aborted.
        self._last = Generated("")
        self._pending = ""
        self.waiting = 0
        self._running: set[asyncio.Task[None]] = set()
        self._reason = -1
        self._total = self._ended = 0
        self._seed = -1
        self._since = time.monotonic()

    async def start(self) -> None:
        """See `Engine.start`; a new process has no state of the old one."""
        self._forget()
        await super().start()

    async def stop(self, close: bool = True) -> None:
        """See `Engine.stop`; the generations end, too."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await super().stop(close)

    def fault(self, name: str, answer: Answer) -> tuple[Send, Answer]:
        """See `Engine.fault`."""
        return mistakes.fault(name, answer)

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        body = request.body if isinstance(request.body, dict) else {}
        if request.path in self.generations:
            return self._generation(request.path, body)
        if request.path == "/api/extra/embeddings" and self.embed is not None:
            self.embedded.append(body["input"])
            await self.may_embed.wait()
            return Answer(one(self.embed(body["input"])))
        if request.path == "/api/extra/tts":
            return await self._speech(body)
        if request.path == "/api/extra/transcribe":
            return await self._transcription(body)
        value = await self._told_of(request.path, body)
        if value is None:
            return Answer(one(b"<html>Not Found</html>"), 404, b"text/html", chunked=False)
        return replied(value, chunked=False)

    async def _speech(self, body: dict[str, Any]) -> Answer:
        """Return a WAV file, or nothing if there is no model that speaks."""
        self.spoken.append(body)
        await self.may_speak.wait()
        if self.refusals:
            self.refusals -= 1
            busy = {"detail": {"msg": "Server is busy; please try again later."}}
            return replied(busy, 503, chunked=False)
        return Answer(one(self.wav), kind=b"audio/wav", chunked=False)

    async def _transcription(self, body: dict[str, Any]) -> Answer:
        """Return the next text; a failure has an empty one, and does not count."""
        if self.refusals:
            self.refusals -= 1
            busy = {"detail": {"msg": "Server is busy; please try again later."}}
            return replied(busy, 503, chunked=False)
        text = self.hears[len(self.heard)]
        self.heard.append(body)
        await self.may_hear.wait()
        self.transcribed += text is not None
        return replied({"text": text or ""}, chunked=False)

    async def _told_of(self, path: str, body: dict[str, Any]) -> Any:
        """Return the response to a call, or None for an unknown path."""
        model = self.model
        match path:
            case "/api/extra/version":
                version = {"result": "KoboldCpp", "version": "1.115.1", "llm": True}
                return {**version, "vision": False, "audio": False, **self.version}
            case "/api/v1/model":
                return {"result": model.name}
            case "/v1/audio/voices":
                return {"status": "ok", "voices": [*self.voices]}
            case "/api/extra/true_max_context_length":
                return {"value": model.context}
            case "/props":
                settings = {"n_ctx": model.context}
                return {"chat_template": model.template, "default_generation_settings": settings}
            case "/api/extra/tokencount":
                ids = await self._ids(body["prompt"], body["special"])
                return {"value": len(ids), "ids": ids}
            case "/api/extra/detokenize":
                return {"result": await self._text(body["ids"]), "success": True}
            case "/api/extra/perf":
                return {
                    "idle": int(not self._one.locked()), "stop_reason": self._reason,
                    "last_token_count": 0, "total_gens": self._total, "queue": self.waiting,
                    "uptime": time.monotonic() - self._since, "last_seed": self._seed,
                    "last_eval": float(self._ended), "total_transcribe_gens": self.transcribed,
                }  # fmt: skip
            case "/api/extra/abort":
                return self._abort(body["genkey"])
            case "/api/extra/generate/check":
                is_last = body.get("genkey") == self._last.key
                return {"results": [{"text": self._last.text if is_last else ""}]}
            case "/api/extra/last_logprobs":
                is_last = body.get("genkey") == self._last.key
                return {"logprobs": self._logprobs(self._last) if is_last else None}
        return None

    async def _ids(self, text: str, special: bool) -> list[int]:
        return [BOS] * bool(special) + self.model.ids(text)

    async def _text(self, ids: list[int]) -> str:
        return self.model.text(ids, "ignore")

    def _abort(self, key: str) -> dict[str, str]:
        self.aborted.append(time.monotonic())
        if key == self._last.key:
            self._last.is_aborted = True
            return {"success": "true", "done": "true"}
        if self.waiting:
            self._pending = key
        return {"success": "true" if self.waiting else "false", "done": "false"}

    def _generation(self, path: str, body: dict[str, Any]) -> Answer:
        if self.waiting >= MOST_WAITING:
            busy = {"msg": "Server is busy; please try again later.", "type": "service_unavailable"}
            return replied({"detail": busy}, 503, chunked=False)
        task = Task.of(body["prompt"][-4096:])
        if self.script is not None:
            self.prompts.append(body["prompt"])
            self.rooms.append(body["max_length"])
            task = Task(self.others.get(body["prompt"][-1:], self.script))
        one = Generated(body.get("genkey", ""))
        self.waiting += 1
        running = asyncio.create_task(self._generate(one, body, task))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        if path.endswith("stream"):
            events = self._events(one)
            return Answer(events, kind=b"text/event-stream", streamed=True, chunked=False)
        return Answer(self._whole(one, body), chunked=False)

    async def _generate(self, one: Generated, body: dict[str, Any], task: Task) -> None:
        async with self._one:
            self.waiting -= 1
            await asyncio.sleep(self.late)
            if self.batches and "sampler_order" not in body and not body.get("grammar"):
                self.batched.append(body["prompt"])
            else:
                self._last, self._seed = one, body.get("sampler_seed", -1)
            self._total += 1
            reason = "length"
            if self._pending and self._pending == one.key:
                self._pending = ""
            else:
                async with aclosing(self._texts(one, body, task)) as texts:
                    async for text, reason in texts:
                        if reason:
                            break
                        one.add(text, "")
                        if one.is_aborted:
                            reason = "length"
                            break
            self._reason = int(reason == "stop")
            self._ended += 1
            one.add("", reason or "length")
            await asyncio.sleep(self.lag)

    async def _texts(
        self, one: Generated, body: dict[str, Any], task: Task
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the characters of a generation, then an empty text with the finish reason."""
        characters = iter(()) if body.get("grammar") == 'root ::= ""' else task.characters()
        for character in characters:
            await asyncio.sleep(task.interval)
            ids = self.model.ids(character)
            if len(one.tokens) + len(ids) > body["max_length"]:
                yield "", "length"
                return
            one.tokens += [(i, self._spelled(i)) for i in ids]
            yield character, ""
            if any(stop in one.text for stop in body.get("stop_sequence", ())):
                yield "", "length"
                return
        if len(one.tokens) < body["max_length"]:
            one.tokens.append((EOS, self._spelled(EOS)))
            yield "", "stop"

    async def _events(self, one: Generated) -> AsyncGenerator[bytes, None]:
        before = self._last if self.late else None
        if before is not None and before.pieces and before.pieces[-1][1]:
            # The state that the stream reads is still that of the generation before.
            for text, reason in before.pieces:
                yield _event(text, reason)
            async for _ in one.read():
                pass
            return
        try:
            async for text, reason in one.read():
                if reason and self.quiet:
                    # The next generation has begun when the connection closes.
                    await asyncio.sleep(1.2 * self.lag)
                    return
                yield _event(text, reason)
        except GeneratorExit:
            loop = asyncio.get_running_loop()
            loop.call_later(LOOK, lambda: setattr(one, "is_aborted", True))
            raise

    async def _whole(self, one: Generated, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        async for _, reason in one.read():  # noqa: B007
            pass
        result: dict[str, Any] = {
            "text": one.text, "tool_calls": [], "finish_reason": reason,
            "logprobs": self._logprobs(one) if body.get("logprobs") else None,
            # The engine adds a BOS.
            "prompt_tokens": len(await self._ids(body["prompt"], True))
            + self.media * sum(len(body.get(kind, ())) for kind in ("images", "audio")),
            "completion_tokens": len(one.tokens),
        }  # fmt: skip
        yield json.dumps({"results": [result]}).encode()

    def _logprobs(self, one: Generated) -> Any:
        content = []
        for token, text in one.tokens:
            shown = {"token": text, "token_id": token, "logprob": -0.1}
            content.append({**shown, "top_logprobs": [shown]})
        return {"content": content, "tokens": [text for _, text in one.tokens],
                "token_ids": [token for token, _ in one.tokens]}  # fmt: skip

    def _spelled(self, token: int) -> str:
        if token >= 256:
            return CONTROL[token - 256]
        return self.model.piece(token).decode(errors="ignore")


def _event(text: str, reason: str) -> bytes:
    event = {"token": text, "finish_reason": reason or None}
    return b"event: message\ndata: " + json.dumps(event).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def koboldcpp(template: str, script: str) -> AsyncIterator[tuple[FakeKoboldcpp, KoboldCpp]]:
    """Return a fake koboldcpp with a template and a script, and its backend."""
    async with FakeKoboldcpp(
        model=Model("koboldcpp/fake", 65_536, template), script=script
    ) as fake:
        backend = KoboldCpp(fake.url)
        yield fake, backend
        await backend.aclose()


END = "<|im_end|>"


@dataclass
class DemoKoboldcpp(FakeKoboldcpp):
    """A koboldcpp whose texts and tokens are those of a llama-server.

    Args:
        upstream: the address of the llama-server.
    """

    upstream: str = ""
    _end: int = 0
    _client: httpx2.AsyncClient = field(default_factory=lambda: httpx2.AsyncClient(timeout=60))

    async def start(self) -> None:
        """Take the model's template, and serve."""
        props = (await self._client.get(f"{self.upstream}/props")).json()
        self.model.template = props["chat_template"]
        self.model.context = props["default_generation_settings"]["n_ctx"]
        self._end = (await self._ids(END, False))[0]
        await super().start()

    async def stop(self, close: bool = True) -> None:
        """Stop, and close the connections to the llama-server."""
        await super().stop(close)
        await self._client.aclose()

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return (await self._client.post(f"{self.upstream}{path}", json=body)).json()

    async def _ids(self, text: str, special: bool) -> list[int]:
        asked = {"content": text, "parse_special": True}
        ids: list[int] = (await self._ask("/tokenize", asked))["tokens"]
        return ids

    async def _text(self, ids: list[int]) -> str:
        return str((await self._ask("/detokenize", {"tokens": ids}))["content"])

    async def _texts(
        self, one: Generated, body: dict[str, Any], task: Task
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the texts of the llama-server's stream, then an empty text with the reason."""
        asked = {
            "prompt": body["prompt"], "n_predict": body["max_length"], "stream": True,
            "temperature": body["temperature"], "top_p": body["top_p"], "top_k": 0, "min_p": 0,
            "seed": body["sampler_seed"],
        }  # fmt: skip
        if body.get("grammar"):
            asked["grammar"] = body["grammar"]
        reason = "stop"
        path = f"{self.upstream}/completion"
        async with self._client.stream("POST", path, json=asked) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                one.tokens += [(token, event["content"]) for token in event.get("tokens") or ()]
                if event["stop"]:
                    if event["stop_type"] == "eos":
                        one.tokens.append((self._end, END))
                    reason = "length" if event["stop_type"] == "limit" else "stop"
                    break
                yield event["content"], ""
                if any(stop in one.text for stop in body["stop_sequence"]):
                    reason = "length"
                    break
        yield "", reason
