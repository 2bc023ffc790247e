"""A small server that keeps every promise, with hooks where a fault can break one.

It is written from the contract alone: what is judged by the suite must not be what wrote it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from suite import model
from suite.rules import Refused, check_body, parse

Send = Callable[[dict[str, Any]], Awaitable[None]]
COMPLETIONS, CHAT = "/completions", "/chat/completions"


class Fault:
    """Nothing is wrong; a fault overrides what it breaks."""

    fails: frozenset[str] = frozenset()

    def head(self, method: str, path: str, headers: dict[str, str]) -> None:
        """Look at a request before its body is read; may raise `Refused`."""

    def raw(self, body: bytes) -> bytes:
        """The body as it came."""
        return body

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request before it is validated."""
        return body

    def valid(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request after it was validated."""
        return body

    def reply(self, path: str, body: dict[str, Any], sent: Mapping[str, Any]) -> Any:
        """The body of a plain reply."""
        return body

    def chunks(self, path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        """The chunks of a stream."""
        return chunks

    def event(self, data: bytes) -> bytes:
        """An event of a stream, as bytes."""
        return data

    def error(self, status: int, error: dict[str, Any], sent: Mapping[str, Any]) -> tuple[int, Any]:
        """A refusal's status and body."""
        return status, {"error": error}

    def headers(self, status: int, headers: dict[str, str]) -> dict[str, str]:
        """The headers of a reply."""
        return headers


class Server:
    """The ASGI app."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault or Fault()
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()
        self._running = 0
        self._last: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        method = scope["method"]
        path = scope["raw_path"].decode().split("?")[0].removeprefix("/v1")
        sent: dict[str, Any] = {}
        try:
            self.fault.head(method, path, headers)
            if path.startswith("/models"):
                await self._models(method, path, send)
                return
            if path not in (COMPLETIONS, CHAT):
                raise Refused(f"Invalid URL ({method} {path})", status=404)
            if method != "POST":
                raise Refused(f"Not allowed to {method} on {path}.", status=405)
            if "json" not in headers.get("content-type", "application/json"):
                raise Refused("Unsupported content type.", code="unsupported_content_type")
            body = parse(self.fault.raw(await _read(receive)))
            sent = self.fault.request(path, body)
            check_body(path, sent)
            sent = self.fault.valid(path, sent)
            await self._answer(path, sent, send, receive)
        except Refused as refused:
            error = {
                "message": refused.message,
                "type": "invalid_request_error",
                "param": refused.param,
                "code": refused.code,
            }
            status, value = self.fault.error(refused.status, error, sent)
            more = {"allow": "POST"} if refused.status == 405 else {}
            await self._send(send, status, value, more)

    async def _send(
        self, send: Send, status: int, body: Any, more: Mapping[str, str] | None = None
    ) -> None:
        headers = self._head("application/json", more or {})
        await _start(send, status, self.fault.headers(status, headers))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await send({"type": "http.response.body", "body": data})

    def _head(self, kind: str, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "content-type": kind,
            "x-request-id": f"req_{next(self._numbers):032x}",
            "openai-processing-ms": "1",
            "openai-version": "2020-10-01",
            "access-control-allow-origin": "*",
            **more,
        }

    async def _models(self, method: str, path: str, send: Send) -> None:
        one = {"id": "org/toy", "object": "model", "created": 1_700_000_000, "owned_by": "suite"}
        if path == "/models":
            listed = {"object": "list", "data": [one]}
            await self._send(send, 200, self.fault.reply(path, listed, {}))
            return
        if unquote(path.removeprefix("/models/")) != one["id"]:
            raise Refused("The model does not exist.", code="model_not_found", status=404)
        await self._send(send, 200, self.fault.reply("/models/", one, {}))

    async def _answer(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        crowded = getattr(self.fault, "crowded", 0)
        self._running += 1
        try:
            if crowded:
                await asyncio.sleep(0.005)
            if crowded and self._running > 20:
                error = {"message": "Busy.", "type": "server_error", "param": None, "code": None}
                await self._send(send, crowded, {"error": error})
                return
            await self._serve(path, sent, send, receive)
        finally:
            self._running -= 1

    async def _serve(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        series = re.fullmatch(r"\d, \d+, \d+,", str(sent.get("prompt")))
        if getattr(self.fault, "mixes", False) and series and sent.get("max_tokens") in (0, 6):
            # Two that come at once get the later one's answer.
            self._last = sent
            await asyncio.sleep(0.005)
            sent = self._last if self._last.get("stream") == sent.get("stream") else sent
        async with self._lock:
            pass
        work = _Work(path, sent)
        work.check_context()
        chat = path == CHAT
        name = f"chatcmpl-{next(self._numbers)}" if chat else f"cmpl-{next(self._numbers)}"
        head = {"id": name, "created": 1_700_000_000, "model": sent["model"],
                "system_fingerprint": "fp_0"}  # fmt: skip
        slow = (sent.get("max_tokens") or 0) >= 200
        if not sent.get("stream"):
            body = {"object": "chat.completion" if chat else "text_completion", **head,
                    **work.whole()}  # fmt: skip
            await self._send(send, 200, self.fault.reply(path, body, sent))
            return
        headers = self._head("text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        await _start(send, 200, self.fault.headers(200, headers))
        kind = "chat.completion.chunk" if chat else "text_completion"
        chunks = [{"object": kind, **head, **chunk} for chunk in work.chunks()]
        chunks = self.fault.chunks(path, chunks, sent)
        if getattr(self.fault, "buffers", False) and slow:
            await asyncio.sleep(1.2)
            slow = False
        async for data in self._paced(chunks, slow, receive):
            await send({"type": "http.response.body", "body": self.fault.event(data),
                        "more_body": True})  # fmt: skip
        if getattr(self.fault, "lingers", False) and sent.get("max_tokens") == 12:
            await asyncio.sleep(8)
        await send({"type": "http.response.body", "body": b""})

    async def _paced(self, chunks: list[Any], slow: bool, receive: Any) -> AsyncIterator[bytes]:
        """Events; a long answer takes its time, and the engine, until its client leaves."""
        gone = asyncio.ensure_future(receive())
        try:
            async with self._lock if slow else contextlib.nullcontext():
                for chunk in chunks:
                    if slow:
                        await asyncio.sleep(0.002)
                    if gone.done() and self.leaves(gone.result()):
                        return
                    yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            gone.cancel()

    def leaves(self, message: Mapping[str, Any]) -> bool:
        """Whether a message says that the client has gone."""
        return message["type"] == "http.disconnect" and not getattr(self.fault, "stays", False)


class _Work:
    """A valid request, worked out."""

    def __init__(self, path: str, sent: Mapping[str, Any]) -> None:
        self.chat = path == CHAT
        self.sent = sent
        self.n = sent.get("n") or 1
        self.candidates = max(sent.get("best_of") or 1, self.n)
        limit = sent.get("max_tokens")
        if self.chat:
            limit = limit or sent.get("max_completion_tokens")
        self.limit = limit if limit is not None else (None if self.chat else 16)
        stop = sent.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else stop
        self.prompts = self._chat_prompt() if self.chat else self._prompts()

    def _chat_prompt(self) -> list[tuple[list[int], str]]:
        ids: list[int] = []
        for message in self.sent["messages"]:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            text = f"{message['role']}\n{content}"
            ids += [model.TURN, *text.encode("utf-8", "replace"), model.TURN_END, 10]
        return [([*ids, model.TURN, *b"assistant\n"], "")]

    def _prompts(self) -> list[tuple[list[int], str]]:
        prompt = self.sent.get("prompt")
        if prompt is None:
            prompt = ""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [self._one(item) for item in prompt]

    def _one(self, item: Any) -> tuple[list[int], str]:
        if isinstance(item, str):
            ids = model.tokenize(item.encode("utf-8", "replace").decode(), True)
            text = item
        else:
            if any(token >= model.SIZE for token in item):
                raise Refused("Invalid 'prompt': an id beyond the vocabulary.", "prompt")
            ids = item
            text = b"".join(map(model.piece, item)).decode(errors="replace")
        if self.sent.get("suffix"):
            ids = [*self.sent["suffix"].encode(), *ids]
        return ids or [model.END], text

    def check_context(self) -> None:
        for ids, _text in self.prompts:
            total = len(ids) + (self.limit or 0)
            if total > model.CONTEXT:
                raise Refused(
                    f"This model's maximum context length is {model.CONTEXT} tokens, however you "
                    f"requested {total} tokens.", "messages" if self.chat else "prompt",
                    "context_length_exceeded",
                )  # fmt: skip

    def choices(self) -> list[_Choice]:
        """Every choice that is kept."""
        kept: list[_Choice] = []
        self.generated = 0
        for ids, text in self.prompts:
            made = [_Choice(self, ids, text, number) for number in range(self.candidates)]
            self.generated += sum(choice.count for choice in made)
            if self.candidates > self.n:
                made.sort(key=lambda choice: -choice.score)
            kept += made[: self.n]
        return kept

    def usage(self) -> dict[str, int]:
        prompt = sum(len(ids) for ids, _ in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
        }

    def whole(self) -> dict[str, Any]:
        choices = [choice.whole(index) for index, choice in enumerate(self.choices())]
        return {"choices": choices, "usage": self.usage()}

    def chunks(self) -> list[Any]:
        parts: list[Any] = []
        for index, choice in enumerate(self.choices()):
            parts += choice.chunks(index)
        wants = (self.sent.get("stream_options") or {}).get("include_usage")
        if wants:
            parts = [{**part, "usage": None} for part in parts]
            parts.append({"choices": [], "usage": self.usage()})
        return parts


class _Choice:
    """One choice, generated to its end."""

    def __init__(self, work: _Work, ids: list[int], prompt: str, number: int) -> None:
        self.work = work
        self.prompt_ids, self.prompt = ids, prompt
        sent = work.sent
        seed = sent.get("seed")
        rng = random.Random(None if seed is None else seed + number)
        bias = {int(token): value for token, value in (sent.get("logit_bias") or {}).items()}
        self.tokens: list[tuple[int, list[float]]] = []
        counts: Counter[int] = Counter()
        self.reason = "length"
        limit = model.CONTEXT - len(ids) if work.limit is None else work.limit
        temperature = 1 if sent.get("temperature") is None else sent["temperature"]
        top_p = 1 if sent.get("top_p") is None else sent["top_p"]
        data = b""
        self.cut: int | None = None
        while len(self.tokens) < limit:
            values = model.logits([*ids, *(token for token, _ in self.tokens)])
            token = model.draw(values, rng, temperature, top_p, bias, counts,
                               sent.get("presence_penalty") or 0,
                               sent.get("frequency_penalty") or 0)  # fmt: skip
            logprobs = model.log_softmax(values)
            if token >= 256:
                self.reason, self.end = "stop", (token, logprobs)
                break
            counts[token] += 1
            self.tokens.append((token, logprobs))
            data += bytes([token])
            ends = [data.find(stop.encode("utf-8", "replace")) for stop in work.stops if stop]
            ends = [end for end in ends if end >= 0]
            if ends:
                self.reason, self.cut = "stop", min(ends)
                break
        if self.cut is not None:
            data, self.tokens = data[: self.cut], self.tokens[: self.cut]
        self.data = data
        self.text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        self.count = len(self.tokens)
        own = [logprobs[token] for token, logprobs in self.tokens]
        self.score = sum(own) / len(own) if own else -9999.0

    def entries(self) -> list[tuple[int, list[float] | None, int]]:
        """Tokens with the distribution of their place, and their offsets."""
        listed: list[tuple[int, list[float] | None]] = []
        echo = self.work.sent.get("echo")
        if echo:
            for at, token in enumerate(self.prompt_ids):
                before = self.prompt_ids[:at]
                listed.append((token, model.log_softmax(model.logits(before)) if at else None))
        listed += self.tokens
        if echo and self.reason == "stop" and self.cut is None and hasattr(self, "end"):
            listed.append(self.end)
        offset = 0 if echo else len(self.prompt)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = []
        last = len(listed) - 1
        for at, (token, logprobs) in enumerate(listed):
            found.append((token, logprobs, offset))
            ending = at == last and token >= 256 and at >= len(self.prompt_ids)
            if not ending:
                offset += len(decoder.decode(model.piece(token)))
        return found

    def legacy(self, entries: list[Any]) -> Any:
        count = self.work.sent.get("logprobs")
        if count is None:
            return None
        return {
            "tokens": [_legacy(token) for token, _, _ in entries],
            "token_logprobs": [p[token] if p else None for token, p, _ in entries],
            "top_logprobs": [
                {**{_legacy(o): p[o] for o in _best(p, count)}, _legacy(token): p[token]}
                if p else None
                for token, p, _ in entries
            ] if count else None,
            "text_offset": [offset for _, _, offset in entries],
        }  # fmt: skip

    def chat_logprobs(self, tokens: list[Any]) -> Any:
        if not self.work.sent.get("logprobs"):
            return None
        count = self.work.sent.get("top_logprobs") or 0
        return {
            "content": [
                {**_chat(token, p), "top_logprobs": [_chat(o, p) for o in _best(p, count)]}
                for token, p in tokens
            ],
            "refusal": None,
        }

    def whole(self, index: int) -> Any:
        if self.work.chat:
            message = {"role": "assistant", "content": self.text, "refusal": None}
            return {"index": index, "message": message, "finish_reason": self.reason,
                    "logprobs": self.chat_logprobs(self.tokens)}  # fmt: skip
        text = (self.prompt if self.work.sent.get("echo") else "") + self.text
        return {"text": text, "index": index, "finish_reason": self.reason,
                "logprobs": self.legacy(self.entries())}  # fmt: skip

    def chunks(self, index: int) -> list[Any]:
        """A chunk for each character, with the tokens that are its bytes."""
        parts: list[Any] = []
        if self.work.chat:
            first = {"role": "assistant", "content": "", "refusal": None}
            parts.append(_delta(index, first, self.chat_logprobs([]), None))
        entries = self.entries()
        at = 0
        if self.work.sent.get("echo"):
            at = len(self.prompt_ids)
            parts.append(_text(index, self.prompt, self.legacy(entries[:at]), None))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        waiting = 0
        for number, (token, _) in enumerate(self.tokens):
            text = decoder.decode(model.piece(token))
            waiting += 1
            if not text:
                continue
            start, end = number + 1 - waiting, number + 1
            waiting = 0
            if self.work.chat:
                told = self.chat_logprobs(self.tokens[start:end])
                parts.append(_delta(index, {"content": text}, told, None))
            else:
                parts.append(_text(index, text, self.legacy(entries[at + start : at + end]), None))
        rest = entries[at + len(self.tokens) - waiting :]
        if self.work.chat:
            parts.append(_delta(index, {}, None, self.reason))
        else:
            parts.append(_text(index, "", self.legacy(rest), self.reason))
        return parts


def _delta(index: int, delta: Any, logprobs: Any, reason: str | None) -> Any:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return {"choices": [choice]}


def _text(index: int, text: str, logprobs: Any, reason: str | None) -> Any:
    choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
    return {"choices": [choice]}


def _best(logprobs: list[float], count: int) -> list[int]:
    return sorted(range(model.SIZE), key=lambda token: (-logprobs[token], token))[:count]


def _legacy(token: int) -> str:
    data = model.piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat(token: int, logprobs: list[float]) -> Any:
    data = model.piece(token)
    text = data.decode() if token < 128 or token >= 256 else f"\\x{token:02x}"
    shown = list(data) if token < 256 else None
    return {"token": text, "logprob": logprobs[token], "bytes": shown}


async def _read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
