"""Translation of jobs to llama-server payloads, and of its stream to events (sans-I/O)."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import orjson

from ...schemas.native.llama_server import CompletionPayload, MultimodalPrompt
from ..base import (
    ALWAYS_OR_NEVER,
    LLAMA_CPP_EXTRAS,
    MEDIA,
    Batch,
    Capabilities,
    Event,
    Finish,
    Generation,
    Piece,
    Pushed,
    Reason,
    Text,
    TokenIds,
)
from ..errors import (
    LARGEST,
    MALFORMED,
    ContextExceeded,
    ContextFull,
    EngineError,
    EngineUnavailable,
    InvalidGrammar,
    LatimerError,
    ModelLoading,
    NotServed,
    Refused,
    UnreadableMedia,
    malformed,
    read_from,
    summed_up,
    whole_of,
)
from ..sentencepiece import decode_piece
from ..sse import EventParser
from ..stops import begun_before, cut

ENGINE = "llama-server"
# The beginning of what it says until its model is loaded.
LOADING = "Loading"
_INTS = {int}


def last_of(event: Any) -> tuple[str, str | None, int, int, int]:
    """Read the last event of an answer.

    Returns:
        The `stop_type`, the stop sequence or None, and the numbers of generated tokens, of prompt
        tokens, and of prompt tokens from the cache.

    Raises:
        EngineError: the event is malformed.
    """
    try:
        kind, predicted, read = (
            event["stop_type"],
            event["tokens_predicted"],
            event["tokens_evaluated"],
        )
        word = event["stopping_word"] if kind == "word" else None
        cached = event["timings"]["cache_n"] if "timings" in event else 0
        is_last = (
            event["stop"] is True
            and type(kind) is str
            and (kind != "word" or type(word) is str)
            and {type(predicted), type(read), type(cached)} == _INTS
            and 0 <= predicted <= LARGEST
            and 0 <= read <= LARGEST
        )
    except (KeyError, TypeError):
        is_last = False
    if not is_last:
        raise none_of(event)
    return kind, word, predicted, read, cached


def none_of(event: Any) -> EngineError:
    """Return the error for a malformed event."""
    return EngineError(f"{ENGINE} sent an invalid event: {str(event)[:200]}")


def more_than_last() -> EngineError:
    """Return the error for an event after the last one."""
    return EngineError(f"{ENGINE} sent data after its last event.")


class OtherModel(Exception):
    """A response from another model, called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def check_model(reply: Mapping[str, Any], names: Container[str]) -> None:
    """Raise `OtherModel` if a response names a model that is not in `names`."""
    name = reply.get("model")
    if name is not None and name not in names:
        raise OtherModel(str(name)[:200])


def read_pieces(reply: bytes) -> list[bytes]:
    """Return every token's bytes by id, empty for control tokens.

    Args:
        reply: the response of a `/completion` with one token and an `n_probs` above the size of the
            vocabulary.
    """
    entries = orjson.loads(reply)["completion_probabilities"][0]["top_logprobs"]
    pieces = [b""] * len(entries)
    for entry in entries:
        data, token = entry["bytes"], entry["id"]
        # `bytes` of a number would be that many zeros.
        if type(data) is not list or token < 0:
            raise TypeError("an invalid entry")
        pieces[token] = bytes(data)
    return pieces


def ends_inside(data: bytes) -> bool:
    """Return True if text ends inside a character by llama-server's rule (`validate_utf8`)."""
    for back, lead, mask in ((1, 0xC0, 0xE0), (1, 0xE0, 0xF0), (2, 0xE0, 0xF0), *_FOUR):
        if back <= len(data) and data[-back] & mask == lead:
            return True
    return False


_FOUR = ((1, 0xF0, 0xF8), (2, 0xF0, 0xF8), (3, 0xF0, 0xF8))


