"""A running llama-server: questions to it, their cached answers, and places for calls.

`/infill` silently cuts prefix and suffix to a share of the batch (`format_prompt_infill` in
server-common.cpp). So it is called once with short texts, only to detect the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import orjson

from ...schemas.native.llama_server import TokenizePayload
from .. import offload
from ..base import Model, Special, TokenIds
from ..errors import (
    LARGEST,
    EngineError,
    EngineUnavailable,
    LatimerError,
    Unsupported,
    ids_of,
    ids_of_text,
    read_from,
)
from ..http import MOST_IDLE, HttpClient
from ..queue import AdmissionQueue, Ticket
from ..single_flight import OnceCell, Throttled
from .identity import ServerMonitor
from .translate import ENGINE, Vocabulary, read_pieces, to_error

Ask = Callable[..., Awaitable[Any]]
Reply = Callable[[str, str, bytes | None], Awaitable[tuple[int, bytes]]]


class ServerInfo(NamedTuple):
    """Facts about a server that reporting tokens needs.

    Args:
        model: the model that the server served when they were read.
        slots: the number of calls that it runs at a time.
        speculative: True if it invents log-probabilities, since it decodes speculatively.
        rolls_back: True if the model's memory can drop its last tokens. A recurrent model's memory
            cannot, and the server then reports other numbers for a prompt with a cached part.
    """

    model: Model
    vocabulary: Vocabulary
    slots: int
    speculative: bool
    rolls_back: bool


async def read_info(reply: Reply, ask: Ask, model: Model, slots: int) -> ServerInfo:
    """Ask a server for its facts.

    Args:
        reply: `reply(method, path, body)` returns the status and the body of a response.
        ask: `ask(method, path, payload)` returns the JSON of a response.
        model: the model that the server serves.
        slots: the number of calls that the server runs at a time.
    """
    pieces = await _read_pieces(reply)
    if model.eos_token and model.eos_token.encode() in pieces:
        await check_hides(model.eos_token, ask)
    control = [token for token, piece in enumerate(pieces) if not piece]
    plain = {"content": "a", "add_special": False, "parse_special": False}
    first = ids_of((await ask("POST", "/tokenize", plain))["tokens"])[:1]
    adds_space = any(pieces[token][:1] == b" " for token in first)
    vocabulary = Vocabulary(pieces, await _names(control, pieces, ask), adds_space)
    await offload.run(len(pieces), vocabulary.index)
    return ServerInfo(
        model,
        vocabulary,
        slots,
        await _speculates(ask),
        await _rolls_back(ask, vocabulary.ordinary),
    )


async def _rolls_back(ask: Ask, token: int) -> bool:
    """Return True if a prompt that diverges halfway reuses the common part.

    A request that runs in between can make the result False. The only cost is that no later call
    reuses the cache. The calls name no slot: for one that is busy, the server restores a saved
    prompt over that of the request that runs there, which then continues the wrong text.
    """
    payload = {"n_predict": 1, "response_fields": ["timings"]}
    first = {**payload, "prompt": [token] * 16, "cache_prompt": False}
    await ask("POST", "/completion", first)
    second = {**payload, "prompt": [*[token] * 8, token + 1], "cache_prompt": True}
    timings = (await ask("POST", "/completion", second)).get("timings") or {}
    return bool(timings.get("cache_n") == 8)


async def _read_pieces(reply: Reply) -> list[bytes]:
    """Return every token's bytes, from one call with all alternatives."""
    payload = {"prompt": [0], "n_predict": 1, "n_probs": 1_000_000, "cache_prompt": False}
    # A server-side ban or an end token still yields the whole distribution; a token that ends
    # inside a character yields no entry, so an ordinary one is forced.
    for bias in ([], [[" a", 1000]], [["a", 1000]]):
        body = orjson.dumps({**payload, "logit_bias": bias})
        status, data = await reply("POST", "/completion", body)
        if status != 200:
            raise to_error(status, data)
        if b'"completion_probabilities"' in data:
            return await offload.run(len(data), read_pieces, data)
    raise EngineError(f"{ENGINE} does not expose its vocabulary.")


