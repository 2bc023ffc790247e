"""One model of a llama-server in router mode.

The router finds the model of a request by a field of its body, or by its query. It must not load a
model because of a request: Latimer loads and unloads its models itself (`fleet/router_mode.py`).
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
from typing_extensions import override

from ..errors import EngineError
from ..http import HttpClient, Response

if TYPE_CHECKING:
    from ..http import Client

_OWN = "autoload=false"


class RouterClient(HttpClient):
    """The HTTP server of one model of a router.

    Args:
        model: the name of the model.
    """

    def __init__(
        self,
        url: str,
        model: str,
        headers: Mapping[str, str] | None = None,
        client: Client | None = None,
    ) -> None:
        super().__init__(url, headers, client)
        self.model = model
        self._query = f"model={quote(model, safe='')}&{_OWN}"
        self._field = b'{"model":%s' % orjson.dumps(model)

    @override
    def send(
        self, method: str, path: str, body: bytes | None = None
    ) -> Coroutine[Any, Any, Response]:
        if body is None:
            return super().send(method, f"{path}?{self._query}")
        rest = body[1:]
        separator = b"" if rest.lstrip().startswith(b"}") else b","
        return super().send(method, f"{path}?{_OWN}", self._field + separator + rest)


def is_router(props: Mapping[str, Any]) -> bool:
    """Return True if a response to `/props` comes from a router, not from a model."""
    return props.get("role") == "router"


def names_in(models: Any) -> list[str]:
    """Return the names of a router's models, from its response to `/models`.

    Raises:
        LookupError, TypeError: the response is not a router's.
    """
    return [str(model["id"]) for model in models["data"]]


def not_an_engine(address: str, names: list[str]) -> EngineError:
    """Return the error for a router that is used like an engine."""
    found = ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
    example = names[0] if names else "NAME"
    return EngineError(
        f"The llama-server at {address} is a router, which has no model of its own. It serves: "
        f"{found or 'no models'}. Serve one of them with a file for --config that has "
        f'[engines.NAME], url = "{address}", model = "{example}".'
    )
