"""Advice for requests to unknown paths that a wrong base URL of a client explains.

A client adds the path of an endpoint to its base URL: OpenAI's add `/chat/completions`, Anthropic's
`/v1/messages`. A base URL that already has a part of that is a usual mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from .messages.errors import speaks_anthropic

_VERSION = "/v1"
# The ends of paths that clients of these APIs ask for.
_SERVED = (
    "/chat/completions", "/completions", "/responses", "/embeddings", "/models", "/v1/messages",
    "/v1/messages/count_tokens",
)  # fmt: skip
_OLLAMA = tuple(
    f"/api/{name}"
    for name in (
        "chat", "embed", "embeddings", "generate", "ps", "pull", "show", "tags", "version",
    )
)  # fmt: skip


def advice_for(path: str, scope: Scope, prefixes: Sequence[str]) -> str:
    """Return the base URL that the client of a request needs; empty if that is not its mistake.

    Args:
        path: the path of the request below the place where the app is mounted.
        prefixes: those of the paths of the API, without slashes around them.
    """
    root: str = scope.get("root_path", "")
    if path == scope["path"] and root != scope.get("app_root_path", root):
        # The app is mounted, but its path is not below its root path.
        return (
            f". The path does not begin with the root path {root}. If a proxy strips a prefix, "
            "start the server with it (--root-path) instead of setting the root path of the app."
        )
    prefix = next((f"/{one}" for one in prefixes if one), "")
    base = f"{root}{prefix}"
    path = path.rstrip("/")
    if path.endswith(_OLLAMA):
        return (
            ". This server does not have Ollama's API. Use a client of OpenAI's API, with a base "
            f"URL that {_end(base)}."
        )
    is_doubled = bool(prefix) and path.startswith(f"{prefix}{prefix}/")
    if not is_doubled and not path.endswith(_SERVED):
        return ""
    if not speaks_anthropic(scope):
        return (
            f". The base URL for clients of OpenAI's API {_end(base)}: they add the path of an "
            "endpoint."
        )
    if not base.endswith(_VERSION):
        return ""
    own = _end(base.removesuffix(_VERSION))
    return f". The base URL for clients of Anthropic's API {own}: they add /v1/messages."


def _end(base: str) -> str:
    return f"ends in {base}" if base else "has no path"
