"""An engine with a Latimer process in front of it, and measurements of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import time
from typing import Any

from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.engines.wire import Engine
from support.servers import llama_server

from faults.canary import Canary
from faults.case import FAKE_KOBOLD, FAKE_SERVER, FAKES, INSIDE, REAL, Case
from faults.client import Reply, ask, encoded
from faults.judge import complete
from faults.process import Latimer
from faults.stored import Seen

# Seconds without data after which Latimer gives up a response in these tests.
TIMEOUT = 2
# Seconds within which work ends after a client disconnects.
LEFT = 1.5
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nCount to 12.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
)


class Stage:
    """A running engine with a running Latimer.

    Args:
        engine: one of `case.ALL`.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.fake: Engine | None = None
        if engine in FAKES:
            self.fake = FakeLlamaServer() if engine == FAKE_SERVER else FakeKoboldcpp()
        self.canary = Canary()
        self.alone = 0.0
        self.references: list[str] = []
        # What cases saw; see `stored.Seen`.
        self.seen: list[Seen] = []
        self.notes: list[str] = []
        self._numbers = itertools.count(1)
        self._cleanup = contextlib.ExitStack()
        self.url = ""

    def note(self, words: str) -> None:
        """Add a line to the report of the running case."""
        self.notes.append(words)

    def skipped(self, reason: str) -> None:
        """Report that the running case cannot run on this machine."""
        self.note(f"skipped: {reason}")

    async def start(self) -> None:
        """Start the canary, the engine and Latimer."""
        await self.canary.start()
        if self.fake is not None:
            await self.fake.start()
            self.url = self.fake.url
        elif self.engine == REAL:
            self.url = self._cleanup.enter_context(llama_server(DEMO_MODEL))
        self.latimer = Latimer(self.words())
        await self._start_latimer()

    def words(self) -> list[str]:
        """Return Latimer's arguments."""
        if self.engine == INSIDE:
            # Threads that share cores with other tests mostly wait for each other.
            sizes = ["--context", "4096", "--parallel", "4", "--threads", "1"]
            return [*sizes, "--any-model", "--gpu-layers", "0"]
        # Latimer has no such option for koboldcpp.
        timeout = [] if self.engine == FAKE_KOBOLD else ["--engine-timeout", str(TIMEOUT)]
        return [self.url, "--any-model", *timeout]

    async def _start_latimer(self) -> None:
        await self.latimer.start()
        if self.fake is None:
            self.references = [await self._reference(prompt) for prompt in PROMPTS]
        # Import and compile everything for the first grammar before the cases are timed.
        await self._reference(PROMPTS[0], regex="[a-z]+")
        times = [(await self.small()).seconds for _ in range(12)]
        self.alone = statistics.median(times)
        self.latimer.fresh_problems()

    async def restart(self) -> None:
        """Restart Latimer after a crash or a hang."""
        if self.fake is not None:
            self.fake.faults.clear()
            await self.fake.restart()
        await self.latimer.stop(1.0)
        if self.engine == REAL:
            self._cleanup.close()
            self.url = self._cleanup.enter_context(llama_server(DEMO_MODEL))
            self.latimer = Latimer(self.words())
        await self._start_latimer()

    async def stop(self) -> None:
        """Stop everything."""
        await self.latimer.stop(2.0)
        if self.fake is not None:
            await self.fake.stop()
        self._cleanup.close()
        await self.canary.stop()

    def marker(self) -> str:
        """Return a text that no other request asks for."""
        return f"m{next(self._numbers):05d}-{time.monotonic_ns() % 99991:05d}"

    def request(self, case: Case, marker: str) -> bytes:
        """Return the bytes of a case's request."""
        body: Any = case.made
        if isinstance(body, bytes):
            body = self.canary.named(body.decode("latin-1")).encode("latin-1")
        elif body is not None:
            body = {"model": "m", **body}
            prompt = f"FAULT:{case.fault} echo:{marker}" if case.fault else f"echo:{marker}"
            if case.path.endswith("/completions") and "messages" not in body:
                body.setdefault("prompt", prompt)
                body.setdefault("max_tokens", 64)
            text = json.dumps(body)
            body = self.canary.named(text).replace("MARKED", prompt).encode()
        return encoded(case.path, body, case.method, case.headers)

    async def ask(self, case: Case, marker: str) -> Reply:
        """Send a case's request."""
        data = self.request(case, marker)
        reply = await ask(self.latimer.port, data, case.seconds)
        reply.wanted = self.wanted(data, marker)
        return reply

    def wanted(self, data: bytes, marker: str) -> str | None:
        """Return the text that a request asks a fake engine for, or None."""
        return marker if self.fake is not None and marker.encode() in data else None

    async def small(self) -> Reply:
        """Send a small request, whose time shows if requests wait for others."""
        if self.engine == FAKE_KOBOLD:
            # The fake koboldcpp runs one generation at a time.
            return await ask(self.latimer.port, encoded("/v1/models", method="GET"), 20)
        prompt = f"echo:{self.marker()}" if self.fake else PROMPTS[0]
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        return await ask(self.latimer.port, encoded("/v1/completions", body), 20)

    async def witness(self) -> list[str]:
        """Check that plain requests after a case each get their own completion."""
        found = []
        for index in range(3):
            text = self.marker()
            stream = index == 1
            if self.fake is not None:
                prompt = f"echo:{text}"
            else:
                prompt, text = PROMPTS[index], self.references[index]
            body = {
                "model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream
            }  # fmt: skip
            reply = await ask(self.latimer.port, encoded("/v1/completions", body), 10)
            if reply.status in (502, 503) and index == 0:
                # Latimer can still report the fault for a moment, so ask once more.
                await asyncio.sleep(0.5)
                reply = await ask(self.latimer.port, encoded("/v1/completions", body), 10)
            if reply.problem or reply.status != 200:
                found.append(f"afterwards a plain request fails: {reply}")
            else:
                found += [
                    f"afterwards {one}" for one in complete(reply, text) if "counted" not in one
                ]
            if found:
                break
        return found

    async def _reference(self, prompt: str, **fields: str) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0, **fields}
        reply = await ask(self.latimer.port, encoded("/v1/completions", body), 60)
        return str(reply.json()["choices"][0]["text"])

    async def slots(self) -> int:
        """Return the number of busy slots of a real llama-server."""
        port = int(self.url.rpartition(":")[2])
        reply = await ask(port, encoded("/slots", method="GET"), 5)
        return sum(slot["is_processing"] for slot in reply.json() or ())

    async def busy(self) -> str:
        """Return why the stage is not idle, or an empty text."""
        if self.fake is not None and self.fake.working:
            return f"{self.fake.working} generations go on in the engine"
        if self.engine == REAL and (count := await self.slots()):
            return f"{count} generations go on in the engine"
        before = self.latimer.cpu()
        await asyncio.sleep(0.2)
        used = self.latimer.cpu() - before
        return f"the process uses {used / 0.2:.0%} of a core" if used > 0.06 else ""

    async def calm(self) -> list[str]:
        """Check that engine and process become idle within the time limit."""
        end = time.monotonic() + LEFT
        while reason := await self.busy():
            if time.monotonic() > end:
                return [f"{LEFT} s after the client left {reason}"]
            await asyncio.sleep(0.02)
        return []
