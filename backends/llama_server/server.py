"""A running llama-server: questions to it, their cached answers, and places for calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from ...schemas.native.llama_server import TokenizePayload
from .. import offload
from ..base import Model, Special, TokenIds
from ..checks import Fresh, Known, changed
from ..errors import LARGEST, EngineError, EngineUnavailable, ids_of_text, read_from
from ..turns import Party, Turns
from ..upstream import Upstream
from .events import ENGINE
from .facts import Facts, read_facts, read_specials
from .infill import InfillTokens
from .translate import to_error
from .vectors import Embedder
from .watch import Watch

# Concurrent questions. A server has four threads more than slots for its connections. A connection
# without a thread waits until another connection is closed, which can take seconds.
QUESTIONS = 2


class Server:
    """A running llama-server.

    Args:
        max_waiting: the largest number of requests that wait for a place.

    Attributes:
        known: the model that it serves.
        turns: the queue of calls.
        watch: the detector of another model at the address.
        names: the model's names in responses.
        infill: the model's infill tokens, once known.
        embedder: the facts about its embeddings, once known.
        learning_embedder: held while they are asked for.
        generates: True if it also generates text; None if not known yet.
    """

    def __init__(self, upstream: Upstream, max_waiting: int) -> None:
        self.upstream = upstream
        self.turns = Turns(max_waiting)
        self._batches = Turns(max_waiting)
        self._most_batches = 1
        # Calls made inside a call that already has a place, which must not wait for each other.
        self._asides = Turns(None)
        self._questions = Turns(None, QUESTIONS)
        self.watch = Watch(upstream, self._forget, self._restarted)
        self._health = Fresh(self._ask_health)
        self.names: frozenset[str] = frozenset()
        self.known = Known(upstream.address, self.watch, self._read_model)
        self._facts: Facts | None = None
        self.infill: InfillTokens | None = None
        self._specials: Sequence[Special] | None = None
        self.embedder: Embedder | None = None
        self.generates: bool | None = None
        self._learning = asyncio.Lock()
        self.learning_embedder = asyncio.Lock()

    async def call(
        self, path: str, payload: bytes, party: Party | None, model: Model | None = None
    ) -> tuple[int, bytes]:
        """Wait for a place, make a call without streaming, and return its status and body.

        Args:
            party: the request of the call; None inside a call that already has a place.
            model: the model that the call is for, if it must not reach another one.
        """
        turns = self.turns
        if party is not None:
            await turns.take(party)
        elif not turns.try_take():
            turns = self._asides
            await turns.take()
        try:
            if model is not None:
                self.known.check_is(model)
            async with self.upstream.send("POST", path, payload) as reply:
                return reply.status, await reply.read()
        except EngineUnavailable:
            self.watch.doubt()
            raise
        finally:
            turns.release()

    async def batch(
        self, path: str, payload: bytes, party: Party, model: Model
    ) -> tuple[int, bytes]:
        """Make a call of many inputs; at most two run at a time, which keep the server busy.

        While a generation runs it is one. The server does not begin a prompt as long as it has
        inputs to embed, so it must run out of them.
        """
        batches = self._batches
        await batches.take(party)
        try:
            return await self.call(path, payload, party, model)
        finally:
            are_alone = self.turns.taken < batches.taken and not self.turns.is_full
            batches.resize(self._most_batches if are_alone else 1)
            batches.release()

    def _resize(self, slots: int) -> None:
        self.turns.resize(slots)
        self._most_batches = min(max(slots // 2, 1), 2)
        self._batches.resize(self._most_batches)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Return the token ids of a text; see `Backend.tokenize`."""
        payload: TokenizePayload = {
            "content": text,
            "add_special": add_special,
            "parse_special": parse_special,
        }
        reply = await self.ask("POST", "/tokenize", payload, len(text))
        size = LARGEST if self._facts is None else len(self._facts.vocabulary)
        with read_from(ENGINE, "/tokenize"):
            return await offload.run(len(text), ids_of_text, reply["tokens"], text, size)

    async def specials(self) -> Sequence[Special]:
        """See `Backend.specials`; the first call reads the vocabulary."""
        specials = self._specials
        if specials is None:
            facts = await self.facts()
            specials = await read_specials(facts.vocabulary, self.plain)
            self.known.check_is(facts.model)
            self._specials = specials
        return specials

    async def health(self) -> None:
        """Check that the server is ready; ask it at most twice a second."""
        await self._health.run()

    async def _ask_health(self) -> None:
        with read_from(ENGINE, "/health"):
            orjson.loads(await self.watch.get("/health"))

    def served(self, name: str) -> EngineError:
        """Clear the cached facts and return the error for a response of another model."""
        model = self.known.model
        error = changed(self.upstream.address, name, "another" if model is None else model.name)
        self.watch.lose(error)
        return EngineError(error.message)

    def _forget(self) -> None:
        """Clear everything read about the model, since the server has another one."""
        self.known.model = self._facts = self.infill = self._specials = None
        self.embedder = self.generates = None

    def _restarted(self) -> None:
        """Clear facts that a restart can change: slots, draft model and embeddings."""
        self._facts = self.embedder = self.generates = None
        if self.watch.identity is not None:
            self._resize(self.watch.identity.slots)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.upstream.aclose()

    async def plain(self, text: str) -> TokenIds:
        """Return the ids of a text without parsing control tokens in it."""
        return await self.tokenize(text, add_special=False, parse_special=False)

    async def ids(self, text: str) -> TokenIds:
        """Return the ids of a prompt as the server itself tokenizes it."""
        return await self.tokenize(text, add_special=True, parse_special=True)

    async def ask(self, method: str, path: str, payload: Any = None, size: int = 0) -> Any:
        """Send a request and return its JSON; `size` is the payload's approximate size in bytes."""
        body = None if payload is None else await offload.run(size, orjson.dumps, payload)
        status, data = await self.reply(method, path, body)
        if status != 200:
            raise to_error(status, data)
        try:
            return await offload.run(len(data), orjson.loads, data)
        except ValueError:
            raise EngineError(f"{ENGINE} sent a response to {path} that is not JSON.") from None

    async def reply(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a question and return status and body; at most `QUESTIONS` run concurrently."""
        async with self._questions:
            try:
                async with self.upstream.send(method, path, body) as reply:
                    return reply.status, await reply.read()
            except EngineUnavailable:
                self.watch.doubt()
                raise

    async def _read_model(self) -> Model:
        await self.watch.check()
        adds_bos = bool(await self.ids(""))
        identity = self.watch.identity
        if identity is None:
            raise self.known.changed()
        self.names = identity.names
        self._resize(identity.slots)
        return identity.model(adds_bos)

    async def vocabulary_size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        size = self.watch.identity.vocabulary if self.watch.identity is not None else None
        return size if size is not None else len((await self.facts()).vocabulary)

    async def facts(self) -> Facts:
        """Return the facts that reporting tokens needs; the first call reads them."""
        facts = self._facts
        if facts is None:
            model = await self.known.get()
            async with self._learning:
                facts = self._facts
                if facts is None:
                    slots = self.watch.identity.slots if self.watch.identity is not None else 1
                    with read_from(ENGINE, "its vocabulary"):
                        facts = await read_facts(self.reply, self.ask, model, slots)
                    self.known.check_is(model)
                    self._facts = facts
        return facts
