"""A backend without a model, which repeats its prompt or says a script, a token for each byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from latimer.backends.base import (
    LLAMA_CPP_EXTRAS,
    Alternative,
    Backend,
    Batch,
    Capabilities,
    Finish,
    Generation,
    Model,
    Piece,
    PromptTokens,
    Reason,
    Special,
    Text,
    Token,
    TokenIds,
)
from latimer.backends.errors import (
    ContextExceeded,
    EmptyPrompt,
    check_ids,
)
from latimer.backends.stops import cut

from support.engines import model
from support.engines.model import CONTROL, EOS, SIZE, TEMPLATE

CAPABILITIES = Capabilities(
    "echo",
    extras=LLAMA_CPP_EXTRAS,
    native=False,
    grammars=frozenset({"gbnf", "json_schema", "regex", "lark"}),
    marks_special=False,
)
_VOCABULARY = model.Model()


class Echo(Backend):
    """A backend that repeats the last message of a chat, or the prompt of a completion.

    It ignores grammars and sampling, except `ignore_eos`: what it says is up to the test.

    Args:
        script: the text of every choice instead; or the batches of every job, yielded unchanged.
        error: raised by each job, and by `health`.
        template: the model's chat template.
        context: the model's context length.
        pause: seconds before each token.

    Attributes:
        jobs: all jobs so far; `running` is the number of those that have not ended.
        left: set when a job ends.
        closed: the number of calls of `aclose`.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        script: str | Sequence[Batch] | None = None,
        *,
        error: Exception | None = None,
        template: str | None = TEMPLATE,
        context: int = 4096,
        pause: float = 0.0,
    ) -> None:
        self.script = script
        self.error = error
        self.pause = pause
        self.facts = Model("demo", context, template, "", CONTROL[2], False, "fp_echo", 7)
        self.jobs: list[Generation] = []
        self.running = 0
        self.left = asyncio.Event()
        self.closed = 0

    async def model(self) -> Model:
        """Return the model."""
        return self.facts

    async def admit(self, job: Generation) -> None:
        """Check a job before its first event."""
        if self.error is not None:
            raise self.error
        ids = ids_of(job)
        if not ids:
            raise EmptyPrompt
        if job.ticket is not None:
            job.ticket.input = len(ids)
        if len(ids) + (0 if job.clips else job.max_tokens or 0) > self.facts.context:
            raise ContextExceeded(self.facts.context, len(ids), job.max_tokens or 0)

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job."""
        self.jobs.append(job)
        self.running += 1
        try:
            await self.admit(job)
            yield self.batches(job)
        finally:
            self.running -= 1
            self.left.set()

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield the events of a job, one token of one choice at a time."""
        if self.script is not None and not isinstance(self.script, str):
            for batch in self.script:
                yield batch
            return
        prompt = ids_of(job)
        if job.prompt.logprobs is not None:
            tokens = [_token(one, job.prompt.logprobs, index) for index, one in enumerate(prompt)]
            yield [PromptTokens(0, tokens)]
        text = _last_message(_VOCABULARY.text(prompt)) if self.script is None else self.script
        room = self.facts.context - len(prompt)
        most = room if job.max_tokens is None else min(job.max_tokens, room)
        data = text.encode()
        if job.sampling.extras.get("ignore_eos"):
            data *= 1 + most // max(len(data), 1)
        end, stop = cut(data, job.stops.texts)
        reason: Reason = "length" if end > most else "end" if stop is None else "stop"
        for choice in range(len(job.seeds)):
            for byte in data[: min(end, most)]:
                if self.pause:
                    await asyncio.sleep(self.pause)
                tokens = [] if job.logprobs is None else [_token(byte, job.logprobs)]
                yield [Piece(choice, bytes([byte]), tokens, token_count=1)]
            last = _token(EOS, job.logprobs) if job.logprobs is not None else None
            yield [
                Finish(
                    choice, reason, stop if reason == "stop" else None, len(prompt), min(end, most),
                    end=last if reason == "end" else None,
                )
            ]  # fmt: skip

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Return the bytes, and the ids of control tokens."""
        return tuple(_VOCABULARY.ids(text, parse_special))

    async def detokenize(self, ids: TokenIds) -> bytes:
        """Return the text of token ids."""
        check_ids("tokens", ids, SIZE)
        return b"".join(map(_spelled, ids))

    async def token_bytes(self) -> Sequence[bytes] | None:
        """Return the bytes of every token."""
        return [_VOCABULARY.piece(token) for token in range(SIZE)]

    async def special_tokens(self) -> Sequence[Special]:
        """Return the control tokens."""
        return [Special(name, True) for name in CONTROL]

    async def health(self) -> None:
        """Raise the error, if any."""
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1


class Slow(Echo):
    """A backend that yields two pieces and then an error, or nothing more."""

    async def admit(self, job: Generation) -> None:
        """Accept every job."""

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield two pieces, then fail or wait for an hour."""
        yield [Piece(0, b"one "), Piece(0, b"two ")]
        await asyncio.sleep(0.05)
        if self.error is not None:
            raise self.error
        await asyncio.sleep(3600)


def ids_of(job: Generation) -> list[int]:
    """Return the token ids of a job's prompt."""
    content = job.prompt.content
    if isinstance(content, Text):
        return _VOCABULARY.ids(content.text, content.parse_special)
    return [*content]


def _last_message(prompt: str) -> str:
    """Return the content of the last message of a chat, or the whole prompt."""
    messages = prompt.split(CONTROL[1])[1:-1]
    return messages[-1].partition("\n")[2].partition(CONTROL[2])[0] if messages else prompt


def _spelled(token: int) -> bytes:
    return CONTROL[token - 256].encode() if token >= 256 else _VOCABULARY.piece(token)


def _token(token: int, top: int, position: int = 1) -> Token:
    """Return a token with its alternatives: itself and the ids that follow."""
    control = token >= 256
    ids = [(token + step) % SIZE for step in range(top)]
    others = [Alternative(i, _spelled(i), i >= 256, -0.1 - step) for step, i in enumerate(ids)]
    data = b"" if control else _VOCABULARY.piece(token)
    return Token(token, data, _spelled(token), control, -0.1 if position else None, tuple(others))
