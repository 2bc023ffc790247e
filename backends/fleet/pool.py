"""A model over several engines: one queue in front of them, and a choice when a place is free."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence, Set
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from typing_extensions import override

from ..base import (
    Backend,
    Capabilities,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Generation,
    Model,
    NativeReply,
    Ranking,
    Scores,
    Special,
    Stream,
    TokenIds,
)
from ..errors import (
    Busy,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    ModelChanged,
    ModelLoading,
    RequestError,
    as_sentence,
    reason_label,
)
from ..identity import difference
from ..queue import QUEUE, Try, is_running, settle
from .affinity import matches
from .breaker import RetryBudget
from .config import Affinity
from .holders import MOST_COMPARED, Holders
from .loading import MOST_RETRY, not_loaded, wait
from .place import Job, Place, Sessions, worth_waiting
from .queue import COMPLETION, PROMPT, Line, Shares
from .replica import NEWEST, Replica
from .run import Run
from .speech import Speaking

log = logging.getLogger("latimer")

T = TypeVar("T")

# Seconds between looks at engines that do not answer, and at those that do.
AGAIN, LOOK = 1.0, 5.0
# Seconds that an engine may take to answer such a look, and the looks without an answer after which
# it gets no requests.
SILENCE, SILENT_LOOKS = 5.0, 2
# Seconds that an engine may take to show what it embeds, before it is used without that.
FACTS = 1.0
# Seconds that a request waits for an engine to answer again, if none does.
PATIENCE = 5.0
# Calls that may wait for a busy engine which has their prompt, while another has a free place: so
# many, or one for so many engines. And the seconds that they wait at most.
MOST_PARKED, ENGINES_A_PARKED, LONGEST_PARKED = 16, 4, 5.0
# What an engine of which all places are taken counts against one that has more of a prompt cached,
# as a share of the prompt: if the prompt continues one that the engine has, and if it only begins
# like others.
LOAD, NEW = 0.25, 2.0
# More than any engine costs.
_MOST = (float("inf"), 0, 0, False, False)
# Tokens that an answer has, as long as none has ended.
_ANSWER = 128.0


class Pool(Speaking):
    """A model that several engines serve.

    Args:
        name: the name of the model, for messages.
        replicas: the engines, of which each may belong to other pools too.
        queue: the largest number of waiting requests; others are rejected.
        affinity: how an engine is chosen among those with a free place.
        draw: returns a random number below 1.

    Attributes:
        capabilities: the capabilities of all engines, which are equal.
        known: the model as an engine last reported it; None if none has answered yet.
        retries: the number of calls that were sent to another engine, by the engine that has not
            served them and the reason.
        load_wait: seconds that a request waits for the model to be loaded, unless it streams; None
            for no limit.
    """

    is_pooled = True
    capabilities = Capabilities("engine", frozenset())

    def __init__(
        self,
        name: str,
        replicas: Sequence[Replica],
        queue: int = QUEUE,
        affinity: Affinity = "prefix",
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.load_wait: float | None = None
        self.retries: Counter[tuple[str, str]] = Counter()
        self.queue = queue
        self._draw = draw
        # Engines that are as good as others take turns: the begin of a turn, and its first engine.
        self._turn_began, self._first = 0.0, int(draw() * len(replicas))
        self.budget = RetryBudget()
        self._shares = Shares()
        self._line: Line[Place] = Line(self._shares)
        self._parked: list[Place] = []
        self._timer: asyncio.TimerHandle | None = None
        self.known: Model | None = None
        # The facts about its embeddings; empty until an engine has answered.
        self._facts: list[EmbeddingModel | None] = []
        self._answer = _ANSWER
        self._sessions = Sessions()
        self._holders: Holders | None = None  # If there are too many to compare for each call.
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._looked: dict[Replica, float] = {}
        self._silent: dict[Replica, int] = {}
        self._is_granting = self._is_closed = False
        # The listeners of an engine that no other model has.
        self._own_listeners = [self.grant]
        self.replicas: list[Replica] = []
        self._use(replicas, affinity)

    # The engines.

    def _use(self, replicas: Sequence[Replica], affinity: Affinity) -> None:
        """Choose among these engines from now on."""
        before, self.replicas = self.replicas, [*replicas]
        for replica in before:
            if replica not in replicas:
                replica.leave(self.grant)
                self._sessions.forget(replica)
                if not is_running(self._tasks.get(replica)):
                    self._forget(replica)
        self._only = replicas[0] if len(replicas) == 1 else None
        # One engine has all prompts.
        self._affinity: Affinity = affinity if len(replicas) > 1 else "none"
        self._tables = [replica.prefixes for replica in replicas]
        self._loaders = [(one, one.loader) for one in replicas if one.loader is not None]
        if len(replicas) <= MOST_COMPARED:
            self._holders = None
        elif self._holders is not None:
            self._holders.use(replicas)
        else:
            self._holders = Holders(replicas)
        self._sessions.resize(len(replicas))
        self._most_parked = max(MOST_PARKED, len(replicas) // ENGINES_A_PARKED)
        known = {*before}
        if self.known is None:
            self.capabilities = replicas[0].backend.capabilities
        for replica in replicas:
            if replica not in known:
                self._add(replica)
        self._adopt()

    def _add(self, replica: Replica) -> None:
        replica.join(self.grant)
        if replica.loader is not None:
            replica.loader.attach(self, replica)

    def _adopt(self) -> None:
        """Take what another model has learned about an engine that both have."""
        for replica in self.replicas if self.known is None else ():
            if replica.state == "ready" and replica.model is not None:
                self.admit(replica, replica.model)

    @property
    def is_available(self) -> bool:
        """True if an engine is ready, or can load the model."""
        return any(one.state == "ready" or one.is_loadable for one in self.replicas)

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._line) + len(self._parked)

    @property
    def stranded(self) -> Set[Replica]:
        """The engines that a waiting call has failed on, if that is each one that is in use."""
        used = {one for one in self.replicas if one.state in ("ready", "loading")}
        found = (one.failed for one in self._calls() if one.failed and used <= one.failed)
        return next(found, frozenset())

    @property
    def oldest(self) -> float:
        """The seconds that the first waiting call has waited for."""
        waiting = [place.since for place in self._calls()]
        return time.monotonic() - min(waiting) if waiting else 0.0

    def update(self, replicas: Sequence[Replica], queue: int, affinity: Affinity) -> None:
        """Change the engines and the rules; running calls stay where they are."""
        self._use(replicas, affinity)
        self.queue = queue
        self.start()
        self.grant()

    def start(self) -> None:
        """Begin to look after the engines."""
        if not (self._is_closed or is_running(self._tasks.get(self))):
            self._tasks[self] = asyncio.create_task(self._look_after())

    async def _look_after(self) -> None:
        """Ask each engine from time to time, before a request needs it."""
        while True:
            now = time.monotonic()
            self._adopt()
            for replica in [*self.replicas]:
                if replica.state == "unavailable":
                    due = not replica.breaker.until or replica.breaker.is_over()
                    wait = AGAIN
                else:
                    due, wait = replica.state == "ready", LOOK
                if due and now - self._looked.get(replica, -LOOK) >= wait:
                    self.ask(replica)
            await asyncio.sleep(AGAIN / 4)

    def ask(self, replica: Replica) -> asyncio.Task[None]:
        """Ask an engine whether it is ready, and what it serves; return the running question."""
        if not is_running(self._tasks.get(replica)):
            self._looked[replica] = time.monotonic()
            self._tasks[replica] = replica.question(self._ask(replica))
        return self._tasks[replica]

    async def ask_all(self) -> None:
        """Ask every engine that is not ready, and wait for the answers."""
        self._adopt()
        await asyncio.gather(*(self.ask(one) for one in self.replicas if one.state != "ready"))

    async def _ask(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(SILENCE):
                await replica.backend.health()
                model = await replica.backend.model()
            with suppress(TimeoutError):
                # A llama-server embeds nothing while it generates, also for others.
                async with asyncio.timeout(FACTS):
                    await self.read_facts(replica.backend)
        except TimeoutError:
            looks = self._silent[replica] = self._silent.get(replica, 0) + 1
            if looks >= SILENT_LOOKS or replica.state != "ready":
                error = EngineSilent(f"The engine {replica.name} does not answer.")
                self._set_aside(replica, error)
                replica.lose(error)
        except Busy:
            pass
        except LatimerError as error:
            self._set_aside(replica, error)
        else:
            self._silent.pop(replica, None)
            self.admit(replica, model)
        finally:
            if replica not in self.replicas:
                self._forget(replica)

    def _forget(self, replica: Replica) -> None:
        """Keep nothing of an engine that has left, and that is not asked any more."""
        self._tasks.pop(replica, None)
        self._looked.pop(replica, None)
        self._silent.pop(replica, None)

    async def read_facts(self, backend: Backend) -> None:
        """Ask an engine once for what a list of models says about embeddings."""
        if not self._facts:
            with suppress(EngineError, RequestError):
                self._keep_facts(await backend.embedding_model())

    def _keep_facts(self, facts: EmbeddingModel | None) -> EmbeddingModel | None:
        """Return facts, and keep them unless an engine that is busy does not know them yet."""
        if facts is None or facts.dimensions is not None:
            self._facts = [facts]
        return facts

    def admit(self, replica: Replica, model: Model) -> None:
        """Let an engine that answers serve requests, if it has the pool's model."""
        if replica not in self.replicas or replica.state not in ("ready", "unavailable"):
            return
        reason = ""
        if self.known is not None:
            has_others = any(one.state == "ready" for one in self.replicas if one is not replica)
            abilities = replica.backend.capabilities, self.capabilities
            than = "that of the others" if has_others else "as before"
            reason = difference(model, self.known, *abilities, than)
        if reason and not has_others:
            # No other engine has the model any more.
            fields = {"engine": replica.name, "model": self.name, "reason": reason}
            log.warning(
                "model %s: %s; all requests get it now", self.name, reason,
                extra={"event": "model_changed", "fields": fields},
            )  # fmt: skip
            self.known = None
            self._facts = []
            reason = ""
        if reason:
            if replica.reason != reason:
                words = f"is not used for {self.name}: {reason}"
                replica.note("engine_differs", self.name, words, reason)
            replica.set("unavailable", reason)
            return
        if self.known is None:
            self.known, self.capabilities = model, replica.backend.capabilities
        if replica.model != model:
            self._sessions.forget(replica)
        replica.learn(model)
        if replica.state != "ready" and not replica.breaker.until:
            replica.set("ready")
            if replica.is_lost:
                replica.is_lost = False
                replica.note("engine_returned", self.name, "is used again")

    def _set_aside(self, replica: Replica, error: LatimerError) -> None:
        """Send no requests to an engine until it answers."""
        loads = isinstance(error, ModelLoading)
        # An engine that has not answered since the start is missing, too, and so is one that was
        # drained or had another model. One that loads its model for the first time is not.
        is_known = replica.is_lost or loads
        if replica.state == "ready" or (replica.state == "unavailable" and not is_known):
            words = f"is not used: {error.message}"
            replica.note("engine_lost", self.name, words, error.message)
            replica.is_lost = True
            replica.prefixes.clear()
            self._sessions.forget(replica)
        if replica.state in ("ready", "unavailable"):
            replica.set("unavailable", error.message, loads)
            if replica.loader is not None:
                replica.loader.doubt()

    def blame(self, replica: Replica, error: LatimerError) -> None:
        """Count an engine's failure."""
        if isinstance(error, EngineUnavailable):
            if replica.state == "ready":
                self._set_aside(replica, error)
                self.ask(replica)
        elif replica.breaker.fail():
            others = any(one.state == "ready" for one in self.replicas if one is not replica)
            if others and replica.state == "ready":
                seconds = replica.breaker.eject()
                replica.ejections += 1
                words = f"is not used for {seconds:.0f} s: {error.message}"
                replica.note("engine_ejected", self.name, words, error.message)
                replica.is_lost = True
                replica.set("unavailable", f"it failed several times: {error.message}")
            else:
                replica.succeed()

    def _demand(self, failed: bool = False) -> None:
        """Ask for the model to be loaded; if `failed`, only by engines that have failed."""
        for replica, loader in self._loaders:
            if replica.is_loadable and (replica.reason or not failed):
                loader.want()

    # Places.

    def _calls(self) -> Iterator[Place]:
        yield from self._parked
        yield from self._line

    async def begin(self, place: Place, job: Job | None) -> Replica:
        """Take a place for a job; the job is for the model of its engine from now on.

        Raises:
            Busy: too many requests wait.
            EngineUnavailable: no engine can run the call.
        """
        ticket, replica = place.ticket, None
        if not self._line.requests and not self._parked:
            replica = self._choose(place)
        if replica is None:
            replica = await self._wait(place)
        elif ticket.key:
            self._shares.enter(ticket.key, place.charged, ticket.weight)
        if job is not None:
            model = replica.model
            if model is not None and job.fingerprint not in ("", model.fingerprint):
                self._fit(place, job, model)
            ticket.engine, affinity = replica.name, "none"
            if self._affinity != "none":
                affinity = "hit" if place.matched else "miss"
            ticket.affinity = affinity
        return replica

    def _fit(self, place: Place, job: Job, model: Model) -> None:
        """Let a job be for the model of its engine.

        Raises:
            ModelChanged: the engines have another model than that for which it was made.
        """
        if self.known is not None and place.fingerprint:
            if place.fingerprint != self.known.fingerprint:
                self.release(place)
                raise ModelChanged(
                    f"The engines of the model {self.name} have loaded another model. Send the "
                    "request again."
                )
            job.fingerprint = model.fingerprint

    async def _wait(self, place: Place) -> Replica:
        """Wait for a place on an engine.

        Raises:
            Busy: too many requests wait.
            EngineUnavailable: no engine can run the call.
        """
        ticket = place.ticket
        if not self._can_wait(place):
            await self._revive()
            if not self._can_wait(place):
                raise self.unavailable()
        if not ticket.admitted and ticket not in self._line and self.waiting >= self.queue:
            call_seconds = max(one.call_seconds for one in self.replicas) or 1.0
            seconds = min(max(call_seconds * self.waiting / max(self.places, 1), 0.1), 60)
            raise Busy(
                f"{self.waiting} requests are already waiting for the model. Send the request "
                "again later.",
                seconds,
            )
        ticket.admitted = True
        ticket.queued += 1
        place.since = time.monotonic()
        place.future = asyncio.get_running_loop().create_future()
        if ticket.key:
            self._shares.enter(ticket.key)
        self._line.push(place)
        self.grant()
        try:
            if not any(one.state == "ready" for one in self.replicas):
                await self._wait_for_load(place)
            return await place.future
        except BaseException:
            if place.replica is None:
                if not self._line.remove(place) and place in self._parked:
                    self._parked.remove(place)
                if ticket.key:
                    self._shares.leave(ticket.key)
            else:
                # The place was already given to this call.
                self.release(place)
            raise
        finally:
            ticket.note_wait(place.since)

    async def _wait_for_load(self, place: Place) -> None:
        """Wait for a place on an engine that is loaded.

        Raises:
            EngineUnavailable: it takes too long.
        """
        assert place.future is not None

        def note() -> str:
            number = next((n for n, one in enumerate(self._calls(), 1) if one is place), 1)
            loaders = [one.loader for one in self.replicas if one.is_loadable]
            what = loaders[0].note() if loaders and loaders[0] else f"waiting for {self.name}"
            return f"{what}, place {number}"

        if not await wait(place.future, note, self.load_wait):
            message = f"The model {self.name} is not loaded yet ({note()})."
            raise not_loaded(f"{message} Send the request again later.", MOST_RETRY)

    @property
    def places(self) -> int:
        """The number of calls that run at a time."""
        return sum(one.places for one in self.replicas if one.state == "ready")

    def _can_wait(self, place: Place) -> bool:
        """Return True if an engine may run a call now or later."""
        return any(
            one not in place.failed and (one.state == "ready" or one.is_loadable)
            for one in self.replicas
        )

    async def _revive(self) -> None:
        """Ask the engines that do not answer, and wait for the first one that does."""
        asked = {self.ask(one) for one in self.replicas if one.state == "unavailable"}
        asked = {task for task in asked if not task.done()}
        end = time.monotonic() + PATIENCE
        while asked and not any(one.state == "ready" for one in self.replicas):
            done, asked = await asyncio.wait(
                asked, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return

    def unavailable(self) -> EngineUnavailable:
        """Return the error of a request that no engine can serve."""
        reasons = [f"{one.name}: {as_sentence(one.reason)}" for one in self.replicas if one.reason]
        message = " ".join([f"No engine of the model {self.name} is available.", *reasons])
        used = [one for one in self.replicas if one.state != "draining"]
        pauses = [one.loader.pause for one in used if one.loader and one.state == "failed"]
        if pauses and len(pauses) == len(used):
            # Any other engine may answer at any time.
            rest = min(pauses)
            words = f"The next attempt is in {max(math.ceil(rest), 1)} s."
            return not_loaded(f"{message} {words}", rest)
        kind = (
            ModelLoading if all(one.reports_loading for one in self.replicas) else EngineUnavailable
        )
        return kind(message)

    def _fail_waiting(self) -> None:
        """Fail the calls that no engine can run."""
        for place in [*self._calls()]:
            if not self._can_wait(place):
                self._fail(place)

    def _fail(self, place: Place) -> None:
        if place.future is not None:
            settle(place.future, self.unavailable())

    def grant(self) -> None:
        """Give free places to waiting calls."""
        if self._is_granting or not (self._line.requests or self._parked):
            return
        self._is_granting = True
        try:
            self._grant()
        finally:
            self._is_granting = False

    def _grant(self) -> None:
        now = time.monotonic()
        # Each of them sees those that wait before it.
        parked, self._parked = self._parked, []
        for place in parked:
            if self._is_over(place):
                continue
            awaited = place.awaited
            if (
                awaited is not None
                and awaited.running >= awaited.room
                and awaited.state == "ready"
                and now < place.until
            ):
                # Every call that begins or ends comes here, and nothing has changed for this one.
                self._parked.append(place)
            elif not self._can_wait(place):
                self._fail(place)
            elif replica := self._choose(place, now, parks=True):
                self._give(place, replica)
            else:
                self._parked.append(place)
        while any(one.running < one.room and one.state == "ready" for one in self.replicas):
            next_one = self._line.pop()
            if next_one is None:
                break
            if self._is_over(next_one):
                continue
            parks = len(self._parked) < self._most_parked
            found = self._choose(next_one, now, parks)
            if found is not None:
                self._give(next_one, found)
            else:
                self._parked.append(next_one)
                if not parks:
                    break
        if not any(one.state == "ready" for one in self.replicas):
            self._demand()
            self._fail_waiting()
        elif self._loaders and (self._line.requests or self._parked):
            self._demand(failed=not self.stranded)
        self._set_timer(now)

    @staticmethod
    def _is_over(place: Place) -> bool:
        return place.future is None or place.future.done()

    def _give(self, place: Place, replica: Replica) -> None:
        assert place.future is not None
        ticket = place.ticket
        if ticket.key:
            self._shares.charge(ticket.key, place.charged, ticket.weight)
        if not settle(place.future, replica):
            self.release(place)

    def _set_timer(self, now: float) -> None:
        """Look again when the first parked call has waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [place.until for place in self._parked if place.until > now]
        if ends:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(ends) - now, self.grant)

    def release(self, place: Place) -> None:
        """Give a place back, and correct what was estimated about a call that has ended."""
        replica, ticket, finishes, cost = place.replica, place.ticket, place.finishes, 0.0
        if replica is None:
            return
        place.replica = None
        replica.running -= place.taken
        now = replica.used_at = time.monotonic()
        count = len(finishes)
        if count >= place.width:
            first = finishes[0]
            generated = first.completion_tokens
            if count > 1:
                generated += sum(one.completion_tokens for one in finishes[1:])
            cost = PROMPT * first.prompt_tokens + COMPLETION * generated - place.charged
            self._answer += 0.1 * (generated / count - self._answer)
            replica.call_seconds += (now - place.begun - replica.call_seconds) * NEWEST
            if replica.breaker.has_failed:
                replica.succeed()
            if self._affinity != "none":
                replica.speed.add(
                    first.prompt_tokens - first.cached_tokens, place.first - place.begun
                )
                if place.matched and place.blocks:
                    replica.compare(first, place.matched / len(place.blocks))
        if ticket.key:
            self._shares.leave(ticket.key, cost, ticket.weight)
        if replica.listeners != self._own_listeners:
            replica.tell()
        elif self._line.requests or self._parked:
            self.grant()

    def _choose(self, place: Place, now: float | None = None, parks: bool = True) -> Replica | None:
        """Take places for a call, and return its engine; None if the call has to wait.

        Args:
            now: the time, if it is known.
            parks: it may wait for a busy engine that has its prompt.
        """
        best = self._only
        if best is None:
            now = time.monotonic() if now is None else now
            best, place.matched = self._best(place, now, parks)
            if best is None:
                return None
        elif best.state != "ready" or best.running >= best.room or best in place.failed:
            return None
        place.replica = best
        places, width = best.places, place.width
        place.taken = taken = width if width < places else places
        best.running += taken
        place.charged = PROMPT * place.tokens + COMPLETION * self._answer * width
        return best

    def _best(self, place: Place, now: float, parks: bool) -> tuple[Replica | None, int]:
        """Return the free engine with the least to do for a call, and the blocks that it has.

        The engine is None if none is free, or if it is sooner to wait for a busy one.
        """
        blocks, failed = place.blocks, place.failed
        count = max(len(blocks), 1)
        home = self._sessions.homes.get(place.session) if place.session is not None else None
        engines: Collection[Replica] = self.replicas
        tables = self._tables
        if self._holders is not None:
            engines = self._holders.compared(place, home)
            tables = [replica.prefixes for replica in engines]
        found = matches(tables, blocks) if blocks else None
        best, fewest, matched = None, _MOST, 0
        began, first = self._turn_began, self._first
        busy: list[tuple[Replica, int]] = []
        for index, replica in enumerate(engines):
            if replica.state != "ready" or replica in failed:
                continue
            has = found[index] if found is not None else 0
            used = replica.prefixes.used
            if replica is home:
                weight = LOAD
                # Its prompt may have changed at the beginning, or is not known.
                has = has or count
            else:
                weight = LOAD if has and used.get(blocks[has - 1]) else NEW
            if replica.running >= replica.room:
                busy.append((replica, has))
                continue
            load = weight * replica.running / replica.places
            has_had = replica.used_at >= began
            cost = 1 - has / count + load, replica.sessions, len(used), has_had, index < first
            if cost < fewest:
                best, fewest, matched = replica, cost, has
        if best is not None and best.used_at >= began:
            # All have had a call. The next turn has another order in each process: with the same
            # one, all processes would choose the same engine at the same time.
            self._turn_began, self._first = now, int(self._draw() * len(engines))
        if best is not None and busy and parks and (not place.until or place.until > now):
            seconds, place.awaited = worth_waiting(place, busy, matched, best, self._parked)
            if place.awaited is not None:
                place.until = place.until or now + min(seconds, LONGEST_PARKED)
                return None, 0
        return best, matched

    # Calls.

    @override
    async def model(self) -> Model:
        """Return the model as an engine last reported it.

        Raises:
            EngineUnavailable: no engine has answered yet.
        """
        if self.known is None:
            self.start()
            await self._learn()
        return self.known  # type: ignore[return-value]

    @override
    def known_model(self) -> Model | None:
        return self.known

    async def _learn(self) -> None:
        self._adopt()
        if self.known is not None:
            return
        if not any(one.is_loadable for one in self.replicas):
            await self._revive()
        elif not any(one.state == "ready" for one in self.replicas):
            place = Place(None, self.name, "none")
            await self.begin(place, None)
            self.release(place)
        if self.known is None:
            raise self.unavailable()

    @override
    def open(self, job: Generation) -> Stream:
        """Run a job on the engine that is chosen when a place is free."""
        self.budget.calls += 1
        return Run(self, job, self.name, self._affinity)

    @override
    async def check(self, job: Generation) -> None:
        # A stream waits for its model in its place, with comments.
        if any(one.state == "ready" for one in self.replicas):
            await self._any(lambda backend: backend.check(job))

    @override
    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        place = Place(job, self.name, self._affinity)
        self.budget.calls += 1
        while True:
            replica = await self.begin(place, job)
            try:
                context = replica.backend.native(job, stream)
                reply = await context.__aenter__()
                if reply.status < 500:
                    replica.succeed()
                break
            except BaseException as error:
                await self.after(place, error)
        try:
            yield reply
        finally:
            try:
                await context.__aexit__(None, None, None)
            finally:
                self.release(place)

    def keep(self, place: Place, replica: Replica) -> None:
        """Note that an engine evaluates the prompt of a call, and runs its session."""
        if place.blocks:
            replica.prefixes.add(place.blocks)
            if self._holders is not None:
                self._holders.add(place.blocks, replica)
        if place.session is not None:
            self._sessions.move(place.session, replica)

    async def after(self, place: Place, error: BaseException) -> None:
        """Decide what follows an error before the first event; raise it if it is the client's.

        The next place of the call is on another engine.
        """
        replica, ended = place.replica, time.monotonic()
        self.release(place)
        if replica is None or not isinstance(error, LatimerError):
            raise error
        if isinstance(error, RequestError):
            replica.succeed()
            raise error
        place.matched, place.until = 0, 0.0
        is_busy = isinstance(error, Busy)
        if not is_busy and not place.is_reloaded and await replica.has_ended():
            place.is_reloaded = True
        else:
            if not is_busy:
                self.blame(replica, error)
            place.failed = {*place.failed, replica}
            if not self._can_wait(place) and any(
                one.state == "unavailable" and one not in place.failed for one in self.replicas
            ):
                await self._revive()
            if not self._can_wait(place) or not self.budget.take():
                raise error
        tried = Try(replica.name, reason_label(error), place.begun, ended)
        self.retries[tried[:2]] += 1
        place.ticket.tries += (tried,)

    async def _call(self, job: Embedding | Ranking, work: Callable[[Backend], Awaitable[T]]) -> T:
        """Run a job with one result."""
        place = Place(job, self.name, self._affinity)
        self.budget.calls += 1
        while True:
            replica = await self.begin(place, job)
            try:
                found = await work(replica.backend)
            except BaseException as error:
                await self.after(place, error)
            else:
                replica.succeed()
                self.release(place)
                return found

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        return await self._call(job, lambda backend: backend.embed(job))

    @override
    async def rank(self, job: Ranking) -> Scores:
        return await self._call(job, lambda backend: backend.rank(job))

    async def _any(self, work: Callable[[Backend], Awaitable[T]]) -> T:
        """Ask a question that every engine can answer, and that takes no place."""
        if not any(one.state == "ready" for one in self.replicas):
            await self._learn()
        error: LatimerError | None = None
        for replica in sorted(self.replicas, key=lambda one: one.state != "ready"):
            if replica.state not in ("ready", "draining"):
                continue
            try:
                return await work(replica.backend)
            except RequestError:
                raise
            except LatimerError as failure:
                error = failure
                if not isinstance(failure, Busy):
                    self.blame(replica, failure)
        raise error or self.unavailable()

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        if self._facts:
            return self._facts[0]
        return self._keep_facts(await self._any(lambda backend: backend.embedding_model()))

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        return await self._any(
            lambda backend: backend.tokenize(
                text, add_special=add_special, parse_special=parse_special
            )
        )

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        return await self._any(lambda backend: backend.detokenize(ids))

    @override
    async def token_bytes(self) -> Sequence[bytes] | None:
        return await self._any(lambda backend: backend.token_bytes())

    @override
    async def special_tokens(self) -> Sequence[Special]:
        return await self._any(lambda backend: backend.special_tokens())

    @override
    async def health(self) -> None:
        """Check that an engine is ready, or can load the model; none is asked twice."""
        self.start()
        if not self.is_available:
            if self.known is None:
                await self._learn()
            else:
                raise self.unavailable()

    @override
    async def aclose(self) -> None:
        """End what waits, and look after the engines no longer; their owner closes them."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = [task for task in self._tasks.values() if is_running(task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in [*self._calls()]:
            if place.future is not None:
                settle(place.future, EngineUnavailable("The model is no longer served."))
        for replica in self.replicas:
            replica.leave(self.grant)
