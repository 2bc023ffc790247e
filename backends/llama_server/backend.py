"""The shell around llama-server: HTTP calls, the model's facts, cancellation by closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from ...schemas.native.llama_server import TokenizePayload
from .. import offload
from ..base import (
    Batch,
    Capabilities,
    Generation,
    Model,
    NativeReply,
    PromptTokens,
    Special,
    Stream,
    Text,
    Token,
    TokenIds,
)
from ..checks import Fresh, changed, still
from ..errors import (
    LARGEST,
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    EngineUnavailable,
    RequestError,
    Unsupported,
    ids_of_text,
    read_from,
    text_of,
)
from ..http import HttpUpstream
from ..streams import ended, merged, together
from ..structured import with_gbnf
from ..turns import QUEUE, Party, Turns
from ..upstream import Upstream
from . import infill, scoring
from .call import Call
from .events import ENGINE, OtherModel
from .facts import Facts, read_facts, read_specials
from .translate import (
    CAPABILITIES,
    NativePrompt,
    size_of,
    to_error,
    to_native,
    with_media,
)
from .vocabulary import Vocabulary
from .watch import Watch

TIMEOUT = 60.0
# Questions that are on their way at a time. A server has four threads more than slots for its
# connections, and one that waits for a thread waits until another connection is given up: seconds.
QUESTIONS = 2


class LlamaServer:
    """A running llama-server.

    Args:
        upstream: its address (`http://127.0.0.1:8080`), or an `Upstream` of one's own.
        key: the server's own `--api-key`, where it has one.
        timeout: seconds of silence in the middle of an answer after which it counts as lost; the
            first token may take ten times as long, and ten minutes at least.
        max_waiting: requests that may wait for a slot; beyond it they are refused as busy.
    """

    capabilities: Capabilities = CAPABILITIES

    def __init__(
        self,
        upstream: str | Upstream,
        key: str | None = None,
        timeout: float = TIMEOUT,
        max_waiting: int = QUEUE,
    ) -> None:
        if isinstance(upstream, str):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            patience = max(10 * timeout, 600.0)
            upstream = HttpUpstream(upstream, headers, timeout, patience, "/health")
        self.upstream = upstream
        self.turns = Turns(max_waiting)
        # Calls from within a call that holds a place: they must not wait for one another.
        self._asides = Turns(None)
        self._questions = Turns(None, QUESTIONS)
        self.watch = Watch(upstream, self._forget, self._restarted)
        self._health = Fresh(self._ask_health)
        self.names: frozenset[str] = frozenset()
        self._model: Model | None = None
        self._facts: Facts | None = None
        self._infill: infill.Markers | None = None
        self._specials: Sequence[Special] | None = None
        self._reading = asyncio.Lock()
        self._learning = asyncio.Lock()

    async def model(self) -> Model:
        """See `Backend.model`; it is asked again when no connection is open any more."""
        model = self._model
        if model is not None and not self.watch.is_sure:
            model = await still(self.watch, lambda: self._model)
        return model or await self._read_model()

    async def model_for(self, job: Generation) -> Model:
        """The model, if it is the one that a job was made for.

        Raises:
            EngineUnavailable: it is another one by now.
        """
        model = self._model if self.watch.is_sure else None
        if model is None:
            model = await self.model()
        if job.fingerprint and job.fingerprint != model.fingerprint:
            raise self._changed()
        return model

    def check_still(self, model: Model) -> None:
        """Raise `EngineUnavailable` where another model was found since: nothing is sent then."""
        if self._model is not model:
            raise self._changed()

    def open(self, job: Generation) -> Stream:
        """See `Backend.open`; choices are separate native calls, run as there are slots."""
        if job.party is None and (len(job.seeds) > 1 or job.prompt_logprobs is not None):
            job = job._replace(party=Party())
        if job.prompt_logprobs is not None:
            return self._scored(job)
        if job.max_tokens == 0:
            return self._nothing(job)
        if len(job.seeds) == 1:
            return Call(self, job, 0)
        return merged([Call(self, job, choice) for choice in range(len(job.seeds))])

    @asynccontextmanager
    async def _nothing(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """A job that wants no tokens: the server would generate one all the same."""
        model = await self.model_for(job)
        _ids, count = await self.prompt_ids(job, model)
        yield ended(job, count)

    @asynccontextmanager
    async def _scored(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """A job whose prompt is scored before anything is generated."""
        self.turns.check(job.party)
        model = await self.model_for(job)
        ids, count = await self.prompt_ids(job, model)
        facts = await self.facts()
        if facts.speculative:
            raise scoring.speculative()
        first = await self._prompt_tokens(job, ids, count, facts)
        rest = job._replace(prompt_logprobs=None)
        async with self._nothing(rest) if job.max_tokens == 0 else self.open(rest) as batches:
            yield _after(first, batches)

    async def _prompt_tokens(
        self, job: Generation, ids: TokenIds, count: int, facts: Facts
    ) -> Batch:
        if not count:
            return ()
        vocabulary, hidden = facts.vocabulary, len(ids) - count
        own = ids[hidden:]
        text = job.prompt.text.encode() if isinstance(job.prompt, Text) else None
        # The first is not told (contract 2.6.1), even where a BOS before it would score it.
        scores = await self.score(ids, hidden + 1, job.prompt_logprobs or 0, job.party)

        def tokens() -> Sequence[Token]:
            return _tokens(own, vocabulary, text, scores)

        return (PromptTokens(0, await offload.run(6 * len(own), tokens)),)

    async def score(
        self, ids: TokenIds, start: int, top: int, party: Party | None = None
    ) -> list[scoring.Score]:
        """Log-probabilities of the tokens from `start` on, each after all that come before it.

        Args:
            party: whose calls it comes to, None from within a call that holds a place.
        """
        facts = await self.facts()
        calls = scoring.plan(ids, start, facts.vocabulary, facts.slots)
        scores = await together(self._score(call, ids, top, facts, party) for call in calls)
        return [score for part in scores for score in part]

    async def _score(
        self, call: scoring.Call, ids: TokenIds, top: int, facts: Facts, party: Party | None
    ) -> list[scoring.Score]:
        scores: list[scoring.Score] = []
        calls = [call]
        while calls:
            call = calls.pop(0)
            native = scoring.to_native(call, ids, top, facts.vocabulary, facts.rolls_back)
            payload = await offload.run(6 * len(ids), orjson.dumps, native)
            self.check_still(facts.model)
            status, body = await self.complete(payload, party)
            if status == 200:
                found, rest = await self._read_scores(call, ids, top, body, facts)
            elif call.kind == "grammar" and status < 503:
                # A grammar that leaves no token is an error of the server's.
                found, rest = [], scoring.after(call, 0, ids)
            else:
                raise to_error(status, body)
            scores += found
            calls = rest + calls
        return scores

    async def _read_scores(
        self, call: scoring.Call, ids: TokenIds, top: int, body: bytes, facts: Facts
    ) -> tuple[list[scoring.Score], list[scoring.Call]]:
        try:
            with read_from(ENGINE, "a call that scores a prompt"):
                return await offload.run(
                    len(body), scoring.read, call, ids, top, body, facts.vocabulary, self.names
                )
        except OtherModel as error:
            raise self.served(error.name) from error

    async def complete(self, payload: bytes, party: Party | None) -> tuple[int, bytes]:
        """Status and body of an unstreamed call, when there is a place for it.

        Args:
            party: see `score`.
        """
        turns = self.turns
        if party is not None:
            await turns.take(party)
        elif not turns.try_take():
            turns = self._asides
            await turns.take()
        try:
            async with self.upstream.send("POST", "/completion", payload) as reply:
                return reply.status, await reply.read()
        except EngineUnavailable:
            self.watch.doubt()
            raise
        finally:
            turns.release()

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """See `Backend.native`."""
        self.turns.check()
        model = await self.model_for(job)
        prompt = await self.native_prompt(job, model)
        payload = to_native(await with_gbnf(job), 0, prompt, model.context, stream)
        del payload["response_fields"]
        data = await offload.run(size_of(prompt), orjson.dumps, payload)
        async with self.turns:
            self.check_still(model)
            async with self.upstream.send("POST", "/completion", data) as reply:
                yield NativeReply(reply.status, reply.content_type, reply.chunks())

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """See `Backend.tokenize`."""
        payload: TokenizePayload = {
            "content": text,
            "add_special": add_special,
            "parse_special": parse_special,
        }
        reply = await self._ask("POST", "/tokenize", payload, len(text))
        size = LARGEST if self._facts is None else len(self._facts.vocabulary)
        with read_from(ENGINE, "/tokenize"):
            return await offload.run(len(text), ids_of_text, reply["tokens"], text, size)

    async def detokenize(self, ids: TokenIds) -> bytes:
        """See `Backend.detokenize`; from the vocabulary, since `/detokenize` breaks characters."""
        vocabulary = (await self.facts()).vocabulary

        def text() -> bytes:
            _check_ids(ids, vocabulary)
            return b"".join(vocabulary.shown(ids))

        return await offload.run(len(ids), text)

    async def pieces(self) -> Sequence[bytes]:
        """See `Backend.pieces`."""
        return (await self.facts()).vocabulary.pieces

    async def specials(self) -> Sequence[Special]:
        """See `Backend.specials`; asks for the vocabulary at the first call."""
        specials = self._specials
        if specials is None:
            facts = await self.facts()
            specials = await read_specials(facts.vocabulary, self._plain)
            self.check_still(facts.model)
            self._specials = specials
        return specials

    async def health(self) -> None:
        """See `Backend.health`; it is asked twice a second at most."""
        await self._health.run()

    async def _ask_health(self) -> None:
        with read_from(ENGINE, "/health"):
            orjson.loads(await self.watch.get("/health"))

    def served(self, name: str) -> EngineError:
        """The error for an answer that another model made; everything is forgotten."""
        model = self._model
        error = changed(self.upstream.address, name, "another" if model is None else model.name)
        self.watch.lose(error)
        return EngineError(error.message)

    def _forget(self) -> None:
        """Forget what was read of the model: another one is there."""
        self._model = self._facts = self._infill = self._specials = None

    def _restarted(self) -> None:
        """The same model is there, perhaps with other slots, or a draft model."""
        self._facts = None
        if self.watch.identity is not None:
            self.turns.resize(self.watch.identity.slots)

    def _changed(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"The engine at {self.upstream.address} serves another model now; ask again."
        )

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.upstream.aclose()

    async def native_prompt(self, job: Generation, model: Model) -> NativePrompt:
        """The prompt as it is sent, after making sure that prompt and completion fit.

        The server refuses a prompt that is too long, but shortens a completion without a word.
        No token is shorter than a byte, so nearly always the text's length tells that all fits.
        """
        prompt = job.prompt
        if job.media:
            size = sum(len(one.data) for one in job.media)
            return await offload.run(size, with_media, job, self._marker())
        if isinstance(prompt, Text) and job.suffix is None and prompt.parse_special:
            room = model.context - (job.max_tokens or 0)
            if len(prompt.text.encode()) + 2 <= room:
                if not prompt.text and not model.adds_bos:
                    raise EmptyPrompt
                return prompt.text
        ids, count = await self.prompt_ids(job, model)
        if len(ids) >= model.context:
            raise ContextExceeded(model.context, count, job.max_tokens or 0)
        return ids

    async def prompt_ids(self, job: Generation, model: Model) -> tuple[TokenIds, int]:
        """The prompt's ids, and how many of them are the client's own, if all fits."""
        prompt = job.prompt
        if job.suffix is not None:
            ids, count = await self._filling(job, model)
        elif isinstance(prompt, Text):
            ids = await self.tokenize(
                prompt.text, add_special=True, parse_special=prompt.parse_special
            )
            count = len(ids) - model.adds_bos
        else:
            ids, count = prompt, len(prompt) - job.hidden
        if not ids:
            raise EmptyPrompt
        if len(ids) + (job.max_tokens or 0) > model.context:
            raise ContextExceeded(model.context, count, job.max_tokens or 0)
        if job.prompt_logprobs is not None:
            _check_ids(ids, (await self.facts()).vocabulary)
        return ids, count

    async def _filling(self, job: Generation, model: Model) -> tuple[TokenIds, int]:
        """A prompt and its suffix around the gap, by the model's own tokens for it."""
        markers = await self._markers()
        prefix = job.prompt
        if isinstance(prefix, Text):
            prefix = await self._plain(prefix.text)
        ids = markers.around(prefix, await self._plain(job.suffix or ""))
        return ((await self._ids("")) + ids if model.adds_bos else ids), len(ids)

    async def _markers(self) -> infill.Markers:
        found = self._infill
        if found is None:
            model = self._model
            status, body = await self.reply("POST", "/infill", orjson.dumps(infill.PROBE))
            if status == 501:
                raise Unsupported(
                    "suffix", ENGINE, "This model has no tokens for filling in the middle."
                )
            if status != 200:
                raise to_error(status, body)
            with read_from(ENGINE, "/infill"):
                spelled = text_of(orjson.loads(body)["prompt"])
            ids = await self.tokenize(spelled, add_special=False, parse_special=True)
            before, after = [await self._plain(text) for text in infill.TEXTS]
            found = infill.markers(ids, before, after)
            if self._model is not model:
                raise self._changed()
            self._infill = found
        return found

    def _marker(self) -> str:
        """What stands for a picture in the server's prompts."""
        return self.watch.identity.marker if self.watch.identity is not None else ""

    async def _plain(self, text: str) -> TokenIds:
        return await self.tokenize(text, add_special=False, parse_special=False)

    async def _ids(self, text: str) -> TokenIds:
        return await self.tokenize(text, add_special=True, parse_special=True)

    async def _ask(self, method: str, path: str, payload: Any = None, size: int = 0) -> Any:
        """Ask a question; `size` is about how many bytes the payload has."""
        body = None if payload is None else await offload.run(size, orjson.dumps, payload)
        status, data = await self.reply(method, path, body)
        if status != 200:
            raise to_error(status, data)
        try:
            return await offload.run(len(data), orjson.loads, data)
        except ValueError:
            raise EngineError(f"{ENGINE} answered {path} with no JSON.") from None

    async def reply(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of an answer to a question, which few wait for at a time."""
        async with self._questions:
            try:
                async with self.upstream.send(method, path, body) as reply:
                    return reply.status, await reply.read()
            except EngineUnavailable:
                self.watch.doubt()
                raise

    async def _read_model(self) -> Model:
        async with self._reading:
            if self._model is None:
                await self.watch.check()
                adds_bos = bool(await self._ids(""))
                identity = self.watch.identity
                if identity is None:
                    raise self._changed()
                self._model = identity.model(adds_bos)
                self.names = identity.names
                self.turns.resize(identity.slots)
            return self._model

    async def facts(self) -> Facts:
        """What is needed to tell tokens; read once, when first wanted."""
        facts = self._facts
        if facts is None:
            model = await self.model()
            async with self._learning:
                facts = self._facts
                if facts is None:
                    slots = self.watch.identity.slots if self.watch.identity is not None else 1
                    with read_from(ENGINE, "questions about its vocabulary"):
                        facts = await read_facts(self.reply, self._ask, model, slots)
                    self.check_still(model)
                    self._facts = facts
        return facts


async def _after(first: Batch, batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    if first:
        yield first
    async for batch in batches:
        yield batch


def _tokens(
    ids: TokenIds, vocabulary: Vocabulary, text: bytes | None, scores: Sequence[scoring.Score]
) -> Sequence[Token]:
    """A prompt's own tokens; the first has no score."""
    tokens = []
    for token, data, score in zip(ids, vocabulary.shown(ids, text), (None, *scores), strict=True):
        spelling, control = vocabulary.token(token)
        told = score or scoring.Score(0.0, ())
        logprob = None if score is None else told.logprob
        spelling = spelling if control else data
        tokens.append(Token(token, data, spelling, control, logprob, told.top))
    return tokens


def _check_ids(ids: TokenIds, vocabulary: Vocabulary) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < len(vocabulary)):
        raise RequestError(
            f"Invalid 'prompt': token ids must be between 0 and {len(vocabulary) - 1}.",
            "prompt",
            "invalid_value",
        )
