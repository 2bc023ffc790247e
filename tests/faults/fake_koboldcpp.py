"""A fake koboldcpp 1.115 with valid responses of recorded shapes, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from faults import mistakes
from faults.wire import Answer, Engine, Request, Send, one
from faults.words import BOS, CONTROL, EOS, Model, Task


@dataclass
class FakeKoboldcpp(Engine):
    """A server that runs one generation at a time, each response on its own connection."""

    model: Model = field(default_factory=lambda: Model("koboldcpp/fake"))
    generations: tuple[str, ...] = ("/api/extra/generate/stream", "/api/v1/generate")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one = asyncio.Lock()
        self._ended: set[str] = set()
        self._told: dict[str, list[int]] = {}
        self._reason = -1
        self._total = 0
        self._since = 0.0

    async def start(self) -> None:
        """See `Engine.start`; a new process has no state of the old one."""
        self._since, self._total, self._reason = time.monotonic(), 0, -1
        self._told.clear()
        await super().start()

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        body = request.body if isinstance(request.body, dict) else {}
        if request.path in self.generations:
            return self._generation(request.path, body)
        value = self._told_of(request.path, body)
        if value is None:
            return Answer(one(b"<html>Not Found</html>"), 404, b"text/html", chunked=False)
        return Answer(one(json.dumps(value).encode()), chunked=False)

    def fault(self, name: str, request: Request, answer: Answer) -> tuple[Send, Answer]:
        """See `Engine.fault`."""
        return mistakes.fault(name, answer)

    def _told_of(self, path: str, body: dict[str, Any]) -> Any:
        """Return the response to a call, or None for an unknown path."""
        model = self.model
        match path:
            case "/api/extra/version":
                version = {"result": "KoboldCpp", "version": "1.115.1", "llm": True}
                return {**version, "vision": False, "audio": False}
            case "/api/v1/model":
                return {"result": model.name}
            case "/api/extra/true_max_context_length":
                return {"value": model.context}
            case "/props":
                settings = {"n_ctx": model.context}
                return {"chat_template": model.template, "default_generation_settings": settings}
            case "/api/extra/tokencount":
                ids = [BOS] * bool(body["special"]) + model.ids(body["prompt"])
                return {"value": len(ids), "ids": ids}
            case "/api/extra/detokenize":
                return {"result": model.text(body["ids"]), "success": True}
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

    def _generation(self, path: str, body: dict[str, Any]) -> Answer:
        task = Task.of(body["prompt"][-4096:])
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
                told += ids
                yield character, ""
            else:
                told.append(EOS)
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
        ids = self._told.get(key)
        if ids is None:
            return None
        spelled = [CONTROL[i - 256] if i >= 256 else self._piece(i) for i in ids]
        content = [
            {"token": text, "token_id": token, "logprob": -0.1,
             "top_logprobs": [{"token": text, "token_id": token, "logprob": -0.1}]}
            for token, text in zip(ids, spelled, strict=True)
        ]  # fmt: skip
        return {"content": content, "tokens": spelled, "token_ids": ids}

    def _piece(self, token: int) -> str:
        return self.model.piece(token).decode(errors="ignore")
