"""Record the exchanges that the tests have with a live koboldcpp, for the replay server.

    koboldcpp --model backends/llama_cpp/demo.gguf --contextsize 2048 --port 5001
    python tests/recordings/record.py http://127.0.0.1:5001

The script puts a recording proxy in front of the live server and runs the tests that use koboldcpp
against it. It writes `koboldcpp/exchanges.jsonl` with one exchange per line: the head of the
response as it was sent, and every chunk of its body as it arrived. Earlier recordings are kept;
remove the file to start over. Further arguments select tests and go to pytest.

    koboldcpp --model backends/llama_cpp/demo.gguf --embeddingsmodel tests/models/bert-cls.gguf \\
        --contextsize 2048 --port 5001
    python tests/recordings/record.py http://127.0.0.1:5001 \\
        tests/backends/koboldcpp/test_embeddings.py

The tests of embeddings are recorded alone, in `koboldcpp/embeddings.jsonl`. Those of speech
are in `koboldcpp/speech.jsonl`, with the models of `tests/models/make_speech.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.engines.replay import EMBEDDINGS, EXCHANGES, GENERATE, SPEECH, STATE, key_of  # noqa: E402

# The tests that are recorded alone: their file of exchanges, and the variable of their server.
ALONE = {
    "tests/backends/koboldcpp/test_embeddings.py": (
        EMBEDDINGS, "LATIMER_KOBOLDCPP_EMBEDDINGS_URL"
    ),
    "tests/backends/koboldcpp/test_speech.py": (SPEECH, "LATIMER_KOBOLDCPP_SPEECH_URL"),
}  # fmt: skip


class Recorder:
    """A proxy that forwards requests and records the responses."""

    def __init__(self, host: str, port: int, path: Path) -> None:
        self._address = (host, port)
        self._path = path
        self._last = ""
        # Python keeps no reference to the task of a connection.
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self.entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._keep(json.loads(line))

    def _keep(self, entry: dict[str, Any]) -> None:
        """Keep an exchange in place of an earlier one of the same request."""
        path, after = entry["path"], entry["after"]
        request = key_of(entry["method"], path, entry["body"])
        self.entries[request if after is None else f"{path} {after}"] = entry

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            text = head.decode("latin-1")
            method, path, _version = text.splitlines()[0].split()
            length = next(
                (int(h.split(":")[1]) for h in text.lower().splitlines() if "content-length" in h),
                0,
            )
            data = await reader.readexactly(length)
            body = json.loads(data) if data else None
            await self._pass(method, path, body, head + data, writer)
        writer.close()
        self._tasks.discard(task)

    async def _pass(
        self, method: str, path: str, body: Any, request: bytes, writer: asyncio.StreamWriter
    ) -> None:
        genkey = body.get("genkey", "") if isinstance(body, dict) else ""
        if path in GENERATE:
            self._last = genkey
        after = (genkey or self._last) if path in STATE else None
        reader, upstream = await asyncio.open_connection(*self._address)
        chunks: list[bytes] = []
        try:
            upstream.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            while chunk := await reader.read(65536):
                chunks.append(chunk)
                # The test may have disconnected; the recording is complete all the same.
                if not writer.is_closing():
                    with contextlib.suppress(ConnectionError):
                        writer.write(chunk)
                        await writer.drain()
        finally:
            upstream.close()
        if path in GENERATE:
            await self._ask_state(genkey)
        if path == "/api/extra/abort":
            return
        entry = {
            "method": method,
            "path": path,
            "body": body,
            "genkey": genkey,
            "after": after,
            "head": head.decode("latin-1"),
            "chunks": [base64.b64encode(chunk).decode() for chunk in chunks],
        }
        self._keep(entry)

    async def _ask_state(self, genkey: str) -> None:
        """Request the engine's state after a generation, whether or not the tests do."""
        body = json.dumps({"genkey": genkey}).encode()
        for method, path, data in (("POST", STATE[0], body), ("GET", STATE[1], b"")):
            reader, upstream = await asyncio.open_connection(*self._address)
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            upstream.write(head.encode() + data)
            answer, _, content = (await reader.read()).partition(b"\r\n\r\n")
            upstream.close()
            if b'"logprobs": null' in content or f"{path} {genkey}" in self.entries:
                # The next generation has begun, or the tests have already requested the state.
                continue
            self._keep(
                {
                    "method": method,
                    "path": path,
                    "body": json.loads(body) if data else None,
                    "genkey": genkey,
                    "after": genkey,
                    "head": answer.decode("latin-1") + "\r\n\r\n",
                    "chunks": [base64.b64encode(content).decode()],
                }
            )

    def write(self) -> None:
        """Write the recordings, with state only for the recorded generations."""
        kept = {e["genkey"] for e in self.entries.values() if e["path"] in GENERATE}
        with self._path.open("w") as file:
            for entry in self.entries.values():
                if entry["after"] is None or entry["after"] in kept:
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")


async def main(address: str) -> int:
    """Record what the tests exchange with a live server and return their exit code."""
    parts = urlsplit(address)
    alone = " ".join(sys.argv[2:])
    path, variable = ALONE.get(alone, (EXCHANGES, "LATIMER_KOBOLDCPP_URL"))
    recorder = Recorder(parts.hostname or "127.0.0.1", parts.port or 5001, path)
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0, backlog=512)
    port = server.sockets[0].getsockname()[1]
    tests = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:randomly", "-k", "koboldcpp"),
        *sys.argv[2:],
        cwd=HERE.parent.parent,
        env={**os.environ, variable: f"http://127.0.0.1:{port}"},
    )
    code = await tests.wait()
    # The engine closes a connection a moment after the response that the last test has read.
    await asyncio.sleep(1)
    server.close()
    if code == 0:
        recorder.write()
        print(f"{len(recorder.entries)} exchanges in {path}")
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
