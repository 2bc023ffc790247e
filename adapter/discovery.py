"""Which engine a setting means, found out by asking it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from urllib.parse import urlsplit

import orjson

from ..backends.base import Backend
from ..backends.errors import EngineError, LatimerError
from ..backends.http import HttpUpstream
from ..backends.koboldcpp import KoboldCpp
from ..backends.llama_cpp import DEMO_MODEL, LlamaCpp
from ..backends.llama_cpp.options import EXTRA, MISSING
from ..backends.llama_server import LlamaServer
from .config import BackendName, Settings


async def backend_of(
    settings: Settings, progress: Callable[[float], None] | None = None
) -> Backend:
    """The backend that the settings name; a URL is probed unless they say what is there.

    Raises:
        EngineError: nothing answers there, or nothing that is known, or llama.cpp is not installed.
    """
    model = settings.model
    key = settings.engine_key.get_secret_value() if settings.engine_key else None
    if model is None or not model.startswith(("http://", "https://")):
        if settings.backend not in ("auto", "llama-cpp"):
            raise EngineError(f"The backend {settings.backend} needs a URL, not {model!r}.")
        if not all(map(find_spec, EXTRA)):
            raise EngineError(MISSING)
        return LlamaCpp(
            DEMO_MODEL if model is None else model,
            context=settings.context,
            parallel=settings.parallel,
            batch=settings.batch,
            threads=settings.threads,
            gpu_layers=settings.gpu_layers,
            cache_type=settings.cache_type,
            cache_memory=settings.cache_bytes,
            flash_attention=settings.flash_attention,
            mmap=settings.mmap,
            mlock=settings.mlock,
            lora=settings.adapters(),
            mmproj=settings.mmproj,
            exact=settings.exact,
            max_waiting=settings.queue,
            progress=progress,
        )
    _check_address(model)
    kind = settings.backend if settings.backend != "auto" else await _probe(model, key)
    if kind == "koboldcpp":
        return KoboldCpp(model, key, settings.queue)
    if kind == "llama-server":
        return LlamaServer(model, key, settings.engine_timeout, settings.queue)
    raise EngineError(f"The backend {kind} needs a GGUF file, not a URL.")


def _check_address(address: str) -> None:
    """Raise `EngineError` for what is no address."""
    try:
        parts = urlsplit(address)
        if parts.hostname and parts.port != 0:
            return
        reason = "it names no host, or port 0"
    except ValueError as error:
        reason = str(error)
    raise EngineError(f"'{address}' is no address like http://127.0.0.1:8080: {reason}.")


async def _probe(address: str, key: str | None) -> BackendName:
    """Ask for what only one engine has; koboldcpp answers `/props` too, so it comes first."""
    upstream = HttpUpstream(address, {"Authorization": f"Bearer {key}"} if key else {}, 10.0)
    try:
        if "KoboldCpp" in await _get(upstream, "/api/extra/version", "result"):
            return "koboldcpp"
        if await _get(upstream, "/props", "default_generation_settings"):
            return "llama-server"
    finally:
        await upstream.aclose()
    raise EngineError(
        f"What answers at {address} is neither a llama-server nor a koboldcpp. If it is one that "
        "is still loading or wants a key, say --backend, and --engine-key."
    )


async def _get(upstream: HttpUpstream, path: str, key: str) -> str:
    try:
        async with upstream.send("GET", path) as reply:
            body = orjson.loads(await reply.read())
    except orjson.JSONDecodeError:
        return ""
    return str(body.get(key, "")) if isinstance(body, dict) else ""


async def describe(backend: Backend) -> tuple[bool, list[tuple[str, str]]]:
    """Whether a backend is reachable, and rows that say what it can do."""
    capabilities = backend.capabilities
    rows = [("engine", capabilities.engine)]
    try:
        await backend.health()
        model = await backend.model()
    except LatimerError as error:
        return False, [*rows, ("reachable", f"no: {error.message}")]
    capabilities = backend.capabilities
    rows += [
        ("reachable", "yes"),
        ("model", model.name),
        ("context", f"{model.context} tokens"),
        ("chat template", "the model's own" if model.template else "none: Alpaca is used"),
        ("adds BOS", f"yes ({model.bos_token})" if model.adds_bos else "no"),
        ("fingerprint", model.fingerprint),
        ("engine's own replies", "yes (oai_compat: false)" if capabilities.native else "no"),
        ("sampling extras", ", ".join(sorted(capabilities.extras))),
        (
            "message content",
            "is text" if capabilities.plain_text else "is text: spelled marks get a U+200B",
        ),
        ("beside text", ", ".join(sorted(model.media)) or "-"),
        ("grammars", ", ".join(sorted(capabilities.grammars)) or "-"),
        ("refused", "; ".join(f"{k}: {v}" for k, v in sorted(capabilities.refused.items())) or "-"),
        ("only nearly", ", ".join(sorted(capabilities.inexact)) or "-"),
    ]
    return True, rows
