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
class FakeKoboldcpp(Engine):
    """A server that runs one generation at a time, each response on its own connection.

    Args:
        script: the text that follows every prompt; None for the text that the prompt asks for.
        others: further texts, by the character at the end of the prompts that they follow.
        version: further facts about the engine.
        embed: returns the response to texts to embed; None without an embedding model.
        may_embed: unset to delay responses with embeddings.

    Attributes:
        prompts: the prompts of all generations of a script.
        embedded: the texts of each call that embeds.
    """

    model: Model = field(default_factory=lambda: Model("koboldcpp/fake"))
    generations: tuple[str, ...] = ("/api/extra/generate/stream", "/api/v1/generate")
    script: str | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    version: dict[str, Any] = field(default_factory=dict)
    embed: Callable[[Sequence[str]], bytes] | None = None
    may_embed: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: list[str] = field(default_factory=list)
    embedded: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_embed.set()
        self._one = asyncio.Lock()
        self._ended: set[str] = set()
        # The tokens of each generation and their texts, by the generation's key.
        self._told: dict[str, list[tuple[int, str]]] = {}
        self._reason = -1
        self._total = 0
        self._since = 0.0

    async def start(self) -> None:
        """See `Engine.start`; a new process has no state of the old one."""
        self._since, self._total, self._reason = time.monotonic(), 0, -1
        self._told.clear()
        await super().start()

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
        value = await self._told_of(request.path, body)
        if value is None:
            return Answer(one(b"<html>Not Found</html>"), 404, b"text/html", chunked=False)
        return replied(value, chunked=False)

    async def _told_of(self, path: str, body: dict[str, Any]) -> Any:
        """Return the response to a call, or None for an unknown path."""
        model = self.model
        match path:
            case "/api/extra/version":
                version = {"result": "KoboldCpp", "version": "1.115.1", "llm": True}
                return {**version, "vision": False, "audio": False, **self.version}
            case "/api/v1/model":
                return {"result": model.name}
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
                    "last_token_count": 0, "total_gens": self._total, "queue": 0,
                    "uptime": time.monotonic() - self._since,
                }  # fmt: skip
            case "/api/extra/abort":
                self.aborted.append(time.monotonic())
                self._ended.add(body["genkey"])
                return {"success": "true", "done": "true"}
            case "/api/extra/last_logprobs":
                return {"logprobs": self._logprobs(body.get("genkey", ""))}
        return None

    async def _ids(self, text: str, special: bool) -> list[int]:
        return [BOS] * bool(special) + self.model.ids(text)

    async def _text(self, ids: list[int]) -> str:
        return self.model.text(ids)

    def _generation(self, path: str, body: dict[str, Any]) -> Answer:
        task = Task.of(body["prompt"][-4096:])
        if self.script is not None:
            self.prompts.append(body["prompt"])
            task = Task(self.others.get(body["prompt"][-1:], self.script))
        if path.endswith("stream"):
            events = self._events(body, task)
            return Answer(events, kind=b"text/event-stream", streamed=True, chunked=False)
        return Answer(self._whole(body, task), chunked=False)

    async def _texts(
        self, body: dict[str, Any], task: Task
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the characters of a generation, then an empty text with the finish reason."""
        key, most = body.get("genkey", ""), body["max_length"]
        async with self._one:
            self._total += 1
            told = self._told[key] = []
            reason = "stop"
            characters = iter(()) if body.get("grammar") == 'root ::= ""' else task.characters()
            for character in characters:
                await asyncio.sleep(task.interval)
                if key in self._ended:
                    break
                ids = self.model.ids(character)
                if len(told) + len(ids) > most:
                    reason = "length"
                    break
                told += [(i, self._spelled(i)) for i in ids]
                yield character, ""
            else:
                told.append((EOS, self._spelled(EOS)))
            self._reason = int(reason == "stop")
            yield "", reason

    async def _events(self, body: dict[str, Any], task: Task) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._texts(body, task)) as texts:
            async for text, reason in texts:
                event = {"token": text, "finish_reason": reason or None}
                yield b"event: message\ndata: " + json.dumps(event).encode() + b"\n\n"

    async def _whole(self, body: dict[str, Any], task: Task) -> AsyncGenerator[bytes, None]:
        pieces = [piece async for piece in self._texts(body, task)]
        result: dict[str, Any] = {
            "text": "".join(text for text, _ in pieces), "tool_calls": [],
            "finish_reason": pieces[-1][1], "logprobs": None,
            # The engine adds a BOS.
            "prompt_tokens": len(self.model.ids(body["prompt"])) + 1,
            "completion_tokens": len(self._told[body.get("genkey", "")]),
        }  # fmt: skip
        yield json.dumps({"results": [result]}).encode()

    def _logprobs(self, key: str) -> Any:
        if (told := self._told.get(key)) is None:
            return None
        content = []
        for token, text in told:
            shown = {"token": text, "token_id": token, "logprob": -0.1}
            content.append({**shown, "top_logprobs": [shown]})
        return {"content": content, "tokens": [text for _, text in told],
                "token_ids": [token for token, _ in told]}  # fmt: skip

    def _spelled(self, token: int) -> str:
        if token >= 256:
            return CONTROL[token - 256]
        return self.model.piece(token).decode(errors="ignore")


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
        self, body: dict[str, Any], task: Task
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the texts of the llama-server's stream, then an empty text with the reason."""
        key = body.get("genkey", "")
        asked = {
            "prompt": body["prompt"], "n_predict": body["max_length"], "stream": True,
            "temperature": body["temperature"], "top_p": body["top_p"], "top_k": 0, "min_p": 0,
            "seed": body["sampler_seed"], "stop": body["stop_sequence"],
        }  # fmt: skip
        if body.get("grammar"):
            asked["grammar"] = body["grammar"]
        async with self._one:
            self._total += 1
            told = self._told[key] = []
            reason = "stop"
            path = f"{self.upstream}/completion"
            async with self._client.stream("POST", path, json=asked) as reply:
                async for line in reply.aiter_lines():
                    if key in self._ended:
                        break
                    if not line.startswith("data: "):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    told += [(token, event["content"]) for token in event.get("tokens") or ()]
                    if event["stop"]:
                        if event["stop_type"] == "eos":
                            told.append((self._end, END))
                        reason = "length" if event["stop_type"] == "limit" else "stop"
                        break
                    yield event["content"], ""
            self._reason = int(reason == "stop")
            yield "", reason