async def check_hides(end: str, ask: Ask) -> None:
    """Check that the server hides control tokens, after it has shown the end token.

    Args:
        end: the spelling of the end token.

    Raises:
        EngineError: it writes them into its texts, where they look like a text's own.
    """
    content = {"content": end, "add_special": False}
    with read_from(ENGINE, "/tokenize"):
        whole, plain = [
            ids_of((await ask("POST", "/tokenize", {**content, "parse_special": parses}))["tokens"])
            for parses in (True, False)
        ]
    # Some files mark the end token as an ordinary one, which every server shows.
    if len(whole) == 1 and whole != plain:
        raise EngineError(
            f"{ENGINE} runs with --special, and writes control tokens into its texts. Start it "
            "without that option."
        )


async def _names(control: Sequence[int], pieces: Sequence[bytes], ask: Ask) -> dict[int, bytes]:
    """Return the spellings of control tokens, from one call with line ends between them."""
    line_end = next((token for token, piece in enumerate(pieces) if piece == b"\n"), None)
    if line_end is not None and control:
        tokens = [token for one in control for token in (one, line_end)]
        reply = await ask("POST", "/detokenize", {"tokens": tokens})
        names = str(reply["content"]).encode().split(b"\n")[:-1]
        if len(names) == len(control):
            return dict(zip(control, names, strict=True))
    found = {}
    for token in control:
        reply = await ask("POST", "/detokenize", {"tokens": [token]})
        found[token] = str(reply["content"]).encode()
    return found


async def _speculates(ask: Ask) -> bool:
    try:
        slots = await ask("GET", "/slots")
    except LatimerError:
        # `--no-slots`: a reply also reports speculation, if the draft model proposed tokens.
        return False
    return any(slot.get("speculative") for slot in slots)


async def read_specials(
    vocabulary: Vocabulary, tokenize: Callable[[str], Awaitable[TokenIds]]
) -> list[Special]:
    """Return the control tokens, and the added tokens that the tokenizer finds anywhere.

    Args:
        tokenize: returns the ids of a text without parsing control tokens.
    """
    found, candidates = await offload.run(len(vocabulary), _candidates, vocabulary)
    for token, text in candidates:
        # Doubling the first character rarely leaves an ordinary token in one piece.
        if (await tokenize(text[0] + text))[-1:] == (token,):
            found.append(Special(text, False))
    return found


def _candidates(vocabulary: Vocabulary) -> tuple[list[Special], list[tuple[int, str]]]:
    """Return the control tokens, and the tokens that look like added ones."""
    found = []
    candidates = []
    for token in range(len(vocabulary)):
        spelling, control = vocabulary.token(token)
        if control and spelling:
            found.append(Special(spelling.decode(errors="replace"), True))
        elif _LIKE_A_MARK.fullmatch(spelling):
            candidates.append((token, spelling.decode(errors="replace")))
    return found, candidates


_LIKE_A_MARK = re.compile(rb"<[^<>]{2,}>|\[[^\[\]]{2,}\]")


INFILL_TEXTS = ("7", "3")
INFILL_PROBE: dict[str, Any] = {
    "input_prefix": INFILL_TEXTS[0],
    "input_suffix": INFILL_TEXTS[1],
    "n_predict": 1,
    "stream": False,
}


class InfillTokens(NamedTuple):
    """The tokens in front of the prefix, the suffix, and the completion that fills the gap."""

    prefix: int
    suffix: int
    middle: int
    suffix_first: bool

    def around(self, prefix: TokenIds, suffix: TokenIds) -> TokenIds:
        """Return the prompt whose completion fills the gap."""
        before, after = (self.prefix, *prefix), (self.suffix, *suffix)
        both = (*after, *before) if self.suffix_first else (*before, *after)
        return (*both, self.middle)


