"""Paths for operators: `/health`, `/ready`, `/metrics` and `/openapi.json`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import orjson

from ...backends import offload
from ...backends.errors import EngineUnavailable, ModelLoading
from ..errors import InvalidRequest, ShuttingDown, StoreUnavailable
from ..metrics import Metrics, Page
from ..readiness import SCRAPE, SERVING, ModelState, States, states_of
from ..request import Exchange
from ..service import Service

# Seconds that an engine may take to answer, for `/ready`. A probe of Kubernetes waits for a second
# by default.
_READY = 0.8
# The reasons in the error of a store that is required. Hosts and paths are in the log only.
_STORE_REASONS = {"unavailable": "the database does not answer", "full": "its queue is full"}


class EngineLoading(EngineUnavailable):
    """An engine that loads its model, for probes."""

    code = "engine_loading"


async def health(exchange: Exchange, service: Service) -> None:
    """Respond with 200 if the engine is ready and 503 if it is not; no API key is needed.

    A store that is not available is a 503 only if it is required.
    """
    try:
        await service.health()
    except ModelLoading as error:
        raise EngineLoading(error.message) from None
    report: dict[str, Any] = {"status": "ok"}
    if service.store is not None:
        state, waiting, lost = service.store.status()
        report["store"] = {"status": state}
        if state != "ok":
            if service.store.place.required:
                raise StoreUnavailable(_STORE_REASONS[state])
            report["store"] |= {"waiting": waiting, "lost": lost}
    await exchange.reply(200, orjson.dumps(report))


async def ready(exchange: Exchange, service: Service) -> None:
    """Respond with 200 if requests are served now, and else with a 503 that says why not.

    Models that stand alone must all be ready. Of models with several engines, one is enough.

    Raises:
        ShuttingDown: the server drains, or will soon.
        StoreUnavailable: a required store does not work.
        EngineUnavailable: an engine does not answer, or loads its model.
    """
    if service.is_leaving or service.is_draining:
        raise ShuttingDown
    if service.store is not None and service.store.place.required:
        state = service.store.status().state
        if state != "ok":
            raise StoreUnavailable(_STORE_REASONS[state])
    states = await states_of(service, _READY)
    missing = [one for one in states if not one.serves]
    pooled = [one for one in states if one.pool is not None]
    if any(one.pool is None for one in missing) or (pooled and not any(o.serves for o in pooled)):
        raise _error(missing)
    await exchange.reply(200, orjson.dumps({"status": "ready"}))


def _error(missing: States) -> EngineUnavailable:
    """Return the error for models that are not served."""
    engines = [engine for one in missing for engine in one.engines if engine.state not in SERVING]
    are_loading = all(engine.state == "loading" for engine in engines)
    message = " ".join(map(_words, missing))
    return EngineLoading(message) if are_loading else EngineUnavailable(message)


def _words(model: ModelState) -> str:
    reasons = "; ".join(
        f"{engine.name} is {engine.state}" + (f": {engine.reason}" if engine.reason else "")
        for engine in model.engines
    )
    return f"The model{' ' * bool(model.name)}{model.name} is not served: {_sentence(reasons)}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


async def metrics(exchange: Exchange, service: Service) -> None:
    """Send the metrics in Prometheus' text format, or in OpenMetrics' if the scraper accepts it.

    Raises:
        InvalidRequest: the key may use some models only, and most numbers are those of all.
    """
    found = next(one for one in service.observers.all if isinstance(one, Metrics))
    grant = exchange.grant
    if grant is not None and grant.names is not None and not found.is_open:
        raise InvalidRequest(
            f"The API key {grant.name} may use some models only, and /metrics shows all of them. "
            "Send a key without 'models' in its table.",
            code="insufficient_permissions",
            status=403,
        )
    states = await states_of(service, SCRAPE)
    # Thousands of lines; they are made in a thread.
    if found.elsewhere is None:
        snapshot = await found.snapshot(service, states)
        values = await offload.run(offload.UNKNOWN, snapshot.values)
    else:
        values = await found.elsewhere.total(states)
    accept = exchange.headers.get("accept", "")
    page = Page(found.names, values)
    body, content_type = await offload.run(offload.UNKNOWN, page.text, accept)
    await exchange.reply(200, body, content_type.encode())


async def openapi(exchange: Exchange, service: Service) -> None:
    """Return the description of the API as an OpenAPI document."""
    # Half a second of work, once; it is done in a thread.
    await exchange.reply(200, await offload.run(offload.UNKNOWN, _described))


def _described() -> bytes:
    """Return the document; its module is imported here, because it imports those of all schemas."""
    text: bytes = import_module("..openapi", __package__).as_json()
    return text
