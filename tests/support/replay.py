"""A koboldcpp replayed byte for byte and chunk for chunk; an unknown request fails.

`tests/recordings/record.py` records a live koboldcpp. A recording is found by method, path and
body, without the body's random parts: `genkey`, and the seed where the temperature is 0.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.recordings import RECORDINGS

EXCHANGES = RECORDINGS / "koboldcpp" / "exchanges.jsonl"
# The exchanges of a koboldcpp that also has an embedding model.
EMBEDDINGS = EXCHANGES.with_name("embeddings.jsonl")
GENERATE = ("/api/extra/generate/stream", "/api/v1/generate")


def key_of(method: str, path: str, body: Any) -> str:
    """Return the key of a request's recording."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "genkey"}
        if body.get("temperature") == 0:
            body.pop("sampler_seed", None)
    return json.dumps([method, path, body], sort_keys=True, ensure_ascii=False)


class Replay:
    """A replay server with the recorded generation of each client's `genkey`."""

    def __init__(self, path: Path = EXCHANGES) -> None:
        self._plain: dict[str, dict[str, Any]] = {}
        self._after: dict[tuple[str, str], dict[str, Any]] = {}
        self._recorded: dict[str, str] = {}
        self._last = ""
        self.unknown: list[str] = []
        self.aborted: list[str] = []
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["after"] is not None:
                self._after[entry["path"], entry["after"]] = entry
            else:
                self._plain[key_of(entry["method"], entry["path"], entry["body"])] = entry

    def _find(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        """Return the recording of a request that does not depend on the one before it."""
        return self._plain.get(key_of(method, path, body))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection, as koboldcpp does."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path, _version = head.splitlines()[0].split()
            length = next(
                (int(h.split(":")[1]) for h in head.lower().splitlines() if "content-length" in h),
                0,
            )
            data = await reader.readexactly(length)
            await self._answer(method, path, json.loads(data) if data else None, writer)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def _answer(
        self, method: str, path: str, body: Any, writer: asyncio.StreamWriter
    ) -> None:
        genkey = body.get("genkey", "") if isinstance(body, dict) else ""
        entry = self._find(method, path, body)
        if path == "/api/extra/abort":
            self.aborted.append(genkey)
            await _send(writer, b"HTTP/1.0 200 OK\r\n\r\n", [b'{"success": "true"}'])
            return
        if path in GENERATE and entry is not None:
            self._recorded[genkey] = entry["genkey"]
            self._last = entry["genkey"]
        elif path in ("/api/extra/last_logprobs", "/api/extra/perf"):
            entry = self._after.get((path, self._recorded.get(genkey, self._last)))
        if entry is None:
            self.unknown.append(key_of(method, path, body))
            message = f"no recording of {self.unknown[-1]}".encode()
            await _send(writer, b"HTTP/1.0 500 No Recording\r\n\r\n", [message])
            return
        chunks = [base64.b64decode(chunk) for chunk in entry["chunks"]]
        await _send(writer, entry["head"].encode("latin-1"), chunks)
        if path == GENERATE[0] and chunks and b'"finish_reason": "' not in b"".join(chunks):
            # The recorded generation ran until it was aborted.
            while genkey not in self.aborted and not writer.is_closing():
                await asyncio.sleep(0.01)


async def _send(writer: asyncio.StreamWriter, head: bytes, chunks: list[bytes]) -> None:
    writer.write(head)
    for chunk in chunks:
        await writer.drain()
        await asyncio.sleep(0.001)
        writer.write(chunk)
    await writer.drain()


@contextlib.contextmanager
def replaying(server: Replay | None = None) -> Iterator[tuple[str, Replay]]:
    """Run the replay server in a thread; yield its address and its state."""
    replay = server or Replay()
    ready = threading.Event()
    address: list[str] = []
    loop = asyncio.new_event_loop()

    async def main() -> None:
        server = await asyncio.start_server(replay.serve, "127.0.0.1", 0, backlog=512)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        async with server:
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve_forever()

    task: list[asyncio.Task[None]] = []

    def run() -> None:
        asyncio.set_event_loop(loop)
        task.append(loop.create_task(main()))
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task[0])
        pending = asyncio.all_tasks(loop)
        for one in pending:
            one.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait(10)
    yield address[0], replay
    loop.call_soon_threadsafe(task[0].cancel)
    thread.join(10)
