"""The identity that a llama-server reports, and a watch for another model at its address.

The server is asked for its identity before a request is sent on a new connection, and before its
model is returned. It is not asked again for a second while the connection of the last answer is
open.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import orjson

from ..base import MediaKind, Model
from ..errors import (
    MALFORMED,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    RequestError,
    read_from,
    text_of,
    whole_of,
)
from ..http import HttpUpstream, Upstream
from ..identity import Checks, changed
from .translate import ENGINE, to_error

# The largest number of slots to accept.
MOST_SLOTS = 65_536
# Kinds of media by the server's names for them.
MODALITIES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}
# The fields of `/v1/models` that describe the model's file; others may change while it is served.
_META = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


class Identity(NamedTuple):
    """The model and the configuration of a server.

    Args:
        path, alias, build: the model's file, its name, and the server's version.
        slots: the number of calls that the server runs at a time.
        media: the kinds of input that the model accepts besides text.
        marker: the media placeholder in the server's prompts; it changes with each start.
        meta: the model's sizes, which distinguish files of the same name; None if not reported.
    """

    path: str
    alias: str
    build: str
    context: int
    template: str
    bos: str
    eos: str
    slots: int
    media: frozenset[MediaKind]
    marker: str
    meta: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The model's name; without `--alias` its file name, since the full path is private."""
        return self.alias if self.alias and self.alias != self.path else PurePath(self.path).name

    @property
    def names(self) -> frozenset[str]:
        """The names of the model in the server's responses."""
        return frozenset({self.path, self.alias, self.name, PurePath(self.path).name} - {""})

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes, by the server's names for them, as far as reported."""
        facts = [fact.partition(" ") for fact in self.meta or ()]
        return {name: int(value) for name, _, value in facts if value.isdigit()}

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the model's vocabulary; None if not reported."""
        return self.sizes.get("n_vocab")

    def is_same(self, other: Identity) -> bool:
        """Return True if the facts read about one identity apply to the other."""
        left, right = self, other
        if left.meta is None or right.meta is None:
            left, right = left._replace(meta=None), right._replace(meta=None)
        if not left.media and not right.media:
            left, right = left._replace(marker=""), right._replace(marker="")
        return left == right

    def model(self, adds_bos: bool) -> Model:
        """Return the model; `adds_bos` comes from a separate question to the server."""
        facts = (
            self.path, self.build, self.context, self.template, self.bos, self.eos,
            sorted(self.media), self.meta,
        )  # fmt: skip
        return Model(
            name=self.name,
            context=self.context,
            template=self.template or None,
            bos_token=self.bos,
            eos_token=self.eos,
            adds_bos=adds_bos,
            fingerprint="fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10],
            modified=int(time.time()),
            media=self.media,
            sizes=self.sizes,
        )


def read_identity(props: Any) -> Identity:
    """Read the identity from `/props`.

    Raises:
        KeyError, TypeError, ValueError: the response is not llama-server's.
    """
    marker = text_of(props.get("media_marker") or "")
    modalities = props.get("modalities") or {}
    return Identity(
        path=text_of(props["model_path"]),
        alias=text_of(props.get("model_alias") or ""),
        build=text_of(props["build_info"]),
        context=whole_of(props["default_generation_settings"]["n_ctx"], least=1),
        template=text_of(props.get("chat_template") or ""),
        bos=text_of(props.get("bos_token") or ""),
        eos=text_of(props.get("eos_token") or ""),
        slots=whole_of(props.get("total_slots", 1), 1, MOST_SLOTS),
        media=frozenset(
            kind for name, kind in MODALITIES.items() if marker and modalities.get(name)
        ),
        marker=marker,
    )


def read_meta(models: Any) -> tuple[str, ...]:
    """Read the description of the model's file from `/v1/models`.

    Raises:
        KeyError, IndexError, TypeError: the response is not llama-server's.
    """
    meta = models["data"][0]["meta"]
    return tuple(f"{name} {meta[name]!s:.40}" for name in _META if name in meta)


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
