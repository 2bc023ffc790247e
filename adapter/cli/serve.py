"""The server of `latimer serve`: start it from settings, and shut it down on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from ...backends import offload
from ...backends.base import Backend, EmbeddingModel, Model
from ...backends.errors import LatimerError, shortened
from ..app import OpenAIAdapter
from ..engines import (
    LIMITS_ADVICE,
    backend_of,
    chosen,
    is_elsewhere,
    is_loading,
    starts_engines,
    store_advice,
    unused,
    with_files,
)
from ..errors import InvalidRequest, LimitsUnavailable
from ..generation.token_ids import load
from ..limits.config import kind_of
from ..limits.leases import LimitsError
from ..observers import Observer
from ..origins import LocalRules, is_loopback
from ..request_log import JsonFormatter, RequestLog, TextFormatter, Writer, form_of
from ..settings import Settings
from ..settings_file import WrongSettings
from ..store.errors import StoreError, StoreUnavailable, in_words
from . import otel
from .listener import Door, Listener
from .reload import end_earlier_engines, follow
from .terminal import (
    EXIT_START,
    NO_FILE,
    START,
    Download,
    end_at_once,
    fail,
    is_read,
    limit_log,
    outlives_hangups,
    print_json,
    say,
)

if TYPE_CHECKING:
    from ...backends.speech.base import Speaker, Transcriber
    from ..fleet import Fleet

# Seconds to wait for the engine's first answer before a line says that it is missing.
_FIRST = 1.0
# Seconds between attempts to reach an engine that is not ready: at first, and at last. Between
# them they are a share of the time since the start. The server may be no engine at all.
_AGAIN, _LONGEST, _SHARE = 0.5, 10.0, 0.05
# Seconds between attempts to open a store that was not available at the start.
_REOPEN = 2.0
# For logs only: on a terminal it would be repeated at each start.
RANDOM_KEY = (
    "Clients of /v1/responses can send encrypted reasoning back until this server ends. Set "
    "--reasoning-key SECRET if they must be able to after a restart, too."
)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop if it is installed; it does not support Windows."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def serve(settings: Settings, door: Door | None = None) -> None:
    """Serve until a signal ends the server.

    Args:
        door: by default the sockets of the settings' address.

    Raises:
        WrongSettings: the vocabulary in the settings does not exist.
        SystemExit: the server could not start.
    """
    _set_up_process(settings, None if door is None else door.worker)
    if settings.admin_socket is not None:
        from .admin_socket import with_key

        settings = with_key(settings)
    way: Door = Listener(settings) if door is None else door
    try:
        await _serve(settings, way)
    finally:
        if door is None and way.admin is not None:
            way.admin.close()


async def _serve(settings: Settings, door: Door) -> None:
    """Serve with bound sockets."""
    # A variable that is misspelt can be why the rest fails.
    _warn_of_settings(settings, door.address)
    try:
        made = await _made_from(settings)
    except LatimerError as error:
        fail(error.message)
    if not settings.wait:
        door.listen()
    tasks = await _started(settings, made, door)
    server = door.server(made.app, settings)
    if door.admin is not None and settings.admin_key is not None:
        server.serve_operator(door.admin.socket, settings.admin_key.get_secret_value())
    _collect_rarely()
    await server.serve([*door.sockets])
    for task in tasks:
        task.cancel()
    made.close()
    if not server.started:
        sys.exit(EXIT_START)


class _Made(NamedTuple):
    """The parts of a server that are made from its settings.

    Args:
        settings: with the file of a model that they name.
        backend: that of the only model, or None.
        fleet: the engines of the tables, if there are some.
        opening: waits for a store that was not available.
    """

    settings: Settings
    backend: Backend | None
    fleet: Fleet | None
    app: OpenAIAdapter
    writer: Writer
    sdk: otel.Sdk | None
    opening: asyncio.Task[None] | None

    def close(self) -> None:
        """Write what is left of logs and spans."""
        if self.sdk is not None:
            self.sdk.close()
        self.writer.close()


async def _made_from(settings: Settings) -> _Made:
    """Make the app and what it serves, and open its stores.

    Raises:
        LatimerError: they cannot be made from the settings.
        WrongSettings: the vocabulary in the settings does not exist.
        SystemExit: a store cannot be used.
    """
    if settings.logit_bias_vocabulary is not None:
        _load_vocabulary(settings)
    progress = _Progress() if sys.stderr.isatty() else None
    fleet = _fleet_of(settings, progress) if settings.engines else None
    backend, placed = None, settings
    if fleet is None:
        placed = with_files(settings, Download())
        backend = backend_of(placed, progress)
        for line in chosen(settings):
            say(line, START)
        for line in unused(settings):
            say(line, START, "warning")
    writer = Writer(form=form_of(settings.log_format, has_requests=True))
    sdk = otel.start(settings)
    observers = [*_logs(settings, writer), *([] if sdk is None else [sdk.observer])]
    try:
        app = adapter_of(settings, backend or fleet, observers)
    except LimitsError as error:
        fail(f"admission.store: {error}")
    for value, spoken in (
        (settings.speech, app.service.speaker),
        (settings.transcription, app.service.transcriber),
    ):
        if spoken is not None and "://" not in (value or ""):
            # A library loads its model, so that an error ends the start.
            await spoken.facts()
    opening = await _open_store(app, settings)
    await _open_limits(app, settings)
    if backend is not None and not is_elsewhere(settings):
        await backend.model()
    return _Made(placed, backend, fleet, app, writer, sdk, opening)


async def _started(settings: Settings, made: _Made, door: Door) -> list[asyncio.Task[None]]:
    """Print what is served, and return the tasks that end with the server."""
    listens = asyncio.Event()
    tasks = [] if made.opening is None else [made.opening]
    if made.fleet is not None:
        starting = _serve_fleet(settings, made.fleet, made.app, door, listens)
    else:
        assert made.backend is not None
        starting = _listen_when_ready(made.settings, made.backend, door, listens)
        if settings.file is not None:
            tasks.append(asyncio.create_task(follow(settings, None, made.app, door)))
    readiness = asyncio.create_task(starting)
    # An engine that answers immediately is reported in one line.
    waiting = asyncio.create_task(listens.wait())
    await asyncio.wait([readiness, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return [readiness, *tasks]


def _set_up_process(settings: Settings, worker: int | None) -> None:
    """Set signals, logs and limits, and end the engines that a killed server has left."""
    end_at_once()
    set_log(settings, worker)
    if worker is None and settings.file is None and outlives_hangups():
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, say, NO_FILE, "reload")
    if starts_engines(settings):
        end_earlier_engines()
    _allow_connections()
    offload.hide_ends_of_work()


def _fleet_of(settings: Settings, progress: Callable[[float], None] | None) -> Fleet:
    # It needs the schemas of all requests, which a server of one engine imports after its start.
    from ..fleet import Fleet

    return Fleet(settings, progress)


def _collect_rarely() -> None:
    """Exempt what exists from the collection of garbage, and collect the rest in small steps.

    Requests leave no reference cycles, and objects made at startup stay alive: collecting them
    repeatedly costs a tenth of the throughput. Rare collections cause long pauses: 50,000 young
    objects take 30 ms, which delays every stream. A large body is hundreds of thousands of objects.
    To collect twenty young generations together took 14 ms, and four take 3 ms. A full collection
    takes 50 ms, so it runs very rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 1_000)


