"""The ASGI app and the middleware: guards, errors, lifespan."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import orjson
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import Unpack, override

from ..backends import offload
from ..backends.base import Backend
from ..backends.errors import LatimerError, shortened
from ..backends.fleet.loading import REQUEST
from ..backends.http import FORWARDED
from .arguments import (
    Options,
    checked,
    entries_of,
    in_keywords,
    listed,
    observers_of,
    prefixes_of,
)
from .auth import Keys
from .base_urls import advice_for
from .errors import (
    InvalidRequest,
    ShuttingDown,
    WebSocketRefused,
    in_log,
    of_http,
    printable,
    unexpected,
)
from .handshake import APP, read_key, refuse
from .limits.config import AdmissionConfig, KeyConfig, grants_of, keys_of, store_of
from .messages.errors import in_api_of
from .metrics import Metrics
from .model_entry import Fetch, ModelEntry, Policy
from .observers import Observer
from .origins import OriginMiddleware
from .playground import playground_routes
from .record import GONE, Record
from .request import EXCHANGE, FRAME, PUSH, WHOLE, Disconnected, Exchange
from .responses.sealed import Seal
from .routes import ApiRoute, MetricsAccess, SocketRoute, routes_of
from .service import Service
from .store.config import store_config_of
from .store.errors import StoreError, StoreUnavailable, in_words
from .store.store import Store

log = logging.getLogger("latimer")


# Seconds from the start to the imports of the endpoints that the start does not need.
_LOAD_AFTER = 0.5

NEEDS_ASYNCIO = (
    "Latimer needs asyncio, and this server runs another event loop. Run it with asyncio, such as "
    "hypercorn with -k asyncio."
)

# Where Starlette's `ExceptionMiddleware` leaves the handlers that its routes ask.
_HANDLERS = "starlette.exception_handlers"


class ErrorMiddleware:
    """Pure ASGI middleware that makes the exchange of a request, and answers with its errors.

    Every error becomes OpenAI's error object. An unexpected exception is logged and becomes a 500.

    Args:
        keys: finds the owner of the request; None below the middleware of users, which see the
            responses with errors because a second `ErrorMiddleware` makes them there.
        share_prefixes: see `Options`.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        keys: Keys | None = None,
        share_prefixes: bool = False,
    ) -> None:
        self._app = app
        self._service = service
        self._keys = keys
        self._shares = share_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            handle: ASGIApp = self._shake if scope["type"] == "websocket" else self._app
            await handle(scope, receive, send)
            return
        exchange: Exchange
        if self._keys is None:
            exchange = scope[EXCHANGE]
            exchange.through(receive, send)
        else:
            exchange = scope[EXCHANGE] = Exchange(scope, receive, send, self._service.arrivals)
            owner: str | None = ""
            if self._keys.needed:
                owner = self._keys.find(scope["headers"], exchange.named)
                offload.OWNER.set(owner or "")
            scope.setdefault("state", {})["key_digest"] = owner
            if owner:
                exchange.key = owner
                exchange.grant = self._keys.grants.get(owner)
                if not self._shares:
                    exchange.owner = owner
                    exchange.hides_cache = self._keys.are_several
            exchange.keepalive = self._service.keepalive
            if FRAME in scope:
                exchange.write = scope[FRAME].write
            elif extensions := scope.get("extensions"):
                exchange.sends_whole, exchange.pushes = WHOLE in extensions, PUSH in extensions
            observers = self._service.observers
            if observers.all:
                exchange.record = Record()
                observers.running.add(exchange)
                if observers.has_followers:
                    observers.follow(exchange)
            REQUEST.set(exchange)
            if _HANDLERS in scope:
                scope[_HANDLERS] = _without_default(*scope[_HANDLERS])
        try:
            if self._service.has_ended:
                raise ShuttingDown
            try:
                await self._app(scope, receive, send)
            finally:
                exchange.unwatch()
        except Disconnected:
            exchange.is_left = True
            await _end_left(exchange)
        except asyncio.CancelledError:
            if exchange.is_left and not _uncancel():
                await _end_left(exchange)
                return
            if not self._service.has_ended:
                raise
            await _shut_down(exchange)
        except Exception as error:
            if exchange.record is not None:
                exchange.record.fail(error)
            if exchange.started and isinstance(error, LatimerError) and not exchange.has_waited:
                raise
            await _fail(exchange, self._worded(error) if isinstance(error, LatimerError) else error)
        finally:
            if self._keys is not None:
                # The exchange refers to the scope.
                scope.pop(EXCHANGE, None)
                REQUEST.set(None)
                if exchange.forwarded is not None:
                    FORWARDED.set(b"")
                if exchange.lease is not None and exchange.lease.counter is not None:
                    exchange.lease.release()
                if exchange.record is not None:
                    self._service.observers.ended(exchange, exchange.record)

    async def _shake(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a handshake on, and answer it with its errors; a connection handles its own."""
        if self._keys is not None:
            scope[APP] = self
            read_key(scope)
            owner: str | None = ""
            if self._keys.needed:
                owner = self._keys.find(scope["headers"], dict(scope["headers"]))
                # The large frames of the connection are parsed in threads.
                offload.OWNER.set(owner or "")
            scope.setdefault("state", {})["key_digest"] = owner
        try:
            if self._service.is_draining or self._service.has_ended:
                raise ShuttingDown
            await self._app(scope, receive, send)
        except LatimerError as error:
            await refuse(scope, send, self._worded(error))

    def _worded(self, error: LatimerError) -> LatimerError:
        """Return an error in words of the command, or of an app that has this one in it."""
        return error if self._service.is_command else in_keywords(error)


def _without_default(by_type: Mapping[Any, Any], by_status: Mapping[int, Any]) -> Any:
    """Return the exception handlers of an app around the adapter, without Starlette's own."""
    default = ExceptionMiddleware.http_exception
    own = {
        kind: handler
        for kind, handler in by_type.items()
        if getattr(handler, "__func__", None) is not default
    }
    return own, by_status


def _uncancel() -> bool:
    """Undo one cancellation of the task; return True if there is another."""
    task = asyncio.current_task()
    return task is not None and task.uncancel() > 0


async def _end_left(exchange: Exchange) -> None:
    """Send an empty response for a client that has left, because middleware may wait for one."""
    if not exchange.started and FRAME not in exchange.scope:
        # ASGI allows a server to raise an OSError, and some raise others.
        with suppress(Exception):
            await exchange.reply(GONE, b"")


async def _shut_down(exchange: Exchange) -> None:
    """Send the shutdown error to the client of a cancelled request, if the response allows it."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    error = ShuttingDown()
    if exchange.record is not None:
        exchange.record.fail(error)
    if not exchange.started:
        await exchange.error(error)
    elif exchange.streams:
        await exchange.end(error)


async def _fail(exchange: Exchange, error: Exception) -> None:
    """Answer with an error; raise it again if the response has started."""
    if isinstance(error, LatimerError):
        await exchange.error(error)
        return
    if isinstance(error, HTTPException) and (not exchange.started or exchange.has_waited):
        # Raised by a route or a middleware of the user.
        status = error.status_code
        body, own = in_api_of(
            exchange.scope, status, of_http(status, str(error.detail)), exchange.request_id
        )
        data = b"" if status in (204, 304) else orjson.dumps(body)
        headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
        await exchange.reply(status, data, headers=[*own, *headers])
        return
    # Text from a request must not control the terminal that shows the log.
    trace = printable("".join(traceback.format_exception(error)), keep="\n")
    user = f" of user {in_log(exchange.end_user)}" if exchange.end_user else ""
    log.error("request %s%s failed\n%s", exchange.request_id, user, trace)
    if exchange.started:
        raise error
    status, reply = unexpected()
    await exchange.refuse(status, *in_api_of(exchange.scope, status, reply, exchange.request_id))


def policy_of(options: Mapping[str, Any]) -> Policy:
    """Return the rules for requests to a model."""
    return Policy(
        strict=options["strict"],
        parse_content=options["parse_content"],
        fetch=_fetch() if options["fetch_images"] else None,
        chat_format=options["chat_format"],
        vocabulary=options["logit_bias_vocabulary"],
        keepalive=options["keepalive"],
        reasoning=options["reasoning_field"],
        matryoshka=options["matryoshka"],
    )


def _service_of(
    backend: Backend | Sequence[ModelEntry], options: Options, observers: Sequence[Observer]
) -> Service:
    """Return the service of a backend, or of several models.

    Raises:
        TypeError: `backend` is neither an engine nor a list of models.
        ValueError: the store's settings are wrong.
    """
    policy = policy_of(options)
    store = store_config_of(
        options["store"],
        options["store_age"],
        options["store_size"],
        options["store_media"],
        options["store_required"],
    )
    entries = entries_of(backend)
    if entries is None:
        engine = cast("Backend", backend)
        entries = [ModelEntry(engine, options["model_names"], options["any_model"], policy)]
    service = Service(
        entries,
        options["max_body"],
        observers,
        hosted=options["limits"] == "openai" or policy.strict,
        store=None if store is None else Store(store),
        seal=Seal(options["reasoning_key"]),
        limits=store_of(cast("AdmissionConfig", options["admission"])),
        socket_lifetime=options["websocket_lifetime"],
        speaker=options["speaker"],
        transcriber=options["transcriber"],
    )
    if service.store is not None and service.store.place.durable and sys.platform != "win32":
        # Only a store that other processes can have needs these; Windows has no such locks.
        from .responses.replicas import Replicas
        from .store.members import Members

        service.background.elsewhere = Replicas(Members(service.store), service.store)
    return service


class OpenAIAdapter(Router):
    """A Starlette router that serves OpenAI's API over a backend.

    Serve it on its own, or mount it under any prefix of another app. The first request starts the
    backend. The end of the app's lifespan, or `aclose`, releases it.

    Args:
        backend: the backend that handles the requests; or several models, each with its names.
        prefixes: the path prefixes of the API; an empty prefix also serves `/health`.
        routes: more routes, after those of the API. They need no API key, unless they call
            `auth.require_key`.
        middleware: middleware around all routes. `request.state.key_digest` is the digest of the
            API key there; what it raises becomes OpenAI's error object.
        observers: get what was measured of each request, such as a `RequestLog`.
        options: see `Options`.

    Attributes:
        stack: the middleware and the routes, without a check of the first request.
    """

    def __init__(
        self,
        backend: Backend | Sequence[ModelEntry],
        prefixes: Sequence[str] = ("/v1", ""),
        routes: Sequence[BaseRoute] = (),
        middleware: Sequence[Middleware] = (),
        observers: Sequence[Observer] = (),
        **options: Unpack[Options],
    ) -> None:
        options, prefixes = checked(options), prefixes_of(prefixes)
        observers = observers_of(observers)
        measures = options["metrics"] and "" in prefixes
        if measures:
            own_metrics = Metrics(options["metrics_names"], options["metrics_open"])
            observers = [own_metrics, *observers]
        self._service = _service_of(backend, options, observers)
        metrics: MetricsAccess = "off"
        if measures:
            metrics = "open" if options["metrics_open"] else "key"
        keys = self._api_keys = Keys(options["api_keys"] or (), grants_of(keys_of(options["keys"])))
        page: Sequence[BaseRoute] = ()
        if options["playground"]:
            if not {"/v1", ""} <= {*prefixes}:
                raise ValueError("the playground needs the prefixes '/v1' and ''")
            page = playground_routes()
        shares = options["share_prefixes"]
        own = [
            Middleware(ErrorMiddleware, self._service, keys, shares),
            Middleware(OriginMiddleware, options["cors_origins"], options["local_rules"]),
        ]
        if middleware:
            own += [*middleware, Middleware(ErrorMiddleware, self._service)]
        super().__init__(
            [*routes_of(self._service, prefixes, metrics=metrics), *page, *routes],
            redirect_slashes=False,
            default=self._unknown_path,
            lifespan=self._lifespan,
            middleware=own,
        )
        # What a server that runs asyncio can call at once.
        self.stack: ASGIApp = self.middleware_stack
        self.middleware_stack = self._begin
        self._starts = tuple(prefix.strip("/") for prefix in prefixes)
        self._has_page = bool(page)
        self._plain: Mapping[str, ApiRoute] = {}
        self._indexed: list[BaseRoute] = []

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the event loop of the first request, or of the lifespan; later ones need no check.

        Without asyncio, the lifespan fails, and each request gets a 500 and a line of the log.
        """
        if _has_loop():
            # Not if an app has put something around it.
            if self.middleware_stack == self._begin:
                self.middleware_stack = self.stack  # type: ignore[assignment]
            await self.stack(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.failed", "message": NEEDS_ASYNCIO})
            return
        log.error(NEEDS_ASYNCIO)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1011})
            return
        body = orjson.dumps(of_http(500, NEEDS_ASYNCIO))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 500, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    @override
    def app(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        """Pass a request to its route; paths without parameters are found in a table."""
        if scope["type"] == "http":
            if self._indexed != self.routes:
                self._index()
            path = scope["path"] if not scope.get("root_path") else _path_in(scope)
            route = self._plain.get(path)
            if route is not None:
                scope["router"], scope["route"] = self, route
                return route.handle(scope, receive, send)
            send = scope[EXCHANGE].named_by(send)
        return super().app(scope, receive, send)

    def _index(self) -> None:
        """Note the paths that no route of the user precedes."""
        found: dict[str, ApiRoute] = {}
        for route in self.routes:
            if not isinstance(route, ApiRoute):
                break
            if not route.param_convertors:
                found.setdefault(route.path, route)
        self._plain, self._indexed = found, [*self.routes]

    def serves(self, scope: Scope) -> bool:
        """Return True if the app serves the path of a request, or of a handshake."""
        if not _path_in(scope).lstrip("/").startswith(self._starts):
            return False
        request = {**scope, "type": "http", "method": "GET"}
        return any(route.matches(request)[0] is not Match.NONE for route in self.routes)

    async def _unknown_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for an unknown path, or a handshake of a WebSocket."""
        if scope["type"] != "http" and self.serves(scope):
            # A client knows by this answer that it can use HTTP.
            raise WebSocketRefused(scope["path"])
        path, method = _path_in(scope), scope.get("method", "GET")
        if method == "HEAD" and path in _PROBED:
            exchange: Exchange = scope[EXCHANGE]
            await exchange.reply(200, b"")
            return
        asked = shortened(f"{method} {scope['path']}")
        raise InvalidRequest(f"Invalid URL ({asked}){self._hint_at(path, scope)}", status=404)

    def _hint_at(self, path: str, scope: Scope) -> str:
        """Return what else there is, for the base URL of the API, or for a wrong one."""
        prefix, root = path.strip("/"), scope.get("root_path", "")
        if prefix not in self._starts:
            return advice_for(path, scope, self._starts)
        base = f"{root}/{prefix}".rstrip("/")
        page = f" The playground is at {root}/." if self._has_page else ""
        return f". This is the base URL of the API: GET {base}/models lists the models.{page}"

    async def open_store(self) -> None:
        """Open a durable store now, instead of when the first request needs it.

        The traceback of an error has the place and the message of the database, as a note.

        Raises:
            StoreError: the store cannot be used as it is set.
            StoreUnavailable: its database does not answer now.
        """
        store = self._service.store
        if store is not None and store.place.durable:
            try:
                await store.open()
            except (StoreError, StoreUnavailable) as error:
                error.add_note(f"{store.place.describe()}: {in_words(error)}")
                raise

    async def open_limits(self) -> None:
        """Connect to the store of the limits now, instead of when the first request needs it.

        Raises:
            LimitsError: it cannot be used as it is set.
            LimitsUnavailable: it does not answer now.
        """
        await self._service.limits.open()

    def replace(self, entries: Sequence[ModelEntry]) -> None:
        """Serve these models from now on; running requests are not affected."""
        self._service.replace(entries)

    def replace_keys(
        self, api_keys: Iterable[str], keys: Mapping[str, KeyConfig | Mapping[str, Any]]
    ) -> tuple[int, int]:
        """Accept these keys from now on; running requests are not affected.

        Returns:
            How many of `api_keys` are new, and how many keys of before are not among them.

        Raises:
            ValueError: there is no key, but there was one: the server would be open.
        """
        tables = checked({"keys": keys})["keys"]
        found = Keys(listed("api_keys", api_keys), grants_of(keys_of(tables)))
        if self._api_keys.needed and not found.needed:
            raise ValueError("a server that needs a key cannot do without one while it runs")
        before = self._api_keys.plain
        self._api_keys.replace(found)
        return len(found.plain - before), len(before - found.plain)

    @property
    def service(self) -> Service:
        """The models that the app serves."""
        return self._service

    async def aclose(self) -> None:
        """Release the backend, and write what waits for the store."""
        await self._service.aclose()

    def drain(self) -> None:
        """Let `/ready` say that the server ends; requests are served until `end`.

        WebSockets close when what they run has ended. This may be called from a signal's handler.
        """
        self._service.is_draining = True
        for socket in [*self._service.sockets]:
            socket.drain()

    def end(self) -> None:
        """Reject new requests, and let requests that are cancelled from now on send an error."""
        self._service.has_ended = True

    def load(self) -> None:
        """Import the endpoints that no request has needed yet; the app's lifespan does it, too."""
        for route in self.routes:
            if isinstance(route, ApiRoute | SocketRoute):
                route.load()

    @asynccontextmanager
    async def _lifespan(self, _app: object) -> AsyncIterator[None]:
        if not _has_loop():
            raise RuntimeError(NEEDS_ASYNCIO)
        loading = asyncio.create_task(self._load_soon())
        yield
        loading.cancel()
        await self.aclose()

    async def _load_soon(self) -> None:
        # The first request to such an endpoint would otherwise wait for its imports. While a thread
        # imports, each step of the event loop waits for the interpreter lock for a moment. So the
        # first requests after the start come first.
        await asyncio.sleep(_LOAD_AFTER)
        await offload.importing(self.load)


def _has_loop() -> bool:
    """Return True if asyncio runs this code, which other libraries such as Trio can do, too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _path_in(scope: Scope) -> str:
    """Return the path of a request below the place where the app is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


# The paths by which Claude Code looks for a server when it starts.
_PROBED = frozenset({"", "/", "/api/hello"})


def _fetch() -> Fetch:
    """Make the image fetcher; its HTTP client is imported only when images are fetched."""
    from .chat.fetch import Fetcher

    return Fetcher()


class OpenAIMiddleware:
    """ASGI middleware that serves OpenAI's paths under `/v1`, and passes the rest to an app.

    The app's own lifespan runs, if it has one. At its end, the middleware writes what waits for the
    store, and releases the backend.

    Args:
        app: the app that handles all other paths.
        backend: the backend that handles OpenAI's paths.
        observers: see `OpenAIAdapter`.
        options: see `Options`.

    Attributes:
        adapter: the adapter of OpenAI's paths, for `open_store`, `drain` and the like.
    """

    def __init__(
        self,
        app: ASGIApp,
        backend: Backend,
        *,
        observers: Sequence[Observer] = (),
        **options: Unpack[Options],
    ) -> None:
        self._outer = app
        self.adapter = OpenAIAdapter(backend, ("/v1",), observers=observers, **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self.adapter.serves(scope):
            await self.adapter(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self._outer(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the adapter's lifespan with that of the app, or alone if the app has none."""
        own = AsyncExitStack()
        taken, sent = list[Message](), list[Message]()

        async def take() -> Message:
            taken.append(await receive())
            return taken[-1]

        async def reply(message: Message) -> None:
            sent.append(message)
            if message["type"] == "lifespan.startup.complete":
                await own.enter_async_context(self.adapter.lifespan_context(self.adapter))
            elif str(message["type"]).startswith("lifespan.shutdown."):
                await own.aclose()
            await send(message)

        try:
            await self._outer(scope, take, reply)
        except Exception as error:
            if taken or sent:
                # It has a lifespan, which failed.
                await own.aclose()
                raise
            # Such as Django's. A server continues without a lifespan then.
            log.info("The app has no lifespan: %s", error)
        # What an app that has a lifespan may have left open.
        await own.aclose()
        if not sent:
            if not taken:
                await receive()
            await reply({"type": "lifespan.startup.complete"})
            await receive()
            await reply({"type": "lifespan.shutdown.complete"})
