"""The shell around llama-server: HTTP calls, the model's facts, cancellation by closing."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePath
from typing import Any

import orjson

from ...schemas.native.llama_server import Props, TokenizePayload
from ..base import (
    Batch,
    Capabilities,
    Event,
    Generation,
    Model,
    NativeReply,
    Stream,
    Text,
    TokenIds,
)
from ..errors import ContextExceeded, EmptyPrompt, EngineError, EngineUnavailable, RequestError
from ..http import HttpUpstream
from ..sse import EventParser
from ..streams import ended, merged
from ..upstream import Upstream
from .translate import CAPABILITIES, ENGINE, ChoiceStream, Vocabulary, to_error, to_native


class LlamaServer:
    """A running llama-server.

    Args:
        upstream: its address (`http://127.0.0.1:8080`), or an `Upstream` of one's own.
        key: the server's own `--api-key`, where it has one.
    """

    capabilities: Capabilities = CAPABILITIES

    def __init__(self, upstream: str | Upstream, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.upstream = HttpUpstream(upstream, headers) if isinstance(upstream, str) else upstream
        self._model: Model | None = None
        self._vocabulary: Vocabulary | None = None
        self._control: dict[int, bytes] = {}
        self._reading = asyncio.Lock()

    async def model(self) -> Model:
        """See `Backend.model`; forgotten when the server turns out to be gone."""
        if self._model is None:
            async with self._reading:
                if self._model is None:
                    self._model = await self._read_model()
        return self._model

    def open(self, job: Generation) -> Stream:
        """See `Backend.open`; choices are separate native calls, run at once."""
        if job.max_tokens == 0:
            return self._nothing(job)
        if len(job.seeds) == 1:
            return _Call(self, job, 0)
        return merged([_Call(self, job, choice) for choice in range(len(job.seeds))])

    @asynccontextmanager
    async def _nothing(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """A job that wants no tokens: the server would generate one all the same."""
        model = await self.model()
        prompt = await self.native_prompt(job, model)
        ids = await self._ids(prompt) if isinstance(prompt, str) else prompt
        hidden = model.adds_bos and isinstance(job.prompt, Text)
        yield ended(job, len(ids) - hidden)

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """See `Backend.native`."""
        model = await self.model()
        prompt = await self.native_prompt(job, model)
        payload = to_native(job, 0, prompt, model.context, stream)
        del payload["response_fields"]
        async with self.upstream.send("POST", "/completion", orjson.dumps(payload)) as reply:
            yield NativeReply(reply.status, reply.content_type, reply.chunks())

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """See `Backend.tokenize`."""
        payload: TokenizePayload = {
            "content": text,
            "add_special": add_special,
            "parse_special": parse_special,
        }
        return tuple((await self._ask("POST", "/tokenize", payload))["tokens"])

    async def detokenize(self, ids: TokenIds) -> bytes:
        """See `Backend.detokenize`; from the vocabulary, since `/detokenize` breaks characters."""
        vocabulary = await self.vocabulary()
        if any(not 0 <= token < len(vocabulary) for token in ids):
            raise RequestError(
                f"Token ids must be between 0 and {len(vocabulary) - 1}.", "prompt", "invalid_value"
            )
        return b"".join([vocabulary.piece(i) or await self._control_spelling(i) for i in ids])

    async def health(self) -> None:
        """See `Backend.health`."""
        await self._ask("GET", "/health")

    def forget(self) -> None:
        """Forget what was read of the model: another may be there when the server comes back."""
        self._model = self._vocabulary = None

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.upstream.aclose()

    async def native_prompt(self, job: Generation, model: Model) -> str | TokenIds:
        """The prompt as it is sent, after making sure that prompt and completion fit.

        The server refuses a prompt that is too long, but shortens a completion without a word.
        No token is shorter than a byte, so nearly always the text's length tells that all fits.
        """
        prompt = job.prompt
        if isinstance(prompt, Text):
            room = model.context - (job.max_tokens or 0)
            if prompt.parse_special and len(prompt.text.encode()) + 2 <= room:
                if not prompt.text and not model.adds_bos:
                    raise EmptyPrompt
                return prompt.text
            ids = await self.tokenize(
                prompt.text, add_special=True, parse_special=prompt.parse_special
            )
            count = len(ids) - model.adds_bos
        else:
            ids, count = prompt, len(prompt)
        if len(ids) + (job.max_tokens or 0) > model.context or len(ids) >= model.context:
            raise ContextExceeded(model.context, count, job.max_tokens or 0)
        return ids

    async def _ids(self, text: str) -> TokenIds:
        return await self.tokenize(text, add_special=True, parse_special=True)

    async def _ask(self, method: str, path: str, payload: Any = None) -> Any:
        body = None if payload is None else orjson.dumps(payload)
        async with self.upstream.send(method, path, body) as reply:
            data = await reply.read()
            if reply.status != 200:
                raise to_error(reply.status, data)
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            raise EngineError(f"{ENGINE} answered {path} with no JSON.") from None

    async def _read_model(self) -> Model:
        props: Props = await self._ask("GET", "/props")
        try:
            context = props["default_generation_settings"]["n_ctx"]
            facts = [props["model_path"], props["build_info"], str(context)]
        except (KeyError, TypeError):
            raise EngineError(f"{self.upstream.address} is no {ENGINE}.") from None
        # Without `--alias` the alias is the path, which is nobody's business.
        path, alias = props["model_path"], props.get("model_alias")
        return Model(
            name=alias if alias and alias != path else PurePath(path).name,
            context=context,
            template=props.get("chat_template") or None,
            bos_token=props.get("bos_token", ""),
            eos_token=props.get("eos_token", ""),
            adds_bos=bool(await self._ids("")),
            fingerprint="fp_" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:10],
            modified=int(time.time()),
        )

    async def vocabulary(self) -> Vocabulary:
        """Every token's bytes, from one wide call; read once, when first wanted."""
        if self._vocabulary is None:
            payload = {"prompt": [0], "n_predict": 1, "n_probs": 1_000_000, "cache_prompt": False}
            # A server-side ban or an end token still yields the whole distribution; a token that
            # ends inside a character yields no entry, so an ordinary one is forced.
            for bias in ([], [[" a", 1000]], [["a", 1000]]):
                body = orjson.dumps({**payload, "logit_bias": bias})
                async with self.upstream.send("POST", "/completion", body) as reply:
                    data = await reply.read()
                    if reply.status != 200:
                        raise to_error(reply.status, data)
                if b'"completion_probabilities"' in data:
                    self._vocabulary = Vocabulary(data)
                    break
            else:
                raise EngineError(f"{ENGINE} does not tell its vocabulary.")
        return self._vocabulary

    async def _control_spelling(self, token: int) -> bytes:
        if token not in self._control:
            reply = await self._ask("POST", "/detokenize", {"tokens": [token]})
            self._control[token] = str(reply["content"]).encode()
        return self._control[token]


