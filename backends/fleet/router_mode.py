"""Models that another server loads: those of a llama-server in router mode, and of koboldcpp.

Loads and unloads are explicit. A router that loads models by itself (`--models-autoload`) or that
unloads others for them (`--models-max`) does not know which of them are in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import orjson
from typing_extensions import override

from ..base import Backend
from ..errors import MALFORMED, EngineError, LatimerError
from ..http import HttpClient
from .loading import POLL, EngineLoader, LoadFailed

# Seconds between two looks at a model that is loaded, unless a request fails: others can unload it.
LOOK = 2.0
# Seconds that an unload may take.
UNLOAD = 60.0
_LOADED = ("loaded", "sleeping")
# The tolerance of start times, in seconds.
SAME_START = 0.03
# The name by which koboldcpp unloads its model.
_NOTHING = "unload_model"


class RemoteModel(EngineLoader):
    """A model that another server loads.

    Args:
        client: the server.
        model: the server's name for the model.
        backend: its backend.
        options: as for `EngineLoader`.
    """

    # True if Latimer has loaded it, and no other client of the server.
    _has_loaded = False
    _is_closing = False

    def __init__(
        self, name: str, client: HttpClient, model: str, backend: Backend, **options: Any
    ) -> None:
        super().__init__(name, **options)
        self._client = client
        self._model = model
        self._backend = backend
        self._looking: asyncio.Task[None] | None = None
        self._doubted = asyncio.Event()

    @property
    @override
    def backend(self) -> Backend:
        return self._backend

    @override
    async def obstacle(self) -> str:
        try:
            await self._is_loaded()
        except (LatimerError, LoadFailed) as error:
            return str(error)
        return ""

    @override
    async def aclose(self) -> None:
        self._is_closing = True
        await super().aclose()
        await self._client.aclose()

    @override
    async def _start(self) -> None:
        try:
            await self._begin()
            await _until(self._is_loaded)
            await _until(self._answers)
        except LatimerError as error:
            raise LoadFailed(error.message) from error
        self._looking = asyncio.create_task(self._look())

    @override
    def leave(self) -> None:
        self._look_away()
        super().leave()

    def _look_away(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    @override
    async def _stop(self) -> None:
        self._look_away()
        if self._is_closing and not self._has_loaded:
            return
        # A server that has ended, or that does not know the model, has not loaded it.
        with contextlib.suppress(LatimerError, LoadFailed, TimeoutError):
            async with asyncio.timeout(UNLOAD):
                await self._end()

    @override
    async def _abandon(self) -> None:
        if self._has_loaded:
            await super()._abandon()
        else:
            self._look_away()

    @override
    def doubt(self) -> None:
        self._doubted.set()

    async def _look(self) -> None:
        """Notice that the model is not loaded any more."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._doubted.wait()
            self._doubted.clear()
            try:
                if await self._is_loaded():
                    continue
            except (LatimerError, LoadFailed) as error:
                self.lost(str(error))
                return
            if self.is_ready:
                self._enter("unloaded")
            return

    @abstractmethod
    async def _begin(self) -> None:
        """Ask the server to load the model."""

    @abstractmethod
    async def _is_loaded(self) -> bool:
        """Return True if the model is loaded; raise `LoadFailed` if it cannot be."""

    @abstractmethod
    async def _end(self) -> None:
        """Unload the model, and return when its memory is free."""

    async def _ask(self, method: str, path: str, payload: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of a response."""
        body = None if payload is None else orjson.dumps(payload)
        async with await self._client.send(method, path, body) as response:
            data = await response.aread()
        try:
            return response.status, orjson.loads(data)
        except ValueError:
            return response.status, {}


class _Entry(NamedTuple):
    """A model of a router, and why it ended if it failed."""

    status: str
    exit_code: int | None


class RouterModel(RemoteModel):
    """One model of a llama-server in router mode."""

    @override
    async def _begin(self) -> None:
        self._has_loaded = False
        while (await self._entry()).status not in (*_LOADED, "loading"):
            # The answer may be lost.
            self._has_loaded = True
            status, reply = await self._ask("POST", "/models/load", {"model": self._model})
            self._has_loaded = status == 200
            message = _message_of(reply)
            if status == 200 or "already running" in message:
                return
            if "model limit" not in message:
                raise LoadFailed(f"the router refused to load it: {message or status}")
            # Other models are loaded until one of them ends.
            await asyncio.sleep(5 * POLL)

    @override
    async def _is_loaded(self) -> bool:
        entry = await self._entry()
        if entry.exit_code is not None:
            raise LoadFailed(f"its process ended with exit code {entry.exit_code}")
        return entry.status in _LOADED

    @override
    async def _end(self) -> None:
        while (await self._entry()).status != "unloaded":
            await self._ask("POST", "/models/unload", {"model": self._model})
            await asyncio.sleep(POLL)

    async def _entry(self) -> _Entry:
        status, reply = await self._ask("GET", "/models")
        try:
            models = reply["data"]
            for model in models:
                if self._model == model["id"] or self._model in (model.get("aliases") or ()):
                    state: Mapping[str, Any] = model["status"]
                    code = state.get("exit_code") if state.get("failed") else None
                    return _Entry(str(state["value"]), code)
            names = ", ".join(str(model["id"]) for model in models)
        except MALFORMED as error:
            raise EngineError(
                f"{self._client.address} is not a llama-server in router mode: status {status} "
                "for /models."
            ) from error
        raise LoadFailed(f"the router has no model '{self._model}'; it has: {names or 'no models'}")


class KoboldModel(RemoteModel):
    """A configuration or a model file of a koboldcpp that runs with `--admin`."""

    @override
    async def _begin(self) -> None:
        self._has_loaded = True
        await self._reload(self._model)

    @override
    async def _is_loaded(self) -> bool:
        try:
            _, reply = await self._ask("GET", "/api/v1/model")
        except LatimerError:
            # It restarts.
            return False
        return str(reply.get("result", "inactive")) != "inactive"

    @override
    async def _end(self) -> None:
        await self._reload(_NOTHING)
        await _until(self._is_unloaded)

    async def _is_unloaded(self) -> bool:
        return not await self._is_loaded()

    async def _reload(self, name: str) -> None:
        """Restart koboldcpp with another configuration, and return when the old one has ended."""
        before = await self._started()
        status, reply = await self._ask("POST", "/api/admin/reload_config", {"filename": name})
        if status != 200 or not reply.get("success"):
            raise LoadFailed(
                f"koboldcpp refused to load '{name}' (status {status}). Start it with --admin and "
                "--admindir; engine_key is its --adminpassword"
            )

        async def has_restarted() -> bool:
            now = await self._started()
            return now is not None and (before is None or now > before + SAME_START)

        await _until(has_restarted)

    async def _started(self) -> float | None:
        """Return the time at which koboldcpp started; None if it does not answer."""
        try:
            _, reply = await self._ask("GET", "/api/extra/perf")
            return time.monotonic() - float(reply["uptime"])
        except (LatimerError, *MALFORMED):
            return None


async def _until(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until the answer is True."""
    while True:
        if await is_done():
            return
        await asyncio.sleep(POLL)


def _message_of(reply: Any) -> str:
    error = reply.get("error") if isinstance(reply, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