def infill_tokens(ids: TokenIds, prefix: TokenIds, suffix: TokenIds) -> InfillTokens:
    """Detect the infill tokens in a prompt that `/infill` made of a known prefix and suffix.

    Raises:
        Unsupported: the tokens are not in the expected places.
    """
    before, after = _last_index(ids, prefix), _last_index(ids, suffix)
    if before < 1 or after < 1:
        raise Unsupported("suffix", ENGINE, "It does not show its fill-in-the-middle tokens.")
    return InfillTokens(ids[before - 1], ids[after - 1], ids[-1], after < before)


def _last_index(ids: TokenIds, part: TokenIds) -> int:
    """Return the last position of a part; -1 if it is missing."""
    size = len(part)
    return next((i for i in range(len(ids) - size, -1, -1) if ids[i : i + size] == part), -1)


# Concurrent questions. A server has four threads more than slots for its connections. A connection
# without a thread waits until another connection is closed, which can take seconds.
QUESTIONS = 2


RERANKING_OFF = "Start llama-server with --reranking."


class Embedder(NamedTuple):
    """Facts about a server's embeddings.

    Args:
        dimensions: the length of a vector; 0 if it returns none.
        hint: what to do for embeddings; empty if it returns vectors.
        rank_hint: what to do for rankings; empty if it ranks.
        prefix, suffix: the tokens that the model adds around a text.
    """

    dimensions: int = 0
    hint: str = ""
    rank_hint: str = RERANKING_OFF
    prefix: TokenIds = ()
    suffix: TokenIds = ()

    @property
    def ranks(self) -> bool:
        """True if the server scores documents."""
        return not self.rank_hint


