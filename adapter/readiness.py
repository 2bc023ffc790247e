"""The states of the engines: what `/ready`, `/metrics` and `latimer top` say about them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..backends.base import Load
from ..backends.errors import LatimerError
from .record import engine_name
from .service import ModelEntry, Question, Service

if TYPE_CHECKING:
    from ..backends.fleet.pool import Pool
    from ..backends.fleet.replica import State

# The states in which a model accepts requests; an unloaded one is loaded for them.
SERVING: frozenset[State] = frozenset({"ready", "unloaded"})

# Seconds that an engine may take to answer, for `/metrics`.
SCRAPE = 0.25
# Seconds without an answer after which an engine elsewhere counts as one that does not answer.
SILENCE = 5.0
_IDLE = Load(0, 0)


class EngineState(NamedTuple):
    """An engine of a model, and what it does now.

    Args:
        reason: why it does not serve; empty if it does.
    """

    name: str
    state: State
    reason: str
    load: Load


class ModelState(NamedTuple):
    """A model and its engines.

    Args:
        name: its first name; empty if no engine has reported it yet.
        waiting: the number of requests that wait for one of the engines.
        pool: the model, if it has several engines.
    """

    name: str
    waiting: int
    engines: tuple[EngineState, ...]
    pool: Pool | None

    @property
    def serves(self) -> bool:
        """True if the model accepts requests now."""
        return any(engine.state in SERVING for engine in self.engines)


States: TypeAlias = list[ModelState]


async def states_of(service: Service, patience: float) -> States:
    """Return the states of all models.

    Args:
        patience: the seconds that the only engine of a model may take to answer.
    """
    alone = [entry for entry in service.entries if entry.pool is None]
    found = await asyncio.gather(*(_of_backend(service, entry, patience) for entry in alone))
    states = iter(found)
    return [
        next(states) if entry.pool is None else _of_pool(service, entry)
        for entry in service.entries
    ]


def pools_of(service: Service) -> States:
    """Return the states of models with several engines, which are known without a question."""
    return [_of_pool(service, entry) for entry in service.entries if entry.pool is not None]


def _of_pool(service: Service, entry: ModelEntry) -> ModelState:
    pool = entry.pool
    assert pool is not None
    engines = []
    for one in pool.replicas:
        load = (one.backend.load() or _IDLE)._replace(running=one.running, waiting=0)
        engines.append(EngineState(one.name, one.state, one.reason, load))
    names = entry.names or ((pool.known.name,) if pool.known is not None else (pool.name,))
    waiting = pool.waiting
    if pool.known is None:
        # Those that wait for the first answer of an engine are not in its queue.
        waiting = max(waiting, service.asking(names[0]))
    return ModelState(names[0], waiting, tuple(engines), pool)


async def _of_backend(service: Service, entry: ModelEntry, patience: float) -> ModelState:
    backend = entry.backend
    state, reason = await _asked(service, entry, patience)
    name = service.label(entry)
    load = backend.load() or _IDLE
    engine = EngineState(engine_name(backend.capabilities.engine), state, reason, load)
    # A request asks the engine for its model before it waits for a place.
    return ModelState(name, load.waiting + service.asking(name), (engine,), None)


async def _asked(service: Service, entry: ModelEntry, patience: float) -> tuple[State, str]:
    """Return the state of an engine, which is asked once at a time."""
    question, before = service.asked.get(entry.backend), ""
    if question is not None and question.task.done():
        before, question = question.reason, None
    if question is None or question.task.get_loop() is not asyncio.get_running_loop():
        task = asyncio.create_task(_ask(service, entry))
        # Retrieves the error, since nobody may wait for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        most = math.inf if entry.backend.loads_here else SILENCE
        question = service.asked[entry.backend] = Question(task, time.monotonic(), most, before)
    await asyncio.wait([question.task], timeout=patience)
    return question.found


async def _ask(service: Service, entry: ModelEntry) -> None:
    """Ask an engine whether it is ready, and for its name if it has no other."""
    try:
        await entry.backend.health()
    except LatimerError as error:
        service.note_error(entry, error)
        raise
    if entry.names:
        service.note_answer(entry)
    else:
        await service.model_of(entry)
