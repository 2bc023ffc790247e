"""A watch for another model at the address of a llama-server.

The server is asked for its identity before a request is sent on a new connection, and before its
model is returned. It is not asked again for a second while the connection of the last answer is
open.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

from ..checks import Checks, changed
from ..errors import (
    MALFORMED,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    RequestError,
    read_from,
)
from ..http import HttpUpstream
from ..upstream import Upstream
from .events import ENGINE
from .identity import Identity, read_identity, read_meta
from .translate import to_error

# Seconds for which an answer is valid with a user's own client, whose connections are unknown.
WITH_OWN_CLIENT = 2.0


class Watch:
    """The last known identity of a server, and the checks of it.

    Args:
        forget: called when the server has another model, so that no earlier answer is valid.
        restarted: called when a new process serves the same model.
    """

    def __init__(
        self, upstream: Upstream, forget: Callable[[], None], restarted: Callable[[], None]
    ) -> None:
        self._upstream = upstream
        self._pool = upstream if isinstance(upstream, HttpUpstream) else None
        self._forget = forget
        self._restarted = restarted
        self._checks = Checks(self._look)
        self._seen = -1e9
        self._props = b""
        self.identity: Identity | None = None
        if self._pool is not None:
            self._pool.on_connect = self._connected

    @property
    def is_sure(self) -> bool:
        """True if the last answer is still valid."""
        if self._pool is not None:
            return self._pool.is_sure
        return time.monotonic() - self._seen < WITH_OWN_CLIENT

    def doubt(self) -> None:
        """Require a new check, since the server was unavailable."""
        self._seen = -1e9
        if self._pool is not None:
            self._pool.doubt()

    async def check(self) -> None:
        """Ask the server for its identity.

        Raises:
            EngineUnavailable: it is not reachable, not ready, or serves another model than before.
            EngineError: it is not a llama-server.
        """
        await self._checks.run()

    def lose(self, error: EngineUnavailable) -> None:
        """Clear the identity and fail the requests for the old model that are not sent yet."""
        self.identity, self._props = None, b""
        self._forget()
        if self._pool is not None:
            self._pool.refuse(error)

    async def get(self, path: str, witness: bool = False) -> bytes:
        """Send a request that does not depend on the model; see `HttpUpstream.ask`."""
        pool = self._pool
        question = self._upstream.send("GET", path) if pool is None else pool.ask(path, witness)
        async with question as reply:
            data = await reply.read()
            if reply.status != 200:
                raise to_error(reply.status, data)
            return data

    async def _connected(self) -> None:
        if self.identity is not None and not self.is_sure:
            await self.check()

    async def _look(self) -> None:
        await self._compare(await self.get("/props", witness=True))
        self._seen = time.monotonic()
        if self._pool is not None:
            self._pool.trust()

    async def _compare(self, data: bytes) -> None:
        before = self.identity
        # The marker changes with each start, so equal bytes come from the same process.
        if before is not None and before.marker and data == self._props:
            return
        now = await self._read(data, before)
        if before is not None and not now.is_same(before):
            error = changed(self._upstream.address, now.name, before.name)
            self.lose(error)
            raise error
        self.identity, self._props = now, data
        if before is not None and now.marker != before.marker:
            self._restarted()

    async def _read(self, data: bytes, before: Identity | None) -> Identity:
        try:
            identity = read_identity(orjson.loads(data))
        except MALFORMED as error:
            raise EngineError(
                f"{self._upstream.address} is not {ENGINE}: {error!r:.200}"
            ) from error
        if before is not None and before.marker and identity.marker == before.marker:
            return identity._replace(meta=before.meta)
        try:
            with read_from(ENGINE, "/v1/models"):
                meta = read_meta(orjson.loads(await self.get("/v1/models")))
        except (EngineUnavailable, EngineSilent):
            raise
        except (EngineError, RequestError):
            # Some versions lack it; the model is then identified by its name and template.
            return identity if before is None else identity._replace(meta=before.meta)
        return identity._replace(meta=meta)
