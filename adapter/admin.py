"""The operator's paths of a fleet: `/admin/engines`, which need the key of `--admin-key`."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..backends.errors import shortened
from ..backends.fleet.machine import Member
from ..backends.fleet.replica import Replica
from .auth import Keys
from .errors import InvalidRequest, MethodNotAllowed
from .fleet import Fleet
from .metric_rows import FROM_BEST

log = logging.getLogger("latimer")

PREFIX = "/admin/engines"
DRAINED = "it is drained by the operator"


def admin_routes(fleet: Fleet, key: str) -> list[Route]:
    """Return the routes that list, load, unload and drain the engines of a fleet.

    Args:
        key: the key that requests must send, in `Authorization: Bearer …` or `x-api-key`.
    """
    keys = Keys([key])

    def own(path: str, method: str, action: Callable[[Request], Awaitable[Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            _check(request, keys)
            if request.method != method and (request.method, method) != ("HEAD", "GET"):
                raise MethodNotAllowed(request.method, request.scope["path"], [method])
            return Response(orjson.dumps(await action(request)), media_type="application/json")

        route = Route(path, endpoint)
        # The path in metrics and logs has no type of its parameter.
        route.path = route.path_format
        # Every method matches, so that others get OpenAI's error instead of Starlette's text.
        route.methods = None
        return route

    async def engines(_: Request) -> Any:
        return {"object": "list", "data": [describe(fleet, one) for one in _all(fleet)]}

    def acting(act: Callable[[Fleet, Replica], Awaitable[None]]) -> Callable[..., Awaitable[Any]]:
        async def action(request: Request) -> Any:
            replica = _named(fleet, request.path_params["name"])
            # Another worker has logged what it passes on.
            if request.client is not None:
                fields = {
                    "action": act.__name__, "engine": replica.name, "client": request.client.host,
                }  # fmt: skip
                log.info(
                    "the operator asked for engine %s: %s", replica.name, act.__name__,
                    extra={"event": "admin", "fields": fields},
                )  # fmt: skip
            await act(fleet, replica)
            return describe(fleet, replica)

        return action

    return [
        own(PREFIX, "GET", engines),
        *(
            # A name such as Qwen/Qwen3-8B has a slash.
            own(f"{PREFIX}/{{name:path}}/{verb}", "POST", acting(act))
            for verb, act in (("load", load), ("unload", unload), ("drain", drain))
        ),
    ]


def describe(fleet: Fleet, replica: Replica) -> dict[str, Any]:
    """Return what an operator sees of an engine."""
    found: dict[str, Any] = {
        "id": replica.name,
        "object": "engine",
        "state": replica.shown,
        "reason": replica.reason if replica.state != "ready" else "",
        "models": [name for name, pool in fleet.pools.items() if replica in pool.replicas],
        "running": replica.running,
        "places": replica.places,
        "waiting": sum(pool.waiting for pool in fleet.pools.values() if replica in pool.replicas),
    }
    member = replica.loader
    if isinstance(member, Member):
        loader = member.loader
        found |= {
            "memory": dict(loader.memory),
            "place": loader.place,
            "loads": member.loads,
            "load_seconds": round(member.load_seconds, 3) if member.loads else None,
            "seconds": round(time.monotonic() - loader.since, 1),
            "log": loader.tail,
        }
    return found


def combined(replies: Sequence[Any], silent: Sequence[int]) -> Any:
    """Return the response of all workers to a request of the operator, from that of each.

    Their requests add up. The state is the worst one, with its reason.

    Args:
        silent: the numbers of the workers that do not answer, from 1 on.
    """
    more = {"silent_workers": silent} if silent else {}
    if "data" not in replies[0]:
        return _as_one(replies) | more
    found: dict[str, list[Any]] = {}
    for engine in chain.from_iterable(reply["data"] for reply in replies):
        found.setdefault(engine["id"], []).append(engine)
    return {**replies[0], "data": [*map(_as_one, found.values())], **more}


def _as_one(engines: Sequence[Any]) -> dict[str, Any]:
    worst = max(engines, key=lambda engine: FROM_BEST.index(engine["state"]))
    sums = {name: sum(one[name] for one in engines) for name in ("running", "waiting")}
    return {**worst, **sums}


async def load(fleet: Fleet, replica: Replica) -> None:
    """Load an engine, and let it serve requests again if it was drained."""
    if replica.state == "draining":
        replica.set("unavailable", "it was drained")
    member = replica.loader
    if isinstance(member, Member):
        member.show()
        await member.load()
        member.show()
    for pool in fleet.pools.values():
        if replica in pool.replicas:
            await pool.ask(replica)


async def unload(_: Fleet, replica: Replica) -> None:
    """Unload an engine when its requests have ended.

    Raises:
        InvalidRequest: Latimer has not loaded it.
    """
    if replica.loader is None:
        raise not_on_demand(replica.name)
    await replica.loader.unload()


async def drain(_: Fleet, replica: Replica) -> None:
    """Send no more requests to an engine; those that it runs end as usual."""
    replica.set("draining", DRAINED)


def _all(fleet: Fleet) -> list[Replica]:
    return [*fleet.replicas.values()]


def _named(fleet: Fleet, name: str) -> Replica:
    replica = fleet.replicas.get(name)
    if replica is None:
        raise engine_not_found(name, fleet.replicas)
    return replica


def not_on_demand(name: str) -> InvalidRequest:
    """Return the error for an engine that Latimer has not loaded."""
    return InvalidRequest(
        f"The engine '{name}' is not loaded on demand, so it cannot be unloaded. Drain it instead.",
        code="not_on_demand",
    )


def engine_not_found(name: str, known: Iterable[str]) -> InvalidRequest:
    """Return the error for a name that no engine has."""
    return InvalidRequest(
        f"There is no engine '{shortened(name)}'. There are: {shortened(', '.join(known))}.",
        code="engine_not_found",
        status=404,
    )


def _check(request: Request, keys: Keys) -> None:
    """Check the operator's key.

    Raises:
        InvalidRequest: it is missing or wrong.
    """
    headers = request.scope["headers"]
    if keys.find(headers, dict(headers)) is None:
        raise InvalidRequest(
            "This path needs the key of --admin-key, in an Authorization header (Bearer) or in "
            "x-api-key. Over the socket of --admin-socket it needs none.",
            code="invalid_api_key",
            status=401,
        )
