"""A fake koboldcpp whose texts and tokens are those of a llama-server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import httpx2
from faults.fake_koboldcpp import FakeKoboldcpp
from faults.wire import Answer, Request, one
from faults.words import Task

END = "<|im_end|>"


@dataclass
class DemoKoboldcpp(FakeKoboldcpp):
    """A koboldcpp with the model of a llama-server.

    Args:
        upstream: the address of the llama-server.
    """

    upstream: str = ""
    _end: int = 0
    # The ids and the texts of each generation's tokens.
    _spelled: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    _client: httpx2.AsyncClient = field(default_factory=lambda: httpx2.AsyncClient(timeout=60))

    async def start(self) -> None:
        """Take the model's template, and serve."""
        props = (await self._client.get(f"{self.upstream}/props")).json()
        self.model.template = props["chat_template"]
        self.model.context = props["default_generation_settings"]["n_ctx"]
        ids = await self._ask("/tokenize", {"content": END, "parse_special": True})
        self._end = ids["tokens"][0]
        await super().start()

    async def stop(self, close: bool = True) -> None:
        """Stop, and close the connections to the llama-server."""
        await super().stop(close)
        await self._client.aclose()

    async def answer(self, request: Request) -> Answer:
        """Answer the calls of the tokenizer as the llama-server does."""
        value: dict[str, Any]
        if request.path == "/api/extra/tokencount":
            text = {"content": request.body["prompt"], "parse_special": True}
            ids = (await self._ask("/tokenize", text))["tokens"]
            value = {"value": len(ids), "ids": ids}
        elif request.path == "/api/extra/detokenize":
            text = await self._ask("/detokenize", {"tokens": request.body["ids"]})
            value = {"result": text["content"], "success": True}
        else:
            return await super().answer(request)
        return Answer(one(json.dumps(value).encode()), chunked=False)

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        return (await self._client.post(f"{self.upstream}{path}", json=body)).json()

    def _logprobs(self, key: str) -> Any:
        told = self._spelled.get(key)
        if told is None:
            return None
        content = [
            {"token": text, "token_id": token, "logprob": -0.1,
             "top_logprobs": [{"token": text, "token_id": token, "logprob": -0.1}]}
            for token, text in told
        ]  # fmt: skip
        return {"content": content, "tokens": [text for _, text in told],
                "token_ids": [token for token, _ in told]}  # fmt: skip

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
            told = self._spelled[key] = []
            self._told[key] = []
            reason = "stop"
            event: dict[str, Any] = {"stop": False}
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
                        reason = "length" if event["stop_type"] == "limit" else "stop"
                        break
                    yield event["content"], ""
            if event["stop"] and event["stop_type"] == "eos":
                told.append((self._end, END))
            self._told[key] = [token for token, _ in told]
            self._reason = int(reason == "stop")
            yield "", reason
