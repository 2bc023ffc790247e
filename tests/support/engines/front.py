"""Servers in front of a real engine: one edits its responses, one writes its completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from support.engines.mistakes import Edits, edit
from support.engines.wire import Answer, Engine, Request, one, replied, running

# Paths whose responses identify the model; Latimer caches them.
FACTS = ("/props", "/tokenize", "/slots", "/v1/models", "/lora-adapters", "/api/v1/model",
         "/api/extra/version", "/api/extra/true_max_context_length", "/api/extra/detokenize",
         "/api/extra/tokencount", "/detokenize", "/api/v1/generate")  # fmt: skip


@dataclass
class _Forwarding(Engine):
    """A server that forwards requests to an engine at `target`."""

    target: str = ""
    client: httpx2.AsyncClient = field(default_factory=lambda: httpx2.AsyncClient(timeout=60))

    async def stop(self, close: bool = True) -> None:
        """See `Engine.stop`."""
        await super().stop(close)
        await self.client.aclose()

    async def ask(self, method: str, path: str, body: bytes | None = None) -> httpx2.Response:
        """Return the engine's response."""
        headers = {"content-type": "application/json"}
        try:
            return await self.client.request(
                method, self.target + path, content=body, headers=headers
            )
        except httpx2.HTTPError as error:
            raise ConnectionError from error


@dataclass
class Front(_Forwarding):
    """A proxy that edits an engine's responses.

    Args:
        idle: less than the seconds after which the engine closes an idle connection.
    """

    idle: float | None = 2.0
    facts_changed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._edits: Edits = []
        self._answers = 0

    def arm(self, edits: Edits) -> None:
        """Set the edits of all responses from now on; an empty list leaves them unchanged."""
        self._edits, self._answers = edits, 0

    def _edits_of_next(self) -> Edits:
        number, self._answers = self._answers, self._answers + 1
        return [one for one in self._edits if one["at"] in (None, number)]

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        edits = self._edits_of_next()
        if edits and request.path in FACTS:
            self.facts_changed = True
        reply = await self.ask(request.method, request.target, request.data)
        kind = reply.headers.get("content-type", "application/json").encode()
        chunked = "chunked" in reply.headers.get("transfer-encoding", "")
        valid = Answer(one(reply.content), reply.status_code, kind, streamed=chunked)
        send, answer = edit(edits, valid)
        return replace(answer, send=send)


# More than any agent sends; the real server never evaluates these prompts.
CONTEXT = 131_072


@dataclass
class Director(_Forwarding):
    """A llama-server whose streamed completions are written by a function.

    Args:
        write: returns the answer to a prompt's text.
    """

    write: Callable[[str], str] = str

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        if request.path == "/completion" and request.body.get("stream"):
            prompt = request.body["prompt"]
            if not isinstance(prompt, str):
                prompt = (await self._json("/detokenize", {"tokens": prompt}))["content"]
            most = request.body.get("n_predict", -1)
            events = self._events(self.write(prompt), len(prompt) // 4, most)
            return Answer(events, kind=b"text/event-stream", streamed=True)
        reply = await self.ask(request.method, request.target, request.data)
        if request.path == "/props":
            props = reply.json()
            props["default_generation_settings"]["n_ctx"] = CONTEXT
            return replied(props)
        kind = reply.headers["content-type"].encode()
        return Answer(one(reply.content), reply.status_code, kind)

    async def _json(self, path: str, payload: Any) -> Any:
        return (await self.ask("POST", path, json.dumps(payload).encode())).json()

    async def _events(self, text: str, evaluated: int, most: int) -> AsyncGenerator[bytes, None]:
        """Yield the native events of an answer, one for each token; -1 sets no limit."""
        asked = {"content": text, "add_special": False, "with_pieces": True}
        tokens = (await self._json("/tokenize", asked))["tokens"]
        is_cut = 0 <= most <= len(tokens)
        if is_cut:
            tokens = tokens[:most]
        counts = {"tokens_evaluated": evaluated}
        for number, token in enumerate(tokens, 1):
            event = {"index": 0, "content": token["piece"], "tokens": [token["id"]], "stop": False}
            yield _event({**event, "tokens_predicted": number, **counts})
        kind, count = ("limit", len(tokens)) if is_cut else ("eos", len(tokens) + 1)
        last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": kind}
        timings = {"cache_n": 0, "prompt_n": evaluated, "predicted_n": count}
        yield _event({
            **last, "stopping_word": "", "tokens_predicted": count, **counts,
            "timings": timings, "model": (await self.ask("GET", "/props")).json()["model_path"],
        })  # fmt: skip


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


@contextlib.contextmanager
def directed(target: str, write: Callable[[str], str]) -> Iterator[str]:
    """Run a director of the llama-server at an address; yield its own."""
    with running(Director(target=target, write=write)) as director:
        yield director.url
