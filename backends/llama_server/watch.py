"""Whether a llama-server is still the one that was asked about its model.

It is asked when a connection to it is new, before anything is sent on it, and when none is open.
While connections are kept nothing is asked: a process does not change its model.
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
from .identity import Identity, read_identity, read_meta
from .translate import ENGINE, to_error

# Seconds for which an answer holds where no connection is open, and where a user's own client
# does not tell about its connections.
BRIEFLY, WITH_OWN_CLIENT = 0.5, 2.0


class Watch:
    """What a server has told of itself.

    Args:
        forget: called when another model is there: nothing that was read before holds.
        restarted: called when the same model is there, in a new process.
    """

    def __init__(
        self, upstream: Upstream, forget: Callable[[], None], restarted: Callable[[], None]
    ) -> None:
        self._upstream = upstream
        self._pool = upstream if isinstance(upstream, HttpUpstream) else None
        self._send = upstream.send if self._pool is None else self._pool.send_unchecked
        self._forget = forget
        self._restarted = restarted
        self._checks = Checks(self._look)
        self._holds = WITH_OWN_CLIENT if self._pool is None else BRIEFLY
        self._seen = -1e9
        self._props = b""
        self.identity: Identity | None = None
        if self._pool is not None:
            self._pool.on_connect = self._connected

    @property
    def is_sure(self) -> bool:
        """Whether what it has told still holds for all that is known here."""
        if self._pool is not None and self._pool.is_connected:
            return True
        return time.monotonic() - self._seen < self._holds

    def doubt(self) -> None:
        """Ask anew before anything else: the server was not there."""
        self._seen = -1e9

    async def check(self) -> None:
        """Ask the server what it serves.

        Raises:
            EngineUnavailable: it is not there, not ready, or serves another model than before.
            EngineError: it is no llama-server.
        """
        await self._checks.run()

    def lose(self, error: EngineUnavailable) -> None:
        """Forget everything; what was made for the old model is refused."""
        self.identity, self._props = None, b""
        self._forget()
        if self._pool is not None:
            self._pool.refuse(error)

    async def get(self, path: str) -> bytes:
        """Ask something that does not depend on the model."""
        async with self._send("GET", path) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise to_error(reply.status, data)
            return data

    async def _connected(self) -> bool:
        if self.identity is None:
            return False
        await self.check()
        return True

    async def _look(self) -> None:
        before = self.identity
        data = await self.get("/props")
        # The marker is another one after each start, so the same bytes come of the same process.
        if before is None or data != self._props or not before.marker:
            now = await self._read(data, before)
            if before is not None and not now.is_same(before):
                error = changed(self._upstream.address, now.name, before.name)
                self.lose(error)
                raise error
            self.identity, self._props = now, data
            if before is not None and now.marker != before.marker:
                self._restarted()
        self._seen = time.monotonic()

    async def _read(self, data: bytes, before: Identity | None) -> Identity:
        try:
            identity = read_identity(orjson.loads(data))
        except MALFORMED as error:
            raise EngineError(f"{self._upstream.address} is no {ENGINE}: {error!r:.200}") from error
        if before is not None and before.marker and identity.marker == before.marker:
            return identity._replace(meta=before.meta)
        try:
            with read_from(ENGINE, "/v1/models"):
                meta = read_meta(orjson.loads(await self.get("/v1/models")))
        except (EngineUnavailable, EngineSilent):
            raise
        except (EngineError, RequestError):
            # Some versions do not tell; a model is known by its name and template then.
            return identity if before is None else identity._replace(meta=before.meta)
        return identity._replace(meta=meta)
