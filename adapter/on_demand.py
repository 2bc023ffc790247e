"""Engines that Latimer loads: a llama-server for a file, and the engines of the tables.

`engines.py` makes their backends.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..backends.base import (
    Backend,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Generation,
    NativeReply,
    Pooling,
    Ranking,
    Scores,
    Stream,
)
from ..backends.errors import ContextExceeded, EngineUnavailable, NotServed
from ..backends.fleet.groups import state_folder
from ..backends.fleet.loading import EngineLoader, cause_of
from ..backends.fleet.machine import Machine, Member
from ..backends.fleet.pool import Pool
from ..backends.fleet.process import EngineProcess
from ..backends.fleet.replica import Replica
from ..backends.fleet.router_mode import KoboldModel, RouterModel
from ..backends.fleet.sizes import Sizes, key_of
from ..backends.http import HttpClient
from ..backends.llama_cpp.options import INCOMPLETE, name_of, parts_of
from ..backends.llama_server.command import (
    PROGRAM,
    SLOTS,
    command_of,
    default_context,
    find_program,
)
from ..backends.llama_server.embeddings import EMBEDDINGS_OFF, NO_VECTORS
from ..backends.llama_server.server import RERANKING_OFF
from ..backends.llama_server.translate import LARGER_BATCH
from ..backends.pooling import Purpose, not_generated, pooling_of, purpose_of
from .hub.memory import read_metadata, trained_context
from .option import option_of
from .settings import EngineTable, Settings

# The variable in which llama-server finds its API key.
_KEY = "LLAMA_API_KEY"
# Seconds that the only model of a server may take to load.
_START = 3_600.0


def options_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments of the in-process engine that the settings set."""
    arguments = settings.arguments("llama-cpp")
    names = [
        option_of(field).argument_of(name)
        for name, field in Settings.model_fields.items()
        if name in settings.model_fields_set and "llama-cpp" in option_of(field).to
    ]
    return {name: arguments[name] for name in names}


def unsupported(settings: Settings) -> list[str]:
    """Return where those settings were set that a llama-server does not know."""
    return [
        settings.source_of(name)
        for name, field in Settings.model_fields.items()
        if name in settings.model_fields_set and option_of(field).in_process
    ]


def child_of(
    settings: Settings,
    program: Sequence[str],
    model: Path,
    make: Callable[[str, str], Backend],
) -> Backend:
    """Return the backend of a file that a llama-server serves, which is a child process.

    Args:
        program: see `find_program`.
        make: makes the backend for an address and an API key.

    Raises:
        EngineError: settings contradict each other or the model.
    """
    key = secrets.token_urlsafe(24)
    name = name_of(model)
    purpose, options = _started(settings, model)
    loader = EngineProcess(
        name,
        command_of(program, model, name, options),
        lambda address: make(address, key),
        environment={_KEY: key},
        start_timeout=_START,
        is_only=True,
    )
    pooling = options["pooling"]
    only = pooling is not None and purpose.only_embeds
    return OnlyModel(name, model, Member(Machine(), loader), settings.queue, pooling, not only)


def _started(settings: Settings, model: Path) -> tuple[Purpose, dict[str, Any]]:
    """Return what a file is made for, and the arguments of `command_of` for it.

    The model embeds and pools as in process.
    """
    options = options_of(settings)
    metadata = read_metadata(parts_of(model)[0]) or {}
    purpose = purpose_of(lambda key: str(metadata.get(key, "")))
    trained = trained_context(metadata)
    options.setdefault("context", default_context(trained, options.get("parallel", SLOTS)))
    asked = (options.get(name) for name in ("embeddings", "pooling", "mmproj"))
    pooling = pooling_of(parts_of(model)[0], purpose, *asked)
    options |= {"embeddings": pooling is not None, "pooling": pooling}
    if pooling is not None and not (purpose.is_causal and pooling == "last"):
        # llama-server splits no other inputs.
        options.setdefault("batch", min(options["context"], trained or options["context"]))
    return purpose, options


# What llama-server's errors advise, in options of Latimer, which has started it.
_ADVICE = {
    EMBEDDINGS_OFF: "Start Latimer with --embeddings, or with an embedding model.",
    NO_VECTORS: (
        "It returns no vectors. If the model is a reranker, start Latimer with --pooling rank."
    ),
    RERANKING_OFF: "Start Latimer with a reranking model.",
    LARGER_BATCH: "Start Latimer with a larger --batch for longer inputs.",
}


# What to do about a llama-server that ends before it serves, by words of its log.
_NEXT_STEPS = {
    "CLIP model": "Correct --mmproj: a model needs the projector that was made for it.",
    "lora adapter": "Correct --lora: an adapter is a GGUF file that was made for this model.",
    "allocat": "Use a smaller --context, or a smaller quantization of the model.",
    "error loading model": INCOMPLETE,
}


