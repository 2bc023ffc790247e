"""Latimer on Ray Serve: an application for each model, and the command that runs them.

`serve run latimer.adapter.ray_serve:app model=model.gguf` serves one model, and `python -m
latimer.adapter.ray_serve serve.yaml` those of a configuration of Ray Serve. docs/ray.md describes
both.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import re
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema
from ray.util import list_named_actors
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from ..backends.errors import LatimerError
from .admission import SESSION_HEADERS
from .cli.reload import end_earlier_engines
from .cli.serve import adapter_of
from .cli.terminal import say
from .engines import background_backend, starts_engines
from .errors import ReplicaUnavailable
from .fleet import Fleet
from .ray_proxy import PLACE, VARIABLE
from .request import REQUEST_ID
from .responses.items import mark_of, named_mark
from .responses.replicas import Replicas
from .settings import Settings

# What Ray Serve's proxy calls a request; clients can set it, and logs show it.
_NAME = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_NAME_HEADER = b"x-request-id"
_RESPONSE = re.compile(r"/responses/+(resp_[0-9a-f]+)")

# Seconds that a replica which leaves gives responses in the background.
_BACKGROUND = 30.0

# The defaults of a deployment; `deployments` of the configuration overrides them.
OPTIONS: Mapping[str, Any] = {
    # What the engine in process runs at a time, and as many that wait in it.
    "max_ongoing_requests": 32,
    "autoscaling_config": {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 8,
        "upscale_delay_s": 5,
        "downscale_delay_s": 60,
    },
    # Ray Serve kills what a replica that leaves still runs after this time, in seconds.
    "graceful_shutdown_timeout_s": 50,
    "graceful_shutdown_wait_loop_s": 1,
}


class SessionRouter(RequestRouter):
    """Send the requests of a session to one replica, and others to the one with fewer requests.

    A request for a response goes to the replica that has made it, because it may run there. A
    session whose replica is full or gone runs on the next one of its own order, so that few
    sessions move when a replica comes or goes.
    """

    @override
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks, the best first."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this, Ray Serve tries again without a pause while all replicas are full.
        pending_request.routing_context.should_backoff = True
        scope = _scope_of(pending_request)
        response = _RESPONSE.search(scope.get("path", ""))
        mark = "" if response is None else mark_of(response[1])
        own = [one for one in candidate_replicas if named_mark(one.replica_id.unique_id) == mark]
        if own:
            return [own, [one for one in candidate_replicas if one not in own]]
        session = pending_request.metadata.session_id or _session_of(scope)
        if not session:
            return [candidate_replicas]
        return [[one] for one in sorted(candidate_replicas, key=partial(_weight, session))]


def _weight(session: str, replica: RunningReplica) -> bytes:
    """Return the place of a replica in a session's order: rendezvous hashing."""
    return hashlib.blake2b(f"{session} {replica.replica_id.unique_id}".encode()).digest()


def _scope_of(pending: PendingRequest) -> Scope:
    """Return the scope of a request, or an empty one for another call."""
    if not pending.args or not isinstance(pending.args[0], bytes):
        return {}
    # The proxy's own message, which holds the scope and not the body.
    return getattr(pickle.loads(pending.args[0]), "_asgi_scope", {})  # noqa: S301


def _session_of(scope: Scope) -> str:
    """Return the session that the headers of a request name, or an empty text."""
    headers = dict(scope.get("headers", ()))
    return next((headers[one].decode("latin-1") for one in SESSION_HEADERS if one in headers), "")


class _Actors:
    """The replicas as Ray's actors; see `replicas.Members`."""

    def __init__(self) -> None:
        self.mark = named_mark(serve.get_replica_context().replica_id.unique_id)

    async def join(self) -> None:
        """See `Members`. Ray knows its actors."""

    async def running(self) -> set[str]:
        """Return the marks of the replicas whose processes run, also of those that end.

        Raises:
            ReplicaUnavailable: Ray does not answer.
        """
        try:
            names = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        except RayError as error:
            raise ReplicaUnavailable from error
        # An actor of a replica has the replica's id after the names of application and deployment.
        return {named_mark(one["name"].rpartition("#")[2]) for one in names}

    async def leave(self) -> None:
        """See `Members`."""