def _logs(settings: Settings, writer: Writer) -> Sequence[Observer]:
    """Return the log of requests."""
    if settings.log_requests is False:
        return ()
    form = form_of(settings.log_format, has_requests=True)
    return [RequestLog(writer.write, form, settings.log_level, settings.log_content)]


def set_log(settings: Settings, worker: int | None = None) -> None:
    """Set the format of all lines, and the least level of those of the log.

    Args:
        worker: the number of the worker, from 1, which its lines have.
    """
    logging.getLogger("latimer").setLevel(settings.log_level.upper())
    limit_log(settings.log_level)
    is_json = form_of(settings.log_format, settings.log_requests is not False) == "json"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker) if is_json else TextFormatter(worker))
    logging.getLogger().handlers = [handler]
    if is_json:
        print_json()


async def _open_store(app: OpenAIAdapter, settings: Settings) -> asyncio.Task[None] | None:
    """Open the store, unless it is in memory, and print where it is.

    A PostgreSQL can start later, unless the store is required; a task then waits for it.

    Raises:
        SystemExit: the store cannot be used.
    """
    place = settings.store_place()
    if place is None or not place.durable:
        return None
    where = place.describe()
    advice = store_advice(place, settings.source_of("store"))
    try:
        await app.open_store()
    except StoreError as error:
        fail(f"{where}: {error} {advice}")
    except StoreUnavailable as error:
        if place.kind == "sqlite" or place.required:
            fail(f"{where}: {in_words(error)} {advice}")
        line = f"The store is not available yet: {where}: {in_words(error)}"
        say(line, level="warning")
        return asyncio.create_task(_open_later(app, where))
    say(_stores(where), START)
    return None


