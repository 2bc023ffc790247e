"""An engine with a Latimer process in front of it, and measurements of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import statistics
import time
from typing import Any

from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.front import Front
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.engines.replay import AnyPrompt, replaying
from support.engines.wire import Engine
from support.servers import Swapped

from chaos.canary import Canary
from chaos.case import (
    CHAT,
    COMPLETIONS,
    EDITED_KOBOLD,
    EDITED_SERVER,
    FAKE_KOBOLD,
    FAKE_SERVER,
    FAKES,
    GONE,
    REAL,
    Case,
)  # fmt: skip
from chaos.client import Reply, Request, ask, get, post
from chaos.judge import judge
from chaos.process import Latimer

# Seconds within which work ends after a client disconnects.
LEFT = 1.5
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nCount to 12.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
)
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip
_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
# Requests whose answers never change: prompts, one of them streamed, and chats.
WITNESSES: dict[str, tuple[dict[str, Any], ...]] = {
    COMPLETIONS: tuple(
        {"prompt": prompt, "max_tokens": 24, "stream": number == 1}
        for number, prompt in enumerate(PROMPTS)
    ),
    CHAT: (
        {"messages": _QUESTION, "max_tokens": 12},
        {"messages": _QUESTION, "max_tokens": 8, "response_format": _FORMAT},
    ),
}


class Stage:
    """A running engine with a running Latimer.

    Args:
        engine: a name of `case.py`.
        words: further arguments of Latimer.
        context: the context length of a real llama-server.
        inside: a way of `inside.py` to run Latimer, or empty.
        witnesses: the path of the requests by which a changed Latimer is noticed.
    """

    def __init__(
        self,
        engine: str,
        *words: str,
        context: int = 2048,
        inside: str = "",
        witnesses: str = COMPLETIONS,
    ) -> None:
        self.engine = engine
        # A double, or the server that edits the responses of a real engine.
        self.fake: Engine | None = None
        self.front: Front | None = None
        self.server: Swapped | None = None
        if engine in FAKES:
            made = FakeLlamaServer if engine == FAKE_SERVER else FakeKoboldcpp
            self.fake = made()
        elif engine in (REAL, EDITED_SERVER):
            self.server = Swapped(slots=4, context=context)
        self.canary = Canary()
        self.alone = 0.0
        # What the running case reports: lines, and rows of the table of stores.
        self.notes: list[str] = []
        self.seen: list[Any] = []
        self.port = 0
        self._words = words
        self._inside = inside
        self._path = witnesses
        self._answers: list[tuple[Request, str]] = []
        self._numbers = itertools.count(1)
        self._cleanup = contextlib.ExitStack()

    async def start(self) -> None:
        """Start the canary, the engine and Latimer."""
        await self.canary.start()
        self.port = await self._start_engine()
        environment = {"PYTHONWARNINGS": "default"} if self._inside in ("timed", "edited") else {}
        self.latimer = Latimer(self.words(), self._inside, **environment)
        await self._start_latimer()

    async def _start_engine(self) -> int:
        """Start the engine and return the port at which Latimer finds it, 0 in process."""
        target = ""
        if self.server is not None:
            await asyncio.to_thread(self.server.start, DEMO_MODEL)
            target = self.server.address
        elif self.engine == EDITED_KOBOLD:
            target, _ = self._cleanup.enter_context(replaying(AnyPrompt(varied=True)))
        if self.engine in (EDITED_SERVER, EDITED_KOBOLD):
            self.front = Front(target=target)
        for double in filter(None, (self.fake, self.front)):
            await double.start()
            return double.port
        return int(target.rpartition(":")[2]) if target else 0

    @property
    def url(self) -> str:
        """The engine's address."""
        return f"http://127.0.0.1:{self.port}"

    def words(self) -> list[str]:
        """Return Latimer's arguments."""
        return [*([self.url] if self.port else []), *self._words, "--any-model"]

    async def _start_latimer(self) -> None:
        await self.latimer.start()
        if self.fake is None:
            # Recorded engines follow no grammar.
            bodies = WITNESSES[self._path][: 1 if self.engine == EDITED_KOBOLD else None]
            requests = [
                post(self._path, {"model": "m", "temperature": 0, **body}) for body in bodies
            ]
            self._answers = [(one, await self._answer(one)) for one in requests]
        # Import and compile everything for the first grammar before the cases are timed.
        body = {"model": "m", "prompt": PROMPTS[0], "max_tokens": 24, "regex": "[a-z]+"}
        await ask(self.latimer.port, post(COMPLETIONS, body), 60)
        times = [(await self.small()).seconds for _ in range(12)]
        self.alone = statistics.median(times)
        self.latimer.fresh_problems()

    async def _answer(self, request: Request) -> str:
        reply = await ask(self.latimer.port, request, 60)
        assert not (wrong := judge(reply, frozenset({200}))), wrong
        return reply.texts()[0]

    async def restart(self) -> None:
        """Restart Latimer after a crash or a hang."""
        if self.fake is not None:
            self.fake.faults.clear()
            await self.fake.restart()
        await self.latimer.stop(1.0)
        if self.server is not None:
            await asyncio.to_thread(self.server.start, DEMO_MODEL)
        await self._start_latimer()

    async def stop(self) -> int | None:
        """Stop everything, and return the exit code of Latimer, None if it was killed."""
        code = await self.latimer.stop(2.0 if self.fake else 20.0)
        for double in filter(None, (self.fake, self.front)):
            await double.stop()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)
        self._cleanup.close()
        await self.canary.stop()
        return code

    async def fail(self, what: str, seconds: float) -> None:
        """Send a signal to the real engine, and bring it back after some seconds."""
        assert self.server is not None
        assert self.server.process is not None
        self.server.process.send_signal(getattr(signal, what))
        await asyncio.sleep(seconds)
        if what == "SIGSTOP":
            self.server.process.send_signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(self.server.start, DEMO_MODEL)

    def marker(self) -> str:
        """Return a text that no other request asks for."""
        return f"m{next(self._numbers):05d}-{time.monotonic_ns() % 99991:05d}"

    def request(self, case: Case, marker: str) -> Request:
        """Return the request of a case."""
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
        headers = {"Connection": "close", **case.headers}
        return Request(case.path, body or b"", method=case.method, headers=headers)

    async def ask(self, case: Case) -> Reply:
        """Send a case's request, with a marker of its own."""
        marker = self.marker()
        request = self.request(case, marker)
        reply = await ask(self.latimer.port, request, case.seconds)
        reply.wanted = self.wanted(request, marker)
        return reply

    def wanted(self, request: Request, marker: str) -> str | None:
        """Return the text that a request asks a fake engine for, or None."""
        return marker if self.fake is not None and marker.encode() in request.body else None

    async def small(self) -> Reply:
        """Send a small request, whose time shows if requests wait for others."""
        if self.engine in (FAKE_KOBOLD, EDITED_KOBOLD):
            # koboldcpp runs one generation at a time.
            return await ask(self.latimer.port, get("/v1/models"), 20)
        prompt = f"echo:{self.marker()}" if self.fake else PROMPTS[0]
        body = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0}
        return await ask(self.latimer.port, post(COMPLETIONS, body), 20)

    async def witness(self, attempts: int = 2, retried: frozenset[int] = GONE) -> list[str]:
        """Check that plain requests after a case each get their own completion.

        Args:
            attempts: how often the first request is sent, because Latimer can still report the
                fault for a moment.
            retried: the statuses after which it is sent again.
        """
        known = self._answers
        if self.fake is not None:
            bodies = ({"prompt": f"echo:{self.marker()}", "stream": n == 1} for n in range(3))
            common = {"model": "m", "max_tokens": 24, "temperature": 0}
            known = [
                (post(COMPLETIONS, {**common, **body}), str(body["prompt"])[5:]) for body in bodies
            ]
        for request, text in known:
            for attempt in range(attempts):
                reply = await ask(self.latimer.port, request, 20)
                if reply.status not in retried:
                    break
                await asyncio.sleep(0.5 * (attempt + 1))
            attempts = 1
            wrong = judge(reply, frozenset({200}))
            if not wrong and (found := reply.texts()[0]) != text:
                wrong = [f"the answer is {found!r}, not {text!r}"]
            if wrong:
                return [f"afterwards a plain request fails: {wrong[0]}"]
        return []

    async def busy(self) -> str:
        """Return why the stage is not idle, or an empty text."""
        if self.fake is not None and self.fake.working:
            return f"{self.fake.working} generations go on in the engine"
        if self.engine == REAL:
            slots = (await ask(self.port, get("/slots"), 5)).json() or ()
            if count := sum(slot["is_processing"] for slot in slots):
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
