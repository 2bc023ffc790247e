"""The service of an adapter: its models by name, its engines' states, and what requests share."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from ..backends.base import Backend, Capabilities, Model
from ..backends.errors import (
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    ModelChanged,
    ModelLoading,
    shortened,
)
from ..backends.fleet.loading import REQUEST
from ..backends.identity import difference
from ..backends.queue import QUEUE, AdmissionQueue
from ..schemas import limits
from .arrivals import Arrivals
from .errors import InvalidRequest, UnknownModel
from .limits.leases import Grant, LeaseStore
from .limits.memory import MemoryLimits
from .model_entry import Chosen, ModelEntry, ServedModel, first_name, may_use
from .observers import Observer, Observers
from .question import ENDS, Question
from .record import Record, engine_name
from .request import Exchange
from .responses.background import Background
from .responses.lanes import KeptTurns
from .responses.sealed import Seal
from .store.store import Store
from .store.transcripts import Transcripts

if TYPE_CHECKING:
    from ..backends.fleet.pool import Pool
    from ..backends.fleet.replica import State
    from ..backends.speech.base import Speaker, Transcriber

log = logging.getLogger("latimer")

DEFAULT_MAX_BODY = limits.BODY.maximum
# Seconds after which the question for a model is a wait for its engine.
_WAIT = 0.05
# Seconds that engines may take to answer `/health`: less than the limits of usual probes.
HEALTH = 3.0
# Seconds without an answer after which an engine elsewhere counts as one that does not answer.
SILENCE = 5.0

# The recordings to transcribe that are in memory at once, of at most 115 MB each.
MOST_RECORDINGS = 4

# How many names of models are kept with what they have led to, and the characters of a name that is
# too long for that. With `any_model`, clients can send any name; a full table begins again.
_MOST_LATEST, _LONG = 64, 256


class Socket(Protocol):
    """A WebSocket that is open."""

    @property
    def is_idle(self) -> bool:
        """True if no response runs or waits."""
        ...

    def drain(self) -> None:
        """Close the connection when what runs has ended; from any thread."""
        ...


class Service:
    """The backends of an adapter.

    Args:
        listings: one for each backend; a name belongs to the first listing that has it.
        max_body: the largest request body, in bytes.
        observers: get what was measured of each request.
        hosted: apply the limits of OpenAI's hosted service (`adapter/hosted.py`).
        store: stores what requests ask to store; None if nothing is stored.
        seal: seals reasoning that clients keep.
        limits: counts the limits of keys; by default in memory.
        socket_lifetime: seconds after which a WebSocket ends; 0 refuses WebSockets.
        speaker: speaks for every model, instead of the engine's own speaker.
        transcriber: transcribes for every model, instead of the engine's own transcriber.

    Attributes:
        kept: the latest responses of WebSockets, which these can continue.
        transcripts: the latest spoken answers, which requests name by their audio.
        table: the models by name, if no engine has to be asked for its own; None if one has to.
        keepalive: seconds between the comments of a stream whose model is loaded; 0 sends none.
        late_checks: True if a call may find another model, and a request is then prepared again.
    """

    def __init__(
        self,
        listings: Sequence[ModelEntry],
        max_body: int = DEFAULT_MAX_BODY,
        observers: Sequence[Observer] = (),
        hosted: bool = False,
        store: Store | None = None,
        seal: Seal | None = None,
        limits: LeaseStore | None = None,
        socket_lifetime: float = 0,
        speaker: Speaker | None = None,
        transcriber: Transcriber | None = None,
    ) -> None:
        self.observers = Observers(observers, self.label_asked)
        self.replace(listings)
        self.max_body, self.arrivals = max_body, Arrivals(max_body)
        self.hosted = hosted
        self.store = store
        self.seal = seal or Seal()
        self.limits: LeaseStore = limits or MemoryLimits()
        self.background = Background()
        self.socket_lifetime = socket_lifetime
        self.speaker = speaker
        self.transcriber = transcriber
        # The recordings that are in memory; others wait as files.
        self.recordings = AdmissionQueue(QUEUE, MOST_RECORDINGS)
        self.kept = KeptTurns()
        self.transcripts = Transcripts()
        # The connections of WebSockets that are open.
        self.sockets: set[Socket] = set()
        # Questions to engines whether they are ready (`readiness`).
        self.asked: dict[Backend, Question] = {}
        # Closes the engines that several models share.
        self.release: Callable[[], Awaitable[None]] | None = None
        # True for `latimer serve`, whose settings are options of a command.
        self.is_command = False
        # True if the server ends when its requests have ended, and if it accepts no more.
        # Before the drain, `/ready` alone says that the server ends.
        self.is_leaving = self.is_draining = self.has_ended = False

    def replace(self, listings: Sequence[ModelEntry]) -> None:
        """Serve these models from now on; running requests end with the models that they have."""
        self._listings = listings
        # What `resolve` has returned for the name of a model that no other one can replace.
        self._latest: dict[str, ServedModel] = {}
        # The models of engines that have reported them, and what these engines can do.
        self._reported: dict[Backend, Model] = {}
        self._abilities: dict[Backend, Capabilities] = {}
        # Whether the only engine of a model answers, once it has answered.
        self._answers: dict[Backend, bool] = {}
        table: dict[str, ModelEntry] = {}
        for listing in listings:
            for name in listing.names:
                table.setdefault(name, listing)
        self.is_fleet = any(listing.pool is not None for listing in listings)
        self.observers.is_fleet = self.is_fleet
        # Names are only known at once if no engine has to be asked for its own.
        are_known = all(listing.names for listing in listings)
        several = self.is_fleet or len(listings) > 1
        self.table = table if are_known and several else None
        self.has_fallbacks = any(listing.fallback for listing in listings)
        self.late_checks = False
        self.keepalive = max((listing.policy.keepalive for listing in listings), default=0)
        has_defaults = any(listing.defaults for listing in listings)
        self.defaults = self._with_defaults if has_defaults else None

    def _with_defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        name = body.get("model")
        entry = self._listings[0]
        if isinstance(name, str) and self.table is not None:
            entry = self.table.get(name, entry)
        return entry.defaults

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """The models that are served."""
        return self._listings

    @property
    def strict(self) -> bool:
        """True if requests that name no model must not have unknown fields."""
        return any(listing.policy.strict for listing in self._listings)

    async def resolve(self, name: str | None, grant: Grant | None = None) -> ServedModel:
        """Return the backend for a model name; an unknown name is a 404 (contract 1.4).

        A request may omit the name if one model is served.

        Args:
            grant: the permissions of the request's key; a model that it may not use is unknown.

        Raises:
            InvalidRequest: no model has the name, or the request must name one.
            EngineUnavailable: an engine that may serve the model is not available.
        """
        if self.table is not None:
            found = self.latest(name, grant)
            return found or await self.served(*self.chosen(name, grant))
        if not name and len(self._listings) == 1:
            return await self.first(grant)
        missing: LatimerError | None = None
        known: list[str] = []
        # Other models may be served since an engine was asked.
        latest = self._latest
        for listing in self._listings:
            try:
                model = await self.model_of(listing)
            except LatimerError as error:
                if name in listing.names:
                    raise
                missing = missing or error
                continue
            self.late_checks |= listing.backend.capabilities.late_checks
            names = listing.names or (model.name,)
            if name and (listing.any_model or name in names):
                if grant is not None and not may_use(grant, name, names):
                    continue
                rules = listing.policy, name, listing.pool is not None
                served = ServedModel(listing.backend, model, *rules, label=names[0])
                if len(name) < _LONG:
                    if len(latest) >= _MOST_LATEST:
                        latest.clear()
                    latest[name] = served
                return served
            known += names
        if missing is not None:
            raise missing
        raise self._unknown(name, known, grant)

    async def served(self, entry: ModelEntry, name: str, replaces: bool) -> ServedModel:
        """Return the backend of a model that was chosen; no other engine is asked."""
        model = None if entry.pool is None else entry.pool.known
        if model is None:
            model = await self.model_of(entry)
        self.late_checks |= entry.backend.capabilities.late_checks
        label = entry.names[0]
        rules = entry.policy, name, self.is_fleet, replaces, label
        found = ServedModel(entry.backend, model, *rules)
        # Other models may be served since the engine was asked.
        is_listed = self.table is not None and self.table.get(name) is entry
        if is_listed and entry.pool is not None and not (replaces or entry.fallback):
            self._latest[name] = found
        return found

    def latest(self, name: str | None, grant: Grant | None) -> ServedModel | None:
        """Return what `resolve` has returned for a name, if that is still true.

        None if a model can replace it, or if its engine must be asked. A key for some models only
        gets it by the model's first name, if it may use that one.
        """
        found = self._latest.get(name or "")
        if found is None or found.backend.known_model() is not found.model:
            return None
        if grant is None or grant.names is None or (name == found.label and grant.allows(name)):
            return found
        return None

    def chosen(self, name: str | None, grant: Grant | None) -> Chosen:
        """Return the model for a name, its name, and True if it replaces another one.

        Raises:
            InvalidRequest: no model has the name, or the request must name one.
        """
        table = self.table
        assert table is not None
        if not name and len(self._listings) == 1:
            only = self._listings[0]
            return only, first_name(only.names, grant), False
        entry = table.get(name or "")
        if entry is None and name:
            entry = next((one for one in self._listings if one.any_model), None)
        if entry is None or (
            grant is not None
            and grant.names is not None
            and not may_use(grant, name or "", entry.names)
        ):
            raise self._unknown(name, [*table], grant)
        if entry.fallback and not entry.is_available:
            for other in entry.fallback:
                if table[other].is_available and (grant is None or grant.allows(other)):
                    return table[other], other, True
        return entry, name or entry.names[0], False

    def may_repeat(self, error: LatimerError, name: object, grant: Grant | None) -> bool:
        """Return True if a request that has failed can succeed when it is prepared once more.

        That is so if its engine has another model now, and if a fallback serves its model now.

        Args:
            name: the name of its model.
        """
        if isinstance(error, ModelChanged):
            return True
        if not isinstance(error, EngineUnavailable) or not isinstance(name, str):
            return False
        return self.table is not None and self.chosen(name, grant)[2]

    @staticmethod
    def is_own(own: Speaker | Transcriber, name: str | None, grant: Grant | None) -> bool:
        """Return True if a key may use the server's speaker or transcriber by a name, its own."""
        return name == own.known().name and (grant is None or grant.allows(name))

    def _unknown(
        self, name: str | None, known: Sequence[str], grant: Grant | None
    ) -> InvalidRequest:
        if grant is not None:
            known = [one for one in known if grant.allows(one)]
        if not name:
            return InvalidRequest(
                "you must provide a model parameter: this server has several models. Expected one "
                f"of: {shortened(', '.join(known))}."
            )
        purposes = (self.speaker, "speech"), (self.transcriber, "transcriptions")
        uses = [use for own, use in purposes if own is not None and self.is_own(own, name, grant)]
        if self.hosted:
            hint = ""
        elif uses:
            hint = f" It is for /v1/audio/{uses[0]} only."
        elif grant is not None and grant.names is not None:
            hint = f" This API key may use: {shortened(grant.shown)}." if grant.shown else ""
        else:
            hint = (
                f" This server has: {shortened(', '.join(known))}. To accept every name, start it "
                "with --any-model."
            )
        return UnknownModel(name, hint)

    async def first(self, grant: Grant | None = None) -> ServedModel:
        """Return the backend for requests that name no model.

        Raises:
            InvalidRequest: the key of the request may use no name of the model.
        """
        listing = self._listings[0]
        model = await self.model_of(listing)
        self.late_checks |= listing.backend.capabilities.late_checks
        name = first_name(listing.names_of(model), grant)
        label = listing.names[0] if listing.names else model.name
        return ServedModel(listing.backend, model, listing.policy, name, self.is_fleet, label=label)

    async def model_of(self, entry: ModelEntry) -> Model:
        """Return the model of an entry, as its engine reports it.

        The wait for an engine that stalls counts as the request's wait for a load.

        Raises:
            EngineUnavailable: the engine is not available.
        """
        begun = perf_counter()
        if entry.pool is not None:
            exchange = REQUEST.get()
            if isinstance(exchange, Exchange) and exchange.keepalive:
                # Until here it is the longest of all models. A frame of a WebSocket has none.
                exchange.keepalive = entry.policy.keepalive
        try:
            model = await entry.backend.model()
        except LatimerError as error:
            self.note_error(entry, error)
            _note_engine(entry)
            raise
        except asyncio.CancelledError:
            _note_engine(entry)
            waited = perf_counter() - begun
            if waited > SILENCE and not entry.backend.loads_here:
                # The client has had less patience than the connection to the engine.
                self.note_error(entry, _silent_for(waited))
            raise
        finally:
            if perf_counter() - begun > _WAIT and (record := _record_at(entry)) is not None:
                record.note_wait(begun)
        if self._reported.get(entry.backend) is not model:
            self._note_model(entry, model)
        if not self._answers.get(entry.backend):
            self.note_answer(entry)
        return model

    def _note_model(self, entry: ModelEntry, model: Model) -> None:
        """Note the model of an engine; log it if the only one has another model than before."""
        backend = entry.backend
        before, label = self._reported.get(backend), self.label(entry)
        now, then = backend.capabilities, self._abilities.get(backend)
        self._reported[backend], self._abilities[backend] = model, now
        if before is None or then is None or entry.pool is not None:
            return
        reason = difference(model, before, now, then, "as before")
        if model.name != before.name and f"({model.name})" not in reason:
            # A fine-tuned model has the same sizes.
            more = f": {reason}" if reason else ""
            reason = f"it serves another model ({model.name}), not {before.name}{more}"
        if reason:
            gets = ""
            if model.name != before.name:
                gets = "; all requests get it now"
                if not (entry.names or entry.any_model):
                    gets = f"; requests have to name {model.name} now"
            fields = {"engine": engine_name(now.engine), "model": label, "reason": reason}
            log.warning(
                "model %s: %s%s", label, reason, gets,
                extra={"event": "model_changed", "fields": fields},
            )  # fmt: skip

    def ask(self, entry: ModelEntry) -> Question:
        """Ask the only engine of a model whether it is ready; it is asked once at a time."""
        backend, loop = entry.backend, asyncio.get_running_loop()
        last = self.asked.get(backend)
        if last is not None and not last.task.done() and last.task.get_loop() is loop:
            return last
        task = loop.create_task(self._check(entry))
        # Retrieves the error, since nobody may wait for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        patience = math.inf if backend.loads_here else SILENCE
        asked = Question(task, monotonic(), patience, *self._state_before(entry, last))
        self.asked[backend] = asked
        if not backend.loads_here:
            timer = loop.call_later(SILENCE, self.note_error, entry, _silent_for(SILENCE))
            task.add_done_callback(lambda _: timer.cancel())
        return asked

    def _state_before(
        self, entry: ModelEntry, last: Question | None
    ) -> tuple[tuple[State, str], float]:
        """Return the state of an engine that is asked, until it answers, and the reason.

        The number is the seconds for which it holds.

        Args:
            last: the question before.
        """
        if self._answers.get(entry.backend):
            return ("ready", ""), math.inf
        is_new = entry.backend not in self._answers
        if last is not None and last.task.done() and last.reason:
            # One that refused connections begins to load when it accepts one, and then it takes
            # longer. The time to find a host that is down is always the same.
            return last.found, last.took if is_new else math.inf
        return ("loading" if is_new else "unavailable", ""), math.inf

    async def _check(self, entry: ModelEntry) -> None:
        """Ask an engine whether it is ready; and for its model, if its name is not known.

        An engine that returns may have another model.
        """
        try:
            await entry.backend.health()
        except LatimerError as error:
            self.note_error(entry, error)
            raise
        if entry.names and self._answers.get(entry.backend) is not False:
            self.note_answer(entry)
        else:
            await self.model_of(entry)

    def note_answer(self, entry: ModelEntry) -> None:
        """Note that an engine answers, and log it if the only one of a model did not."""
        if self._answers.get(entry.backend) is False:
            self._log_engine(entry, "engine_returned", "answers again")
        self._answers[entry.backend] = True

    def note_error(self, entry: ModelEntry, error: LatimerError) -> None:
        """Log that the only engine of a model has stopped answering; a pool logs its own."""
        is_silent = isinstance(error, EngineUnavailable | EngineSilent)
        stops = is_silent and self._answers.get(entry.backend)
        if stops and entry.pool is None:
            self._answers[entry.backend] = False
            words = f"does not answer: {error.message}"
            self._log_engine(entry, "engine_lost", words, error.message)

    def _log_engine(self, entry: ModelEntry, event: str, words: str, reason: str = "") -> None:
        name = engine_name(entry.backend.capabilities.engine)
        fields = {"engine": name, "model": self.label(entry)}
        fields |= {"reason": reason} if reason else {}
        level = logging.WARNING if reason else logging.INFO
        log.log(level, "engine %s %s", name, words, extra={"event": event, "fields": fields})

    def label(self, entry: ModelEntry) -> str:
        """Return the name of a model in metrics; empty if no engine has reported it yet."""
        if entry.names:
            return entry.names[0]
        model = self._reported.get(entry.backend)
        return "" if model is None else model.name

    def label_asked(self, exchange: Exchange) -> str:
        """Return the name in metrics of the model that a request asks for, without asking engines.

        It is empty if no model has the name, or if the request's key may not use it.
        """
        asked, grant, entries = exchange.asked, exchange.grant, self._listings
        if not isinstance(asked, str):
            return ""
        if not asked:
            found = entries[:1] if len(entries) == 1 else ()
        else:
            found = [one for one in entries if asked in (one.names or (self.label(one),))]
            found = found or [one for one in entries if one.any_model]
        for entry in found:
            label = self.label(entry)
            names = entry.names or (label,)
            if grant is None or (
                may_use(grant, asked, names) if asked else any(map(grant.allows, names))
            ):
                return label
        return ""

    def asking(self, label: str) -> int:
        """Return the number of requests that wait for the only engine of a model to say what it is.

        Args:
            label: the name of the model in metrics.
        """
        asking = (
            one
            for one in [*self.observers.running]
            if not (one.model or one.asked is None or one.is_detached)
        )
        return sum(self.label_asked(one) == label for one in asking)

    async def models(self, grant: Grant | None = None) -> dict[str, ServedModel | None]:
        """Return every name that requests with a key may use, with its backend.

        A model of several engines is described as they last reported it, and is None if none has
        answered yet.

        Raises:
            EngineUnavailable: an engine that is the only one is not available.
        """
        found: dict[str, ServedModel | None] = {}
        for listing in self._listings:
            pool = listing.pool
            model = await listing.backend.model() if pool is None else pool.known
            for name in listing.names if model is None else listing.names_of(model):
                if grant is not None and not grant.allows(name):
                    continue
                served = None
                if model is not None:
                    policy, is_pooled = listing.policy, pool is not None
                    served = ServedModel(listing.backend, model, policy, name, is_pooled)
                found.setdefault(name, served)
        return found

    async def health(self) -> None:
        """Check that every engine is ready; of models with several engines, one is enough.

        Raises:
            EngineUnavailable: an engine is not available, or has not answered for `HEALTH` seconds.
        """
        pools = [listing.pool for listing in self._listings if listing.pool is not None]
        # A probe that leaves does not cancel the question, whose silence is the engine's state.
        alone = [one for one in self._listings if one.pool is None]
        checks: list[Awaitable[None]] = [asyncio.shield(self.ask(one).task) for one in alone]
        if pools:
            checks.append(_check_any(pools))
        try:
            async with asyncio.timeout(HEALTH):
                results = await asyncio.gather(*checks, return_exceptions=True)
        except TimeoutError:
            raise EngineUnavailable(f"The engine has not answered within {HEALTH:g} s.") from None
        for result in results:
            if isinstance(result, asyncio.CancelledError):
                # The app is closed; nobody has cancelled the request.
                raise EngineUnavailable(ENDS)
        _raise_all([result for result in results if result is not None])

    async def aclose(self) -> None:
        """End what runs, write what waits for the store, and release the store and the backends."""
        await self.background.aclose()
        self.observers.close()
        if self.store is not None:
            await self.store.aclose()
        await self.limits.aclose()
        await asyncio.to_thread(self.transcripts.close)
        for spoken in (self.speaker, self.transcriber):
            if spoken is not None:
                await spoken.aclose()
        for question in self.asked.values():
            with suppress(RuntimeError):
                # Its event loop may be closed.
                question.task.cancel()
        for listing in self._listings:
            await listing.backend.aclose()
        if self.release is not None:
            await self.release()