class Vocabulary:
    """The exact bytes of every token, by id.

    Args:
        names: the spelling of each control token.
        adds_space: True if the tokenizer adds a space in front of words at a start.
    """

    def __init__(
        self, pieces: Sequence[bytes], names: Mapping[int, bytes], adds_space: bool = False
    ) -> None:
        self.pieces = pieces
        self._names = names
        self._adds_space = adds_space

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        return self.pieces[token]

    def token(self, token: int) -> tuple[bytes, bool]:
        """Return a token's spelling, and True if it is a control token."""
        if token < 0:
            raise IndexError(token)
        data = self.pieces[token]
        return (data, False) if data else (self._names.get(token, b""), True)

    def shown(self, ids: TokenIds, text: bytes | None = None) -> list[bytes]:
        """Return the text of each token of a prompt; see `sentencepiece.decode_piece`."""
        return decode_piece([self.token(token) for token in ids], self._adds_space, text)

    def spelled(self, spellings: Iterable[str]) -> dict[int, bytes]:
        """Return the spellings that are tokens, by token id."""
        wanted = {spelling.encode() for spelling in spellings}
        return {self._ids[one]: one for one in wanted if one in self._ids}

    def index(self) -> None:
        """Build the cached tables; a large vocabulary takes a tenth of a second."""
        _ = self._ids, self.ordinary, self.fragments

    @cached_property
    def _ids(self) -> Mapping[bytes, int]:
        return {self.token(token)[0]: token for token in range(len(self))}

    @cached_property
    def ordinary(self) -> int:
        """The id of a token that is a single letter, which always has an entry."""
        for token, piece in enumerate(self.pieces):
            if len(piece) == 1 and piece.isalpha():
                return token
        raise ValueError("a vocabulary without letters")

    @cached_property
    def fragments(self) -> Mapping[bytes, list[int]]:
        """Ids of the tokens with incomplete characters, by their bytes."""
        found: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self.pieces):
            try:
                piece.decode()
            except UnicodeDecodeError:
                found.setdefault(piece, []).append(token)
        return found


_SAMPLERS = [
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
]  # fmt: skip
# With it, adaptive-p draws each token in place of the server's usual last step.
_ADAPTIVE = [*_SAMPLERS, "adaptive_p"]

# The server's own defaults and flags (top_k 40, min_p 0.05, temperature 0.8 …) apply to omitted
# fields, so every request has neutral values.
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "dry_multiplier": 0.0,
    "adaptive_target": -1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "ignore_eos": False,
    "n_probs": 0,
    "logit_bias": [],
    # Limits the last event, which would otherwise repeat all settings and the whole prompt.
    "response_fields": ["model", "stop", "stop_type", "stopping_word", "tokens_predicted",
                        "tokens_evaluated", "timings"],
    "samplers": _SAMPLERS,
}  # fmt: skip

CAPABILITIES = Capabilities(
    engine=ENGINE,
    extras=LLAMA_CPP_EXTRAS,
    refused={"min_tokens": ALWAYS_OR_NEVER},
    # The server also counts the prompt's tokens; OpenAI counts generated tokens only.
    inexact=frozenset({"presence_penalty", "frequency_penalty"}),
    grammars=frozenset({"gbnf", "json_schema", "regex"}),
    media_among_ids=False,
)


# Events and tokens beyond the requested number before an answer counts as endless.
SLACK = 8
_new: Any = tuple.__new__
# Finish reasons by the `stop_type` of the last event.
_REASONS: Mapping[str, Reason] = {"eos": "end", "word": "stop", "limit": "length"}

# The error for an input of an embedding or a ranking that the server cannot split into batches.
_TOO_LARGE = re.compile(
    r"input \((\d{1,9}) tokens\) is too large to process\..*current batch size: (\d{1,9})\)"
)
# The beginning of what it says to all its calls if they have filled the context that they share.
_FULL = "Context size has been exceeded"
_LARGER_CONTEXT = (
    "Its operator can start it with a larger context (-c; --context for a model file), or with "
    "-np N, which divides the context among the slots."
)
LARGER_BATCH = "Start llama-server with a larger --ubatch-size and --batch-size for longer inputs."

