"""A running koboldcpp: questions to it, their cached answers, and the queue for its one call."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import orjson

from ...schemas.native.koboldcpp import LastLogprobs, Perf, TokenCount, TokenCountPayload
from .. import offload
from ..base import Generation, Model, Prompt, Sampling, Special, Text, TokenIds
from ..errors import (
    MALFORMED,
    Busy,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    NotServed,
    ids_of_text,
    read_from,
    text_of,
    whole_of,
)
from ..http import FORWARDED, HttpClient
from ..queue import QUEUE, AdmissionQueue
from ..single_flight import OnceCell, Throttled
from .call import WHOLE, Call
from .identity import Identity, ServerMonitor
from .translate import ENGINE, to_error, to_native

if TYPE_CHECKING:
    from ..http import Client

T = TypeVar("T")
# A question for the tokenizer: its path, payload, size and headers, and the answer.
Question: TypeAlias = tuple[str, Any, int, bytes, "asyncio.Future[Any]"]

_log = logging.getLogger(__name__)

# Seconds without an event after which the engine is asked if it still generates.
SILENCE = 5.0
# Seconds for the answer to a question about its state, which koboldcpp answers at once, also while
# it generates. Later it counts as hung.
ANSWER_SECONDS = 15.0
# Seconds for which a call waits while other clients keep the engine busy. Clients themselves wait
# for minutes, and then retry.
PATIENCE = 60.0
# The shortest and longest time between two attempts while the engine is busy.
SOON, LATER = 0.05, 0.5
# The number of texts in the first call that embeds several.
FIRST_EMBEDS = 8
# The seed of a call that shows if the engine batches calls.
PROBE_SEED = 1_115_001
# Seconds for calls to end before the connections are closed.
CLOSE_SECONDS = 5.0

# The pattern of control tokens in a template, and control tokens that templates often assemble from
# parts.
_MARK = re.compile(r"<[^<>\s'\"{}%]{1,60}>|\[/?[A-Za-z_]{2,30}\]")
WELL_KNOWN = frozenset(
    {
        "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>",
        "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>",
        "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<tool_call>",
        "</tool_call>", "<think>", "</think>", "<|start|>", "<|message|>", "<|channel|>",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Embedder:
    """Facts about an embedding model: the length of its vectors, or what to do if it has none."""

    dimensions: int = 0
    hint: str = ""


class Server:
    """A running koboldcpp.

    Args:
        max_waiting: the largest number of waiting requests.
        silence: seconds without an event after which it is asked if it still generates.

    Attributes:
        calls: the connections of generations.
        patience: seconds for which a call waits while other clients keep the engine busy.
        monitor: the model that it serves, and the detector of another one at the address.
        turns: the queue of calls.
        embedder: the facts about its embeddings.
        embeds_at_once: the number of texts in its next call that embeds.
    """

    def __init__(self, client: HttpClient, max_waiting: int, silence: float) -> None:
        self.client = client
        # After a response, koboldcpp sleeps 0.05 s before it reads from the connection again.
        self.calls = client.separate()
        self.silence = silence
        self.patience = PATIENCE
        self.turns = AdmissionQueue(max_waiting, forget=self.calls.forget_closed)
        self.monitor = ServerMonitor(client.address, self.ask, self._read_model, self._forget)
        self._health = Throttled(self._ask_health)
        self._specials: OnceCell[Sequence[Special]] = OnceCell()
        self.embedder: OnceCell[Embedder] = OnceCell()
        self.embeds_at_once = FIRST_EMBEDS
        # The questions of each event loop for the tokenizer, each with its answer; the task that
        # sends the first one has the place.
        self._texts: dict[asyncio.AbstractEventLoop, deque[Question]] = {}
        self._tokenizer_place = AdmissionQueue(None, forget=client.forget_closed)
        self._tasks: set[asyncio.Future[Any]] = set()

    @classmethod
    def at(
        cls,
        url: str,
        key: str | None = None,
        max_waiting: int = QUEUE,
        silence: float = SILENCE,
        client: Client | None = None,
    ) -> Server:
        """Return the koboldcpp at an address; see `KoboldCpp` for the arguments."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return cls(HttpClient(url, headers, client), max_waiting, silence)

    @property
    def reports_tokens(self) -> bool:
        """True if it reports the tokens of its last generation."""
        identity = self.monitor.identity
        return identity is None or identity.reports_tokens

    @property
    def generates(self) -> bool:
        """True if it has a text model."""
        return self.monitor.identity is None or self.monitor.identity.generates

    @property
    def embeds(self) -> bool:
        """True if it has an embedding model."""
        return self.monitor.identity is not None and self.monitor.identity.embedder is not None

    async def check_still(self, model: Model) -> None:
        """Raise `EngineUnavailable` if the server has another model now."""
        if self.monitor.model is model:
            await self.monitor.check()
        self.monitor.check_is(model)

    async def detokenize(self, ids: TokenIds) -> bytes:
        """Return the text of token ids; the engine drops incomplete characters."""
        payload = {"ids": ids, "special": True}
        reply = await self._tokenizer("/api/extra/detokenize", payload, 6 * len(ids))
        with read_from(ENGINE, "/api/extra/detokenize"):
            return text_of(reply["result"]).encode()

    async def special_tokens(self) -> Sequence[Special]:
        """Return the spellings of the template, and well-known ones, that are a single token."""
        return await self._specials.get(self._read_specials)

    async def _read_specials(self) -> Sequence[Special]:
        model = await self.monitor.get()
        spellings = {model.bos_token, model.eos_token, *_MARK.findall(model.template or "")}
        spellings |= WELL_KNOWN
        specials = [
            Special(spelling, control=True)
            for spelling in sorted(spellings - {""})
            if len((await self.token_count(spelling, False))["ids"]) == 1
        ]
        self.monitor.check_is(model)
        return specials

    async def health(self) -> None:
        """Check that the server is ready; ask it at most twice a second."""
        await self._health.run()

    async def _ask_health(self) -> None:
        await self.ask("GET", "/api/extra/version")

    async def aclose(self) -> None:
        """Wait for the background tasks, and close all connections."""
        own = asyncio.get_running_loop()
        for task in [one for one in self._tasks if one.get_loop() is not own]:
            self._tasks.discard(task)
            with suppress(RuntimeError):
                # Its event loop may be closed.
                task.get_loop().call_soon_threadsafe(task.cancel)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.calls.aclose()
        await self.client.aclose()

    async def token_count(self, text: str, special: bool) -> TokenCount:
        """Return the tokens of a text; `special` adds a BOS."""
        payload: TokenCountPayload = {"prompt": text, "special": special}
        reply = await self._tokenizer("/api/extra/tokencount", payload, len(text))
        with read_from(ENGINE, "/api/extra/tokencount"):
            ids = await offload.run(len(text), ids_of_text, reply["ids"], text)
        return {"value": len(ids), "ids": list(ids)}

    async def _tokenizer(self, path: str, payload: Any, size: int) -> Any:
        """Send a request to the tokenizer, one request at a time.

        The tokenizer answers from one static buffer without a lock (expose.cpp). Two concurrent
        requests get each other's tokens or crash the engine. A cancelled caller lets its request
        finish if it was sent.

        Raises:
            NotServed: there is only an embedding model, and the tokenizer is the text model's.
        """
        if not self.generates:
            raise NotServed("generate", ENGINE, "Did you mean to use v1/embeddings?")

        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        texts = self._texts.get(loop)
        if texts is None:
            for closed in [one for one in self._texts if one.is_closed()]:
                self._texts.pop(closed, None)
            texts = self._texts[loop] = deque()
        texts.append((path, payload, size, FORWARDED.get(), answer))
        if len(texts) == 1:
            self.background(self._tokenize(texts))
        return await answer

    async def _tokenize(self, texts: deque[Question]) -> None:
        """Ask what waits; the next question is sent in the turn of the event loop with an answer.

        With a lock, the tokenizer would have nothing to do for two turns after each answer.
        """
        try:
            while texts:
                path, payload, size, forwarded, answer = texts[0]
                if not answer.done():
                    FORWARDED.set(forwarded)
                    try:
                        async with self._tokenizer_place:
                            reply = await self.ask("POST", path, payload, size)
                    except Exception as error:
                        # The caller may have been cancelled.
                        if not answer.done():
                            answer.set_exception(error)
                    else:
                        if not answer.done():
                            answer.set_result(reply)
                texts.popleft()
        finally:
            # After a cancellation, since the connections are closed.
            for *_, answer in texts:
                answer.cancel()
            texts.clear()

    async def perf(self) -> Perf:
        """Return the facts of the last generation, and if the engine is idle."""
        perf: Perf = await self.ask("GET", "/api/extra/perf")
        return perf

    async def last_logprobs(self, genkey: str) -> LastLogprobs | None:
        """Return the tokens of the call that has just ended, or None if they are not known."""
        if not self.reports_tokens:
            return None
        reply = await self.ask("POST", "/api/extra/last_logprobs", {"genkey": genkey})
        last: LastLogprobs | None = reply["logprobs"]
        return last

    async def generated(self, genkey: str) -> str:
        """Return the text so far of a generation; empty if it is not the last one that began."""
        reply = await self.ask("POST", "/api/extra/generate/check", {"genkey": genkey})
        with read_from(ENGINE, "/api/extra/generate/check"):
            return text_of(reply["results"][0]["text"])

    async def abort(self, genkey: str) -> None:
        """Abort a generation by its key; it has no effect before the generation begins."""
        await self.ask("POST", "/api/extra/abort", {"genkey": genkey})

    async def once_free(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that the engine rejects, because requests of other clients fill its queue.

        Raises:
            Busy: it still does so when the patience ends.
        """
        deadline, pause = time.monotonic() + self.patience, SOON
        while True:
            try:
                return await work()
            except Busy as error:
                # A rate limit says when the next call may come.
                wait = max(pause, (error.retry_after or 0) - 1)
                if time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, LATER)

    def pass_on(self, call: Call | None) -> None:
        """Give a turn to the next request, when the engine has ended the call that had it.

        The caller does not wait: a cancelled request has nothing to wait for.
        """

        if call is None:
            self.turns.release()
            return
        has_left = False

        def leave(_: object = None) -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self.turns.release()

        async def end() -> None:
            try:
                await call.end()
            finally:
                leave()

        # The event loop may end before the task begins.
        self.background(end()).add_done_callback(leave)

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that must finish even if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieves the error, since the caller may have been cancelled.
            task.exception()

    async def ask(self, method: str, path: str, payload: Any = None, size: int = 0) -> Any:
        """Send a request and return its JSON; `size` is the payload's approximate size in bytes."""
        body = None if payload is None else await offload.run(size, orjson.dumps, payload)
        limit = ANSWER_SECONDS if method == "GET" else None
        try:
            async with (
                asyncio.timeout(limit),
                await self.client.send(method, path, body) as response,
            ):
                data = await response.aread()
                if response.status != 200:
                    raise to_error(response.status, data)
        except EngineUnavailable:
            # The server may come back with another model.
            self.monitor.invalidate()
            raise
        except TimeoutError:
            raise EngineSilent(
                f"The engine at {self.client.address} did not answer {path} for "
                f"{ANSWER_SECONDS:g} s."
            ) from None
        return await offload.run(len(data), read_json, data, path)

    def _forget(self) -> None:
        """Clear everything read about the model, since the server has another one."""
        self._specials.value = self.embedder.value = None
        self.embeds_at_once = FIRST_EMBEDS

    async def _read_model(self) -> Model:
        await self.monitor.check()
        identity = self.monitor.identity
        assert identity is not None
        with read_from(ENGINE, "its model"):
            model = await self._read_facts(identity)
        if self.monitor.identity != identity:
            raise self.monitor.changed()
        return model

    async def _read_facts(self, identity: Identity) -> Model:
        bos: TokenIds = ()
        if identity.generates:
            bos = tuple((await self.token_count("", True))["ids"])
        adds_bos, eos = False, ""
        if identity.generates:
            adds_bos, eos = await self._probe(identity.context, bos)
        media = sorted(identity.media)
        facts = (*identity._replace(media=frozenset()), media, bos, adds_bos, eos)
        return Model(
            name=identity.name,
            context=identity.context,
            template=identity.template or None,
            bos_token=(await self.detokenize(bos)).decode() if bos else "",
            eos_token=eos,
            adds_bos=adds_bos,
            fingerprint="fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10],
            modified=int(time.time()),
            media=identity.media,
            build=identity.version,
        )

    async def _probe(self, context: int, bos: TokenIds) -> tuple[bool, str]:
        """Return True if prompts get a BOS, and the spelling of the end token.

        No endpoint reports them. With an empty grammar, a generation ends with its first token, and
        the reply has the number of prompt tokens. Older versions do not report tokens; they add a
        BOS if the model has one.
        """
        if not self.reports_tokens:
            return bool(bos), ""
        reply, last = await self._generate(context, 'root ::= ""')
        await self._check_batches(context)
        counted = whole_of(reply["results"][0]["prompt_tokens"])
        plain = len((await self.token_count("a", False))["ids"])
        return counted > plain, text_of(last["tokens"][-1]) if last and last["tokens"] else ""

    async def _check_batches(self, context: int) -> None:
        """Warn if the engine batches calls (`--parallelrequests`), for which it keeps no record.

        No endpoint reports it, either. The seed of the last generation is part of the record.

        Raises:
            EngineError: the engine does not generate as many tokens as requested.
        """
        try:
            reply, _ = await self._generate(context, seed=PROBE_SEED)
        except Busy:
            # A rate limit (`--ratelimit`) allows one call only.
            return
        if (tokens := whole_of(reply["results"][0]["completion_tokens"])) > 1:
            raise EngineError(
                f"{ENGINE} generates {tokens} tokens where 1 was requested: its "
                "--gendefaultsoverwrite replaces fields of requests. Start it without that option."
            )
        try:
            seed = (await self.perf()).get("last_seed", PROBE_SEED)
        except (LatimerError, *MALFORMED):
            return
        if seed != PROBE_SEED:
            _log.warning(
                "koboldcpp runs with --parallelrequests. Batched calls have no limits, counts and "
                "log-probabilities that could be checked, so Latimer sends one call at a time, "
                "which koboldcpp does not batch."
            )

    async def _generate(
        self, context: int, grammar: str = "", seed: int | None = None
    ) -> tuple[Any, LastLogprobs | None]:
        """Generate a token; with a seed, as a call that the engine may batch."""
        call = Call(self)
        job = Generation(Prompt(Text("a")), 1, (None,), sampling=Sampling(temperature=0.0))
        payload = to_native(job, 0, "a", 1, context, call.genkey)
        if grammar:
            payload["grammar"] = grammar
        if seed is not None:
            payload["sampler_seed"] = seed
            payload.pop("sampler_order", None)
        await self.turns.take()
        try:
            await call.start(WHOLE, orjson.dumps(payload))
            reply = read_json(await call.read(1), WHOLE)
            return reply, await self.last_logprobs(call.genkey)
        finally:
            self.pass_on(call)


def read_json(data: bytes, path: str) -> Any:
    """Return the JSON of a response.

    Raises:
        EngineError: it is not JSON, or the engine failed.
    """
    try:
        answer = orjson.loads(data)
    except ValueError:
        raise EngineError(f"{ENGINE} sent a response to {path} that is not JSON.") from None
    if answer is None:
        # koboldcpp swallows its exceptions and answers 200 with a bare null.
        raise EngineError(f"{ENGINE} failed to answer {path}.")
    return answer
