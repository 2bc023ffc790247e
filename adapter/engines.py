"""Make the backend that the settings name, detect the engine at a URL, and describe engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import orjson

from ..backends.base import Backend, Capabilities, Embedding, EmbeddingModel, Model, Ranking, Text
from ..backends.errors import (
    EngineError,
    EngineUnavailable,
    LatimerError,
    ModelLoading,
    NotServed,
    shortened,
)
from ..backends.http import ConnectionPool, HttpClient, shown_address
from ..backends.identity import LazyBackend
from ..backends.llama_cpp import DEMO_MODEL, LlamaCpp
from ..backends.llama_cpp.options import EXTRA, MISSING, ModelNotFound, parts_of
from ..backends.llama_server import LlamaServer
from ..backends.llama_server.command import build_of, find_program, shown_program
from ..backends.llama_server.identity import OTHER_SERVER
from ..backends.llama_server.router import is_router, names_in, not_an_engine
from ..backends.llama_server.translate import LOADING
from .errors import LimitsUnavailable, printable
from .hub.names import PREFIX, is_name, parse
from .limits.config import AdmissionConfig, store_of
from .limits.leases import LimitsError
from .option import Need
from .settings import BackendName, Settings
from .settings_file import reason_of
from .store.config import OFF, StoreConfig
from .store.errors import StoreError, StoreUnavailable, in_words
from .store.store import Store

# `on_demand` is imported by the functions that need it: it needs the modules of a fleet, which a
# server of one engine starts without.
if TYPE_CHECKING:
    from ..backends.fleet.config import EngineConfig
    from ..backends.fleet.loading import EngineLoader
    from ..backends.fleet.machine import Machine, Member
    from .hub.download import Report

T = TypeVar("T")

log = logging.getLogger("latimer")


class WrongSetup(LatimerError):
    """Settings that no backend can be made from; `message` says what to write instead."""


# A URL without its scheme: `localhost:8080`, `[::1]:8080`, `10.0.0.5:80/x`.
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:/.*)?")
# A model of the hub without its prefix: `ORG/REPO`, `ORG/REPO:Q4_K_M`.
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+(?<!\.gguf)(?::[\w.-]+)?")
_EXAMPLE = "http://127.0.0.1:8080"
_ADDRESS = re.compile(r"https?:|[A-Za-z][A-Za-z0-9+.-]*://", re.IGNORECASE)
# The first bytes of a GGUF file.
_MAGIC = b"GGUF"


def _koboldcpp() -> Callable[..., Backend]:
    # Most servers start without it.
    from ..backends.koboldcpp import KoboldCpp

    return KoboldCpp


class HttpEngine(NamedTuple):
    """An engine over HTTP; `_probe` detects it.

    Args:
        backend: returns what makes its backend of an address and the settings.
        example: a URL of it, if Latimer cannot start it for a file; otherwise empty.
        one_process: why only one process can call it; empty if several can.
    """

    backend: Callable[[], Callable[..., Backend]]
    example: str = ""
    one_process: str = ""


# The engines over HTTP by their names, which are those of their programs, too.
ENGINES: Mapping[BackendName, HttpEngine] = {
    "llama-server": HttpEngine(lambda: LlamaServer),
    "koboldcpp": HttpEngine(
        _koboldcpp,
        "http://127.0.0.1:5001",
        "koboldcpp runs one call at a time and reports only on the last one, so only one process "
        "can call it. Start Latimer with --workers 1, which carries more than koboldcpp does.",
    ),
}
NO_PROGRAM = (
    "There is no llama-server on the PATH. Install llama.cpp, or its server as a Python package "
    "with pip install xllamacpp."
)
NO_ENGINE = (
    "No engine is installed. In a clone of Latimer, run pip install '.[prebuilt]' for llama.cpp's "
    "server, which needs no compiler, or pip install '.[llama-cpp]' for llama.cpp in process. Or "
    "name the URL of a running engine, such as latimer serve http://127.0.0.1:8080"
)
# What `latimer check` shows of an engine that is not loaded yet.
ON_DEMAND = "loads on demand"
# Seconds before a download that failed is tried again.
_RETRY_DOWNLOAD = 30.0
# The most characters of an engine's version that are shown.
_MOST_BUILD = 40
# Seconds that detecting the engine may take.
_PROBE_SECONDS = 10.0
# Seconds that an engine gets to say what it is before several processes serve it.
_SOON = 2.0


def backend_of(settings: Settings, progress: Callable[[float], None] | None = None) -> Backend:
    """Return the backend that the settings name; an engine at a URL may start later.

    Raises:
        WrongSetup: the settings contradict each other, the URL is invalid, a file is missing, or
            llama.cpp is not installed.
    """
    model = settings.model
    if model is not None and is_elsewhere(settings):
        _check_address(model)
        if settings.backend == "llama-cpp":
            raise WrongSetup("The backend llama-cpp needs a GGUF file, not a URL.")
        name = "unknown" if settings.backend == "auto" else settings.backend
        return LazyBackend(_finder(settings, model), name)
    if settings.backend in ENGINES and (example := ENGINES[settings.backend].example):
        wanted = f"The backend {settings.backend} needs the URL of its engine, such as {example}"
        raise WrongSetup(
            f"{wanted}." if model is None else f"{wanted}, not '{shown_address(model)}'."
        )
    if model is not None:
        _check_file(model)
    if not is_in_process(settings):
        from .on_demand import child_of

        program = find_program()
        if program is None:
            raise WrongSetup(NO_PROGRAM)
        file = DEMO_MODEL if model is None else Path(model)
        if settings.mmproj is not None and not settings.mmproj.is_file():
            where = settings.source_of("mmproj")
            raise WrongSetup(f"There is no projector at {settings.mmproj} ({where}).")
        for path, _ in settings.adapters():
            if not Path(path).is_file():
                where = settings.source_of("lora")
                raise WrongSetup(f"There is no LoRA adapter at {path} ({where}).")
        make = partial(_llama_server, settings, build_of(program))
        try:
            return child_of(settings, program, file, make)
        except EngineError as error:
            raise WrongSetup(error.message) from error
    if not all(map(find_spec, EXTRA)):
        raise WrongSetup(NO_ENGINE if settings.backend == "auto" else MISSING)
    try:
        arguments = settings.arguments("llama-cpp")
        return LlamaCpp(DEMO_MODEL if model is None else model, **arguments, progress=progress)
    except EngineError as error:
        raise WrongSetup(error.message) from error


def with_files(settings: Settings, report: Report) -> Settings:
    """Return the settings with the files of a model that is named `hf:ORG/REPO`.

    The files are downloaded, unless they are in the hub's cache. This blocks.

    Raises:
        HubError: there is no such model, no permission, or too little disk or memory.
    """
    if not is_name(settings.model):
        return settings
    from .hub.locate import Needs, locate

    needs = Needs(
        context=settings.context,
        cache_type=settings.cache_type,
        has_projector=settings.mmproj is None,
    )
    found = locate(parse(settings.model or ""), report, needs, offline=settings.offline)
    update: dict[str, Any] = {"model": str(found.parts[0])}
    if found.projector is not None:
        update["mmproj"] = found.projector
    return settings.model_copy(update=update)


def background_backend(
    settings: Settings, progress: Callable[[float], None] | None, place: str
) -> Backend:
    """Return the backend that the settings name, for a server that runs meanwhile.

    A model that is named `hf:ORG/REPO` is downloaded when it is first asked for, without holding
    the event loop.

    Args:
        place: where the settings are from, for the log of downloads.

    Raises:
        WrongSetup: see `backend_of`.
        HubError: it is not a name.
    """
    if not is_name(settings.model):
        return backend_of(settings, progress)
    parse(settings.model or "")
    find = _NamedModel(settings, progress, _Log(place))
    return LazyBackend(find, "llama.cpp", loads_here=is_in_process(settings))


class _Log:
    """The log as a receiver of what is said about a download."""

    def __init__(self, place: str) -> None:
        self._place = place

    def say(self, line: str) -> None:
        log.warning("%s: %s", self._place, line)

    def show(self, label: str, done: int, total: int) -> None:
        return


class _NamedModel:
    """The function that finds the backend of a name; it downloads in a thread, once at a time."""

    def __init__(
        self, settings: Settings, progress: Callable[[float], None] | None, report: Report
    ) -> None:
        self._settings, self._progress, self._report = settings, progress, report
        self._made: Backend | None = None
        self._failure = ""
        self._failed_at = 0.0

    async def __call__(self) -> Backend:
        if self._made is not None:
            return self._made
        if time.monotonic() < self._failed_at + _RETRY_DOWNLOAD and self._failure:
            raise EngineUnavailable(self._failure)
        try:
            settings = await in_thread(partial(with_files, self._settings, self._report))
            self._made = backend_of(settings, self._progress)
        except LatimerError as error:
            self._failure, self._failed_at = error.message, time.monotonic()
            raise EngineUnavailable(error.message) from None
        return self._made


async def in_thread(work: Callable[[], T]) -> T:
    """Run work that takes minutes in a thread that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(method: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            method(value)

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            outcome = partial(deliver, result.set_exception, error)
        else:
            outcome = partial(deliver, result.set_result, value)
        # The loop is closed if the process ends.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(outcome)

    threading.Thread(target=run, daemon=True, name="latimer-download").start()
    return await result


def _llama_server(settings: Settings, build: str, address: str, key: str) -> Backend:
    arguments = {**settings.arguments("llama-server"), "key": key, "build": build}
    return LlamaServer(address, **arguments)


def member_of(settings: Settings, name: str, machines: Mapping[str, Machine]) -> Member:
    """Return what loads an engine of the tables.

    Raises:
        WrongSetup: its address is invalid.
    """
    from ..backends.fleet.machine import Member
    from .on_demand import loader_of, machine_of

    table, own = settings.engines[name], settings.for_engine(name, "http://127.0.0.1")
    if own.backend == "llama-cpp":
        raise WrongSetup("The backend llama-cpp needs a GGUF file, not a URL or a command.")
    if table.url is not None:
        _check_address(table.url)

    def make(address: str) -> Backend:
        kind = own.backend if own.backend != "auto" else _kind_of(table)
        if kind is None:
            return LazyBackend(_finder(own, address), "unknown")
        if kind == "llama-server":
            return LlamaServer(address, **own.arguments(kind), model=table.model)
        return ENGINES[kind].backend()(address, **own.arguments(kind))

    loader = loader_of(settings, name, table.model, make)
    return Member(machine_of(settings, name, machines), loader)


def _kind_of(table: EngineConfig) -> BackendName | None:
    """Return the engine of a router's model, or of a command that names it."""
    if table.model is not None:
        return "llama-server"
    program = Path((table.command or ("",))[0]).name.lower()
    return next((name for name in ENGINES if program.startswith(name)), None)


def is_elsewhere(settings: Settings) -> bool:
    """Return True if the engine is at a URL, so that it may start later."""
    return settings.model is not None and _ADDRESS.match(settings.model) is not None


def is_in_process(settings: Settings) -> bool:
    """Return True if llama.cpp in this process serves a file, and not a llama-server."""
    if settings.backend == "auto":
        return all(map(find_spec, EXTRA)) or find_program() is None
    return settings.backend == "llama-cpp"


def starts_engines(settings: Settings) -> bool:
    """Return True if engines of these settings are processes that Latimer starts."""
    if settings.engines:
        return any(table.command is not None for table in settings.engines.values())
    return not is_elsewhere(settings) and not is_in_process(settings)


def chosen(settings: Settings) -> list[str]:
    """Return a line about the llama-server that serves a file, if no setting asks for it."""
    program = find_program()
    if program is None or settings.backend != "auto" or not starts_engines(settings):
        return []
    return [f"{shown_program(program)} serves the model, in a process of its own."]


def unused(settings: Settings) -> list[str]:
    """Return lines about settings without effect."""
    reasons: list[tuple[Need, str]] = [
        ("a GGUF file", "only for a GGUF file")
        if is_elsewhere(settings)
        else ("an engine at a URL", "only for an engine at a URL")
    ]
    lines = []
    operator = [name for name in ("admin_key", "admin_socket") if getattr(settings, name)]
    if operator:
        where = ", ".join(map(settings.source_of, operator))
        lines.append(f"Ignored: {where} (only with tables of engines).")
    if not is_elsewhere(settings) and not is_in_process(settings):
        from .on_demand import unsupported

        program, places = find_program(), unsupported(settings)
        if places and program is not None:
            kind = shown_program(program)
            lines.append(f"Ignored: {', '.join(places)} (not supported by {kind}).")
    if settings.store == OFF:
        reasons.append(("a store", "the store is off"))
    unused = [(settings.unused(need), why) for need, why in reasons]
    return [*lines, *(f"Ignored: {', '.join(places)} ({why})." for places, why in unused if places)]


def _check_file(model: str) -> None:
    if not model:
        raise WrongSetup(
            "The model is empty. Omit it for the demo model, or specify a GGUF file, a model of "
            "the hub (hf:ORG/REPO), or the URL of an engine."
        )
    try:
        path = Path(model)
        if path.is_dir():
            raise WrongSetup(f"'{model}' is a directory. {_instead_of(model, path)}")
        # This check comes before that for the extra: a mistyped name does not require it.
        with parts_of(path)[0].open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise WrongSetup(
                    f"'{model}' is not a GGUF file. Specify one: convert other formats with "
                    "llama.cpp's convert_hf_to_gguf.py, or find a model in GGUF on the hub."
                )
    except ModelNotFound as error:
        raise WrongSetup(f"{error.message} {_instead_of(model, path)}") from None
    except EngineError as error:
        raise WrongSetup(error.message) from None
    except (OSError, ValueError) as error:
        raise WrongSetup(f"'{model[:200]}' cannot be opened: {reason_of(error)}.") from None


def _instead_of(model: str, path: Path) -> str:
    """Return what to write instead of a path without a file: what is near, or what is allowed."""
    # Only this error needs it.
    from difflib import get_close_matches

    folder, is_missing = (path, False) if path.is_dir() else (path.parent, True)
    if is_missing and _HOST_AND_PORT.fullmatch(model):
        return f"Did you mean http://{model}?"
    if is_missing and _REPOSITORY.fullmatch(model) and not folder.exists():
        return f"Did you mean {PREFIX}{model}?"
    found = sorted(file.name for file in folder.glob("*.gguf") if file.is_file())
    stems = {Path(name).stem.lower(): name for name in found}
    near = get_close_matches(path.stem.lower(), stems, 1) if is_missing else []
    if near:
        return f"Did you mean {folder / stems[near[0]]}?"
    if found:
        place = "Its folder" if is_missing else "It"
        return f"{place} has {shortened(', '.join(found))}. Specify one of these files."
    return (
        "Specify a GGUF file, a model of the hub (hf:ORG/REPO), or the URL of an engine, such as "
        f"{_EXAMPLE}. latimer models lists what is downloaded."
    )


def _check_address(address: str) -> None:
    """Raise `WrongSetup` if the URL is invalid; the message shows no password in it."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        # The text that urlsplit reads as a port can be the beginning of a password.
        reason = str(error) if "@" not in address else "it must not contain a user name or password"
    else:
        if "@" in parts.netloc:
            raise WrongSetup(
                "The engine's address must not contain a user name or password, which would not be "
                "sent. Set the engine's API key with --engine-key."
            )
        if parts.scheme not in ("http", "https"):
            reason = "it must start with http:// or https://"
        elif not host or port == 0:
            reason = "it has no host, or port 0"
        elif not address.isascii() or not address.isprintable() or " " in address:
            reason = "it must be ASCII without spaces; write other host names as xn--…"
        elif not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
            reason = "a label of its host name is empty or longer than 63 characters"
        elif parts.query or parts.fragment:
            reason = "it must not contain '?' or '#'"
        else:
            return
    shown = "The engine's URL" if "@" in address else f"'{address}'"
    raise WrongSetup(f"{shown} is not a valid address such as {_EXAMPLE}: {reason}.")


def _finder(settings: Settings, address: str) -> Callable[[], Awaitable[Backend]]:
    """Return a function that finds the backend for a URL; it makes one for each kind of engine."""
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    made: dict[str, Backend] = {}

    async def find() -> Backend:
        kind = settings.backend if settings.backend != "auto" else await _probe(address, key)
        if settings.workers > 1 and (reason := why_one_process(kind)):
            raise EngineError(f"{address}: {reason}")
        if kind not in made:
            made[kind] = ENGINES[kind].backend()(address, **settings.arguments(kind))
        return made[kind]

    return find


def why_one_process(kind: BackendName) -> str:
    """Return why only one process can call an engine over HTTP; empty if several can."""
    engine = ENGINES.get(kind)
    return engine.one_process if engine is not None else ""


async def why_one_process_at(settings: Settings) -> str:
    """Return the same of the engine at a URL; empty if it does not say soon what it is."""
    assert settings.model is not None
    if settings.backend != "auto":
        return why_one_process(settings.backend)
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    try:
        _check_address(settings.model)
        async with asyncio.timeout(_SOON):
            return why_one_process(await _probe(settings.model, key))
    except (LatimerError, TimeoutError):
        return ""


async def _probe(address: str, key: str | None) -> BackendName:
    """Detect the engine at a URL.

    koboldcpp also serves `/props`, so it is tested first.

    Raises:
        EngineUnavailable: no server answers, or the engine is loading its model.
        EngineError: the server is not a known engine, or requires an API key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    pool = ConnectionPool(address, _PROBE_SECONDS, _PROBE_SECONDS)
    client = HttpClient(address, headers, pool)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            status, body = await _get(client, "/api/extra/version")
            if "KoboldCpp" in str(body.get("result", "")):
                return "koboldcpp"
            if status != 503:
                status, body = await _get(client, "/props")
            if is_router(body):
                _, models = await _get(client, "/models")
                raise not_an_engine(address, names_in(models) if "data" in models else [])
            if body.get("default_generation_settings"):
                return "llama-server"
    except TimeoutError:
        raise EngineUnavailable(
            f"The engine at {address} did not identify itself within {_PROBE_SECONDS:g} s."
        ) from None
    finally:
        await client.aclose()
    if status == 503:
        # A proxy before an engine that has ended says no more.
        kind = ModelLoading if _says_loading(body) else EngineUnavailable
        raise kind(f"The engine at {address} is loading its model.")
    if status in (401, 403):
        raise EngineError(
            f"The engine at {address} requires {'another' if key else 'an'} API key. Set it with "
            "--engine-key, or as engine_key in the engine's table."
        )
    hint = ""
    if address.rstrip("/").endswith("/v1"):
        hint = " Remove /v1 from the address."
    elif status == 404 and "error" in body:
        hint = f" {OTHER_SERVER}"
    raise EngineError(f"The server at {address} is neither {' nor '.join(ENGINES)}.{hint}")


def is_loading(error: LatimerError) -> bool:
    """Return True if an engine loads its model, as it says or as a proxy's 503 may mean."""
    return isinstance(error, ModelLoading) or "is loading" in error.message


def _says_loading(body: Mapping[str, Any]) -> bool:
    """Return True if the body of a 503 is that of an engine that loads."""
    error = body.get("error")
    return isinstance(error, dict) and str(error.get("message")).startswith(LOADING)


async def _get(client: HttpClient, path: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON object of a response, or an empty object if it has none."""
    async with await client.send("GET", path) as response:
        status, data = response.status, await response.aread()
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return status, {}
    return status, body if isinstance(body, dict) else {}


async def describe(backend: Backend) -> tuple[LatimerError | None, list[tuple[str, str]]]:
    """Return why a backend cannot be reached, and the rows of a table of its capabilities."""
    try:
        await backend.health()
        model = await backend.model()
        facts = await backend.embedding_model()
        vectors = [
            ("embeddings", await _embeddings(backend, facts)),
            ("rerank", await _rerank(backend, facts)),
            *await _own_speech(backend),
        ]
    except LatimerError as error:
        rows = [("engine", backend.capabilities.engine)]
        return error, [*rows, ("reachable", f"no: {error.message}")]
    rows = [
        ("engine", shown_engine(backend.capabilities.engine, model)),
        ("reachable", "yes"),
        ("model", model.name),
        ("fingerprint", model.fingerprint),
    ]
    if facts is not None and not facts.generates:
        task = "ranks documents" if facts.pooling == "rank" else "embeds"
        return None, [*rows, ("chat, completions", f"no: the model only {task}"), *vectors]
    return None, [*rows, *_generation(model, backend.capabilities), *vectors]


def shown_engine(name: str, model: Model) -> str:
    """Return the name of an engine with its version."""
    build = printable(model.build)[:_MOST_BUILD]
    return f"{name} ({build})" if build else name


async def describe_loader(loader: EngineLoader) -> tuple[bool, list[tuple[str, str]]]:
    """Return True if an engine can be loaded, as far as that is known, and the rows of a table."""
    reason = await loader.obstacle()
    rows = [("engine", loader.backend.capabilities.engine)]
    return not reason, [*rows, ("reachable", f"no: {reason}" if reason else ON_DEMAND)]


async def describe_store(place: StoreConfig | None) -> tuple[bool, tuple[str, str]]:
    """Return False if a store cannot be opened, and its row of the table; nothing is changed."""
    if place is None:
        return True, ("store", OFF)
    where = place.describe()
    if not place.durable:
        return True, ("store", where)
    store = Store(place)
    try:
        exists = await store.look()
    except (StoreError, StoreUnavailable) as error:
        return False, ("store", f"no: {where}: {in_words(error)}")
    return True, ("store", where if exists else f"{where}, new")


# What to do about a store of the limits that cannot be used.
LIMITS_ADVICE = "Correct the URL in admission.store, or the user in that database."


async def describe_limits(admission: AdmissionConfig) -> tuple[str, tuple[str, str]]:
    """Return what to do about a store of limits, empty if it works, and its row of the table.

    Nothing is changed.
    """
    where = admission.describe()
    try:
        store = store_of(admission)
        try:
            await store.look()
        finally:
            await store.aclose()
    except LimitsError as error:
        return LIMITS_ADVICE, ("limits", f"no: {where}: {error}")
    except LimitsUnavailable as error:
        advice = "Start its database, or correct admission.store."
        return advice, ("limits", f"no: {where}: {error.detail}")
    return "", ("limits", where)


def store_advice(place: StoreConfig | None, setting: str) -> str:
    """Return what to do about a store that cannot be opened.

    Args:
        setting: where it was set, such as `--store`.
    """
    if place is not None and place.kind == "sqlite":
        first = (
            "Name a new file, or a file of Latimer, in a folder that exists and can be written, or "
            f"correct {setting}."
        )
    else:
        first = f"Start its database, or correct {setting}."
    return f"{first} --store memory needs neither."


def _generation(model: Model, capabilities: Capabilities) -> list[tuple[str, str]]:
    return [
        ("context", f"{model.context} tokens"),
        ("parallel", f"{model.places} calls" if model.places > 1 else "1 call"),
        ("chat template", "the model's own" if model.template else "none: Alpaca is used"),
        ("adds BOS", f"yes ({model.bos_token})" if model.adds_bos else "no"),
        ("native responses", "yes (oai_compat: false)" if capabilities.native else "no"),
        ("sampling extras", ", ".join(sorted(capabilities.extras))),
        (
            "messages",
            "control tokens are text"
            if capabilities.plain_text
            else "control tokens are text, split by a zero-width space",
        ),
        (
            "logprobs",
            "at the end of a response" if capabilities.late_logprobs else "with each token",
        ),
        ("media", ", ".join(sorted(model.media)) or "-"),
        ("grammars", ", ".join(sorted(capabilities.grammars)) or "-"),
        (
            "not supported",
            "; ".join(f"{k}: {v}" for k, v in sorted(capabilities.refused.items())) or "-",
        ),
        ("approximated", ", ".join(sorted(capabilities.inexact)) or "-"),
    ]


async def _embeddings(backend: Backend, facts: EmbeddingModel | None) -> str:
    """Return what `check` says about embeddings; facts that are not known are omitted."""
    if facts is not None and facts.pooling == "rank":
        return "no: the model ranks documents"
    if facts is None:
        return await _refusal(backend.embed(Embedding([Text("a", parse_special=False)])))
    known = (
        f"{facts.dimensions} dimensions" if facts.dimensions else "",
        f"{facts.pooling} pooling" if facts.pooling else "",
        f"up to {facts.context} tokens" if facts.context else "",
        f"{', '.join(sorted(facts.inexact))} approximated" if facts.inexact else "",
    )
    return ", ".join(filter(None, known)) or "yes"


async def _rerank(backend: Backend, facts: EmbeddingModel | None) -> str:
    if facts is None or facts.pooling != "rank":
        return await _refusal(backend.rank(Ranking("a", ["a"])))
    return f"up to {facts.context} tokens" if facts.context else "yes"


async def _own_speech(backend: Backend) -> list[tuple[str, str]]:
    """Return rows for what the engine itself speaks and transcribes with, if it does."""
    rows = []
    speaker, transcriber = await backend.speaker(), await backend.transcriber()
    if speaker is not None:
        rows.append(("own speech", f"{len((await speaker.facts()).voices)} voices"))
    if transcriber is not None:
        rows.append(("own transcription", (await transcriber.facts()).name))
    return rows


async def _refusal(job: Awaitable[object]) -> str:
    try:
        await job
    except LatimerError as error:
        return f"no: {error.hint if isinstance(error, NotServed) else error.message}"
    return "yes"
