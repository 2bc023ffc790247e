"""A translator from OpenAI's API to llama-server's, written by hand for speed.

    python tests/benchmarks/translate.py PORT ENGINE_PORT

It is the yardstick of `proxy.py`: the least that a translation takes in Python, on the same server
(uvicorn on uvloop and httptools) and over a client of its own on httptools. It serves chat in
ChatML and completions, streamed or not, to well-behaved clients of a well-behaved engine. It checks
nothing, handles no errors, and has one set of fields and one choice.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import httptools
import orjson
import uvicorn

_REQUEST = (
    b"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)
_REASONS = {"limit": "length", "eos": "stop", "word": "stop"}
_DONE = b"data: [DONE]\n\n"


class Upstream(asyncio.Protocol):
    """A connection to the engine, for one response at a time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_complete = False
        self._parser: Any = None
        # The parser's callback for data of the body.
        self.on_body = self._parts.append

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._waiter is not None and (self._parts or self._is_complete):
            self._waiter.set_result(None)
            self._waiter = None

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self._is_complete = True

    def send(self, body: bytes) -> None:
        """Send a request."""
        self._is_complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(_REQUEST % (len(body), body))

    async def read(self) -> bytes:
        """Return the data of the body that has arrived; nothing at its end."""
        if not self._parts and not self._is_complete:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class Translator:
    """The ASGI app."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._idle: list[Upstream] = []
        self._sent = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        asked = orjson.loads(body)
        is_chat = scope["path"].endswith("/chat/completions")
        is_streamed = asked.get("stream", False)
        native = {
            "prompt": _prompt(asked["messages"]) if is_chat else asked["prompt"],
            "n_predict": asked.get("max_tokens", -1),
            "temperature": asked.get("temperature", 1.0),
            "top_p": asked.get("top_p", 1.0),
            "stop": asked.get("stop", []),
            "stream": True,
        }
        upstream = self._idle.pop() if self._idle else await self._connect()
        upstream.send(orjson.dumps(native))
        self._sent += 1
        kind = "chat.completion" if is_chat else "text_completion"
        head = {
            "id": f"cmpl-{self._sent}",
            "object": f"{kind}.chunk" if is_chat and is_streamed else kind,
            "created": int(time.time()),
            "model": asked["model"],
        }
        if is_streamed:
            await _stream(upstream, is_chat, head, send)
        else:
            await _reply(upstream, is_chat, head, send)
        self._idle.append(upstream)

    async def _connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(Upstream, "127.0.0.1", self._engine)
        return upstream


def _prompt(messages: list[Any]) -> str:
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _events(begun: bytes, data: bytes) -> tuple[list[Any], bytes]:
    """Return the events that data completes, and the rest of the data."""
    *whole, rest = (begun + data).split(b"\n\n")
    # After `data: `.
    return [orjson.loads(one[6:]) for one in whole], rest


async def _stream(upstream: Upstream, is_chat: bool, head: Any, send: Any) -> None:
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [(b"content-type", b"text/event-stream")]})
    before = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":0,"finish_reason":null,'
    before, after = (
        (before + b'"delta":{"content":', b"}}]}\n\n")
        if is_chat
        else (before + b'"text":', b"}]}\n\n")
    )
    begun = b""
    while data := await upstream.read():
        events, begun = _events(begun, data)
        out = b"".join(
            [before + orjson.dumps(one["content"]) + after for one in events if not one["stop"]]
        )
        if events and events[-1]["stop"]:
            reason = _REASONS[events[-1]["stop_type"]]
            last: dict[str, Any] = {"index": 0, "finish_reason": reason}
            if is_chat:
                last["delta"] = {}
            else:
                last["text"] = ""
            out += b"data: " + orjson.dumps({**head, "choices": [last]}) + b"\n\n" + _DONE
        await send({"type": "http.response.body", "body": out, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _reply(upstream: Upstream, is_chat: bool, head: Any, send: Any) -> None:
    texts, begun, last = [], b"", {}
    while data := await upstream.read():
        events, begun = _events(begun, data)
        for last in events:
            if not last["stop"]:
                texts.append(last["content"])
    text, choice = "".join(texts), {"index": 0, "finish_reason": _REASONS[last["stop_type"]]}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    prompt, completion = last["tokens_evaluated"], last["tokens_predicted"]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    body = orjson.dumps({**head, "choices": [choice], "usage": usage})
    length = (b"content-length", str(len(body)).encode())
    headers = [(b"content-type", b"application/json"), length]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(port: int, engine: int) -> None:
    """Serve until a signal ends the process."""
    uvicorn.run(Translator(engine), port=port, log_level="error", access_log=False, lifespan="off")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
