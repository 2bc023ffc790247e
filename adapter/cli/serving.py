"""`latimer serve`: from settings to a server that runs, and from a signal to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click
import uvicorn

from ...backends.errors import LatimerError
from ...backends.offload import Abandoned
from ..app import OpenAIAdapter
from ..config import WrongSettings
from ..discovery import backend_of, is_elsewhere, unused
from ..errors import InvalidRequest
from ..generation.token_ids import load
from ..printable import printable
from .listening import bound, local_rules
from .protocol import Protocol
from .signals import end_at_once

if TYPE_CHECKING:
    import socket

    from ...backends.base import Backend
    from ..config import Settings

EXIT_START = 3

# Connections that wait to be accepted, as uvicorn has it.
_BACKLOG = 2048
# Seconds in which an engine that runs has answered, so that no line says that it does not.
_FIRST = 1.0
# Seconds between two questions to an engine that is not ready.
_AGAIN = 0.5
# Seconds that cancelled requests get for their last words, and the process for its end.
_LAST_WORDS, _END = 2, 5.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where there is one; there is none for Windows."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def fail(message: str) -> NoReturn:
    """End the process, since nothing can be served."""
    _say(f"Latimer cannot start: {message}")
    sys.exit(EXIT_START)


async def serve(settings: Settings) -> None:
    """Serve until a signal comes.

    Raises:
        WrongSettings: a setting names what does not exist.
        SystemExit: it could not start.
    """
    end_at_once()
    _allow_connections()
    _hide_ends_of_work()
    sockets = _sockets(settings)
    try:
        if settings.logit_bias_vocabulary is not None:
            _load_vocabulary(settings)
        backend = backend_of(settings, _Progress() if sys.stderr.isatty() else None)
        idle = unused(settings)
        if idle is not None:
            _say(idle)
        if not is_elsewhere(settings):
            await backend.model()
    except LatimerError as error:
        fail(error.message)
    if not settings.wait:
        _listen(settings, sockets)
    told = asyncio.Event()
    readiness = asyncio.create_task(_tell_when_ready(settings, backend, sockets, told))
    # An engine that answers at once is told in one line.
    telling = asyncio.create_task(told.wait())
    await asyncio.wait([readiness, telling], return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    server = _Server(adapter_of(settings, backend), settings.drain)
    # A request leaves no cycles behind, and what start-up made stays: looking for garbage in it
    # again and again costs a tenth of all requests. Looking seldom makes each look a long pause:
    # 50,000 young objects take 30 ms, which is a frame too late for every stream. A large body is
    # hundreds of thousands of objects: twenty generations of young ones at once took 14 ms, four
    # take 3 ms, and a look at all that lives 50 ms, so there is hardly ever one.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 4, 1_000)
    await server.serve(sockets)
    readiness.cancel()
    if not server.started:
        sys.exit(EXIT_START)


def _allow_connections() -> None:
    """Open as many files as the system allows: each client's connection is one."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _hide_ends_of_work() -> None:
    """Print nothing where work ends while Python frees something."""
    usual = sys.unraisablehook

    def hook(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, Abandoned):
            usual(found)

    sys.unraisablehook = hook


def _sockets(settings: Settings) -> list[socket.socket]:
    try:
        return bound(settings.host, settings.port)
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        # A host that the name service cannot even be asked for: with empty or endless labels.
        reason = "it is no name of a host"
    fail(f"{settings.host}:{settings.port} cannot be listened on: {reason}.")


def _listen(settings: Settings, sockets: list[socket.socket]) -> None:
    """Let clients connect; they wait for their answers until the server runs."""
    try:
        for one in sockets:
            one.listen(_BACKLOG)
    except OSError as error:
        # Two processes can have a port as long as neither listens.
        fail(f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}.")


def _load_vocabulary(settings: Settings) -> None:
    name = settings.logit_bias_vocabulary or ""
    try:
        load(name)
    except InvalidRequest as error:
        raise WrongSettings(f"{settings.place('logit_bias_vocabulary')}: {error.message}") from None


