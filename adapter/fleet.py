"""The engines and the models of the settings' tables, and how they change while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ..backends.errors import LatimerError
from ..backends.fleet.config import ModelConfig
from ..backends.fleet.machine import Machine, Member
from ..backends.fleet.pool import Pool
from ..backends.fleet.replica import Replica
from ..schemas.openai.chat import ChatRequest
from ..schemas.openai.completions import CompletionRequest
from ..schemas.openai.responses import ResponseRequest
from .app import policy_of
from .engines import WrongSetup, background_backend, member_of
from .hub.names import HubError
from .model_entry import ModelEntry
from .on_demand import is_pinned, machines_of, update_machines
from .settings import OF_ENGINE, Settings
from .validation import parse

# Seconds that the waiting requests of a removed model get.
_REMOVED = 60
# Seconds between looks at models that are not available yet.
_AGAIN = 0.5
# The requests that a model's defaults are for, each with its required fields.
_REQUESTS: Mapping[type[BaseModel], Mapping[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"prompt": "Hello"},
    ResponseRequest: {"input": "Hello"},
}
_FIELDS = frozenset(name for request in _REQUESTS for name in request.model_fields)


class Fleet:
    """The engines and the models of the settings' tables.

    Args:
        progress: called with the share of a model file that is loaded.

    Attributes:
        replicas: the engines by name; `pools`: the models by name.
        machines: the machines by name, of engines that are loaded on demand.
        entries: the models, as the adapter serves them.
    """

    def __init__(self, settings: Settings, progress: Callable[[float], None] | None = None) -> None:
        self.replicas: dict[str, Replica] = {}
        self.pools: dict[str, Pool] = {}
        self.machines: dict[str, Machine] = {}
        self.entries: Sequence[ModelEntry] = ()
        self._keys: dict[str, object] = {}
        self._models: Mapping[str, ModelConfig] = {}
        self._leaving: dict[Replica, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._progress = progress
        self.apply(settings)

    def apply(self, settings: Settings) -> list[str]:
        """Serve what the settings say from now on, and return the changes, in words.

        Engines and models whose tables have not changed go on as they are. Those that are gone end
        what they run.

        Raises:
            WrongSetup: an engine or a model cannot be made. Nothing has changed then.
        """
        machines = machines_of(self.machines, settings)
        keys = {name: _key(settings, name) for name in settings.engines}
        models = settings.served()
        policies = {name: _policy(settings, name, model) for name, model in models.items()}
        made: dict[str, Replica] = {}
        try:
            for name, key in keys.items():
                if key != self._keys.get(name):
                    made[name] = self._make(settings, name, machines)
        except BaseException:
            for replica in made.values():
                if isinstance(replica.loader, Member):
                    replica.loader.leave()
            raise
        update_machines(machines, settings)
        self.machines = machines
        before = self.replicas
        replicas = {name: made[name] if name in made else before[name] for name in keys}
        changes = changes_of("engine", before, replicas)
        for name, replica in before.items():
            if replicas.get(name) is not replica:
                self._drain(replica)
        changes += self._apply_models(settings, models, replicas)
        for name, replica in replicas.items():
            self._pin(replica, is_pinned(settings, name))
        self.replicas, self._keys = replicas, keys
        self.entries = [
            ModelEntry(
                self.pools[name],
                (name, *model.aliases),
                settings.any_model and not index,
                policies[name],
                model.fallback,
                model.defaults,
            )
            for index, (name, model) in enumerate(models.items())
        ]
        return changes

    def _apply_models(
        self,
        settings: Settings,
        models: Mapping[str, ModelConfig],
        replicas: Mapping[str, Replica],
    ) -> list[str]:
        pools: dict[str, Pool] = {}
        for name, model in models.items():
            own = [replicas[engine] for engine in model.engines]
            queue = settings.share_of(settings.queue if model.queue is None else model.queue)
            pool = self.pools.get(name)
            if pool is None:
                pools[name] = Pool(name, own, queue, model.affinity)
            else:
                pools[name] = pool
                pool.update(own, queue, model.affinity)
            pools[name].load_wait = model.load_wait
        changes = changes_of("model", self._models, models)
        for name, pool in self.pools.items():
            if name not in pools:
                self._end(pool)
        self.pools, self._models = pools, models
        return changes

    def _make(self, settings: Settings, name: str, machines: Mapping[str, Machine]) -> Replica:
        """Return a new engine.

        Raises:
            WrongSetup: its settings contradict each other, or its file cannot be used.
        """
        table = settings.engines[name]
        try:
            if table.is_loaded_on_demand:
                loader = member_of(settings, name, machines)
                return Replica(name, loader.backend, table.places, loader)
            own = settings.for_engine(name)
            backend = background_backend(own, self._progress, f"engines.{name}")
        except (WrongSetup, HubError) as error:
            raise WrongSetup(f"engines.{name}: {error.message}") from None
        return Replica(name, backend, table.places)

    @staticmethod
    def _pin(replica: Replica, pinned: bool) -> None:
        """Let an engine be unloaded for others, or not any more."""
        loader = replica.loader
        if loader is not None and loader.is_pinned != pinned:
            loader.is_pinned = pinned
            loader.want()

    def _drain(self, replica: Replica) -> None:
        """End an engine when it has run its last call."""
        # What takes its place waits for its memory.
        self._pin(replica, False)
        replica.set("draining", "it is not in the settings any more")
        self._leaving[replica] = asyncio.create_task(self._close(replica))

    async def _close(self, replica: Replica) -> None:
        over = asyncio.Event()

        def look() -> None:
            # In process, a question after the end would load the model once more, for ever.
            is_asked = replica.questions and replica.backend.loads_here
            if replica.running <= 0 and not is_asked:
                over.set()

        replica.join(look)
        look()
        await over.wait()
        await _release(replica)
        del self._leaving[replica]

    def _end(self, pool: Pool) -> None:
        """End a model; its running requests keep their engines, and those that wait get one."""
        task = asyncio.create_task(_close_model(pool))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def start(self) -> None:
        """Begin to look after the engines."""
        for pool in self.pools.values():
            pool.start()

    async def wait(self) -> None:
        """Wait until each model has an engine, or can load one."""
        for pool in self.pools.values():
            while not pool.is_available:  # noqa: ASYNC110
                await asyncio.sleep(_AGAIN)

    async def aclose(self) -> None:
        """Release all engines; running calls end."""
        for pool in self.pools.values():
            await pool.aclose()
        for task in (*self._leaving.values(), *self._closing):
            task.cancel()
        replicas = (*self.replicas.values(), *self._leaving)
        await asyncio.gather(*(_release(replica) for replica in replicas))

    def states(self) -> list[tuple[str, str, str]]:
        """Return the name, the state and the reason of each engine."""
        found = (*self.replicas.values(), *self._leaving)
        return [(one.name, one.shown, one.reason) for one in found]


async def _release(replica: Replica) -> None:
    if replica.loader is not None:
        await replica.loader.aclose()
    else:
        await replica.backend.aclose()


async def _close_model(pool: Pool) -> None:
    """End a model after its waiting requests, which its engines still run."""
    for _ in range(_REMOVED):
        if not pool.waiting:
            break
        await asyncio.sleep(1)
    await pool.aclose()


def _key(settings: Settings, name: str) -> object:
    """Return what an engine is made from; equal ones are the same engine."""
    own = settings.for_engine(name)
    return settings.engines[name], [getattr(own, key) for key in OF_ENGINE]


def _policy(settings: Settings, name: str, model: ModelConfig) -> Any:
    unknown = sorted(model.defaults.keys() - _FIELDS)
    if unknown:
        raise WrongSetup(
            f"models.{name}.defaults: no request has the field {unknown[0]!r}. Write a field of "
            "chat completions, completions or responses."
        )
    for request, body in _REQUESTS.items():
        own_fields = request.model_fields.keys() & model.defaults.keys()
        try:
            # A wrong value would be an error of each request that does not set the field.
            values = {field: model.defaults[field] for field in own_fields}
            parse(TypeAdapter(request), (), {"model": name, **body, **values})
        except LatimerError as error:
            raise WrongSetup(f"models.{name}.defaults: {error.message}") from None
    own = settings.for_model(model)
    if own.logit_bias_vocabulary is not None:
        from .generation.token_ids import load

        try:
            load(own.logit_bias_vocabulary)
        except LatimerError as error:
            raise WrongSetup(f"models.{name}.logit_bias_vocabulary: {error.message}") from None
    return policy_of(own.arguments("adapter"))


def changes_of(kind: str, before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the changes of tables of a kind by their names, in words."""
    words = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "changed": [name for name in now if name in before and now[name] != before[name]],
    }
    return [f"{kind} {name} {word}" for word, names in words.items() for name in names]
