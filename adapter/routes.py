"""The routes of the API: which endpoint handles a path and a method."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..backends.errors import shortened
from .endpoints.chat import create_chat_completion
from .endpoints.completions import create_completion
from .endpoints.conversations import (
    append_items,
    create_conversation,
    delete_conversation,
    delete_item,
    list_items,
    retrieve_conversation,
    retrieve_item,
    update_conversation,
)
from .endpoints.embeddings import create_embeddings, rerank
from .endpoints.models import (
    detokenize,
    health,
    list_models,
    retrieve_model,
    tokenize,
    tokenizer_info,
)
from .endpoints.responses import count_input_tokens, create_response
from .endpoints.stored import (
    cancel_response,
    delete_chat_completion,
    delete_response,
    list_chat_completions,
    list_input_items,
    list_messages,
    retrieve_chat_completion,
    retrieve_response,
    update_chat_completion,
)
from .errors import InvalidRequest
from .request import Exchange
from .service import Service

# An endpoint also gets the values of the parameters in its path, in their order.
Endpoint: TypeAlias = Callable[..., Awaitable[None]]
Methods: TypeAlias = Mapping[str, Endpoint]


async def refuse(exchange: Exchange, _service: Service, *_values: str) -> None:
    """Refuse a request; with 404, because clients repeat it after an error of the server.

    Raises:
        InvalidRequest: always.
    """
    asked = shortened(f"{exchange.scope['method']} {exchange.scope['path']}")
    raise InvalidRequest(
        f"This server does not serve {asked}.", code="unsupported_endpoint", status=404
    )


# Paths without the prefix `/v1`, which is optional: many clients misconfigure their base URL.
# `{name}` matches one segment of a path, and `{name:path}` the rest of it.
ROUTES: Mapping[str, Methods] = {
    "/chat/completions": {"GET": list_chat_completions, "POST": create_chat_completion},
    "/chat/completions/{id}": {
        "GET": retrieve_chat_completion,
        "POST": update_chat_completion,
        "DELETE": delete_chat_completion,
    },
    "/chat/completions/{id}/messages": {"GET": list_messages},
    "/completions": {"POST": create_completion},
    "/responses": {"POST": create_response},
    "/responses/compact": {"POST": refuse},
    "/responses/input_tokens": {"POST": count_input_tokens},
    "/responses/{name}": {"GET": retrieve_response, "DELETE": delete_response},
    "/responses/{name}/cancel": {"POST": cancel_response},
    "/responses/{name}/input_items": {"GET": list_input_items},
    "/conversations": {"POST": create_conversation},
    "/conversations/{id}": {
        "GET": retrieve_conversation,
        "POST": update_conversation,
        "DELETE": delete_conversation,
    },
    "/conversations/{id}/items": {"GET": list_items, "POST": append_items},
    "/conversations/{id}/items/{item}": {"GET": retrieve_item, "DELETE": delete_item},
    "/embeddings": {"POST": create_embeddings},
    "/rerank": {"POST": rerank},
    # Cohere's clients add this path to their base URL.
    "/v2/rerank": {"POST": rerank},
    "/models": {"GET": list_models},
    "/models/{name:path}": {"GET": retrieve_model},
    "/tokenizer_info": {"GET": tokenizer_info},
    "/tokenize": {"POST": tokenize},
    "/detokenize": {"POST": detokenize},
}
# Routes that need no API key; they have no prefix.
OPEN_ROUTES: Mapping[str, Methods] = {"/health": {"GET": health}}

_SLASHES = re.compile("/{2,}")
_PARAMETER = re.compile(r"\{\w+(?P<rest>:path)?\}")


class Found(NamedTuple):
    """The route of a path.

    Args:
        methods: the endpoint of each method; `HEAD` has the endpoint of `GET`.
        guarded: True if requests need an API key.
        values: the values of the parameters in the path.
    """

    methods: Methods
    guarded: bool
    values: Sequence[str] = ()


class Routes:
    """The routes below several prefixes.

    Args:
        prefixes: the prefixes of the API's paths; an empty prefix also adds `OPEN_ROUTES`.
    """

    def __init__(self, prefixes: Sequence[str], routes: Mapping[str, Methods] = ROUTES) -> None:
        self._plain: dict[str, Found] = {}
        self._patterns: list[tuple[re.Pattern[str], Found]] = []
        starts: list[str] = []
        for prefix in prefixes:
            for path, methods in routes.items():
                found = Found(_with_head(methods), guarded=True)
                start, brace, _ = (prefix + path).partition("{")
                if brace:
                    starts.append(start)
                    self._patterns.append((_pattern(prefix + path), found))
                else:
                    self._plain[start] = found
        if "" in prefixes:
            for path, methods in OPEN_ROUTES.items():
                self._plain[path] = Found(_with_head(methods), guarded=False)
        self._starts = tuple(starts)

    def find(self, path: str) -> Found | None:
        """Return the route of a path, or None.

        Base URLs are often written with a slash too many, so doubled and trailing slashes are
        ignored, except in the values of parameters.
        """
        found = self._plain.get(path)
        if found is not None:
            return found
        single = _SLASHES.sub("/", path)
        found = self._plain.get(single.rstrip("/"))
        if found is None and single.startswith(self._starts):
            for pattern, route in self._patterns:
                match = pattern.fullmatch(path)
                if match is not None:
                    return route._replace(values=match.groups())
        return found


def _with_head(methods: Methods) -> Methods:
    found: dict[str, Endpoint] = {}
    for method, endpoint in methods.items():
        found[method] = endpoint
        if method == "GET":
            found["HEAD"] = endpoint
    return found


def _pattern(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters.

    The value of a parameter for the rest of a path may begin with a slash, since the name of a
    model can be a path.
    """
    pattern, end = "", 0
    for match in _PARAMETER.finditer(path):
        pattern += re.escape(path[end : match.start()]).replace("/", "/+")
        if match["rest"]:
            pattern = pattern.removesuffix("+") + "(.*[^/])"
        else:
            pattern += "([^/]+)"
        end = match.end()
    pattern += re.escape(path[end:]).replace("/", "/+")
    return re.compile(pattern + "/*", re.DOTALL)