@contextmanager
def _own_advice() -> Iterator[None]:
    try:
        yield
    except (NotServed, ContextExceeded) as error:
        error.hint = _ADVICE.get(error.hint, error.hint)
        raise


class OnlyModel(Pool):
    """The only model of a server, whose engine ends with it.

    Args:
        file: the model's.
        pooling: that of its embeddings; None without embeddings.
        generates: False for a model that is made for embeddings or reranking only.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        member: Member,
        queue: int,
        pooling: Pooling | None,
        generates: bool,
    ) -> None:
        super().__init__(name, [Replica(name, member.backend, loader=member)], queue)
        self._file, self._member = file, member
        self._pooling, self._generates = pooling, generates

    @override
    def unavailable(self) -> EngineUnavailable:
        loader = self._member.loader
        if self.known is not None or not loader.failure:
            return super().unavailable()
        # The start fails.
        reason = cause_of(loader.tail) or loader.failure
        steps = [step for words, step in _NEXT_STEPS.items() if words in loader.tail]
        message = f"llama-server cannot serve {self._file}: {reason}."
        return EngineUnavailable(" ".join([message, *steps[:1]]))

    @override
    def open(self, job: Generation) -> Stream:
        if not self._generates:
            # As in process; a llama-server would generate with a decoder.
            raise not_generated(PROGRAM, self._pooling)
        return super().open(job)

    @override
    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        if not self._generates:
            raise not_generated(PROGRAM, self._pooling)
        async with super().native(job, stream) as reply:
            yield reply

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        facts = await super().embedding_model()
        if facts is None:
            return None
        return facts._replace(pooling=self._pooling, generates=self._generates)

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        with _own_advice():
            return await super().embed(job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        with _own_advice():
            return await super().rank(job)

    @override
    async def aclose(self) -> None:
        await super().aclose()
        await self._member.aclose()


# Begins the names of the machines of koboldcpps that have no other.
_KOBOLD = "koboldcpp at "


def machines_of(machines: Mapping[str, Machine], settings: Settings) -> dict[str, Machine]:
    """Return the machines that exist, and new ones of the tables; see `update_machines`."""
    names = [*settings.machines]
    names += [place for engine in settings.engines.values() if (place := _place_of(engine))]
    return {**{name: Machine(name) for name in names}, **machines}


def update_machines(machines: Mapping[str, Machine], settings: Settings) -> None:
    """Give the machines the limits of the tables."""
    for name, table in settings.machines.items():
        machines[name].limit(table.memory, table.most_wait)


def _place_of(engine: EngineTable) -> str:
    """Return the name of an engine's machine; an empty text if it has one for itself."""
    return engine.machine or (_KOBOLD + str(engine.url) if _is_kobold(engine) else "")


def _is_kobold(engine: EngineTable) -> bool:
    return engine.model is not None and getattr(engine, "backend", "auto") == "koboldcpp"


def _started_by(command: Sequence[str]) -> Sequence[str]:
    """Return a command with the llama-server of a package, if the PATH has none."""
    if command[0] == PROGRAM and shutil.which(PROGRAM) is None:
        return [*(find_program() or [PROGRAM]), *command[1:]]
    return command


def is_pinned(settings: Settings, name: str) -> bool:
    """Return True if the engine of a table has a model that is never unloaded."""
    return any(model.pinned for model in settings.served().values() if name in model.engines)


def loader_of(
    settings: Settings, name: str, model: Any, make: Callable[[str], Backend]
) -> EngineLoader:
    """Return what loads the model of an engine's table.

    Args:
        make: makes the backend for an address.
    """
    table = settings.engines[name]
    options: dict[str, Any] = {
        "start_timeout": table.start_timeout,
        "idle": table.idle,
        "is_pinned": is_pinned(settings, name),
        "memory": table.memory,
    }
    if table.command is not None:
        process = EngineProcess(name, _started_by(table.command), make, **options)
        if table.memory is None:
            sizes, key = Sizes(state_folder()), key_of(name, table.command)
            process.memory = sizes.get(key)
            process.measured = partial(sizes.put, key)
        return process
    url, secret = str(table.url), settings.for_engine(name).engine_key
    headers = {"Authorization": f"Bearer {secret.get_secret_value()}"} if secret else {}
    client = HttpClient(url, headers)
    if _is_kobold(table):
        return KoboldModel(name, client, model, make(url), place=url, **options)
    return RouterModel(name, client, model, make(url), **options)


def machine_of(settings: Settings, name: str, machines: Mapping[str, Machine]) -> Machine:
    """Return the machine of an engine; one without limits of its own if it names none."""
    place = _place_of(settings.engines[name])
    return machines[place] if place else Machine(name)
