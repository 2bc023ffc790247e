"""What a koboldcpp tells of itself, by which another model at its address is noticed.

It closes its connections all the time, so they tell nothing. When it was started is one question,
and a process does not change its model; everything else is asked only when that has changed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from ..base import MediaKind
from ..checks import Checks, changed
from ..errors import (
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    RequestError,
    read_from,
    shortened,
    text_of,
    whole_of,
)
from .translate import ENGINE

TESTED = (1, 115)
# Seconds for which an answer holds for questions; each generation asks anew.
HOLDS = 0.02
# Clocks that are read at different moments differ by less; if not, all is read again.
SAME_START = 0.03

# What `/api/extra/version` tells of the model.
_MEDIA: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}


class Identity(NamedTuple):
    """A koboldcpp's version, its model's name and template, and how it is served."""

    version: str
    name: str
    context: int
    template: str
    media: frozenset[MediaKind]

    @property
    def tells_tokens(self) -> bool:
        """Whether it tells which tokens it has generated."""
        numbers = re.findall(r"\d{1,9}", self.version)[:2]
        return tuple(map(int, numbers)) >= TESTED


class Watch:
    """What a koboldcpp has told of itself.

    Args:
        address: for errors.
        ask: `ask(method, path)` gets the JSON of an answer.
        forget: called when another model is there: nothing that was read before holds.
    """

    def __init__(
        self, address: str, ask: Callable[[str, str], Awaitable[Any]], forget: Callable[[], None]
    ) -> None:
        self._address = address
        self._ask = ask
        self._forget = forget
        self._checks = Checks(self._look)
        self._started: float | None = None
        self._seen = -1e9
        self.identity: Identity | None = None
        # How many generations there had been when it was asked last, where it tells.
        self.generations: int | None = None

    @property
    def is_sure(self) -> bool:
        """Whether it was asked a moment ago."""
        return time.monotonic() - self._seen < HOLDS

    def doubt(self) -> None:
        """Ask anew before anything else: it was not there."""
        self._seen = -1e9

    async def check(self) -> None:
        """Ask what it serves.

        Raises:
            EngineUnavailable: it is not there, or serves another model than before.
            EngineError: it is no koboldcpp.
        """
        await self._checks.run()

    async def _look(self) -> None:
        before, started = self.identity, await self._start()
        if before is None or not _is_same(started, self._started):
            now = await self._read()
            if before is not None and now != before:
                self.identity = self._started = None
                self._forget()
                raise changed(self._address, now.name, before.name)
            self.identity, self._started = now, started
        self._seen = time.monotonic()

    async def _start(self) -> float | None:
        """When it was started, on the clock of this process; None where it does not tell."""
        if self.identity is None:
            return None
        try:
            with read_from(ENGINE, "/api/extra/perf"):
                perf = await self._ask("GET", "/api/extra/perf")
                started = time.monotonic() - float(perf["uptime"])
                self.generations = perf.get("total_gens")
                return started
        except (EngineUnavailable, EngineSilent):
            raise
        except LatimerError:
            self.generations = None
            return None

    async def _read(self) -> Identity:
        with read_from(ENGINE, "questions about its model"):
            version = await self._ask("GET", "/api/extra/version")
            if version.get("result") != "KoboldCpp":
                raise EngineError(f"{self._address} does not answer as {ENGINE} does.")
            if not any(letter.isdigit() for letter in text_of(version["version"])):
                raise EngineError(f"{ENGINE} names no version: {shortened(version['version'])!r}.")
            if version.get("llm") is False:
                raise EngineUnavailable(f"{ENGINE} has loaded no text model.")
            name = text_of((await self._ask("GET", "/api/v1/model"))["result"])
            told = await self._ask("GET", "/api/extra/true_max_context_length")
            identity = Identity(
                version=text_of(version["version"]),
                name=name,
                context=whole_of(told["value"], least=1),
                template="",
                media=frozenset(kind for key, kind in _MEDIA.items() if version.get(key)),
            )
            try:
                template = (await self._ask("GET", "/props")).get("chat_template") or ""
            except (EngineError, RequestError):
                if identity.tells_tokens:
                    raise
                return identity
            return identity._replace(template=text_of(template))


def _is_same(started: float | None, before: float | None) -> bool:
    """Whether two starts are the same one; what is not told may be any."""
    return started is not None and before is not None and abs(started - before) < SAME_START
