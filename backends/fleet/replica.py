"""One engine of a model: its places, its state, and what loads it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Set
from typing import Any, Literal, Protocol, TypeAlias

from ..base import Backend, Finish, Model
from ..errors import LatimerError
from .affinity import TOKENS, Prefixes
from .breaker import Breaker

log = logging.getLogger("latimer")

# `ready`: it gets requests. `unavailable`: it does not answer, or serves another model. `draining`:
# its requests run to their end, and it gets no others. The others concern a `Loader`; `loading` is
# also shown for an engine that says so (`Replica.shown`).
State: TypeAlias = Literal["ready", "unavailable", "draining", "unloaded", "loading", "failed"]
LoadState: TypeAlias = Literal["unloaded", "loading", "ready", "failed"]


# The reason of an engine that has not answered the first question yet.
NOT_ASKED = "it has not answered yet"


class Demand(Protocol):
    """The calls that wait for a model (`Pool`).

    Attributes:
        name: the name of the model.
        replicas: the engines that can run them.
    """

    name: str
    replicas: list[Replica]

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        ...

    @property
    def oldest(self) -> float:
        """The seconds that the first waiting call has waited for."""
        ...

    @property
    def stranded(self) -> Set[Replica]:
        """The engines that a waiting call has failed on, if that is each one that is in use."""
        ...

    def admit(self, replica: Replica, model: Model) -> None:
        """Let an engine that answers serve calls, if it has the model of the others."""
        ...

    async def read_facts(self, backend: Backend) -> None:
        """Ask a loaded engine for what lists say about the model."""
        ...


class First(Protocol):
    """A call that waits for its first event."""

    def lose(self, error: LatimerError) -> None:
        """Let the call fail, so that another engine can run it."""
        ...


class Loader(Protocol):
    """An engine whose model Latimer loads and unloads.

    Attributes:
        loads, unloads: how often the model was loaded and unloaded.
        is_pinned: True if the model is never unloaded.
        idle: seconds without requests after which the model is unloaded; None for never.
    """

    loads: int
    unloads: int
    is_pinned: bool
    idle: float | None

    @property
    def state(self) -> LoadState:
        """The state of the model."""
        ...

    @property
    def backend(self) -> Backend:
        """The engine; the same object before, while and after its model is loaded."""
        ...

    @property
    def pause(self) -> float:
        """The seconds until a failed load may be repeated."""
        ...

    @property
    def memory(self) -> Mapping[str, int]:
        """The bytes of each kind of memory that the model needs; empty if unknown.

        They are declared, or measured at its last load.
        """
        ...

    def attach(self, pool: Demand, replica: Replica) -> None:
        """Keep the state of a pool's replica from now on."""
        ...

    def want(self) -> None:
        """Look at the calls that wait, and load the model when there is room for it."""
        ...

    def doubt(self) -> None:
        """Look soon whether the model is still loaded, since a request has failed."""
        ...

    def note(self) -> str:
        """Describe what requests wait for that need the model, as one line."""
        ...

    async def load(self) -> None:
        """Load the model, and return when it is ready; a second call joins the first.

        Raises:
            EngineUnavailable: the model cannot be loaded; with the end of the engine's log.
        """
        ...

    async def unload(self) -> None:
        """Unload the model when nothing runs on it, and return when its memory is free."""
        ...

    async def aclose(self) -> None:
        """Unload the model at once, and release its backend."""
        ...


# The connections of a program end a moment before its end is known: how often to look, and the
# seconds between two looks.
LOOKS, LOOK = 8, 0.05
# The weight of the last measurement in a mean.
NEWEST = 0.2
# The weight of earlier measurements with each new one, and the number that is needed.
_KEPT, _LEAST = 0.998, 8.0
# The blocks that a prompt cache of unknown size has for each token of its context.
_CACHED = 16


