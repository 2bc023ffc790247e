"""A Latimer that stores completions, and what its client, log and `/health` show."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
import time
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.projector import png, projector
from support.reader import DEMO_WIDTH

from chaos.client import Reply, ask, get, post
from chaos.judge import error_of, shape
from chaos.process import BAD, Latimer

CHAT = "/v1/chat/completions"
# A part of every stored text; a log with it shows stored text.
SECRET = "rumpelstiltskin"
# Seconds that a chat reply, and a reply about stored completions, can take during a fault.
CHAT_SECONDS, READ_SECONDS = 2.0, 5.5
# Lines of the log during a fault.
LINES = 12


class Seen(NamedTuple):
    """Observations of a fault, one cell of the table for each place."""

    fault: str
    chat: str
    reads: str
    health: str
    log: str
    afterwards: str


@dataclass
class Sent:
    """A request that was answered and whose completion must be stored."""

    text: str
    image: str


class Storing:
    """A Latimer with the demo model and a store.

    Args:
        store: the setting `--store`.
        words: further arguments.
        environment: additional environment variables.
    """

    def __init__(self, store: str, *words: str, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="latimer-stored-")
        model = projector(Path(self._folder.name) / "mmproj.gguf", DEMO_WIDTH)
        sizes = ["--context", "1024", "--parallel", "8", "--threads", "1", "--gpu-layers", "0"]
        common = [*sizes, "--any-model", "--mmproj", str(model), "--queue", "500"]
        self.latimer = Latimer([*common, "--store", store, *words], **environment)
        self.answered: dict[str, Sent] = {}
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Start the process."""
        await self.latimer.start()

    async def stop(self, seconds: float = 10.0) -> int | None:
        """End the process; see `Latimer.stop`."""
        try:
            return await self.latimer.stop(seconds)
        finally:
            self._folder.cleanup()

    async def kill(self) -> None:
        """End the process with SIGKILL."""
        self.latimer.process.kill()
        self.latimer.process.wait()
        await self.latimer.stop()

    async def post(
        self, image: bool = False, stream: bool = False, fields: Mapping[str, Any] | None = None
    ) -> Reply:
        """Send a request with `store: true`, and note the completion that it says is stored."""
        number = next(self._numbers)
        text = f"{SECRET} {number}-{time.monotonic_ns()}"
        content: Any = text
        url = ""
        if image:
            picture = png(*(number // 16**place % 16 * 16 for place in range(3)))
            url = f"data:image/png;base64,{b64encode(picture).decode()}"
            image_part = {"type": "image_url", "image_url": {"url": url}}
            content = [{"type": "text", "text": text}, image_part]
        body = {
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4,
            "store": True, "stream": stream, "metadata": {"text": text}, **(fields or {}),
        }  # fmt: skip
        reply = await ask(self.latimer.port, post(CHAT, body), 60)
        ignored = reply.headers.get("x-latimer-ignored", "").split(", ")
        is_stored = reply.status == 200 and not reply.problem and "store" not in ignored
        if is_stored and error_of(reply) is None:
            found = reply.chunks()[0] if reply.streamed else reply.json()
            self.answered[found["id"]] = Sent(text, url)
        return reply

    async def get(self, path: str = "", method: str = "GET", seconds: float = 30) -> Reply:
        """Send a request about stored completions."""
        return await ask(self.latimer.port, get(CHAT + path, method), seconds)

    async def listed(self) -> list[str]:
        """Return the ids of all stored completions.

        Raises:
            ConnectionError: a page was not answered.
        """
        found: list[str] = []
        after = ""
        while True:
            reply = await self.get(f"?limit=100{after}")
            body = reply.json()
            if reply.status != 200 or not body:
                raise ConnectionError(str(reply))
            found += [one["id"] for one in body["data"]]
            if not body["has_more"]:
                return found
            after = f"&after={found[-1]}"

    async def partial(self, names: list[str]) -> list[str]:
        """Return a sentence for each stored completion that is not whole."""
        found = []
        for name in names:
            reply, messages = await self.get(f"/{name}"), await self.get(f"/{name}/messages")
            if reply.status != 200 or messages.status != 200:
                found.append(f"a listed completion is not found: {reply}, {messages}")
                continue
            whole, message = reply.json(), messages.json()["data"][0]
            if whole["choices"][0]["finish_reason"] is None or not whole["metadata"]["text"]:
                found.append(f"a listed completion is not whole: {reply}")
            if message["content"] != whole["metadata"]["text"]:
                found.append(f"a listed completion has other messages: {messages}")
            sent = self.answered.get(name)
            if sent is not None and (sent.text != message["content"]):
                found.append(f"a listed completion is of another request: {messages}")
            parts = message["content_parts"] or ()
            images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
            if not all(map(_is_png, images)) or (sent and [*filter(None, [sent.image])] != images):
                found.append(f"a listed completion has another image: {messages}")
        return found

    async def health(self) -> str:
        """Return the status of `/health`, and what it says about the store."""
        reply = await ask(self.latimer.port, get("/health"), 5)
        body = reply.json() or {}
        store = body.get("store") or body.get("error", {}).get("message")
        return f"{reply.status} {store if isinstance(store, str) else json.dumps(store)}"


class Watch:
    """Notes of what a client, `/health` and the log show while the store fails.

    Args:
        old: the id of a completion that was stored before.
        violations: the list of violations.
        chat: the statuses of chat that are allowed; an error event of a stream counts as 503.
        reads: the statuses of reads that are allowed.

    Attributes:
        afterwards: what was seen when the fault was over.
    """

    def __init__(
        self,
        storing: Storing,
        old: str,
        violations: list[str],
        chat: frozenset[int] = frozenset({200}),
        reads: frozenset[int] = frozenset({200, 503}),
    ) -> None:
        self.storing = storing
        self.violations = violations
        self.afterwards = ""
        self._old = old
        self._allowed = {"chat": chat, "reads": reads}
        self._start = len(storing.latimer.output())
        self._seen: dict[str, Counter[str]] = {
            name: Counter() for name in ("chat", "get", "list", "health")
        }
        self._slowest: dict[str, float] = {}

    async def look(self, seconds: float, pause: float = 0.2) -> None:
        """Chat, read and look at `/health` from time to time, all at once."""
        end = time.monotonic() + seconds
        numbers = itertools.count()

        async def chat() -> None:
            number = next(numbers)
            await self.chat(image=number % 3 == 0, stream=number % 3 == 1)

        async def reads() -> None:
            self._note("reads", "get", await self.storing.get(f"/{self._old}"), READ_SECONDS)
            self._note("reads", "list", await self.storing.get("?limit=5"), READ_SECONDS)

        async def health() -> None:
            self._seen["health"][await self.storing.health()] += 1

        async def again(what: Any) -> None:
            while time.monotonic() < end:
                await what()
                await asyncio.sleep(pause)

        await asyncio.gather(*map(again, (chat, reads, health)))

    async def chat(self, **request: Any) -> None:
        """Send a request; see `Storing.post`."""
        self._note("chat", "chat", await self.storing.post(**request), CHAT_SECONDS)

    def _note(self, allowed: str, name: str, reply: Reply, seconds: float) -> None:
        status, words, error = reply.status, "stream" * reply.streamed, error_of(reply)
        if error is not None:
            if reply.streamed:
                status, words = 503, "stream with an error event"
            self.violations += shape(reply, *error)
            words += f" {error[1]['error']['message']}"
        if "store" in reply.headers.get("x-latimer-ignored", "").split(", "):
            words += " x-latimer-ignored: store"
        self._seen[name][f"{status} {words}".strip()] += 1
        self._slowest[name] = max(self._slowest.get(name, 0), reply.seconds)
        if status not in self._allowed[allowed] or reply.problem:
            self.violations.append(f"{name}: {reply}")
        if reply.seconds > seconds:
            self.violations.append(f"{name} took {reply.seconds:.1f} s: {reply}")

    async def recover(self, seconds: float = 20.0) -> None:
        """Wait until everything that was answered is stored, and note what is seen then."""
        start = time.monotonic()
        while True:
            try:
                names = await self.storing.listed()
            except ConnectionError as error:
                names, problem = [], str(error)
            else:
                problem = f"{len(set(self.storing.answered) - set(names))} are missing"
            missing = set(self.storing.answered) - set(names)
            if not missing or time.monotonic() > start + seconds:
                break
            await asyncio.sleep(0.3)
        if missing:
            self.violations.append(f"after {seconds:.0f} s not all are stored: {problem}")
        self.violations += await self.storing.partial(names[-30:])
        health = await self.storing.health()
        if not health.startswith("200") or '"ok"' not in health:
            self.violations.append(f"afterwards /health is {health}")
        took = time.monotonic() - start
        self.afterwards = f"all {len(names)} listed and whole after {took:.1f} s"

    def seen(self, fault: str) -> Seen:
        """Check the log, and return what was seen."""
        text = self.storing.latimer.output()[self._start :].decode(errors="replace")
        lines = text.strip().splitlines()
        if SECRET in text:
            self.violations.append("the log shows stored text")
        if BAD.search(text.encode()):
            self.violations.append(f"the log has an exception: {text[-1500:]}")
        if len(lines) > LINES:
            self.violations.append(f"the log has {len(lines)} lines: {lines[:5]} … {lines[-5:]}")
        reads = f"GET: {self._all('get')}<br>list: {self._all('list')}"
        log = "<br>".join(f"{line} (×{number})" if number > 1 else line
                          for line, number in Counter(map(_plain, lines)).items())  # fmt: skip
        chat, health = self._all("chat"), self._all("health")
        return Seen(fault, chat, reads, health, log or "–", self.afterwards)

    def _all(self, name: str) -> str:
        counts = Counter[str]()
        for words, number in self._seen[name].items():
            counts[_plain(words)] += number
        shown = "<br>".join(f"{words} (×{number})" for words, number in counts.most_common())
        slowest = self._slowest.get(name)
        return shown + (f"<br>slowest {slowest:.2f} s" if slowest is not None else "")


def _plain(line: str) -> str:
    """Return a line without the numbers and names that differ between two runs."""
    line = re.sub(r"req_\w+", "req_…", line)
    line = re.sub(r"\(user \w+\)", "(user …)", line)
    line = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w./-]+", "…", line)
    line = re.sub(r"port \d+", "port …", line)
    line = re.sub(r"\b\d+ objects", "N objects", line)
    return re.sub(r'"(waiting|lost)": \d+', r'"\1": N', line).replace("|", "\\|")


def _is_png(url: str) -> bool:
    return b64decode(url.partition(",")[2]).endswith(b"IEND\xaeB`\x82")