def _listening(settings: Settings, sockets: list[socket.socket]) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{sockets[0].getsockname()[1]}/v1"


async def _tell_when_ready(
    settings: Settings, backend: Backend, sockets: list[socket.socket], told: asyncio.Event
) -> None:
    """Say what is served where when the engine is ready, and until then why it is not.

    Args:
        told: set when requests can be answered, if only with a 503.
    """
    listening = _listening(settings, sockets)
    said = ""
    asking = asyncio.ensure_future(backend.model())
    while True:
        await asyncio.wait([asking], timeout=None if said else _FIRST)
        reason = f"The engine at {settings.model} has not answered yet."
        if asking.done():
            try:
                model = asking.result()
                break
            except LatimerError as error:
                reason = error.message
        if not said and settings.wait:
            _say(f"Latimer waits for its engine before it serves. {reason}")
        elif not said:
            until = "answers 503 until its engine is ready"
            _say(f"Latimer listens at {listening} and {until}. {reason}")
            told.set()
        elif reason != said:
            _say(reason)
        said = reason
        if asking.done():
            await asyncio.sleep(_AGAIN)
            asking = asyncio.ensure_future(backend.model())
    names = ", ".join(settings.model_name or [model.name])
    engine = f"{backend.capabilities.engine}, {model.context} tokens"
    if settings.wait:
        _listen(settings, sockets)
    _say(f"Latimer serves {names} ({engine}) at {listening}")
    told.set()


def adapter_of(settings: Settings, backend: Backend) -> OpenAIAdapter:
    """The app over a backend, as the settings say."""
    keys, pages = settings.keys(), settings.cors_origin
    return OpenAIAdapter(
        backend,
        model_names=settings.model_name,
        any_model=settings.any_model,
        api_keys=keys,
        share_prefixes=settings.share_prefixes,
        cors_origins=pages or ("*",),
        local_rules=None if keys else local_rules(settings.host, pages, settings.allowed_host),
        max_body=settings.max_body,
        strict=settings.strict,
        parse_content=settings.parse_content,
        fetch_images=settings.fetch_images,
        chat_format=settings.chat_format,
        logit_bias_vocabulary=settings.logit_bias_vocabulary,
    )


class _Server(uvicorn.Server):
    """uvicorn, with an end for requests that still run when the drain is over.

    uvicorn would cancel them without a word.

    Args:
        drain: seconds that running requests get after the first signal; a second one ends them.
    """

    def __init__(self, app: OpenAIAdapter, drain: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                # A websocket is a request like any other here: it gets an error object.
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=drain + _LAST_WORDS,
            )
        )
        self._app = app
        self._drain = drain
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain, or end it; uvicorn would raise the signal again when all is done."""
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._end)
        elif running := len(self.server_state.tasks):
            requests = "1 request" if running == 1 else f"{running} requests"
            end = f"for {self._drain} s at most; a second signal ends it"
            line = f"Latimer lets {requests} end, {end}."
            self._loop.call_soon_threadsafe(_say, line)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end for as long as the drain takes."""
        timer = self._loop.call_later(self._drain, self._end)
        await super().shutdown(sockets)
        timer.cancel()
        _end_within(_END)

    def _end(self) -> None:
        """End what still runs: it answers that the server shuts down."""
        self._app.end()
        for task in list(self.server_state.tasks):
            task.cancel()
        _end_within(_END)


def _end_within(seconds: float) -> None:
    """End the process when it does not end by itself: an engine or a thread may not stop."""
    timer = threading.Timer(seconds, os._exit, [0])
    timer.daemon = True
    timer.start()


class _Progress:
    """A line on the terminal that grows while a model loads."""

    def __init__(self) -> None:
        self._percent = -1

    def __call__(self, fraction: float) -> None:
        percent = int(fraction * 100)
        if percent != self._percent:
            self._percent = percent
            end = "\n" if percent == 100 else ""
            click.echo(f"\rLoading the model … {percent:3d} %{end}", nl=False, err=True)


def _say(line: str) -> None:
    click.echo(printable(line), err=True)