class Replica:
    """One engine of a model.

    Args:
        places: the number of calls that run at a time; by default what the engine reports.
        loader: loads and unloads the engine's model; None for an engine that others run.

    Attributes:
        places: the number of calls that run at a time.
        room: the number of calls that may run now: one after an ejection, which tries the engine.
        sessions: the number of sessions that it runs.
        reason: why it gets no requests; empty if it does.
        running: the places that are taken; it can be more than there are, for many choices.
        questions: the number of questions that run.
        model: what the engine serves; None until it has answered.
        prefixes: what the engine probably has in its prompt cache.
        speed: the times of prompts.
        call_seconds: the seconds for a call; 0 if unknown.
        reports_cache: True if it has reported tokens from its prompt cache.
        trust: what it has reported of them, as a share of what was expected; 1 at first.
        used_at: the time of the end of its last call.
        waiting_first: the calls that wait for their first event.
        ejections: how often it was ejected.
        is_lost: True if it was ready, and did not answer or failed since.
        reports_loading: True if it is unavailable because it says that it loads its model.
        listeners: functions that are called whenever a place or the state changes.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        places: int | None = None,
        loader: Loader | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self.loader = loader
        self.state: State = "unavailable" if loader is None else loader.state
        self.reason = NOT_ASKED if loader is None else ""
        self.running = self.questions = 0
        self.model: Model | None = None
        self.breaker = Breaker()
        self.prefixes = Prefixes()
        self.call_seconds = 0.0
        self.reports_cache = False
        self.trust = 1.0
        self.used_at = time.monotonic()
        self.waiting_first: set[First] = set()
        self.speed = Speed()
        self.sessions = self.ejections = 0
        self.is_lost = self.reports_loading = False
        self._declared = places
        self.places = self.room = places or 1
        self.listeners: list[Callable[[], None]] = []

    @property
    def shown(self) -> State:
        """The state for operators."""
        return "loading" if self.reports_loading else self.state

    @property
    def is_loadable(self) -> bool:
        """True if its model can be loaded, or loads now."""
        return self.loader is not None and self.state in ("unloaded", "loading")

    async def has_ended(self) -> bool:
        """Return True if an engine on demand has ended, so that it can be loaded again."""
        if self.loader is None:
            return False
        for _ in range(LOOKS):
            if self.is_loadable:
                break
            self.loader.doubt()
            await asyncio.sleep(LOOK)
        return self.is_loadable

    def join(self, changed: Callable[[], None]) -> None:
        """Call a function of a pool whenever a place or the state changes."""
        self.listeners.append(changed)

    def leave(self, changed: Callable[[], None]) -> None:
        """Call a function no longer."""
        if changed in self.listeners:
            self.listeners.remove(changed)

    def set(self, state: State, reason: str = "", reports_loading: bool = False) -> None:
        """Change the state, and tell the pools."""
        self.state, self.reason, self.reports_loading = state, reason, reports_loading
        self._make_room()
        self.tell()

    def note(self, event: str, model: str, words: str, reason: str = "") -> None:
        """Log what has happened to the engine; with a reason, as a warning.

        Args:
            model: the model that it served or serves.
            words: what has happened, after its name.
        """
        fields = {"engine": self.name, "model": model} | ({"reason": reason} if reason else {})
        level = logging.WARNING if reason else logging.INFO
        extra = {"event": event, "fields": fields}
        log.log(level, "engine %s %s", self.name, words, extra=extra)

    def succeed(self) -> None:
        """Note that the engine has answered a call."""
        if self.breaker.has_failed:
            self.breaker.succeed()
            self._make_room()

    def _make_room(self) -> None:
        self.room = 1 if self.breaker.is_trying else self.places

    def tell(self) -> None:
        """Tell the pools that a place or the state has changed."""
        listeners = self.listeners
        for changed in [*listeners]:
            changed()
        if len(listeners) > 1:
            # The pools of an engine that several models share take turns.
            listeners.append(listeners.pop(0))

    def question(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a question to the engine, which counts until it ends."""
        self.questions += 1
        task = asyncio.create_task(work)
        task.add_done_callback(self._answered)
        return task

    def _answered(self, _task: asyncio.Task[None]) -> None:
        self.questions -= 1
        if self.state == "draining":
            self.tell()

    def learn(self, model: Model) -> None:
        """Note what the engine serves."""
        if self.model != model:
            self.prefixes.clear()
        self.model = model
        self.places = self._declared or model.places
        self._make_room()
        self.prefixes.resize(_CACHED * self.places * model.context // TOKENS)

    def compare(self, end: Finish, share: float) -> None:
        """Compare what a call has found in the prompt cache with what was expected.

        Args:
            share: the expected share of its prompt.
        """
        self.reports_cache = self.reports_cache or end.cached_tokens > 0
        if self.reports_cache:
            found = min(end.cached_tokens / max(end.prompt_tokens * share, 1.0), 1.0)
            self.trust += 0.1 * (found - self.trust)

    def lose(self, error: LatimerError) -> None:
        """Cancel the calls that wait for their first event; another engine can run them."""
        for call in [*self.waiting_first]:
            call.lose(error)


class Speed:
    """The seconds for one more token, from the times of prompts of different lengths.

    The time before a first event has a part that no cache saves: connections, and other calls on
    the same engine. So this is the slope of a line through recent times, not their mean.
    """

    __slots__ = ("_count", "_products", "_seconds", "_squares", "_tokens")

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement; earlier ones count less and less."""
        self._count = _KEPT * self._count + 1
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + tokens * tokens
        self._products = _KEPT * self._products + tokens * seconds

    @property
    def slope(self) -> float:
        """The seconds for one more token; 0 if unknown."""
        spread = self._count * self._squares - self._tokens**2
        if self._count < _LEAST or spread < (self._count * TOKENS) ** 2:
            return 0.0
        slope = (self._count * self._products - self._tokens * self._seconds) / spread
        return max(slope, 0.0)
