"""Advice for requests to unknown paths: a wrong base URL of a client, or an endpoint of OpenAI's.

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
# The beginnings of koboldcpp's own paths.
_KOBOLDCPP = (
    "/api/extra/", "/api/latest/", "/api/v1/config/", "/api/v1/generate", "/api/v1/info/",
    "/api/v1/model",
)  # fmt: skip
# OpenAI's endpoints that Latimer does not have, by the beginnings of their paths.
_MISSING = {
    "agents": "This server does not run agents. Use the Responses API.",
    "assistants": "This server does not have assistants. Use the Responses API.",
    "batches": "This server does not run batches. Send the requests themselves.",
    "containers": "This server does not have containers.",
    "decisions": "This server does not make decisions. Use an answer with a JSON schema.",
    "evals": "This server does not run evals.",
    "files": "This server does not store files. Send a file in a message.",
    "fine_tuning": "This server does not train models.",
    "images": "This server does not make images.",
    "moderations": "This server does not moderate texts.",
    "realtime": "This server does not have realtime sessions.",
    "sdapi": "This server does not make images.",
    "skills": "This server does not have skills.",
    "threads": "This server does not have threads. Use the Responses API.",
    "uploads": "This server does not store files. Send a file in a message.",
    "vector_stores": "This server does not have vector stores.",
    "videos": "This server does not make videos.",
}


def advice_for(path: str, scope: Scope, prefixes: Sequence[str]) -> str:
    """Return the base URL that the client of a request needs, or that an endpoint is missing.

    It is empty for any other path.

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
    below = path.removeprefix(prefix)
    is_koboldcpps = below.startswith(_KOBOLDCPP) and not path.endswith(_SERVED)
    if is_koboldcpps or path.endswith(_OLLAMA):
        api = "koboldcpp" if is_koboldcpps else "Ollama"
        return (
            f". This server does not have {api}'s API. Use a client of OpenAI's API, with a base "
            f"URL that {_end(base)}."
        )
    is_doubled = bool(prefix) and path.startswith(f"{prefix}{prefix}/")
    if not is_doubled and not path.endswith(_SERVED):
        missing = _MISSING.get(below.lstrip("/").partition("/")[0])
        return f". {missing}" if missing else ""
    if not speaks_anthropic(scope):
        if is_doubled:
            return f". This client adds {prefix} itself: its base URL {_end(root)}."
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
