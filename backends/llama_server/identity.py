"""The identity that a llama-server reports, and a watch for another model at its address.

The server is asked for its identity before a request is sent on a new connection, and before its
model is returned. It is not asked again for a second while the connection of the last answer is
open.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import orjson
from typing_extensions import override

from ..base import MediaKind, Model
from ..connection import Connection
from ..errors import (
    MALFORMED,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    RequestError,
    read_from,
    text_of,
    whole_of,
)
from ..http import HttpClient
from ..identity import IdentityMonitor
from .router import RouterClient, is_router, names_in, not_an_engine
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
        adapters: the file of each LoRA adapter and its scale; None if not reported.
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
    adapters: tuple[str, ...] | None = None

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
        if left.adapters is None or right.adapters is None:
            left, right = left._replace(adapters=None), right._replace(adapters=None)
        if not left.media and not right.media:
            left, right = left._replace(marker=""), right._replace(marker="")
        return left == right

    def model(self, adds_bos: bool) -> Model:
        """Return the model; `adds_bos` comes from a separate question to the server."""
        facts = (
            self.path, self.build, self.context, self.template, self.bos, self.eos,
            sorted(self.media), self.meta, self.adapters or (),
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
            adapters=self.adapters or (),
            sizes=self.sizes,
            places=self.slots,
            build=self.build,
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


def read_meta(models: Any, name: str | None = None) -> tuple[str, ...]:
    """Read the description of the model's file from `/v1/models`.

    Args:
        name: the name of the model, if the server has several.

    Raises:
        KeyError, IndexError, TypeError: the response is not llama-server's.
    """
    model = models["data"][0]
    if name is not None:
        model = next(one for one in models["data"] if name in (one["id"], *one["aliases"]))
    meta = model["meta"]
    return tuple(f"{name} {meta[name]!s:.40}" for name in _META if name in meta)


def read_adapters(adapters: Any) -> tuple[str, ...]:
    """Read the file names and scales of LoRA adapters from `/lora-adapters`.

    Raises:
        KeyError, TypeError, ValueError: the response is not llama-server's.
    """
    return tuple(f"{PurePath(text_of(a['path'])).name:.80}:{float(a['scale']):g}" for a in adapters)


# What a server reports as its version if it was built without a copy of git's data.
NO_BUILD = "b0-unknown"
# What to do about a server of OpenAI's API, such as another Latimer.
OTHER_SERVER = "If it serves OpenAI's API, use the address of the engine behind it."

# Seconds for which a check is valid while the connection of its answer is open, and with a user's
# own client, whose connections are unknown.
HOLDS, HOLDS_WITHOUT_POOL = 1.0, 2.0


class ServerMonitor(IdentityMonitor[Identity]):
    """The last known identity of a server, and the checks of it.

    Args:
        forget: called when the server has another model, so that no earlier answer is valid.
        restarted: called when a new process serves the same model.

    Attributes:
        build: the server's version, for a server that does not know its own; empty if unknown.
    """

    def __init__(
        self,
        client: HttpClient,
        read_model: Callable[[], Coroutine[Any, Any, Model]],
        forget: Callable[[], None],
        restarted: Callable[[], None],
    ) -> None:
        pool = self._pool = client.pool
        holds = HOLDS_WITHOUT_POOL if pool is None else HOLDS
        super().__init__(client.address, read_model, forget, holds)
        # Other connections prove nothing: llama-server closes those of streamed responses.
        self.client = client.separate()
        self.build = ""
        self._witness: Connection | None = None
        self._name = client.model if isinstance(client, RouterClient) else None
        self._restarted = restarted
        self._props = b""
        if pool is not None:
            pool.on_connect = self._verify_connection

    @property
    @override
    def is_verified(self) -> bool:
        """True if the last check is still valid.

        The open connection of its answer shows that the process is running. The time limit is
        needed because a process that shuts down may keep its connections while another one listens.
        """
        witness = self._witness
        if self._pool is not None and (witness is None or witness.closed):
            return False
        return time.monotonic() - self._checked_at < self._holds

    @override
    def lose(self, error: EngineUnavailable) -> None:
        """Clear the identity and fail the requests for the old model that are not sent yet."""
        self._props = b""
        self.invalidate()
        super().lose(error)
        if self._pool is not None:
            self._pool.fail_pending(error)

    async def ask(self, path: str) -> bytes:
        """Send a request that does not depend on the model, on a connection of its own."""
        return (await self._ask(path))[0]

    async def _ask(self, path: str) -> tuple[bytes, Connection | None]:
        """Return the body of a response, and the connection that it came by if that is known."""
        async with await self.client.send("GET", path) as response:
            data = await response.aread()
            if response.status != 200:
                raise self._failed(path, response.status, data)
            stream = response.stream
            return data, stream if isinstance(stream, Connection) else None

    def _failed(self, path: str, status: int, body: bytes) -> LatimerError:
        """Return the error for a response to `ask`; no client has sent what it was asked."""
        error = to_error(status, body)
        if status == 404 and not isinstance(error, RequestError):
            return EngineError(f"{self.address} is not {ENGINE}: it has no {path}.")
        if not isinstance(error, RequestError):
            return error
        return EngineError(f"{self.address} is not {ENGINE}: it rejects GET {path}. {OTHER_SERVER}")

    async def _verify_connection(self) -> None:
        if self.identity is not None and not self.is_verified:
            await self.check()

    @override
    async def _compare(self) -> None:
        data, self._witness = await self._ask("/props")
        before = self.identity
        # The marker changes with each start, so equal bytes come from the same process.
        if before is not None and before.marker and data == self._props:
            return
        now = await self._read(data, before)
        if before is not None and not now.is_same(before):
            error = self.changed(now.name, before.name)
            self.lose(error)
            raise error
        self.identity, self._props = now, data
        if before is not None and now.marker != before.marker:
            self._restarted()

    async def _read(self, data: bytes, before: Identity | None) -> Identity:
        try:
            props = orjson.loads(data)
            if is_router(props):
                raise not_an_engine(self.address, names_in(orjson.loads(await self.ask("/models"))))
            identity = read_identity(props)
            if self.build and identity.build == NO_BUILD:
                identity = identity._replace(build=self.build)
        except MALFORMED as error:
            raise EngineError(f"{self.address} is not {ENGINE}: {error!r:.200}") from error
        meta, adapters = (None, None) if before is None else (before.meta, before.adapters)
        if before is None or not before.marker or identity.marker != before.marker:
            meta = await self._detail("/v1/models", partial(read_meta, name=self._name), meta)
            adapters = await self._detail("/lora-adapters", read_adapters, adapters)
        return identity._replace(meta=meta, adapters=adapters)

    async def _detail(
        self, path: str, read: Callable[[Any], tuple[str, ...]], before: tuple[str, ...] | None
    ) -> tuple[str, ...] | None:
        """Return a detail of the model; the one before if this version does not report it."""
        try:
            with read_from(ENGINE, path):
                return read(orjson.loads(await self.ask(path)))
        except (EngineUnavailable, EngineSilent):
            raise
        except (EngineError, RequestError):
            # The model is then identified by the rest.
            return before
