"""Engines that respond as recorded, with some responses replaced."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx2
import orjson
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.koboldcpp.server import PROBE_SEED
from latimer.backends.llama_server import LlamaServer

from support.recordings import body

# The content of a response, an object that is its JSON, or a function that returns the response.
Answer = bytes | AsyncIterator[bytes] | dict[str, Any] | Callable[[httpx2.Request], httpx2.Response]


class Recorded:
    """An engine whose responses can be changed.

    Args:
        answers: responses by path.
        status: the status of these responses.
    """

    def __init__(self, answers: Mapping[str, Answer], status: int = 200) -> None:
        self.answers = {**self.usual(), **answers}
        self.asked: list[str] = []
        self._status = status
        self.client = httpx2.MockTransport(self._respond)

    def usual(self) -> dict[str, Answer]:
        """Return the responses that are not replaced."""
        raise NotImplementedError

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        self.asked.append(path)
        answer = self.answers.get(path)
        if answer is None:
            return httpx2.Response(404, content=b"{}")
        if isinstance(answer, dict):
            return httpx2.Response(200, json=answer)
        if callable(answer):
            return answer(request)
        return httpx2.Response(self._status, content=answer)


class RecordedServer(Recorded):
    """A llama-server with the demo model, which has no response to a generation of its own."""

    def __init__(self, answers: Mapping[str, Answer] = {}, status: int = 200) -> None:
        super().__init__(answers, status)
        self.backend = LlamaServer("http://fake", client=self.client)

    def usual(self) -> dict[str, Answer]:
        """Return the facts of the model, and one token for each text."""
        return {"/props": orjson.loads(body("llama_server", "props")), "/tokenize": {"tokens": [5]}}


def one_token() -> dict[str, Any]:
    """Return the recorded completion of five tokens as one of one."""
    reply: dict[str, Any] = orjson.loads(body("koboldcpp", "limit"))
    reply["results"][0]["completion_tokens"] = 1
    return reply


class RecordedKoboldcpp(Recorded):
    """A koboldcpp with the demo model and one completion.

    Attributes:
        one: the response to the backend's request of one token; bytes have the status 503.
        since: the start of the process.
    """

    def __init__(self, answers: Mapping[str, Answer] = {}, silence: float = 0.1) -> None:
        self.one: dict[str, Any] | bytes = one_token()
        self.since = time.monotonic()
        super().__init__(answers)
        self.backend = KoboldCpp("http://fake", client=self.client, silence=silence)

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        payload = orjson.loads(request.content) if request.content else {}
        if isinstance(payload, dict) and payload.get("sampler_seed") == PROBE_SEED:
            if isinstance(self.one, bytes):
                return httpx2.Response(503, content=self.one)
            return httpx2.Response(200, json=self.one)
        perf = self.answers.get(request.url.path) if request.url.path.endswith("/perf") else None
        if isinstance(perf, dict):
            self.asked.append(request.url.path)
            uptime = time.monotonic() - self.since
            return httpx2.Response(200, json={**perf, "uptime": uptime})
        return super()._respond(request)

    def usual(self) -> dict[str, Answer]:
        """Return the recorded responses, and three tokens for each text."""
        names = {
            "/api/extra/version": "version",
            "/api/v1/model": "model",
            "/api/extra/true_max_context_length": "true-max-context",
            "/props": "props",
            "/api/v1/generate": "limit",
            "/api/extra/generate/stream": "limit-stream",
        }

        def count(request: httpx2.Request) -> httpx2.Response:
            ids = [0] if orjson.loads(request.content)["special"] else [5, 6, 7]
            return httpx2.Response(200, json={"value": len(ids), "ids": ids})

        # The tokens of a longer completion, which begins like the recorded one of five.
        last = orjson.loads(body("koboldcpp", "last-logprobs"))["logprobs"]
        return {
            **{path: body("koboldcpp", name) for path, name in names.items()},
            "/api/extra/perf": orjson.loads(body("koboldcpp", "perf")),
            "/api/extra/last_logprobs": {
                "logprobs": {name: values[:5] for name, values in last.items()}
            },
            "/api/extra/abort": {"success": True},
            "/api/extra/detokenize": {"result": "<s>", "success": True},
            "/api/extra/tokencount": count,
        }