NativePrompt: TypeAlias = "str | TokenIds | MultimodalPrompt"


def with_media(job: Generation, marker: str) -> MultimodalPrompt:
    """Return a prompt with media, each in its place.

    Args:
        marker: the media placeholder of the server's prompts.
    """
    assert isinstance(job.prompt.content, Text)
    data = [b64encode(one.data).decode() for one in job.prompt.media]
    return {
        "prompt_string": job.prompt.content.text.replace(MEDIA, marker),
        "multimodal_data": data,
    }


def size_of(prompt: str | Sequence[int] | MultimodalPrompt) -> int:
    """Return the approximate size of a prompt as JSON, in bytes."""
    if isinstance(prompt, dict):
        return len(prompt["prompt_string"]) + sum(map(len, prompt["multimodal_data"]))
    return len(prompt) if isinstance(prompt, str) else 6 * len(prompt)


def to_native(
    job: Generation, choice: int, prompt: NativePrompt, context: int, stream: bool = True
) -> CompletionPayload:
    """Return the payload of one choice; a grammar must be GBNF (`grammar.with_gbnf`).

    Args:
        prompt: the prompt to send: text that the server tokenizes, token ids, or text with media.
        context: the slot's context length in tokens; penalties apply to all of it.
    """
    return {**NEUTRAL, **own_fields(job, choice, prompt, context, stream)}  # type: ignore[typeddict-item]


_NEUTRAL_START = orjson.dumps(NEUTRAL)[:-1] + b","


def encoded(own: dict[str, Any]) -> bytes:
    """Return a payload as JSON, from the result of `own_fields`."""
    if NEUTRAL.keys().isdisjoint(own):
        # Most requests leave the neutral values, which are then encoded only once.
        return _NEUTRAL_START + orjson.dumps(own)[1:]
    return orjson.dumps({**NEUTRAL, **own})


def own_fields(
    job: Generation, choice: int, prompt: NativePrompt, context: int, stream: bool = True
) -> dict[str, Any]:
    """Return the fields of `to_native` without the neutral values that the job leaves."""
    sampling = job.sampling
    seed = job.seeds[choice]
    payload: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": -1 if job.max_tokens is None else job.max_tokens,
        "stream": stream,
        # The server takes 2**32 - 1 as "random". 0.56 µs; `random` takes 0.03 µs, but a client
        # can compute its next values.
        "seed": int.from_bytes(os.urandom(4)) >> 1 if seed is None else seed % (2**32 - 1),
        # A cached prefix changes the last digits of logits, but a seed must give the same answer.
        "cache_prompt": job.reuses and (seed is None or sampling.temperature == 0),
        "stop": () if job.stops.by_reader else job.stops.texts,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.logit_bias:
        # -100 bans a token (contract 2.1). The server bans on `False`; -100 only makes it unlikely.
        payload["logit_bias"] = [
            [token, bias if bias > -100 else False] for token, bias in sampling.logit_bias
        ]
    if sampling.extras:
        payload |= sampling.extras_within(context)
        if payload.get("dry_sequence_breakers") == []:
            # The server rejects an empty list, but skips an empty text.
            payload["dry_sequence_breakers"] = [""]
        if "adaptive_target" in payload:
            payload["samplers"] = _ADAPTIVE
    if job.stops.by_reader:
        # If the reader ends the choice, no last event reports the number of cached tokens.
        payload["timings_per_token"] = True
    if job.grammar is not None:
        payload["grammar"] = job.grammar.text
        # At the end of a grammar the server fails unless an end token is allowed.
        payload["ignore_eos"] = False
    if job.logprobs is not None:
        payload["n_probs"] = max(job.logprobs, 1)
    if job.stops.texts or job.preserved_tokens:
        # A control token adds no text unless it is listed here.
        payload["preserved_tokens"] = (*job.stops.texts, *job.preserved_tokens)
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    if penalised and "repeat_last_n" not in sampling.extras:
        payload["repeat_last_n"] = context
    return payload


