"""The shell around koboldcpp: its queue, token counts, continuation, and abort."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson

from ...schemas.native.koboldcpp import LastLogprobs, Perf, TokenCount, TokenCountPayload
from .. import offload
from ..base import (
    Batch,
    Capabilities,
    Generation,
    Model,
    NativeReply,
    Sampling,
    Special,
    Text,
    TokenIds,
)
from ..checks import Fresh, still
from ..errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    EngineUnavailable,
    Unsupported,
    ids_of_text,
    read_from,
    text_of,
    whole_of,
)
from ..http import HttpUpstream
from ..streams import ended
from ..structured import with_gbnf
from ..turns import QUEUE, Turns
from ..upstream import Upstream
from . import tokens as tokens_of
from .call import Run, new_genkey, payload_of
from .identity import Identity, Watch
from .translate import (
    CAPABILITIES,
    ENGINE,
    longest_call,
    to_error,
    to_native,
    with_media,
)

# What a template spells as a control token, if it is not put together from parts; and those that
# often are.
_MARK = re.compile(r"<[^<>\s'\"{}%]{1,60}>|\[/?[A-Za-z_]{2,30}\]")
WELL_KNOWN = frozenset(
    {
        "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>",
        "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>",
        "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<tool_call>",
        "</tool_call>", "<think>", "</think>", "<|start|>", "<|message|>", "<|channel|>",
    }
)  # fmt: skip


class KoboldCpp:
    """A running koboldcpp.

    Args:
        upstream: its address (`http://127.0.0.1:5001`), or an `Upstream` of one's own.
        key: the server's own `--password`, where it has one.
        max_waiting: requests that may wait for their turn; beyond it they are refused as busy.
        silence: seconds without an event after which the engine is asked whether it still works.
    """

    def __init__(
        self,
        upstream: str | Upstream,
        key: str | None = None,
        max_waiting: int = QUEUE,
        silence: float = 5.0,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.upstream = HttpUpstream(upstream, headers) if isinstance(upstream, str) else upstream
        self.silence = silence
        self.turns = Turns(max_waiting)
        self.watch = Watch(self.upstream.address, self._ask, self._forget)
        self._health = Fresh(self._ask_health)
        self._model: Model | None = None
        self._specials: Sequence[Special] | None = None
        self._reading = asyncio.Lock()
        self._tokenizing = asyncio.Lock()
        self._closing: set[asyncio.Future[Any]] = set()

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`; token counts of versions before 1.115 are the tokeniser's."""
        if self.tells_tokens:
            return CAPABILITIES
        return replace(CAPABILITIES, inexact=CAPABILITIES.inexact | {"usage"})

    @property
    def tells_tokens(self) -> bool:
        """Whether it tells the tokens of its last generation."""
        identity = self.watch.identity
        return identity is None or identity.tells_tokens

    async def model(self) -> Model:
        """See `Backend.model`; it is asked again when that was not done a moment ago."""
        model = self._model
        if model is not None and not self.watch.is_sure:
            model = await still(self.watch, lambda: self._model)
        return model or await self._renewed()

    async def check_still(self, model: Model) -> None:
        """Raise `EngineUnavailable` where another model is there by now."""
        if self._model is model:
            await self.watch.check()
        if self._model is not model:
            raise self._changed()

    async def _model_for(self, job: Generation) -> Model:
        """The model, if it is the one that a job was made for."""
        model = await self.model()
        if job.fingerprint and job.fingerprint != model.fingerprint:
            raise self._changed()
        return model

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """See `Backend.open`; each choice takes a turn, one after the other."""
        tokens_of.check(job)
        if job.suffix is not None:
            raise Unsupported("suffix", ENGINE, CAPABILITIES.refused["suffix"])
        self.turns.check(job.party)
        model = await self._model_for(job)
        if job.logprobs is not None and not self.tells_tokens:
            raise Unsupported("logprobs", f"this {ENGINE}", "Versions before 1.115 tell none.")
        with read_from(ENGINE, "questions to its tokeniser"):
            prompt, count, tokens = await self._counted_prompt(job, model)
        job = await with_gbnf(job)
        max_tokens = model.context - count if job.max_tokens is None else job.max_tokens
        if max_tokens == 0:
            yield ended(job, tokens)
            return
        run = Run(self, job, model, prompt, max_tokens, tokens)
        await run.take()
        try:
            yield run.batches()
        finally:
            # Shielded: a cancelled request must still abort its generation and give up its turn.
            await asyncio.shield(self._background(self._leave(run)))

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """See `Backend.native`."""
        self.turns.check(job.party)
        model = await self._model_for(job)
        with read_from(ENGINE, "questions to its tokeniser"):
            prompt, count, _tokens = await self._counted_prompt(job, model)
        job = await with_gbnf(job)
        room = model.context - count if job.max_tokens is None else job.max_tokens
        cap = longest_call(model.context)
        if job.max_tokens is not None and room > cap:
            raise Unsupported("oai_compat", ENGINE, f"One call generates at most {cap} tokens.")
        genkey = new_genkey()
        payload = await payload_of(job, 0, prompt, min(room, cap), model.context, genkey)
        path = "/api/extra/generate/stream" if stream else "/api/v1/generate"
        await self.turns.take(job.party)
        done = False
        try:
            await self.check_still(model)
            async with self.upstream.send("POST", path, payload) as reply:
                yield NativeReply(reply.status, reply.content_type, reply.chunks())
            done = True
        finally:
            try:
                if not done:
                    await asyncio.shield(self._background(self.abort(genkey)))
            finally:
                self.turns.release()

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """See `Backend.tokenize`; control tokens are always parsed here."""
        if not parse_special:
            raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
        return tuple((await self.token_count(text, add_special))["ids"])

    async def detokenize(self, ids: TokenIds) -> bytes:
        """See `Backend.detokenize`; incomplete characters are left out by the engine."""
        payload = {"ids": ids, "special": True}
        reply = await self._tokenizer("/api/extra/detokenize", payload, 6 * len(ids))
        with read_from(ENGINE, "/api/extra/detokenize"):
            return text_of(reply["result"]).encode()

    async def pieces(self) -> None:
        """See `Backend.pieces`."""

    async def specials(self) -> Sequence[Special]:
        """See `Backend.specials`: what the template spells, as far as that is one token."""
        specials = self._specials
        if specials is None:
            model = await self.model()
            spellings = {model.bos_token, model.eos_token, *_MARK.findall(model.template or "")}
            spellings |= WELL_KNOWN
            specials = [
                Special(spelling, control=True)
                for spelling in sorted(spellings - {""})
                if len((await self.token_count(spelling, False))["ids"]) == 1
            ]
            if self._model is not model:
                raise self._changed()
            self._specials = specials
        return specials

    async def health(self) -> None:
        """See `Backend.health`; it is asked twice a second at most."""
        await self._health.run()

    async def _ask_health(self) -> None:
        await self._ask("GET", "/api/extra/version")

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self.upstream.aclose()

    async def _counted_prompt(self, job: Generation, model: Model) -> tuple[str, int, int]:
        """The prompt as text, and how many tokens it has with a BOS and without.

        koboldcpp cuts what does not fit from the prompt's front, silently: so it is counted first.
        """
        if isinstance(job.prompt, Text):
            if not job.prompt.parse_special:
                raise Unsupported("parse_special", ENGINE, CAPABILITIES.refused["parse_special"])
            text = await offload.run(len(job.prompt.text), with_media, job, job.prompt.text)
        else:
            text = await self._text_of(job.prompt)
        tokens = len((await self.token_count(text, False))["ids"])
        count = tokens + model.adds_bos
        if not count:
            raise EmptyPrompt
        if count + (job.max_tokens or 0) > model.context or count >= model.context:
            raise ContextExceeded(model.context, tokens, job.max_tokens or 0)
        return text, count, tokens

    async def _text_of(self, ids: TokenIds) -> str:
        """The text of token ids, if koboldcpp reads the same ids out of it again."""
        text = (await self.detokenize(ids)).decode()
        if tuple((await self.token_count(text, False))["ids"]) != ids:
            raise Unsupported(
                "prompt", ENGINE, "These token ids do not survive its tokeniser; send text instead."
            )
        return text

    async def token_count(self, text: str, special: bool) -> TokenCount:
        payload: TokenCountPayload = {"prompt": text, "special": special}
        reply = await self._tokenizer("/api/extra/tokencount", payload, len(text))
        with read_from(ENGINE, "/api/extra/tokencount"):
            ids = await offload.run(len(text), ids_of_text, reply["ids"], text)
        return {"value": len(ids), "ids": list(ids)}

    async def _tokenizer(self, path: str, payload: Any, size: int) -> Any:
        """Ask the tokeniser, when nobody else does.

        It answers out of one static buffer, without a lock (expose.cpp): two requests at once get
        each other's tokens, or end the engine. Whoever leaves leaves the request to its end.
        """

        async def alone() -> Any:
            async with self._tokenizing:
                return await self._ask("POST", path, payload, size)

        task = asyncio.ensure_future(alone())
        self._closing.add(task)
        task.add_done_callback(self._tokenized)
        return await asyncio.shield(task)

    def _tokenized(self, task: asyncio.Future[Any]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            # Who asked may have left; then nobody else looks at what went wrong.
            task.exception()

    async def perf(self) -> Perf:
        perf: Perf = await self._ask("GET", "/api/extra/perf")
        return perf

    async def told(self, genkey: str) -> LastLogprobs | None:
        """The tokens of the call that has just ended, if they are still that call's."""
        if not self.tells_tokens:
            return None
        reply = await self._ask("POST", "/api/extra/last_logprobs", {"genkey": genkey})
        told: LastLogprobs | None = reply["logprobs"]
        return told

    async def abort(self, genkey: str) -> None:
        await self._ask("POST", "/api/extra/abort", {"genkey": genkey})

    async def _leave(self, run: Run) -> None:
        try:
            await run.aclose()
        finally:
            run.release()

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _ask(self, method: str, path: str, payload: Any = None, size: int = 0) -> Any:
        """Ask a question; `size` is about how many bytes the payload has."""
        body = None if payload is None else await offload.run(size, orjson.dumps, payload)
        try:
            async with self.upstream.send(method, path, body) as reply:
                data = await reply.read()
                if reply.status != 200:
                    raise to_error(reply.status, data)
        except EngineUnavailable:
            # Another model may be there when it comes back.
            self.watch.doubt()
            raise
        try:
            answer = await offload.run(len(data), orjson.loads, data)
        except ValueError:
            raise EngineError(f"{ENGINE} answered {path} with no JSON.") from None
        if answer is None:
            # koboldcpp swallows its exceptions and answers 200 with a bare null.
            raise EngineError(f"{ENGINE} failed to answer {path}.")
        return answer

    def _forget(self) -> None:
        """Forget what was read of the model: another one is there."""
        self._model = self._specials = None

    def _changed(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"The engine at {self.upstream.address} serves another model now; ask again."
        )

    async def _renewed(self) -> Model:
        async with self._reading:
            if self._model is None:
                await self.watch.check()
                identity = self.watch.identity
                assert identity is not None
                with read_from(ENGINE, "questions about its model"):
                    model = await self._read_model(identity)
                if self.watch.identity != identity:
                    raise self._changed()
                self._model = model
            return self._model

    async def _read_model(self, identity: Identity) -> Model:
        bos = tuple((await self.token_count("", True))["ids"])
        adds_bos, eos = await self._probe(identity.context) if bos else (False, "")
        told = (*identity[:-1], sorted(identity.media), bos)
        return Model(
            name=identity.name,
            context=identity.context,
            template=identity.template or None,
            bos_token=(await self.detokenize(bos)).decode() if bos else "",
            eos_token=eos,
            adds_bos=adds_bos,
            fingerprint="fp_" + hashlib.sha256(repr(told).encode()).hexdigest()[:10],
            modified=int(time.time()),
            media=identity.media,
        )

    async def _probe(self, context: int) -> tuple[bool, str]:
        """Whether prompts get a BOS, and the end token's spelling: no endpoint tells either.

        A grammar of nothing ends a generation with its first token, and the reply counts the
        prompt's tokens. Versions that do not count them add a BOS wherever there is one.
        """
        if not self.tells_tokens:
            return True, ""
        genkey = new_genkey()
        job = Generation(Text("a"), 1, sampling=Sampling(temperature=0.0))
        payload = to_native(job, 0, "a", 1, context, genkey)
        payload["grammar"] = 'root ::= ""'
        await self.turns.take()
        try:
            reply = await self._ask("POST", "/api/v1/generate", payload)
            told = await self.told(genkey)
        finally:
            self.turns.release()
        counted = whole_of(reply["results"][0]["prompt_tokens"])
        plain = len((await self.token_count("a", False))["ids"])
        return counted > plain, text_of(told["tokens"][-1]) if told and told["tokens"] else ""
