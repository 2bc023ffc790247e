"""The ASGI app and the middleware: routing, guards, errors, lifespan."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypedDict

import orjson
from typing_extensions import Unpack

from ..backends.base import Backend
from ..backends.errors import LatimerError, shortened
from .chat.instruct import FORMATS
from .cors import Access
from .endpoints.chat import create_chat_completion
from .endpoints.completions import create_completion
from .endpoints.embeddings import create_embeddings
from .endpoints.health import health
from .endpoints.models import list_models, retrieve_model
from .endpoints.rerank import rerank
from .endpoints.tokenizer import detokenize, tokenize, tokenizer_info
from .errors import InvalidRequest, MethodNotAllowed, ShuttingDown, error_event, unexpected
from .exchange import Disconnected, Exchange, Receive, Scope, Send, unless_disconnected
from .guards import Keys
from .hosted import NAMES, Limits
from .origins import LocalRules
from .printable import printable
from .service import (
    DEFAULT_MAX_BODY,
    KEEPALIVE,
    REASONING_FIELDS,
    Fetch,
    Listing,
    Policy,
    ReasoningField,
    Service,
)

log = logging.getLogger("latimer")

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Endpoint = Callable[[Exchange, Service], Awaitable[None]]
Found = tuple[str, Endpoint, bool]

# Paths without the `/v1` prefix, which is optional: many clients misconfigure their base URL.
ENDPOINTS: dict[str, tuple[str, Endpoint]] = {
    "/chat/completions": ("POST", create_chat_completion),
    "/completions": ("POST", create_completion),
    "/embeddings": ("POST", create_embeddings),
    "/rerank": ("POST", rerank),
    # Cohere's clients add this path to their base URL.
    "/v2/rerank": ("POST", rerank),
    "/models": ("GET", list_models),
    "/tokenizer_info": ("GET", tokenizer_info),
    "/tokenize": ("POST", tokenize),
    "/detokenize": ("POST", detokenize),
}


_SLASHES = re.compile("/{2,}")


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
    matryoshka: bool


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
        name = options.get("chat_format")
        if name is not None and name not in FORMATS:
            raise KeyError(name)
        policy = Policy(
            strict=options.get("strict", False),
            parse_content=options.get("parse_content", False),
            fetch=_fetch() if options.get("fetch_images") else None,
            chat_format=name,
            vocabulary=options.get("logit_bias_vocabulary"),
            keepalive=options.get("keepalive", KEEPALIVE),
            reasoning=options.get("reasoning_field", REASONING_FIELDS[0]),
            matryoshka=options.get("matryoshka", False),
        )
        limits = options.get("limits", "engine")
        if limits not in NAMES:
            raise ValueError(f"limits must be one of {', '.join(NAMES)}, not {limits!r}")
        names, any_model = tuple(options.get("model_names", ())), options.get("any_model", False)
        listing = Listing(backend, names, any_model, policy)
        self._service = Service(
            [listing],
            options.get("max_body", DEFAULT_MAX_BODY),
            hosted=limits == "openai" or policy.strict,
        )
        self._keys = Keys(options.get("api_keys", ()))
        self._shares = options.get("share_prefixes", False)
        endpoints = {
            prefix + path: (method, endpoint, True)
            for prefix in prefixes
            for path, (method, endpoint) in ENDPOINTS.items()
        }
        if "" in prefixes:
            endpoints["/health"] = ("GET", health, False)
        self._endpoints = endpoints
        self._models = tuple(f"{prefix}/models/" for prefix in prefixes)
        self._access = Access(options.get("cors_origins", ("*",)), options.get("local_rules"))
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
            method, endpoint, guarded = found
            if guarded:
                owner = self._keys.check(exchange)
                exchange.owner = "" if self._shares else owner
            if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
                allowed = [method, "HEAD"] if method == "GET" else [method]
                raise MethodNotAllowed(scope["method"], scope["path"], allowed)
            if method == "POST":
                await exchange.receive(self._service.max_body)
            await unless_disconnected(exchange, endpoint(exchange, self._service))
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
            log.error("request %s failed\n%s", exchange.request_id, trace)
            if exchange.started:
                raise
            status, body = unexpected()
            await exchange.reply(status, orjson.dumps(body))

    def serves(self, scope: Scope) -> bool:
        """Return True if the app serves the path of a request."""
        return self._find(scope) is not None

    def _find(self, scope: Scope) -> Found | None:
        """Return the endpoint of a path, relative to the app's mount point; None if unknown."""
        path, root = scope["path"], scope.get("root_path", "")
        if root and path.startswith(root + "/"):
            path = path[len(root) :]
        found = self._endpoints.get(path)
        if found is not None:
            return found
        # Base URLs are often written with a slash too many.
        single = _SLASHES.sub("/", path)
        if single.startswith(self._models) and (name := path.partition("/models/")[2].rstrip("/")):
            return "GET", partial(retrieve_model, name=name), True
        return self._endpoints.get(single.rstrip("/"))

    async def aclose(self) -> None:
        """Release the backend."""
        await self._service.aclose()

    def end(self) -> None:
        """Reject new requests, and let requests that are cancelled from now on send an error."""
        self._has_ended = True

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
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


async def _shut_down(exchange: Exchange) -> None:
    """Send the shutdown error to the client of a cancelled request, if the response allows it."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
    if not exchange.started:
        await exchange.error(ShuttingDown())
    elif exchange.streams:
        await exchange.chunk(error_event(ShuttingDown()), more=False)


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
        if scope["type"] == "http" and self._adapter.serves(scope):
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
