"""A koboldcpp replayed byte for byte and chunk for chunk; an unknown request fails.

`tests/recordings/record.py` records a live koboldcpp. A recording is found by method, path and
body, without the body's random parts: `genkey`, and the seed where the temperature is 0.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from latimer.backends.llama_cpp import DEMO_MODEL

from support.embeddings import ids_of
from support.engines.wire import Answer, Engine, Request, one, replied, running
from support.recordings import RECORDINGS

EXCHANGES = RECORDINGS / "koboldcpp" / "exchanges.jsonl"
# The exchanges of a koboldcpp that also has an embedding model.
EMBEDDINGS = EXCHANGES.with_name("embeddings.jsonl")
# The exchanges of a koboldcpp with a model that speaks noise (`tests/models/make_speech.py`).
SPEECH = EXCHANGES.with_name("speech.jsonl")
TOKENCOUNT = "/api/extra/tokencount"
CHECK = "/api/extra/generate/check"
GENERATE = ("/api/extra/generate/stream", "/api/v1/generate")
# Paths of the engine's state, which is that of the last generation.
PERF = "/api/extra/perf"
STATE = ("/api/extra/last_logprobs", PERF, CHECK)
# The response to a request that was never recorded, and what to do. An error of Latimer shows it.
UNKNOWN = (
    "no recording of this request; record it over a running koboldcpp with the demo model, make "
    "record URL=http://127.0.0.1:5001, or leave the payload as it was:"
)


def key_of(method: str, path: str, body: Any) -> str:
    """Return the key of a request's recording."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "genkey"}
        if body.get("temperature") == 0:
            body.pop("sampler_seed", None)
    return json.dumps([method, path, body], sort_keys=True, ensure_ascii=False)


def count_of(text: str) -> dict[str, Any]:
    """Return what koboldcpp says of a text without a BOS, by the tokenizer of the same model."""
    ids = ids_of(DEMO_MODEL, text, add_special=False, parse_special=True)
    return {"value": len(ids), "ids": list(ids)}


class Replay(Engine):
    """A replay server with the recorded generation of each client's `genkey`."""

    def __init__(self, path: Path = EXCHANGES) -> None:
        super().__init__()
        self._plain: dict[str, dict[str, Any]] = {}
        self._after: dict[tuple[str, str], dict[str, Any]] = {}
        self._recorded: dict[str, str] = {}
        # The whole responses by their recorded `genkey`; `CHECK` has their text in the same form.
        self._wholes: dict[str, dict[str, Any]] = {}
        self._last = ""
        self._since = time.monotonic()
        self.unknown: list[str] = []
        self.ended: list[str] = []
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["after"] is not None:
                self._after[entry["path"], entry["after"]] = entry
            else:
                self._plain[key_of(entry["method"], entry["path"], entry["body"])] = entry
                if entry["path"] == GENERATE[1]:
                    self._wholes[entry["genkey"]] = entry

    def _find(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        """Return the recording of a request that does not depend on the one before it."""
        return self._plain.get(key_of(method, path, body))

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`; every response ends its connection."""
        path, body = request.path, request.body
        genkey = body.get("genkey", "") if isinstance(body, dict) else ""
        if path == "/api/extra/abort":
            self.ended.append(genkey)
            return _closing(b"HTTP/1.0 200 OK\r\n\r\n", one(b'{"success": "true"}'))
        entry = self._find(request.method, path, body)
        if path in GENERATE and entry is not None:
            self._recorded[genkey] = self._last = entry["genkey"]
        elif path in STATE:
            entry = self._after.get((path, self._recorded.get(genkey, self._last)))
        if path == PERF:
            # The recordings are of several times, and the replay is one process.
            perf = {"idle": 1} if entry is None else json.loads(_content(entry))
            return replied({**perf, "uptime": time.monotonic() - self._since}, chunked=False)
        if entry is None:
            if path == TOKENCOUNT and not body["special"]:
                # The text of a call that is cut depends on the time, and has no recording.
                return replied(count_of(body["prompt"]))
            whole = self._wholes.get(self._recorded.get(genkey, ""))
            if path == CHECK and whole is not None:
                # Of a whole response that is cut, too.
                return replied(json.loads(_content(whole)))
            self.unknown.append(key_of(request.method, path, body))
            message = f"{UNKNOWN} {self.unknown[-1]}"
            return _closing(b"HTTP/1.0 500 No Recording\r\n\r\n", one(message.encode()))
        chunks = [base64.b64decode(chunk) for chunk in entry["chunks"]]
        # The recorded generation may have run until it was aborted.
        endless = path == GENERATE[0] and b'"finish_reason": "' not in b"".join(chunks)
        parts = self._chunks(chunks, genkey if chunks and endless else None)
        return _closing(entry["head"].encode("latin-1"), parts)

    async def _chunks(self, chunks: list[bytes], until: str | None) -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            await asyncio.sleep(0.001)
            yield chunk
        while until is not None and until not in self.ended:
            await asyncio.sleep(0.01)


def _content(entry: dict[str, Any]) -> bytes:
    return b"".join(map(base64.b64decode, entry["chunks"]))


def _closing(raw: bytes, parts: AsyncGenerator[bytes, None]) -> Answer:
    return Answer(parts, raw=raw, streamed=True, chunked=False)


class AnyPrompt(Replay):
    """A koboldcpp that counts three characters as a token and responds to any prompt.

    Args:
        varied: True to choose among the recorded responses by the prompt; else it is the first.
    """

    def __init__(self, varied: bool = False) -> None:
        super().__init__()
        self._varied = varied

    async def answer(self, request: Request) -> Answer:
        """See `Engine.answer`."""
        body, path = request.body, request.path
        known = self._varied and self._find(request.method, path, body) is not None
        match path:
            case "/api/extra/tokencount" if not known:
                ids = list(range(-(-len(body["prompt"]) // 3)))
                return replied({"value": len(ids), "ids": ids})
            case "/api/extra/detokenize" if not known:
                return replied({"result": "A" * len(body["ids"])})
            case "/api/extra/version" if not known:
                return replied({"result": "KoboldCpp", "version": "1.115.1", "vision": True})
        return await super().answer(request)

    def _find(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        found = super()._find(method, path, body)
        if path not in GENERATE or (found is not None and self._varied):
            return found
        if body.get("grammar") == 'root ::= ""' and not self._varied:
            return found
        # A koboldcpp never generates more tokens than it is asked for.
        most = body.get("max_length", 0)
        every = [entry for entry in self._plain.values() if entry["path"] == path]
        same = [entry for entry in every if entry["body"]["max_length"] <= most] or every
        digest = hashlib.sha256(str(body.get("prompt")).encode("utf-8", "replace")).digest()
        return same[digest[0] % len(same) if self._varied else 0]


@contextlib.contextmanager
def replaying(server: Replay | None = None) -> Iterator[tuple[str, Replay]]:
    """Run the replay server in a thread; yield its address and its state."""
    with running(server or Replay()) as replay:
        yield replay.url, replay