def _record_at(entry: ModelEntry) -> Record | None:
    """Return the record of the request that waits for the only engine of a model."""
    exchange = REQUEST.get()
    if entry.pool is None and isinstance(exchange, Exchange):
        return exchange.record
    return None


def _note_engine(entry: ModelEntry) -> None:
    """Note that the only engine of a model is that of the request which waited for it in vain."""
    record = _record_at(entry)
    if record is not None:
        record.engine = entry.backend.capabilities.engine


def _silent_for(seconds: float) -> EngineSilent:
    return EngineSilent(f"The engine has not answered for {round(seconds, 1):g} s.")


async def _check_any(pools: Sequence[Pool]) -> None:
    """Return when the first model is ready; raise the errors of all if none is."""
    for pool in pools:
        pool.start()
    if any(pool.is_available for pool in pools):
        return
    checks = [asyncio.ensure_future(pool.health()) for pool in pools]
    try:
        for check in asyncio.as_completed(checks):
            with suppress(LatimerError):
                await check
                return
    finally:
        for one in checks:
            one.cancel()
        results = await asyncio.gather(*checks, return_exceptions=True)
    _raise_all([result for result in results if result is not None])


def _raise_all(errors: Sequence[BaseException]) -> None:
    """Raise the only error, or one with the messages of all."""
    if len(errors) == 1 or not all(isinstance(one, LatimerError) for one in errors):
        raise errors[0]
    if errors:
        are_loading = all(isinstance(one, ModelLoading) for one in errors)
        message = " ".join(dict.fromkeys(map(str, errors)))
        raise ModelLoading(message) if are_loading else EngineUnavailable(message)