class Ingress:
    """The ASGI app of a replica: the adapter, with Ray Serve's ids of requests.

    Args:
        settings: what the adapter serves.

    Raises:
        WrongSetup: no engine can be made from the settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._fleet = Fleet(settings) if settings.engines else None
        self._backend = None
        if self._fleet is None:
            self._backend = background_backend(settings, None, "model")
        self._adapter = adapter_of(settings, self._fleet or self._backend)
        self._releases = self._adapter.lifespan_context
        self._adapter.lifespan_context = self._lifespan
        self._ends_engines = starts_engines(settings)
        self._join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = dict(scope["headers"]).get(_NAME_HEADER, b"")
            # The proxy sends the header itself.
            scope[REQUEST_ID] = name.decode() if _NAME.fullmatch(name) else ""
        await self._adapter(scope, receive, send)

    async def check(self) -> None:
        """Raise `LatimerError` if the engine does not answer; a fleet starts its own again."""
        if self._backend is not None:
            await self._backend.health()

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> Any:
        """Load the model before the replica gets requests, and release it afterwards."""
        if self._ends_engines:
            end_earlier_engines()
        if self._backend is not None:
            await self._backend.model()
        elif self._fleet is not None:
            self._fleet.start()
            await self._fleet.wait()
        await self._adapter.open_store()
        await self._adapter.open_limits()
        async with self._releases(app):
            yield
            await self._adapter.service.background.wait(_BACKGROUND)

    def _join(self) -> None:
        """Let this replica and the others find each other's responses."""
        service = self._adapter.service
        store = service.store
        shared = store if store is not None and store.place.durable else None
        if shared is not None:
            shared.is_shared = True
        service.background.elsewhere = Replicas(_Actors(), shared)


class Latimer:
    """A replica of a deployment."""

    app: Ingress

    async def check_health(self) -> None:
        """Raise an error if the engine does not answer, so that Ray Serve replaces the replica."""
        await self.app.check()


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application of a model, or of the tables of a settings file.

    Args:
        args: settings of `latimer serve` by their names in its file, and `config` for such a file,
            which every node needs. The environment of a replica counts, too.

    Raises:
        WrongSettings: a value is not allowed, or a name is unknown.
    """
    if "config" not in args:
        _settings(args)
    secret = secrets.token_urlsafe(32)

    def build() -> Ingress:
        settings = _settings(args)
        if settings.reasoning_key is None:
            # All replicas open what one of them has sealed.
            settings = settings.with_flags(reasoning_key=secret)
        return Ingress(settings)

    deployment = serve.deployment(
        name="Latimer",
        request_router_config=RequestRouterConfig(
            request_router_class=f"{SessionRouter.__module__}:{SessionRouter.__name__}"
        ),
        **OPTIONS,
    )
    return deployment(serve.ingress(build)(Latimer)).bind()


def _settings(args: Mapping[str, Any]) -> Settings:
    given = {**args}
    file = given.pop("config", None)
    return Settings.load(None if file is None else Path(file), **given)


_DEMO: Mapping[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {"name": "demo", "route_prefix": "/", "import_path": f"{__package__}.ray_serve:app"}
    ],
}


@click.command()
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False
)
@click.option("--address", help="The Ray cluster to use; by default a new one on this machine.")
def main(file: Path | None, address: str | None) -> None:
    """Serve the applications of FILE, a configuration of Ray Serve, until a signal.

    Without FILE, serve the demo model on http://127.0.0.1:8000/v1. After SIGTERM or SIGINT, running
    requests end before the replicas do.
    """
    config = ServeDeploySchema.model_validate(
        _DEMO if file is None else yaml.safe_load(file.read_text())
    )
    over = threading.Event()
    # Ray Serve kills a proxy whose process is not ready in three times this, and the start fails
    # with it; the default of 5 s is too short for a busy machine. `serve.start` waits for 60 s.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")
    os.environ.setdefault(VARIABLE, PLACE)
    ray.init(address=address or "local", namespace="serve", include_dashboard=False)
    for one in (signal.SIGTERM, signal.SIGINT):
        # Ray's own handler would end all replicas at once.
        signal.signal(one, lambda *_: over.set())
    options = config.http_options
    serve.start(proxy_location=config.proxy_location, http_options=options.model_dump())
    _deploy(config)
    place = f"http://{options.host}:{options.port}"
    say(f"Ray Serve starts {', '.join(one.name for one in config.applications)} at {place}")
    over.wait()
    say("Latimer waits for running requests.")
    _drain([one.name for one in config.applications])
    serve.shutdown()
    ray.shutdown()


def _deploy(config: ServeDeploySchema) -> None:
    """Deploy as `serve deploy` does, which needs Ray's dashboard."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    client.deploy_apps(config)


def _drain(names: Sequence[str]) -> None:
    """Delete applications; each waits until its replicas have ended their requests."""
    for name in names:
        try:
            serve.delete(name)
        except (LatimerError, TimeoutError, RuntimeError) as error:
            say(f"{name} did not end: {error}")


if __name__ == "__main__":
    main()
