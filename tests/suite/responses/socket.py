"""The WebSocket of responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from suite.responses.objects import answer, events
from suite.responses.routes import LONG, State, given_in
from suite.responses.rules import check, check_calls, unsupported
from suite.responses.turns import as_chat
from suite.rules import Refused, parse

if TYPE_CHECKING:
    from suite.responses.routes import Routes
    from suite.server import Send, Server

LANES, FRAME = 32, 32 << 20
NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class Socket:
    """One connection.

    Attributes:
        kept: the id and the items of the latest response of each lane.
    """

    def __init__(self, server: Server, routes: Routes, receive: Any, send: Send) -> None:
        self._server, self._fault = server, server.fault
        self._stored: State = routes.state
        self._receive, self._send = receive, send
        self._locks: dict[str, asyncio.Lock] = {}
        self._gone = asyncio.Event()
        self.kept: dict[str, tuple[str, list[Any]]] = {}
        self.all: dict[str, list[Any]] = routes.shared if self._fault.shares else {}

    async def run(self) -> None:
        """Answer frames until the client leaves."""
        await self._receive()
        await self._send({"type": "websocket.accept"})
        tasks: list[asyncio.Task[None]] = []
        while (message := await self._receive())["type"] != "websocket.disconnect":
            frame: dict[str, Any] = {}
            try:
                data = message.get("text")
                if data is None:
                    raise Refused("Expected a text frame.")
                frame = self._fault.frame(parse(data.encode()))
                lane = self._lane(frame)
                if frame.get("type") == "response.create":
                    tasks.append(asyncio.create_task(self._create(frame, lane)))
                    # Tasks take the lock of their lane in this order.
                    await asyncio.sleep(0)
                else:
                    await self._other(frame)
            except Refused as refused:
                await self._refuse(refused, frame, named=refused.code != "invalid_stream_id")
        self._gone.set()
        await asyncio.gather(*tasks)

    def _lane(self, frame: Mapping[str, Any]) -> str:
        name = frame.get("stream_id")
        if name is None:
            return ""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            text = "The 'stream_id' field must be a non-empty string."
            raise Refused(text, "stream_id", "invalid_stream_id")
        if name not in self._locks and len(self._locks.keys() - {""}) >= self._fault.lanes:
            text = "This WebSocket connection has reached its maximum number of stream IDs (32)."
            raise Refused(text, "stream_id", "websocket_stream_limit_reached")
        self._locks.setdefault(name, asyncio.Lock())
        return name

    async def _other(self, frame: Mapping[str, Any]) -> None:
        kind = frame.get("type")
        if kind == "response.processed":
            if self._fault.tells_processed:
                await self._tell({"type": "response.processed"})
            return
        if kind == "response.steer":
            error = {"type": "invalid_request_error", "code": "steering_not_supported",
                     "message": "This server does not steer."}  # fmt: skip
            await self._tell({"type": self._fault.steered, "sequence_number": 0, "error": error,
                              "steer": {"previous_response_id": "", "input": ""}})  # fmt: skip
            return
        raise Refused(f"Unknown type: {kind}.", "type", "invalid_value")

    async def _create(self, frame: Mapping[str, Any], lane: str) -> None:
        lock = self._locks.setdefault(lane, asyncio.Lock())
        async with lock if self._fault.in_order else asyncio.Lock():
            try:
                await self._answer(frame, lane)
            except Refused as refused:
                latest = self.kept.get(lane)
                before = frame.get("previous_response_id")
                own = latest is not None and latest[0] == before
                if own and self._fault.evicts:
                    self.all.pop(str(before), None)
                    del self.kept[lane]
                elif before and not own and self._fault.evicts_forks:
                    self.kept, self.all = {}, {}
                await self._refuse(refused, frame)

    async def _answer(self, frame: Mapping[str, Any], lane: str) -> None:
        body = {name: value for name, value in frame.items()
                if name not in ("type", "stream_id", "generate", "stream")}  # fmt: skip
        if body.get("background"):
            raise unsupported("background")
        if len(json.dumps(body)) > FRAME // 2:
            raise Refused("Invalid 'metadata': it is too long.", "metadata")
        check(body)
        before = self._before(body.get("previous_response_id"))
        given = given_in(body)
        check_calls([*before, *given])
        await self._server.ready()
        chat = as_chat(body, [*before, *given])
        whole = answer(body, chat, self._server.clock(), self._server.turn(body))
        if frame.get("generate") is False and self._fault.warms_up:
            usage = whole["usage"]
            usage |= {"output_tokens": 0, "total_tokens": usage["input_tokens"]}
            whole |= {"output": [], "status": "completed", "incomplete_details": None}
        told = self._fault.frames(events(whole, False), dict(frame))
        if lane:
            told = [{**event, "stream_id": lane} for event in told]
        slow = (body.get("max_output_tokens") or 0) >= LONG
        found = self._server.paced(self._fault.lane(told), slow, self._left)
        await self._sent(found, whole, body, lane, [*before, *given])

    async def _sent(
        self, found: AsyncIterator[tuple[Any, bool]], whole: Any, body: Any, lane: str, items: Any
    ) -> None:
        """Send events; before the last one the response can be continued."""
        async for event, _died in found:
            if event.get("type", "").startswith(f"response.{whole['status']}"):
                self._keep(whole, body, lane, [*items, *whole["output"]])
            await self._tell(event)
            if not self._fault.in_order:
                await asyncio.sleep(0.005)

    def _keep(self, whole: Any, body: Any, lane: str, items: list[Any]) -> None:
        if whole["store"]:
            self._stored.keep(whole, body, given_in(body))
        if lane in self.kept and not self._fault.keeps_older:
            self.all.pop(self.kept[lane][0], None)
        self.kept[lane] = (whole["id"], items)
        self.all[whole["id"]] = items

    def _before(self, name: str | None) -> list[Any]:
        """Return the items before a request."""
        if name is None:
            return []
        if name in self.all and self._fault.keeps:
            return self.all[name]
        return self._stored.before({"previous_response_id": name})

    async def _left(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _refuse(self, refused: Refused, frame: Mapping[str, Any], named: bool = True) -> None:
        error = {"type": "invalid_request_error", "code": refused.code,
                 "message": refused.message, "param": refused.param}  # fmt: skip
        told = {"type": "error", "status": refused.status, "error": error}
        if named and frame.get("stream_id"):
            told["stream_id"] = frame["stream_id"]
        told = self._fault.refusal(told)
        if told:
            await self._tell(told)
        if self._fault.closes:
            await self._send({"type": "websocket.close", "code": 1008})

    async def _tell(self, frame: Any) -> None:
        if self._gone.is_set():
            return
        text = frame if isinstance(frame, str) else json.dumps(frame)
        if self._fault.binary:
            await self._send({"type": "websocket.send", "bytes": text.encode()})
        else:
            await self._send({"type": "websocket.send", "text": text})


async def refuse(send: Send, status: int, error: Mapping[str, Any] | None) -> None:
    """Answer a handshake with an error."""
    body = b"" if error is None else json.dumps({"error": error}).encode()
    head = [(b"content-type", b"application/json")]
    await send({"type": "websocket.http.response.start", "status": status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": body})
