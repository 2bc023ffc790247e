"""The routes of the API: which endpoint handles a path and a method."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, TypeAlias

from starlette.datastructures import URLPath
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from typing_extensions import override

from ..backends import offload
from ..backends.errors import EngineUnavailable, ModelChanged, shortened
from .auth import require_key
from .endpoints import chat, operations
from .errors import InvalidRequest, MethodNotAllowed, WebSocketRefused
from .handshake import APP
from .request import EXCHANGE, Exchange
from .service import Service

# An endpoint also gets the values of the parameters in its path, in their order.
Endpoint: TypeAlias = Callable[..., Awaitable[None]]
Methods: TypeAlias = Mapping[str, Endpoint]
MetricsAccess: TypeAlias = Literal["off", "key", "open"]


class Later:
    """An endpoint whose module is imported when the server has started, or by its first request.

    A server starts without these modules, which take a fifth of the imports. A thread imports them,
    so that the event loop is free.

    Args:
        module: its module in `endpoints`.
        name: its name there.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self.__name__ = name

    async def __call__(self, exchange: Exchange, service: Service, *values: str) -> None:
        route: ApiRoute = exchange.scope["route"]
        # The next request to the route finds the endpoint itself.
        await offload.importing(route.load)
        await self.load()(exchange, service, *values)

    def load(self) -> Endpoint:
        """Return the endpoint itself."""
        module = import_module(f".endpoints.{self._module}", __package__)
        endpoint: Endpoint = getattr(module, self.__name__)
        return endpoint


async def refuse(exchange: Exchange, _service: Service, *_values: str) -> None:
    """Refuse a request; with 404, because clients repeat it after an error of the server.

    Raises:
        InvalidRequest: always.
    """
    await exchange.read_body()
    asked = shortened(exchange.place)
    raise InvalidRequest(
        f"This server does not serve {asked}.", code="unsupported_endpoint", status=404
    )


# Paths without the prefix `/v1`, which is optional: many clients misconfigure their base URL.
ROUTES: Mapping[str, Methods] = {
    "/chat/completions": {
        "GET": Later("stored", "list_chat_completions"),
        "POST": chat.create_chat_completion,
    },
    "/chat/completions/{id}": {
        "GET": Later("stored", "retrieve_chat_completion"),
        "POST": Later("stored", "update_chat_completion"),
        "DELETE": Later("stored", "delete_chat_completion"),
    },
    "/chat/completions/{id}/messages": {"GET": Later("stored", "list_messages")},
    "/completions": {"POST": Later("completions", "create_completion")},
    "/responses": {
        "GET": Later("stored", "list_responses"),
        "POST": Later("responses", "create_response"),
    },
    "/responses/compact": {"POST": refuse},
    "/responses/input_tokens": {"POST": Later("responses", "count_input_tokens")},
    "/responses/{name}": {
        "GET": Later("stored", "retrieve_response"),
        "DELETE": Later("stored", "delete_response"),
    },
    "/responses/{name}/cancel": {"POST": Later("stored", "cancel_response")},
    "/responses/{name}/input_items": {"GET": Later("stored", "list_input_items")},
    "/conversations": {"POST": Later("conversations", "create_conversation")},
    "/conversations/{id}": {
        "GET": Later("conversations", "retrieve_conversation"),
        "POST": Later("conversations", "update_conversation"),
        "DELETE": Later("conversations", "delete_conversation"),
    },
    "/conversations/{id}/items": {
        "GET": Later("conversations", "list_items"),
        "POST": Later("conversations", "append_items"),
    },
    "/conversations/{id}/items/{item}": {
        "GET": Later("conversations", "retrieve_item"),
        "DELETE": Later("conversations", "delete_item"),
    },
    # Anthropic's API.
    "/messages": {"POST": Later("messages", "create_message")},
    "/messages/count_tokens": {"POST": Later("messages", "count_message_tokens")},
    "/messages/batches": {"GET": refuse, "POST": refuse},
    "/messages/batches/{rest:path}": {"GET": refuse, "POST": refuse, "DELETE": refuse},
    "/embeddings": {"POST": Later("embeddings", "create_embeddings")},
    "/rerank": {"POST": Later("embeddings", "rerank")},
    # Cohere's clients add this path to their base URL.
    "/v2/rerank": {"POST": Later("embeddings", "rerank")},
    "/audio/transcriptions": {"POST": Later("transcriptions", "create_transcription")},
    "/audio/translations": {"POST": Later("transcriptions", "create_translation")},
    "/audio/speech": {"POST": Later("audio", "create_speech")},
    "/audio/voices": {"GET": Later("audio", "list_voices")},
    "/models": {"GET": Later("models", "list_models")},
    "/models/{name:path}": {"GET": Later("models", "retrieve_model")},
    "/tokenizer_info": {"GET": Later("models", "tokenizer_info")},
    "/tokenize": {"POST": Later("models", "tokenize")},
    "/detokenize": {"POST": Later("models", "detokenize")},
}
# The path of the WebSocket of responses.
RESPONSES = "/responses"
# Routes that need no API key; they have no prefix.
OPEN_ROUTES: Mapping[str, Methods] = {
    "/health": {"GET": operations.health},
    "/ready": {"GET": operations.ready},
}
# Routes without a prefix that need the key, like those of the API.
CLOSED_ROUTES: Mapping[str, Methods] = {"/openapi.json": {"GET": operations.openapi}}
# The path of the metrics; `--metrics-open` makes it an open route.
METRICS = "/metrics"
_HOW_TO_OPEN = " With --metrics-open, /metrics needs no key."