async def _open_limits(app: OpenAIAdapter, settings: Settings) -> None:
    """Connect to the store of the limits, if processes share one, and print where it is.

    It can start later: what happens until then is the setting `unavailable`.

    Raises:
        SystemExit: the store cannot be used as it is set.
    """
    admission = settings.admission
    if not settings.keys or kind_of(admission.store) == "memory":
        return
    where = admission.describe()
    try:
        await app.open_limits()
    except LimitsError as error:
        fail(f"admission.store: {where}: {error}. {LIMITS_ADVICE}")
    except LimitsUnavailable as error:
        until = (
            "this process counts alone" if admission.unavailable == "admit" else "keys get a 503"
        )
        line = f"The store of the limits is not available yet, so {until}: {where}: {error.detail}"
        say(line, level="warning")
    else:
        say(f"Latimer counts the limits of keys in {where}.", START)


async def _open_later(app: OpenAIAdapter, where: str) -> None:
    """Open a store that was not available at the start, and print when it is."""
    while True:
        await asyncio.sleep(_REOPEN)
        try:
            await app.open_store()
        except StoreUnavailable:
            continue
        except StoreError as error:
            say(f"The store cannot be used: {where}: {error}", level="error")
        else:
            say(_stores(where))
        return


def _stores(where: str) -> str:
    return f"Latimer stores responses and completions: {where}."


