"""The states of the engines: what `/ready`, `/metrics` and `latimer top` say about them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..backends.base import Load
from .model_entry import ModelEntry
from .record import engine_name
from .service import Service

if TYPE_CHECKING:
    from ..backends.fleet.pool import Pool
    from ..backends.fleet.replica import State

# The states in which a model accepts requests; an unloaded one is loaded for them.
SERVING: frozenset[State] = frozenset({"ready", "unloaded"})

# Seconds that an engine may take to answer, for `/metrics`.
SCRAPE = 0.25
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
        engines.append(EngineState(one.name, one.shown, one.reason, load))
    names = entry.names or ((pool.known.name,) if pool.known is not None else (pool.name,))
    waiting = pool.waiting
    if pool.known is None:
        # Those that wait for the first answer of an engine are not in its queue.
        waiting = max(waiting, service.asking(names[0]))
    return ModelState(names[0], waiting, tuple(engines), pool)


async def _of_backend(service: Service, entry: ModelEntry, patience: float) -> ModelState:
    backend = entry.backend
    question = service.ask(entry)
    await asyncio.wait([question.task], timeout=patience)
    state, reason = question.found
    name = service.label(entry)
    load = backend.load() or _IDLE
    engine = EngineState(engine_name(backend.capabilities.engine), state, reason, load)
    # A request asks the engine for its model before it waits for a place.
    return ModelState(name, load.waiting + service.asking(name), (engine,), None)