class _Call:
    """One native call: the stream of one choice.

    A class rather than generators: this is the road of every token.
    """

    __slots__ = ("_backend", "_choice", "_chunks", "_exchange", "_job", "_parser", "_stream")

    def __init__(self, backend: LlamaServer, job: Generation, choice: int) -> None:
        self._backend = backend
        self._job = job
        self._choice = choice

    async def __aenter__(self) -> _Call:
        backend, job = self._backend, self._job
        model = await backend.model()
        prompt = await backend.native_prompt(job, model)
        payload = to_native(job, self._choice, prompt, model.context)
        exchange = backend.upstream.send("POST", "/completion", orjson.dumps(payload))
        try:
            reply = await exchange.__aenter__()
        except EngineUnavailable:
            backend.forget()
            raise
        self._exchange = exchange
        if reply.status != 200:
            try:
                raise to_error(reply.status, await reply.read(), job)
            finally:
                await exchange.__aexit__(None, None, None)
        self._chunks = reply.chunks()
        self._parser = EventParser()
        adds_bos = model.adds_bos and isinstance(job.prompt, Text)
        self._stream = ChoiceStream(job, self._choice, adds_bos)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exchange.__aexit__(None, None, None)

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> Batch:
        stream = self._stream
        async for chunk in self._chunks:
            data = self._parser.feed(chunk)
            if not data:
                continue
            events = stream.parse(data)
            batch: list[Event] = []
            if self._job.stops and events:
                batch = stream.feed(events[:-1])
                events = events[-1:]
                if stream.needs_vocabulary(events[0]):
                    stream.vocabulary = await self._backend.vocabulary()
            batch += stream.feed(events)
            if batch:
                return batch
        if not stream.finished:
            raise EngineError(f"{ENGINE} ended its answer before it was finished.")
        raise StopAsyncIteration