def _allow_connections() -> None:
    """Raise the limit of open files to the maximum; each client connection is an open file."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _load_vocabulary(settings: Settings) -> None:
    name = settings.logit_bias_vocabulary or ""
    try:
        load(name)
    except InvalidRequest as error:
        raise WrongSettings(
            f"{settings.source_of('logit_bias_vocabulary')}: {error.message}"
        ) from None


async def _listen_when_ready(
    settings: Settings, backend: Backend, door: Door, listens: asyncio.Event
) -> None:
    """Print the model and the address when the engine is ready; until then, a reason.

    Args:
        listens: set when the server can accept requests, even if it responds with 503.
    """
    address = door.address
    printed = ""
    since = time.monotonic()
    asking = _asked(backend)
    while True:
        await asyncio.wait([asking], timeout=None if printed else _FIRST)
        reason = f"The engine at {settings.model} has not responded yet."
        if asking.done():
            try:
                model = asking.result()
                break
            except LatimerError as error:
                reason = error.message + _next_step(error, settings)
        if not printed and settings.wait:
            say(f"Latimer waits for the engine before it accepts requests. {reason}")
        elif not printed:
            until = "responds with 503 until the engine is ready"
            say(f"Latimer listens at {address} and {until}. {reason}")
            listens.set()
        elif reason != printed:
            say(reason)
        printed = reason
        if asking.done():
            waited = time.monotonic() - since
            await asyncio.sleep(min(max(_SHARE * waited, _AGAIN), _LONGEST))
            asking = _asked(backend)
    if settings.wait:
        door.listen()
    await _say_ready(settings, backend, model, address)
    listens.set()


def _asked(backend: Backend) -> asyncio.Future[Model]:
    asking = asyncio.ensure_future(backend.model())
    # Retrieves the error of one that fails while the server ends.
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asking


async def _say_ready(settings: Settings, backend: Backend, model: Model, address: str) -> None:
    """Print the model, the addresses, and on a terminal a command that calls the server."""
    names = settings.model_name or [model.name]
    # An engine at a URL would be asked what it can do, which a start does not wait for.
    task = None if is_elsewhere(settings) else await backend.embedding_model()
    engine = backend.capabilities.engine
    say(
        f"Latimer serves {', '.join(names)} ({engine}, {model.context} tokens{_made_for(task)}) "
        f"at {address}",
        START,
    )
    _say_context(settings, model)
    _say_page(settings, address)
    say_key(settings)
    if is_read():
        from . import banner

        server = banner.Server(settings, address, is_local(settings.host))
        is_named = settings.strict or settings.limits == "openai"
        command = banner.command_of(server, names[0] if is_named else None, task)
        banner.show([*banner.rows_of(server, model, engine)], command)


def _next_step(error: LatimerError, settings: Settings) -> str:
    """Return what to do about an engine that does not serve; empty if it loads its model, or if the
    error says what to do.
    """
    says_it = any(word in error.message for word in ("--engine-key", "SSL_CERT_FILE"))
    if not is_elsewhere(settings) or is_loading(error) or says_it:
        return ""
    return f" Start an engine there, or correct the URL; latimer check {settings.model} tests it."


async def _serve_fleet(
    settings: Settings,
    fleet: Fleet,
    app: OpenAIAdapter,
    door: Door,
    listens: asyncio.Event,
) -> None:
    """Print the models and the address, and follow the changes of the settings file."""
    fleet.start()
    if settings.wait:
        await _warn(fleet, waits=True)
        await fleet.wait()
        door.listen()
    engines = len(fleet.replicas)
    names = shortened(", ".join(fleet.pools))
    count = f"{engines} engine{'s' * (engines > 1)}"
    say(f"Latimer serves {names} over {count} at {door.address}", START)
    _say_page(settings, door.address)
    say_key(settings)
    if is_read():
        from . import banner

        server = banner.Server(settings, door.address, is_local(settings.host))
        command = banner.command_of(server, next(iter(fleet.pools)), None)
        banner.show([*banner.rows_of_fleet(server, fleet)], command)
    listens.set()
    # A signal to read the file again may come at once.
    warning = asyncio.create_task(_warn(fleet, waits=False))
    try:
        await follow(settings, fleet, app, door)
    finally:
        warning.cancel()


async def _warn(fleet: Fleet, waits: bool) -> None:
    """Say which models have no engine that answers soon, or can be loaded.

    Args:
        waits: True if the server accepts no requests before they have one.
    """
    asking = [asyncio.ensure_future(pool.ask_all()) for pool in fleet.pools.values()]
    await asyncio.wait(asking, timeout=_FIRST)
    for entry, (name, pool) in zip(fleet.entries, fleet.pools.items(), strict=True):
        if not pool.is_available:
            other = next((one for one in entry.fallback if fleet.pools[one].is_available), None)
            until = "its requests get a 503" if other is None else f"{other} serves its requests"
            if waits:
                until = "Latimer accepts no requests"
            reasons = "; ".join(f"{one.name}: {one.reason}" for one in pool.replicas)
            advice = "Start one, or correct its table: latimer check --config FILE tests all. "
            if any(one.shown == "loading" for one in pool.replicas):
                advice = ""
            words = f"No engine of the model {name} is ready, so {until} until one is."
            words = f"{words} {advice}{reasons}"
            say(words, START, "warning", model=name, engines=[one.name for one in pool.replicas])


def _made_for(task: EmbeddingModel | None) -> str:
    """Return what a model is made for, unless it generates."""
    if task is None or task.generates:
        return ""
    return ", reranking only" if task.pooling == "rank" else ", embeddings only"


def _say_context(settings: Settings, model: Model) -> None:
    """Say which context is used if --context asks for more than the model was trained for."""
    trained = model.sizes.get("n_ctx_train")
    if settings.context is None or is_elsewhere(settings) or trained is None:
        return
    where = settings.source_of("context")
    if settings.context > trained:
        used = (
            "its text gets worse beyond them"
            if model.context > trained
            else f"the context is {model.context:,} tokens"
        )
        say(
            f"{where}: the model was trained for {trained:,} tokens, not {settings.context:,}, so "
            f"{used}.", START, "warning",
        )  # fmt: skip


def _warn_of_settings(settings: Settings, address: str) -> None:
    """Say which variables have no effect, and in a log that a server without keys is open."""
    for variable, advice in settings.unknown_variables():
        say(f"{variable} is no setting; {advice}", START, "warning", variable=variable)
    has_keys = bool(settings.api_keys() or settings.keys)
    if not (has_keys or is_local(settings.host) or is_read()):
        # A terminal shows it with the addresses.
        say(
            f"No API key is needed, and other machines can connect to {address}. Set --api-key, or "
            "--host 127.0.0.1 for this machine only.", START, "warning",
        )  # fmt: skip


def _say_page(settings: Settings, address: str) -> None:
    """Say in a log where the playground is; a terminal shows it with the other addresses."""
    if settings.playground is not False and not is_read():
        say(f"The playground is at {address.removesuffix('v1')}", START)


def say_key(settings: Settings) -> None:
    """Say in a log that the secret of reasoning is random."""
    if settings.reasoning_key is None and not is_read():
        say(RANDOM_KEY, START)


def adapter_of(
    settings: Settings, served: Backend | Fleet | None, observers: Sequence[Observer] = ()
) -> OpenAIAdapter:
    """Return the app that serves a backend, or the models of a fleet, with these settings."""
    assert served is not None
    arguments = settings.arguments("adapter")
    arguments["observers"] = observers
    if settings.speech is not None:
        arguments["speaker"] = _speaker_of(settings.speech, settings.offline)
    if settings.transcription is not None:
        arguments["transcriber"] = _transcriber_of(settings.transcription, settings.offline)
    if not arguments["api_keys"] and not arguments["keys"]:
        arguments["local_rules"] = local_rules(
            settings.host, settings.cors_origin, settings.allowed_host
        )
    if not settings.engines:
        app = OpenAIAdapter(cast("Backend", served), **arguments)
        app.service.is_command = True
        return app
    fleet = cast("Fleet", served)
    if settings.admin_key is not None:
        from ..admin import admin_routes

        key = settings.admin_key.get_secret_value()
        arguments["routes"] = admin_routes(fleet, key)
    app = OpenAIAdapter(fleet.entries, **arguments)
    app.service.release, app.service.is_command = fleet.aclose, True
    return app


def _speaker_of(value: str, offline: bool) -> Speaker:
    from ...backends.speech.libraries import UnknownLibrary, speaker_of
    from ..hub.voices import placed

    try:
        return speaker_of(placed(value, Download(), offline=offline))
    except UnknownLibrary as error:
        raise WrongSettings(f"--speech: {error}") from None


def _transcriber_of(value: str, offline: bool) -> Transcriber:
    from ...backends.speech.libraries import UnknownLibrary, transcriber_of

    try:
        return transcriber_of(value, offline=offline)
    except UnknownLibrary as error:
        raise WrongSettings(f"--transcription: {error}") from None


class _Progress:
    """A progress line on the terminal while a model loads."""

    def __init__(self) -> None:
        self._percent = -1

    def __call__(self, fraction: float) -> None:
        percent = int(fraction * 100)
        if percent != self._percent:
            self._percent = percent
            end = "\n" if percent == 100 else ""
            click.echo(f"\rLoading the model … {percent:3d} %{end}", nl=False, err=True)


def local_rules(host: str, origins: Iterable[str], hosts: Iterable[str]) -> LocalRules:
    """Return the rules of a server without a key that listens on a host; see `LocalRules`."""
    return LocalRules(origins, hosts, socket.gethostname(), not is_local(host))


def is_local(host: str) -> bool:
    """Return True if only programs of this machine can reach a host, or if it has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return True
    return all(is_loopback(str(address[0])) for *_, address in found)