class Server:
    """A running llama-server.

    Args:
        max_waiting: the largest number of requests that wait for a place.

    Attributes:
        monitor: the model that it serves, and the detector of another one at the address.
        turns: the queue of calls.
        names: the model's names in responses.
        infill: the model's infill tokens, once known.
        embedder: the facts about its embeddings.
        generates: True if it also generates text; None if not known yet.
    """

    def __init__(self, client: HttpClient, max_waiting: int) -> None:
        self.client = client
        self.turns = AdmissionQueue(max_waiting, forget=client.forget_closed)
        self._batches = AdmissionQueue(max_waiting, forget=client.forget_closed)
        self._most_batches = 1
        # Calls made inside a call that already has a place, which must not wait for each other.
        self._asides = AdmissionQueue(None, forget=client.forget_closed)
        self._questions = AdmissionQueue(None, QUESTIONS, client.forget_closed)
        self.monitor = ServerMonitor(client, self._read_model, self._forget, self._restarted)
        self._health = Throttled(self._ask_health)
        self.names: frozenset[str] = frozenset()
        self._facts: OnceCell[ServerInfo] = OnceCell()
        self.infill: InfillTokens | None = None
        self._specials: OnceCell[Sequence[Special]] = OnceCell()
        self.embedder: OnceCell[Embedder] = OnceCell()
        self.generates: bool | None = None

    async def call(
        self, path: str, payload: bytes, ticket: Ticket | None, model: Model | None = None
    ) -> tuple[int, bytes]:
        """Wait for a place, make a call without streaming, and return its status and body.

        Args:
            ticket: the request of the call; None inside a call that already has a place.
            model: the model that the call is for, if it must not reach another one.
        """
        turns = self.turns
        if ticket is not None:
            await turns.take(ticket)
        elif not turns.try_take():
            turns = self._asides
            await turns.take()
        try:
            if model is not None:
                self.monitor.check_is(model)
            async with await self.client.send("POST", path, payload) as response:
                return response.status, await response.aread()
        except EngineUnavailable:
            self.monitor.invalidate()
            raise
        finally:
            turns.release()

    async def batch(
        self, path: str, payload: bytes, ticket: Ticket, model: Model
    ) -> tuple[int, bytes]:
        """Make a call of many inputs; at most two run at a time, which keep the server busy.

        While a generation runs it is one. The server does not begin a prompt as long as it has
        inputs to embed, so it must run out of them.
        """
        batches = self._batches
        await batches.take(ticket)
        try:
            return await self.call(path, payload, ticket, model)
        finally:
            are_alone = self.turns.taken < batches.taken and not self.turns.is_full
            batches.resize(self._most_batches if are_alone else 1)
            batches.release()

    def _resize(self, slots: int) -> None:
        self.turns.resize(slots)
        pool = self.client.pool
        if pool is not None:
            # With fewer, calls that end together would close connections that the next ones need.
            pool.most_idle = max(slots, MOST_IDLE)
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
        facts = self._facts.value
        size = LARGEST if facts is None else len(facts.vocabulary)
        with read_from(ENGINE, "/tokenize"):
            return await offload.run(len(text), ids_of_text, reply["tokens"], text, size)

    async def special_tokens(self) -> Sequence[Special]:
        """Return its special spellings; the first call reads the vocabulary."""
        return await self._specials.get(self._read_specials)

    async def _read_specials(self) -> Sequence[Special]:
        facts = await self.facts()
        specials = await read_specials(facts.vocabulary, self.plain)
        self.monitor.check_is(facts.model)
        return specials

    async def health(self) -> None:
        """Check that the server is ready; ask it at most twice a second."""
        await self._health.run()

    async def _ask_health(self) -> None:
        with read_from(ENGINE, "/health"):
            orjson.loads(await self.monitor.ask("/health"))

    def served(self, name: str) -> EngineError:
        """Clear the cached facts and return the error for a response of another model."""
        model = self.monitor.model
        error = self.monitor.changed(name, "another" if model is None else model.name)
        self.monitor.lose(error)
        return EngineError(error.message)

    def _forget(self) -> None:
        """Clear everything read about the model, since the server has another one."""
        self._facts.value = self._specials.value = self.embedder.value = None
        self.infill = self.generates = None

    def _restarted(self) -> None:
        """Clear facts that a restart can change: slots, draft model and embeddings."""
        self._facts.value = self.embedder.value = self.generates = None
        if self.monitor.identity is not None:
            self._resize(self.monitor.identity.slots)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        await self.monitor.client.aclose()

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
        """Send a question and return status and body.

        At most `QUESTIONS` run concurrently, and as many more as calls leave places. Under load, an
        answer is read some turns of the event loop after it has come, so two are few.
        """
        places = self._questions
        if not places.try_take():
            if self.turns.try_take():
                places = self.turns
            else:
                await places.take()
        try:
            async with await self.client.send(method, path, body) as response:
                return response.status, await response.aread()
        except EngineUnavailable:
            self.monitor.invalidate()
            raise
        finally:
            places.release()

    async def _read_model(self) -> Model:
        await self.monitor.check()
        adds_bos = bool(await self.ids(""))
        identity = self.monitor.identity
        if identity is None:
            raise self.monitor.changed()
        self.names = identity.names
        self._resize(identity.slots)
        return identity.model(adds_bos)

    async def vocabulary_size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        size = self.monitor.identity.vocabulary if self.monitor.identity is not None else None
        return size if size is not None else len((await self.facts()).vocabulary)

    async def facts(self) -> ServerInfo:
        """Return the facts that reporting tokens needs; the first call reads them."""
        return self._facts.value or await self._facts.get(self._read_info)

    async def _read_info(self) -> ServerInfo:
        model = await self.monitor.get()
        slots = self.monitor.identity.slots if self.monitor.identity is not None else 1
        with read_from(ENGINE, "its vocabulary"):
            facts = await read_info(self.reply, self.ask, model, slots)
        self.monitor.check_is(model)
        return facts
