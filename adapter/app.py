"""The ASGI app and the middleware: guards, errors, lifespan."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypedDict, cast

import orjson
from typing_extensions import Unpack

from ..backends.base import Backend
from ..backends.errors import LatimerError, shortened
from .chat.instruct import FORMATS
from .cors import Access
from .end_user import in_log
from .errors import (
    InvalidRequest,
    MethodNotAllowed,
    ShuttingDown,
    WebSocketRefused,
    render,
    unexpected,
)
from .exchange import Disconnected, Exchange, Receive, Scope, Send, unless_disconnected
from .guards import Keys
from .hosted import NAMES, Limits
from .origins import LocalRules
from .printable import printable
from .routes import Found, Routes
from .sealed import Seal
from .service import (
    Fetch,
    Listing,
    Policy,
    ReasoningField,
    Service,
)
from .settings import Settings
from .store.errors import StoreError, StoreUnavailable, in_words
from .store.place import place_of
from .store.store import Store

log = logging.getLogger("latimer")

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Options(TypedDict, total=False):
    """The options of an adapter.

    Args:
        model_names: the model names for clients; by default the engine's own name.
        any_model: accept every model name.
        api_keys: reject requests with 401 that do not send one of these keys in
            `Authorization: Bearer …`. Without keys, every client is accepted.
        share_prefixes: share the prompt cache of the in-process engine across API keys. A client
            can then infer other clients' prompts from response times.
        cors_origins: the web pages that may read responses in a browser; by default all.
        local_rules: the rules of `latimer serve` without a key (`origins.LocalRules`), instead of
            `cors_origins`. They reject requests from other pages, and requests to unknown host
            names. By default there are none.
        max_body: the largest request body, in bytes; by default 32 MiB.
        strict: reject unknown fields, and fields that the engine only approximates; implies
            `limits="openai"`.
        limits: `openai` to apply the limits of OpenAI's hosted service too; by default `engine`:
            a request may ask for what the engine can do.
        parse_content: parse control tokens in message text. The author of a message can then
            forge messages of any role.
        fetch_images: fetch images from the http and https URLs in a request, at public addresses
            only. By default only data: URLs are accepted.
        chat_format: the name of an instruct format (`instruct.FORMATS`) that replaces the model's
            chat template. The `adapter` of a request overrides it.
        logit_bias_vocabulary: the vocabulary of the token ids in requests, by its name in tiktoken
            (`cl100k_base`); by default the model's own.
        keepalive: the seconds of silence after which a stream sends a comment, 10 by default; 0
            sends none.
        reasoning_field: the field of messages for reasoning: `reasoning_content` (the default),
            `reasoning`, or None to omit reasoning from responses.
        matryoshka: cut vectors to the `dimensions` of a request. Use it only for a model that was
            trained for it; by default `dimensions` is rejected.
        reasoning_key: the secret that seals the reasoning which clients of Responses keep
            (`encrypted_content`). By default it is random, so that sealed reasoning can be opened
            until the end of the process.
        store: where requests with `store: true` are kept: `memory` (the default), the path of an
            SQLite file, a URL `postgresql://…`, or `off`.
        store_age: the time that they are kept: a duration such as `24h`, or seconds; `forever`. By
            default 24 hours in memory, else for ever.
        store_size: the MiB that all of them may take; the oldest are deleted. By default 64 in
            memory, else there is no limit.
        store_media: a folder or `s3://BUCKET/PREFIX` for their images and audio; by default a
            folder next to an SQLite file, else the database.
        store_required: reject a request that cannot be stored.
    """

    model_names: Sequence[str]
    any_model: bool
    api_keys: Iterable[str]
    share_prefixes: bool
    cors_origins: Sequence[str]
    local_rules: LocalRules | None
    max_body: int
    strict: bool
    limits: Limits
    parse_content: bool
    fetch_images: bool
    chat_format: str | None
    logit_bias_vocabulary: str | None
    keepalive: float
    reasoning_field: ReasoningField | None
    reasoning_key: str | None
    matryoshka: bool
    store: str
    store_age: str | float | None
    store_size: int | None
    store_media: str | None
    store_required: bool


# The defaults of `latimer serve`, without rules for local pages.
DEFAULTS = cast("Options", {"local_rules": None, **Settings.model_construct().arguments("adapter")})


class OpenAIAdapter:
    """An ASGI app that serves OpenAI's API over a backend.

    Serve it on its own, or mount it under any prefix of another app. The first request starts the
    backend. The end of the app's lifespan, or `aclose`, releases it.

    Args:
        backend: the backend that handles the requests.
        prefixes: the path prefixes of the API; an empty prefix also serves `/health`.
        options: see `Options`.
    """

    def __init__(
        self,
        backend: Backend,
        prefixes: Sequence[str] = ("/v1", ""),
        **options: Unpack[Options],
    ) -> None:
        options = {**DEFAULTS, **options}
        name = options["chat_format"]
        if name is not None and name not in FORMATS:
            raise KeyError(name)
        policy = Policy(
            strict=options["strict"],
            parse_content=options["parse_content"],
            fetch=_fetch() if options["fetch_images"] else None,
            chat_format=name,
            vocabulary=options["logit_bias_vocabulary"],
            keepalive=options["keepalive"],
            reasoning=options["reasoning_field"],
            matryoshka=options["matryoshka"],
        )
        limits = options["limits"]
        if limits not in NAMES:
            raise ValueError(f"limits must be one of {', '.join(NAMES)}, not {limits!r}")
        place = place_of(
            options["store"],
            options["store_age"],
            options["store_size"],
            options["store_media"],
            options["store_required"],
        )
        listing = Listing(backend, tuple(options["model_names"]), options["any_model"], policy)
        self._service = Service(
            [listing],
            options["max_body"],
            hosted=limits == "openai" or policy.strict,
            store=None if place is None else Store(place),
            seal=Seal(options["reasoning_key"]),
        )
        self._keys = Keys(options["api_keys"])
        self._shares = options["share_prefixes"]
        self._routes = Routes(prefixes)
        self._access = Access(options["cors_origins"], options["local_rules"])
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an endpoint; every error becomes OpenAI's error object.

        An unexpected exception is logged and becomes a 500.
        """
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        try:
            if self._has_ended:
                raise ShuttingDown
            scheme = scope.get("scheme", "http")
            verdict = self._access.judge(scope["method"], scheme, scope["headers"])
            if verdict is not None:
                exchange.headers += verdict.headers
                if verdict.error is not None:
                    raise verdict.error
                if verdict.is_preflight:
                    await exchange.reply(200, b"OK", b"text/plain")
                    return
            found = self._find(scope)
            if found is None:
                asked = shortened(f"{scope['method']} {scope['path']}")
                raise InvalidRequest(f"Invalid URL ({asked})", status=404)
            if found.guarded:
                exchange.key = self._keys.check(exchange)
                exchange.owner = "" if self._shares else exchange.key
            method = scope["method"]
            endpoint = found.methods.get(method)
            if endpoint is None:
                if (exchange.raw_header(b"upgrade") or b"").lower() == b"websocket":
                    raise WebSocketRefused(scope["path"])
                raise MethodNotAllowed(method, scope["path"], found.methods)
            if method == "POST":
                await exchange.receive(self._service.max_body)
            work = endpoint(exchange, self._service, *found.values)
            await unless_disconnected(exchange, work)
        except Disconnected:
            pass
        except LatimerError as error:
            if exchange.started:
                raise
            await exchange.error(error)
        except asyncio.CancelledError:
            if not self._has_ended:
                raise
            await _shut_down(exchange)
        except Exception:
            # Text from a request must not control the terminal that shows the log.
            trace = printable(traceback.format_exc(), keep="\n")
            user = f" of user {in_log(exchange.end_user)}" if exchange.end_user else ""
            log.error("request %s%s failed\n%s", exchange.request_id, user, trace)
            if exchange.started:
                raise
            status, body = unexpected()
            await exchange.reply(status, orjson.dumps(body))

    def serves(self, scope: Scope) -> bool:
        """Return True if the app serves the path of a request."""
        return self._find(scope) is not None

    def _find(self, scope: Scope) -> Found | None:
        """Return the route of a path, relative to the app's mount point; None if unknown."""
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root + "/"):
            path = path[len(root) :]
        return self._routes.find(path)

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

    async def aclose(self) -> None:
        """Release the backend, and write what waits for the store."""
        await self._service.aclose()

    def end(self) -> None:
        """Reject new requests, and let requests that are cancelled from now on send an error."""
        self._has_ended = True

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif "websocket.http.response" in (scope.get("extensions") or ()):
            await _refuse_websocket(scope["path"], send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def _refuse_websocket(path: str, send: Send) -> None:
    """Answer a handshake with an error, by which a client knows that it can use HTTP."""
    status, body, headers = render(WebSocketRefused(path))
    head = [(b"content-type", b"application/json"), *headers]
    await send({"type": "websocket.http.response.start", "status": status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": orjson.dumps(body)})


async def _shut_down(exchange: Exchange) -> None:
    """Send the shutdown error to the client of a cancelled request, if the response allows it."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    if not exchange.started:
        await exchange.error(ShuttingDown())
    elif exchange.streams:
        await exchange.chunk(exchange.fault(ShuttingDown()), more=False)


def _fetch() -> Fetch:
    """Make the image fetcher; its HTTP client is imported only when images are fetched."""
    from .chat.fetch import Fetcher

    return Fetcher()


class OpenAIMiddleware:
    """ASGI middleware that serves OpenAI's paths under `/v1`, and passes the rest to an app.

    The app's own lifespan runs. When it ends, the middleware releases the backend.

    Args:
        app: the app that handles all other paths.
        backend: the backend that handles OpenAI's paths.
        options: see `Options`.
    """

    def __init__(self, app: ASGIApp, backend: Backend, **options: Unpack[Options]) -> None:
        self._outer = app
        self._adapter = OpenAIAdapter(backend, ("/v1",), **options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._adapter.serves(scope):
            await self._adapter(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self._outer(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def release(message: dict[str, object]) -> None:
            if str(message["type"]).startswith("lifespan.shutdown."):
                await self._adapter.aclose()
            await send(message)

        await self._outer(scope, receive, release)  # type: ignore[arg-type]
