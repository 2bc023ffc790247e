"""A fake llama-server with valid responses of recorded shapes, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from support.engines import mistakes
from support.engines.model import CONTROL, EOS, SIZE, Model, Task
from support.engines.wire import Answer, Engine, Request, Send, replied


@dataclass
class FakeLlamaServer(Engine):
    """A server whose `model` can change with a restart."""

    model: Model = field(default_factory=Model)
    slots: int = 64
    generations: tuple[str, ...] = ("/completion",)

    def fault(self, name: str, answer: Answer) -> tuple[Send, Answer]:
        """See `Engine.fault`."""
        return mistakes.fault(name, answer)

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        body = request.body if isinstance(request.body, dict) else {}
        match request.path:
            case "/health":
                return replied({"status": "ok"})
            case "/props":
                return replied(self._props())
            case "/slots":
                slot = {"n_ctx": self.model.context, "speculative": False, "is_processing": False}
                return replied([{"id": index, **slot} for index in range(self.slots)])
            case "/tokenize":
                ids = self.model.ids(body["content"], body.get("parse_special", True))
                return replied({"tokens": ids})
            case "/detokenize":
                return replied({"content": self.model.text(body["tokens"])})
            case "/embedding" | "/rerank":
                message = "This server does not support embeddings. Start it with `--embeddings`"
                return replied(_error(501, message, "not_supported_error"), 501)
            case "/infill":
                message = "Infill is not supported by this model: prefix token is missing. "
                return replied(_error(501, message, "not_supported_error"), 501)
            case "/completion":
                return self._completion(request)
        return replied(_error(404, "File Not Found", "not_found_error"), 404)

    def _props(self) -> Any:
        return {
            "default_generation_settings": {"n_ctx": self.model.context, "params": {}},
            "total_slots": self.slots,
            "model_alias": self.model.name,
            "model_path": f"/models/{self.model.name}",
            "modalities": {"vision": False, "audio": False},
            "media_marker": "<__media_fake__>",
            "chat_template": self.model.template,
            "bos_token": CONTROL[0],
            "eos_token": CONTROL[2],
            "build_info": "b1-fake",
            "is_sleeping": False,
        }

    def _completion(self, request: Request) -> Answer:
        body, prompt = request.body, request.body["prompt"]
        if isinstance(prompt, dict):
            prompt = prompt["prompt_string"]
        ids = self.model.ids(prompt) if isinstance(prompt, str) else prompt
        if any(not isinstance(one, int) or not 0 <= one < SIZE for one in ids):
            message = "Prompt contains invalid tokens"
            return replied(_error(400, message, "invalid_request_error"), 400)
        if len(ids) >= self.model.context:
            error = _error(400, "the request is too long", "exceed_context_size_error")
            error["error"] |= {"n_prompt_tokens": len(ids), "n_ctx": self.model.context}
            return replied(error, 400)
        if not isinstance(prompt, str):
            request.body = {**body, "prompt": self.model.text(ids[-4096:])}
            self.seen[-1] = request.text
        task = Task.of(self.model.text(ids[-4096:]))
        if forced := _forced(body):
            task = Task(self.model.text(forced))
        if body.get("stream"):
            return Answer(
                self._events(body, task, len(ids)), kind=b"text/event-stream", streamed=True
            )
        return Answer(self._whole(body, task, len(ids)))

    async def _steps(
        self, body: dict[str, Any], task: Task, count: int
    ) -> AsyncGenerator[Any, None]:
        """Yield the events of a generation, the last with `stop` set."""
        most, predicted = body.get("n_predict", -1), 0
        cached = 0
        if body.get("cache_prompt", True) and isinstance(body["prompt"], str):
            cached = max(count - 1, 0)
        if body.get("response_fields") == ["timings"] and body.get("cache_prompt"):
            # Latimer tests with this call if the KV cache can drop its last tokens.
            cached = 8
        limited = most == 0
        for character in task.characters():
            if task.interval:
                await asyncio.sleep(task.interval)
            elif not predicted % 8:
                # Other calls have their turns: 32 endless ones must not hold the loop for long.
                await asyncio.sleep(0)
            ids = self.model.ids(character)
            predicted += len(ids)
            limited = 0 <= most <= predicted
            if predicted > most >= 0:
                predicted = most
                break
            event = {
                "index": 0, "content": character, "tokens": [ids[-1]], "stop": False,
                "id_slot": -1, "tokens_predicted": predicted, "tokens_evaluated": count,
            }  # fmt: skip
            if body.get("timings_per_token"):
                event["timings"] = {"cache_n": cached}
            if body.get("n_probs"):
                event["completion_probabilities"] = [self._entry(ids[-1], body["n_probs"])]
            yield event
            if limited:
                break
        if not limited:
            event = {
                "index": 0, "content": "", "tokens": [EOS], "stop": False, "id_slot": -1,
                "tokens_predicted": predicted + 1, "tokens_evaluated": count,
            }  # fmt: skip
            if body.get("n_probs"):
                event["completion_probabilities"] = [self._entry(EOS, body["n_probs"])]
            yield event
        last = {
            "index": 0, "content": "", "tokens": [], "stop": True, "id_slot": 0,
            "model": self.model.name, "tokens_predicted": predicted + (not limited),
            "tokens_evaluated": count, "stop_type": "limit" if limited else "eos",
            "stopping_word": "", "truncated": False, "has_new_line": False, "prompt": "",
            "generation_settings": {}, "tokens_cached": count,
            "timings": {"cache_n": cached, "prompt_n": count - cached, "predicted_n": predicted},
        }  # fmt: skip
        fields = body.get("response_fields") or list(last)
        yield {name: last[name] for name in fields if name in last}

    async def _events(
        self, body: dict[str, Any], task: Task, count: int
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._steps(body, task, count)) as steps:
            async for event in steps:
                yield b"data: " + json.dumps(event).encode() + b"\n\n"

    async def _whole(
        self, body: dict[str, Any], task: Task, count: int
    ) -> AsyncGenerator[bytes, None]:
        events = [
            event async for event in self._steps({**body, "response_fields": []}, task, count)
        ]
        steps, reply = events[:-1], events[-1]
        reply["content"] = "".join(event["content"] for event in steps)
        if body.get("return_tokens"):
            reply["tokens"] = self.model.ids(reply["content"])
        if body.get("n_probs"):
            entries = [event["completion_probabilities"][0] for event in steps]
            reply["completion_probabilities"] = entries
        fields = body.get("response_fields") or list(reply)
        yield json.dumps({name: reply[name] for name in fields if name in reply}).encode()

    def _entry(self, token: int, top: int) -> Any:
        others = [one for one in range(min(top, SIZE)) if one != token]
        ids = [token, *others][: min(top, SIZE)]
        return {
            **self._shown(token, -0.1),
            "top_logprobs": [self._shown(one, -0.1 - (one != token) * (1 + one)) for one in ids],
        }

    def _shown(self, token: int, logprob: float) -> Any:
        piece = self.model.piece(token)
        text = piece.decode(errors="replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}


def _forced(body: dict[str, Any]) -> list[int]:
    """Return the tokens that a grammar or a bias forces."""
    found = [int(one) for one in re.findall(r"<\[(\d+)\]>", body.get("grammar") or "")]
    return found or [
        token
        for token, bias in body.get("logit_bias") or ()
        if bias is not False and bias >= 1000 and isinstance(token, int)
    ]


def _error(code: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "type": kind}}