_PARAMETER = re.compile(r"\{\w+(?P<rest>:path)?\}")


class ApiRoute(Route):
    """A path of the API, with an endpoint for each of its methods.

    A request with another method gets OpenAI's 405. Base URLs are often written with a slash too
    many, so doubled and trailing slashes are ignored, except in the values of parameters.

    Args:
        path: `{name}` matches one segment of a path, and `{name:path}` the rest of it.
        endpoints: the endpoint of each method; `HEAD` has the endpoint of `GET`.
        is_open: True if requests need no API key.
        hint: the end of the message of an error for a missing key.

    Attributes:
        names: the names for `url_path_for`: those of the endpoints.
    """

    def __init__(
        self,
        path: str,
        endpoints: Methods,
        service: Service,
        is_open: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(path, next(iter(endpoints.values())))
        # Every method matches, so that another route cannot take one of them.
        self.methods = None
        self.path_regex = _pattern(path)
        self.names = frozenset(endpoint.__name__ for endpoint in endpoints.values())
        self.endpoints: dict[str, Endpoint] = {}
        for method, endpoint in endpoints.items():
            self.endpoints[method] = endpoint
            if method == "GET":
                self.endpoints["HEAD"] = endpoint
        self._service = service
        self._is_open = is_open
        self._hint = hint

    def load(self) -> None:
        """Import the endpoints that are imported later."""
        for method, endpoint in self.endpoints.items():
            if isinstance(endpoint, Later):
                self.endpoints[method] = endpoint.load()

    @override
    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        return super().url_path_for(self.name if name in self.names else name, **path_params)

    @override
    def handle(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:  # type: ignore[override]
        exchange: Exchange = scope[EXCHANGE]
        if not self._is_open and scope["state"]["key_digest"] is None:
            require_key(exchange, self._hint)
        method = scope["method"]
        endpoint = self.endpoints.get(method)
        if endpoint is None:
            if exchange.headers.get("upgrade", "").lower() == "websocket":
                raise WebSocketRefused(scope["path"])
            raise MethodNotAllowed(method, scope["path"], self.endpoints)
        if method != "POST":
            exchange.watch()
        service = self._service
        if not self.param_convertors:
            exchange.defaults = service.defaults
            if service.has_fallbacks or service.late_checks:
                return _repeated(exchange, service, endpoint)
            return endpoint(exchange, service)
        values = [scope["path_params"][name] for name in self.param_convertors]
        return endpoint(exchange, self._service, *values)


class SocketRoute(WebSocketRoute):
    """The path of a WebSocket, whose endpoint is imported when the server has started."""

    def __init__(self, path: str, service: Service) -> None:
        super().__init__(path, self.load, name="connect_responses")
        self.path_regex = _pattern(path)
        self._service = service

    def load(self) -> Callable[..., Awaitable[None]]:
        """Return the endpoint, which is imported first."""
        from .endpoints.response_socket import serve_frames

        return serve_frames

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        require_key(socket)
        if not self._service.socket_lifetime:
            raise WebSocketRefused(scope["path"])
        serve = await offload.importing(self.load)
        await serve(socket, self._service, scope[APP], receive, send)


async def _repeated(exchange: Exchange, service: Service, endpoint: Endpoint) -> None:
    """Run an endpoint, and once more if its engine was lost before the response.

    That is so if a model with fallbacks lost its engines, and if the engine has another model now.
    """
    exchange.keeps_body = True
    headers = [*exchange.response_headers]
    try:
        await endpoint(exchange, service)
    except EngineUnavailable as error:
        if exchange.started or exchange.method != "POST" or exchange.is_once:
            raise
        name = None
        if not isinstance(error, ModelChanged):
            name = await exchange.read_json(lambda body: body.get("model"))
        if not service.may_repeat(error, name, exchange.grant):
            raise
        if exchange.record is not None:
            exchange.record.repeat(error, exchange.ticket is not None)
        # The request keeps its lease, so that it counts once.
        exchange.response_headers[:] = headers
        exchange.draft = exchange.to_store = exchange.ticket = None
        await endpoint(exchange, service)


def load_endpoints() -> None:
    """Import the modules of all endpoints now, as a process does that will fork."""
    for endpoints in ROUTES.values():
        for endpoint in endpoints.values():
            if isinstance(endpoint, Later):
                endpoint.load()
    import_module(".endpoints.response_socket", __package__)


def routes_of(
    service: Service,
    prefixes: Sequence[str],
    table: Mapping[str, Methods] = ROUTES,
    metrics: MetricsAccess = "off",
) -> list[BaseRoute]:
    """Return the routes of the API.

    Args:
        prefixes: the prefixes of its paths; an empty prefix also adds `OPEN_ROUTES`,
            `CLOSED_ROUTES` and `METRICS`.
        metrics: `open` if `METRICS` needs no API key.
    """
    routes: list[BaseRoute] = [
        ApiRoute(prefix + path, endpoints, service)
        for prefix in prefixes
        for path, endpoints in table.items()
    ]
    if "" in prefixes:
        for path, endpoints in OPEN_ROUTES.items():
            routes.append(ApiRoute(path, endpoints, service, is_open=True))
        for path, endpoints in CLOSED_ROUTES.items():
            routes.append(ApiRoute(path, endpoints, service))
        if metrics != "off":
            own: Methods = {"GET": operations.metrics}
            is_open = metrics == "open"
            routes.append(ApiRoute(METRICS, own, service, is_open, _HOW_TO_OPEN))
    return [*routes, *(SocketRoute(prefix + RESPONSES, service) for prefix in prefixes)]


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with any number of slashes instead of each.

    The value of a parameter for the rest of a path may begin with a slash, since the name of a
    model can be a path.
    """
    pattern, end = "", 0
    for match in _PARAMETER.finditer(path):
        pattern += re.escape(path[end : match.start()]).replace("/", "/++")
        name = match[0][1:-1].partition(":")[0]
        if match["rest"]:
            pattern = f"{pattern.removesuffix('++')}(?P<{name}>.*[^/])"
        else:
            pattern += f"(?P<{name}>[^/]++)"
        end = match.end()
    pattern += re.escape(path[end:]).replace("/", "/++")
    return re.compile(rf"{pattern}/*\Z", re.DOTALL)