def to_error(
    status: int, body: bytes, job: Generation | None = None, context: int | None = None
) -> LatimerError:
    """Return the error for a failed response or an error event.

    Args:
        context: the tokens that fit into the context of a slot, for a message.
    """
    try:
        native = orjson.loads(body)["error"]
        message, kind = summed_up(str(native["message"])), str(native.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = f"{ENGINE} responded with status {status}: {body[:200].decode(errors='replace')}"
        return EngineUnavailable(text) if status == 503 else EngineError(text)
    if kind == "exceed_context_size_error":
        with read_from(ENGINE, "a prompt that is too long"):
            context, prompt = whole_of(native["n_ctx"]), whole_of(native["n_prompt_tokens"])
        return ContextExceeded(context, prompt, (job.max_tokens or 0) if job is not None else 0)
    too_large = _TOO_LARGE.match(message)
    if too_large is not None:
        tokens, batch = map(int, too_large.groups())
        return ContextExceeded(batch, tokens, hint=LARGER_BATCH)
    if "does not support logits computation" in message:
        return NotServed("generate", ENGINE, "Did you mean to use v1/embeddings?")
    if kind == "unavailable_error":
        loads = message.startswith(LOADING)
        return (ModelLoading if loads else EngineUnavailable)(f"{ENGINE} is not ready: {message}")
    if message == "model is not loaded":
        # A router has unloaded it, because of others.
        return EngineUnavailable(f"{ENGINE} is not ready: {message}")
    if kind == "invalid_request_error":
        param = "grammar" if "grammar" in message else None
        param = "prompt" if message.startswith("Prompt") else param
        if message.startswith("Failed to load image"):
            media = job.prompt.media if job is not None else ()
            return UnreadableMedia(media[0].param if len(media) == 1 else "messages")
        return Refused(param, ENGINE, message)
    if message.startswith(_FULL):
        return ContextFull(ENGINE, _LARGER_CONTEXT, context)
    if "empty grammar stack" in message and job is not None and job.grammar is not None:
        # The server sampled a token that the grammar forbids, since no other was left.
        reason = "it allows no further token: all tokens that it allows are banned"
        return InvalidGrammar(job.grammar.param, reason)
    return EngineError(f"{ENGINE} failed: {message}")


class Step:
    """One event of the stream: its number of tokens, the id of the last one, and its text."""

    __slots__ = ("content", "id", "tokens")

    def __init__(self, tokens: int, token: int, content: bytes) -> None:
        self.tokens = tokens
        self.id = token
        self.content = content


class ChoiceStream:
    """A translator of one choice's native events to `Event` objects.

    The server holds back text that may become a stop sequence, and cuts it if one completes. At the
    length limit it drops the text but still sends the token ids, so the text is restored from the
    vocabulary. Call `needs_vocabulary` before feeding the last event.

    Args:
        bos_count: the number of prompt tokens that are not from the client: a BOS.
        vocabulary: required from the start for preserved tokens, and for stop sequences that apply
            to a part of the text only.

    Attributes:
        parser: splits the response into events, but for what is pushed.
    """

    # The numbers of tokens and of events so far.
    _predicted = _sent = 0
    # The last event that was read.
    event: Mapping[str, Any] = MappingProxyType({})
    finished = False
    # True if what is pushed is read as texts.
    _pushes_texts = False
    # What only stop sequences and preserved tokens need.
    _preserved: Mapping[int, bytes] = MappingProxyType({})
    _searches = _reads_tokens = False
    vocabulary: Vocabulary | None = None
    # The tokens that fit into the context; None if unknown.
    context: int | None = None

    def __init__(
        self, job: Generation, choice: int, bos_count: int, vocabulary: Vocabulary | None = None
    ) -> None:
        self._job = job
        self._choice = choice
        self.bos_count = bos_count
        self.parser = EventParser()
        self._steps: list[Step] = []
        self._most = LARGEST if job.max_tokens is None else job.max_tokens + SLACK
        if job.stops.texts:
            self._searches, self._reads_tokens = not job.stops.by_reader, True
        if vocabulary is not None:
            self.vocabulary, self._preserved = vocabulary, vocabulary.spelled(job.preserved_tokens)
            self._reads_tokens = self._reads_tokens or bool(self._preserved)

    def check_room(self, event: dict[str, Any], context: int) -> None:
        """Check that prompt and completion fit the context, by the first event.

        With media, only the server knows the length of the prompt, and it silently shortens
        completions that do not fit.

        Raises:
            ContextExceeded: prompt and completion do not fit.
        """
        job, wanted = self._job, self._job.max_tokens or 0
        prompt = self.prompt_tokens(event) + self.bos_count
        if prompt + (0 if job.clips else wanted) > context:
            raise ContextExceeded(context, prompt, wanted)

    def prompt_tokens(self, event: Mapping[str, Any]) -> int:
        """Return the number of the client's own prompt tokens, which every event has."""
        return max(whole_of(event["tokens_evaluated"]) - self.bos_count, 0)

    def parse(self, events: list[bytes]) -> list[dict[str, Any]]:
        """Parse the events of a chunk; `feed` checks their contents.

        Raises:
            LatimerError: an event is an error, or not JSON.
        """
        data = b"[" + b",".join(events) + b"]"
        try:
            found: list[dict[str, Any]] = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise EngineError(f"{ENGINE} sent invalid JSON: {events[0][:200]!r}") from None
        if b'"error"' in data:
            for event in found:
                if isinstance(event, dict) and "error" in event:
                    raise to_error(200, orjson.dumps(event), self._job, self.context)
        if len(found) != len(events):
            raise EngineError(f"{ENGINE} sent an invalid event.")
        return found

    def needs_vocabulary(self, event: dict[str, Any]) -> bool:
        """Return True if an event cannot be translated without the bytes of tokens."""
        if not event["stop"] or not self._searches or self.vocabulary is not None:
            return False
        if event["stop_type"] == "word" or self._held():
            return True
        return (
            cut(b"".join(step.content for step in self._steps), self._job.stops.texts)[1]
            is not None
        )

    def feed(self, events: Sequence[dict[str, Any]]) -> list[Event]:
        """Check and translate the events of a chunk.

        Every token passes here, so one pass both checks and translates. The ids of tokens are
        checked where something needs them.

        Raises:
            EngineError: an event is malformed or contradicts earlier ones.
        """
        if not events:
            return []
        if self.finished:
            raise more_than_last()
        self._sent += len(events)
        choice, start, reads_tokens = self._choice, self._predicted, self._reads_tokens
        before = start
        out: list[Event] = []
        # The text of an answer whose tokens nobody needs is one piece.
        texts: list[bytes] | None = [] if self._job.is_joined else None
        for event in events:
            try:
                if event["stop"] is not False:
                    self._predicted = before
                    out += self._finish(event, event is events[-1])
                    break
                content, predicted = event["content"].encode(), event["tokens_predicted"]
            except (KeyError, TypeError, AttributeError):
                raise none_of(event) from None
            if type(predicted) is not int:
                raise none_of(event)
            count = predicted - before
            if count < 0:
                raise EngineError(f"{ENGINE} reported {predicted} tokens after {before}.")
            before = predicted
            if reads_tokens:
                out += self._read(event, content, count)
            elif texts is not None:
                texts.append(content)
            elif content:
                # Like `Piece(…)`, without the call of a Python function.
                out.append(_new(Piece, (choice, content, (), False, count, ())))
        if texts and (text := b"".join(texts)):
            out.insert(0, _new(Piece, (choice, text, (), False, before - start, ())))
        self.event = events[-1]
        self._predicted = before
        if self._sent > self._most or before > self._most:
            raise EngineError(
                f"{ENGINE} sent more than the {self._job.max_tokens} tokens requested."
            )
        return out

    def push(self, as_text: bool) -> Pushed:
        """Return how to read what is pushed; see `base.Pushing`."""
        self._pushes_texts = as_text and not self._reads_tokens
        return Pushed(self._translate, self._pushes_texts)

    def _translate(self, chunk: bytes) -> Batch | Sequence[str] | None:
        """Read a chunk of whole events with text, each in one line, as most tokens arrive.

        None leaves the chunk to the parser and to `feed`, such as one with the last event, an error
        or a part of an event. Then nothing has changed. The texts of a stream that is only text are
        read in this one call.
        """
        data = chunk[6:-2].replace(b"\n\ndata: ", b",")
        if (
            not (self.parser.is_idle and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"))
            or b"\n" in data
            or b"\r" in data
            or b'"error"' in data
        ):
            return None
        before, texts = self._predicted, list[str]()
        try:
            events = orjson.loads(b"[%b]" % data)
            if len(events) != chunk.count(b"\n\n") or events[-1]["stop"] is not False:
                return None
            if self._pushes_texts:
                for event in events:
                    text, predicted = event["content"], event["tokens_predicted"]
                    if (
                        type(text) is not str
                        or type(predicted) is not int
                        or predicted < before
                        or event["stop"] is not False
                    ):
                        return None
                    before = predicted
                    if text:
                        texts.append(text)
        except MALFORMED:
            return None
        if not self._pushes_texts:
            try:
                return self.feed(events)
            except MALFORMED as error:
                raise malformed(ENGINE, "a completion", error) from error
        sent = self._sent + len(events)
        if self.finished or sent > self._most or before > self._most:
            return None
        self._sent, self._predicted, self.event = sent, before, events[-1]
        return texts

    def _read(self, event: dict[str, Any], content: bytes, count: int) -> list[Event]:
        """Translate an event whose token ids matter.

        Raises:
            EngineError: it has none.
        """
        ids = event.get("tokens")
        if type(ids) is not list or (ids and type(ids[-1]) is not int):
            raise none_of(event)
        token = ids[-1] if ids else -1
        if self._searches:
            # A stop sequence may cut the step or hold its text back.
            self._steps.append(Step(count, token, content))
        starts: Sequence[int] = ()
        if self._job.stops.by_reader:
            if not content:
                # Control tokens count, too.
                return [Piece(self._choice, b"", token_count=count)] if count else []
            starts = self._starts(token, count, content)
        if not content:
            return []
        return [*self._separated(Piece(self._choice, content, (), False, count, starts), token)]

    def _starts(self, token: int, count: int, content: bytes) -> Sequence[int]:
        """Return the positions in a step's text at which its tokens begin, if there are several.

        Tokens without an event end inside a character. The first of them begins with its step, and
        the last token of a step ends with its text.
        """
        if count < 2:
            return ()
        assert self.vocabulary is not None
        size = len(self.vocabulary.piece(token)) if token >= 0 else 0
        return (0, *[1] * (count - 2), max(len(content) - size, 0))

    def _separated(self, piece: Piece, token: int) -> tuple[Piece, ...]:
        """Return a step's text; a preserved token at its end is a separate piece."""
        marker, content = self._preserved.get(token), piece.data
        if marker is None or not content.endswith(marker):
            return (piece,)
        own = Piece(self._choice, marker, (), True, 1)
        if content == marker:
            return (own,)
        rest = piece._replace(
            data=content[: -len(marker)],
            token_count=piece.token_count - 1,
            starts=piece.starts[:-1],
        )
        return rest, own

    def stopped(self) -> Finish:
        """Return the end of a choice that its reader has cut."""
        event = self.event
        prompt = max(event["tokens_evaluated"] - self.bos_count, 0)
        cached = event["timings"]["cache_n"] if "timings" in event else 0
        count = max(min(cached, prompt), 0)
        return Finish(self._choice, "stop", None, prompt, self._predicted, count)

    def _held(self) -> Sequence[Step]:
        """Return the trailing steps whose text was not sent."""
        kept = len(self._steps)
        while kept and not self._steps[kept - 1].content:
            kept -= 1
        return self._steps[kept:]

    def _finish(self, event: dict[str, Any], is_final: bool) -> list[Event]:
        """Check and translate the last event of an answer.

        Args:
            is_final: True if no event follows it.
        """
        kind, word, predicted, read, cached = last_of(event)
        if not is_final:
            raise more_than_last()
        if kind not in _REASONS:
            raise EngineError(f"{ENGINE} ended its response for an unknown reason: {kind!r:.50}")
        # Each other event has at least one token.
        least, most = max(self._sent - 1, kind == "eos"), self._job.max_tokens
        if predicted < least or (most is not None and predicted > most) or predicted > self._most:
            raise EngineError(f"{ENGINE} reported {predicted} tokens, which is impossible.")
        if predicted < self._predicted:
            raise EngineError(f"{ENGINE} reported {predicted} tokens after {self._predicted}.")
        self.finished = True
        events: list[Event] = []
        rest = b""
        if word is not None:
            rest = word.encode()
        elif self.vocabulary is not None:
            rest = b"".join(self._restored(step) for step in self._held() if step.id >= 0)
        if rest:
            events.append(Piece(self._choice, rest))
        completion = predicted - (kind == "eos")
        if self._steps:
            text = b"".join(step.content for step in self._steps) + rest
            end, stop = cut(text, self._job.stops.texts)
            if stop is not None:
                completion = begun_before(end, self._token_starts())
        prompt = max(read - self.bos_count, 0)
        cached = max(min(cached, prompt), 0)
        events.append(Finish(self._choice, _REASONS[kind], word, prompt, completion, cached))
        return events

    def _restored(self, step: Step) -> bytes:
        """Return the text of a step that was held back.

        Tokens that end inside a character have no event, so their ids are unknown. But text is only
        held back if it may become a stop sequence. So the incomplete character is part of a stop
        sequence, and its bytes before the known last token are the missing ones.

        Raises:
            EngineError: the stop sequences allow more than one text, or none.
        """
        assert self.vocabulary is not None
        piece = self.vocabulary.piece(step.id)
        if step.tokens == 1:
            return piece
        found = {head for stop in self._job.stops.texts for head in heads(stop.encode(), piece)}
        if len(found) != 1:
            raise EngineError(
                f"{ENGINE} held back text that ends in {piece!r} and did not send its beginning."
            )
        return found.pop() + piece

    def _token_starts(self) -> Iterator[int]:
        """Yield the position in the text at which each token begins.

        A token begins where the previous one ends. Tokens without an event end inside a character.
        The first of them begins with its step, and the last token of a step ends with its text.
        """
        assert self.vocabulary is not None
        position = sent = 0
        for index, step in enumerate(self._steps):
            size = len(self.vocabulary.piece(step.id)) if step.id >= 0 else 0
            sent += len(step.content)
            released = step.content and index < len(self._steps) - 1
            after = sent if released else position + size
            yield position
            if step.tokens > 1:
                yield from [position + 1] * (step.tokens - 2)
                yield after - size
            position = after


def heads(stop: bytes, piece: bytes) -> Iterator[bytes]:
    """Yield the bytes before a piece in a stop sequence, if it begins inside a character there."""
    at = stop.find(piece)
    while at > 0:
        start = at
        # Continuation bytes are 10xxxxxx.
        while start > 0 and stop[start] & 0xC0 == 0x80:
            start -= 1
        if start < at:
            yield stop[start:at]
        at = stop.find(piece, at + 1)
