"""Whether a llama-server is still the one that was asked about its model.

It is asked when a connection to it is new, before anything is sent on it, and before its model is
told: but not again while the connection on which it was asked is open, for a second.
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

# Seconds for which an answer holds where a user's own client does not tell about its connections.
WITH_OWN_CLIENT = 2.0


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
        """Whether what it has told still holds for all that is known here."""
        if self._pool is not None:
            return self._pool.is_sure
        return time.monotonic() - self._seen < WITH_OWN_CLIENT

    def doubt(self) -> None:
        """Ask anew before anything else: the server was not there."""
        self._seen = -1e9
        if self._pool is not None:
            self._pool.doubt()

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

    async def get(self, path: str, witness: bool = False) -> bytes:
        """Ask something that does not depend on the model; see `HttpUpstream.ask`."""
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
        # The marker is another one after each start, so the same bytes come of the same process.
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
