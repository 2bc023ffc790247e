"""The identity that a koboldcpp reports, which shows when another model is at its address.

koboldcpp closes its connections all the time, so open ones prove nothing. A process does not change
its model, so one question suffices: its start time. The other questions are asked only if the start
time has changed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from ..base import MediaKind, Model
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
from ..identity import IdentityMonitor
from .translate import ENGINE

TESTED = (1, 115)
# Seconds for which an answer is valid for questions, and for preparing a request. Each call asks
# again while it runs, and a request whose call finds another model is prepared once more. koboldcpp
# takes at least 2.8 s to start again.
HOLDS = 2.0
# The tolerance of start times, and the longest answer that shows one, in seconds; beyond either
# everything is read again.
SAME_START, LONGEST_ANSWER = 0.03, 0.5

# The beginning of the names of koboldcpp's models.
_NAME = "koboldcpp/"
# Kinds of media by their names in `/api/extra/version`.
_MEDIA: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}


class Identity(NamedTuple):
    """The version of a koboldcpp, and its models and configuration.

    Args:
        embedder: the name of its embedding model; None without one.
        generates: False without a text model; the other facts are then those of the engine.
        transcribes: True if it has a Whisper model.
    """

    version: str
    name: str
    context: int
    template: str
    media: frozenset[MediaKind]
    embedder: str | None = None
    generates: bool = True
    transcribes: bool = False

    @property
    def reports_tokens(self) -> bool:
        """True if it reports the tokens that it has generated."""
        numbers = re.findall(r"\d{1,9}", self.version)[:2]
        return tuple(map(int, numbers)) >= TESTED


class Started(NamedTuple):
    """The earliest and the latest time at which a server can have started.

    The difference is the time of the answer, which is long on a busy machine.
    """

    earliest: float
    latest: float


class ServerMonitor(IdentityMonitor[Identity]):
    """The last known identity of a koboldcpp, and the checks of it.

    Args:
        ask: `ask(method, path)` returns the JSON of a response.

    Attributes:
        generations: the number of generations at the last check, if reported.
    """

    def __init__(
        self,
        address: str,
        ask: Callable[[str, str], Awaitable[Any]],
        read_model: Callable[[], Coroutine[Any, Any, Model]],
        forget: Callable[[], None],
    ) -> None:
        super().__init__(address, read_model, forget, HOLDS)
        self._ask = ask
        self._started: Started | None = None
        self.generations: int | None = None

    @override
    async def _compare(self) -> None:
        before, started = self.identity, await self._start()
        if before is None or not _is_same(started, self._started):
            now = await self._read()
            if before is not None and now != before:
                self._started = None
                error = self.changed(now.name, before.name)
                self.lose(error)
                raise error
            if _is_later(started, self._started):
                # Other facts of the model depend on its file and on options of the start.
                self.model = None
                self._forget()
            self.identity, self._started = now, started

    async def _start(self) -> Started | None:
        """Return the server's start on the clock of this process; None if not reported."""
        try:
            with read_from(ENGINE, "/api/extra/perf"):
                asked = time.monotonic()
                perf = await self._ask("GET", "/api/extra/perf")
                uptime = float(perf["uptime"])
                started = Started(asked - uptime, time.monotonic() - uptime)
                self.generations = perf.get("total_gens")
                return started
        except (EngineUnavailable, EngineSilent):
            raise
        except LatimerError:
            self.generations = None
            return None

    async def _read(self) -> Identity:
        with read_from(ENGINE, "its model"):
            version = await self._ask("GET", "/api/extra/version")
            if version.get("result") != "KoboldCpp":
                raise EngineError(f"{self.address} does not respond like {ENGINE}.")
            if not any(letter.isdigit() for letter in text_of(version["version"])):
                raise EngineError(
                    f"{ENGINE} reports an invalid version: {shortened(version['version'])!r}."
                )
            embedder = None
            if version.get("embeddings"):
                embedder = text_of(version.get("embeddingModel") or "")
            generates = version.get("llm") is not False
            if not generates and embedder is None:
                raise EngineUnavailable(f"{ENGINE} has no text model loaded.")
            name = f"{_NAME}{embedder}"
            if generates:
                name = text_of((await self._ask("GET", "/api/v1/model"))["result"])
            context = await self._ask("GET", "/api/extra/true_max_context_length")
            identity = Identity(
                version=text_of(version["version"]),
                name=name,
                context=whole_of(context["value"], least=1),
                template="",
                media=frozenset(kind for key, kind in _MEDIA.items() if version.get(key)),
                embedder=embedder,
                generates=generates,
                transcribes=version.get("transcribe") is True,
            )
            if not generates:
                return identity
            try:
                template = (await self._ask("GET", "/props")).get("chat_template") or ""
            except (EngineError, RequestError):
                if identity.reports_tokens:
                    raise
                return identity
            return identity._replace(template=text_of(template))


def _is_later(started: Started | None, before: Started | None) -> bool:
    """Return True if a server has started again; an unknown start proves nothing."""
    if started is None or before is None:
        return False
    return started.earliest - before.latest >= SAME_START


def _is_same(started: Started | None, before: Started | None) -> bool:
    """Return True if two starts can be the same; an unknown one equals none."""
    if started is None or before is None:
        return False
    if max(one.latest - one.earliest for one in (started, before)) > LONGEST_ANSWER:
        return False
    earliest = max(started.earliest, before.earliest)
    return earliest - min(started.latest, before.latest) < SAME_START
