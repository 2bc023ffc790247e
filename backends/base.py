"""The engine-independent job, its event stream, and the protocol that every backend implements.

Engines differ only behind `Backend`: it takes a job as a `Generation` and yields batches of events.
Events that arrive together stay in one batch, so that the adapter can send them together.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from .errors import NotServed, Unsupported
from .queue import Ticket

if TYPE_CHECKING:
    from .speech.base import Speaker, Transcriber

Reason: TypeAlias = Literal["end", "stop", "length"]
GrammarKind: TypeAlias = Literal["gbnf", "json_schema", "regex", "lark"]


class Text(NamedTuple):
    """Prompt text.

    Args:
        text: the text, without a BOS that the engine adds.
        parse_special: True if control tokens spelled in it are parsed as such.
        bos: the spelling of the BOS with which the client began the text, or empty. The BOS that
            the engine adds then counts as the client's own.
    """

    text: str
    parse_special: bool = True
    bos: str = ""

    @property
    def spelled(self) -> str:
        """The text as the client wrote it."""
        return self.bos + self.text


TokenIds: TypeAlias = tuple[int, ...]
Content: TypeAlias = TokenIds | Text

# Extras that set the number of last tokens that a sampler considers.
WINDOWS = frozenset({"repeat_last_n", "dry_penalty_last_n"})
# llama.cpp's default of `dry_sequence_breakers` (common/common.h).
BREAKERS = ("\n", ":", '"', "*")


@dataclass(slots=True)
class Sampling:
    """OpenAI's sampling parameters, and the engine extras that the request sets.

    `extras` holds only parameters that the request sets. Every other parameter is neutral on every
    engine, regardless of the engine's own defaults.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def extras_within(self, context: int) -> Mapping[str, Any]:
        """Return the extras, with windows cut to the context length; -1 means all of it.

        A longer window has no effect, but engines allocate memory for it: 8 GiB for 2**31 - 1. DRY
        gets its window in each request, because the engines' defaults differ.
        """
        if WINDOWS.isdisjoint(self.extras) and not self.extras.get("dry_multiplier"):
            return self.extras
        extras = {
            name: (context if value < 0 else min(value, context)) if name in WINDOWS else value
            for name, value in self.extras.items()
        }
        # For koboldcpp a window of 0 means the whole context; for llama.cpp it disables DRY.
        if extras.get("dry_multiplier") and not extras.setdefault("dry_penalty_last_n", context):
            extras["dry_multiplier"] = 0.0
        return extras


MediaKind: TypeAlias = Literal["image", "audio"]
# Placeholders for a prompt's media, in their order: in text, and among token ids.
MEDIA = "\U000fffc0"
MEDIA_ID = -1


class Media(NamedTuple):
    """An image or audio file of a prompt, unchanged; `param` is its field, for errors."""

    kind: MediaKind
    data: bytes
    param: str


class Preamble(NamedTuple):
    """Reasoning that a model may write before its answer.

    Args:
        begin, end: the markers around it.
        is_open: True if the prompt already contains `begin`; otherwise the model may omit it.
        special: the markers that are tokens of the model; text that spells them does not count.
    """

    begin: str
    end: str
    is_open: bool
    special: frozenset[str] = frozenset()


class Grammar(NamedTuple):
    """A grammar that a completion must match.

    Args:
        kind: the language of `text`; a JSON schema is JSON.
        param: the request field that contains it, for errors.
        after: the reasoning that may precede the text that it constrains.
        is_own: True if the adapter made it from tools; it may then be longer than a client's.
    """

    kind: GrammarKind
    text: str
    param: str
    after: Preamble | None = None
    is_own: bool = False


@dataclass(slots=True)
class Prompt:
    """The input of a completion.

    Args:
        content: text, or token ids that are used verbatim (nothing is added to them).
        suffix: the text after the gap to fill; `content` is the text before it.
        media: images and audio; `content` has a `MEDIA` or `MEDIA_ID` placeholder for each.
        bos_count: the number of leading ids that are not from the client: a BOS.
        logprobs: the number of alternatives to report for each prompt token; None reports no
            tokens.
        is_cut: True if it ends inside a character, and the answer is shown as its continuation.
    """

    content: Content
    suffix: str | None = None
    media: tuple[Media, ...] = ()
    bos_count: int = 0
    logprobs: int | None = None
    is_cut: bool = False


@dataclass(slots=True)
class Stops:
    """Stop sequences; a choice is cut before the first one that completes.

    Args:
        by_reader: True if they apply to a part of the text only. The engine would search all of the
            text, so the reader of the events finds them, and writes the choice into `ends`.
        ends: the choices that the reader has cut, and the number of bytes before the cut. The
            engine stops generating them and yields their `Finish`.
    """

    texts: tuple[str, ...] = ()
    by_reader: bool = False
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def for_engine(self) -> tuple[str, ...]:
        """The stop sequences at which the engine itself may end a choice."""
        return () if self.by_reader else self.texts


@dataclass(slots=True)
class Generation:
    """One prompt and its choices.

    Args:
        max_tokens: the largest number of tokens to generate; None is up to the context length.
        seeds: one per choice; its length is the number of choices. None means a random seed.
        preserved_tokens: control tokens whose spelling appears in the generated text.
        logprobs: the number of alternatives to report for each generated token; None reports no
            tokens.
        owner: the owner of the prompt cache entries; owners do not share entries.
        grammar: the grammar that each choice must match, or None.
        ticket: the request that the job belongs to; None if the request has no other job.
        fingerprint: the model that the job was made for. The backend rejects the job if the engine
            serves another model. Empty if any model will do.
        streamed: False if nobody needs the text before its end; an engine may then yield it whole.
        is_joined: True if nobody needs the tokens of the text either; an engine may then yield all
            of it as one piece.
        prediction: text that the answer is expected to repeat, for engines that can draft it.
        clips: True if `max_tokens` may be more than the context has room for; the answer then ends
            with the context.
        reuses: False if the engine must not use its prompt cache.
    """

    prompt: Prompt
    max_tokens: int | None
    seeds: tuple[int | None, ...] = (None,)
    stops: Stops = field(default_factory=Stops)
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    owner: str = ""
    grammar: Grammar | None = None
    preserved_tokens: tuple[str, ...] = ()
    ticket: Ticket | None = None
    fingerprint: str = ""
    streamed: bool = True
    is_joined: bool = False
    prediction: str = ""
    clips: bool = False
    reuses: bool = True


@dataclass(slots=True)
class Embedding:
    """Inputs to embed; the engine processes them in any order.

    Args:
        inputs: texts, which get the model's special tokens, or token ids, which are not changed.
        ticket, fingerprint: as in `Generation`.
    """

    inputs: Sequence[Content]
    ticket: Ticket | None = None
    fingerprint: str = ""


class Embeddings(NamedTuple):
    """Vectors of unit length in 32-bit floats, in the order of the inputs.

    `prompt_tokens` counts all tokens of the inputs, without special tokens that were added.
    """

    vectors: Sequence[array[float]]
    prompt_tokens: int


@dataclass(slots=True)
class Ranking:
    """Documents to score by their relevance to a query; control tokens in them are text."""

    query: str
    documents: Sequence[str]
    ticket: Ticket | None = None
    fingerprint: str = ""


class Scores(NamedTuple):
    """The result of a `Ranking`: the model's own score of each document, and the tokens of all."""

    scores: Sequence[float]
    prompt_tokens: int


class Special(NamedTuple):
    """A spelling that the tokenizer always reads as one token.

    `control` is True if `parse_special` can switch that off; it cannot for tokens that were added
    as text.
    """

    spelling: str
    control: bool


class Alternative(NamedTuple):
    """A candidate token at a position, and its log-probability.

    Args:
        spelling: its bytes; the name of a control token.
        control: True for a control token, which adds no text.
        logprob: the natural logarithm of the model's own probability; -inf if that is zero.
    """

    id: int
    spelling: bytes
    control: bool
    logprob: float


class Token(NamedTuple):
    """A token of the prompt or of a choice.

    Args:
        data: the bytes that it adds to the text; empty for a generated control token.
        spelling: the bytes that a list of log-probabilities shows for it.
        control: True for a control token.
        logprob: as in `Alternative`; None for the first token of a prompt.
        top: the most likely tokens at its position, most likely first. The token itself is listed
            only if it is one of them.
    """

    id: int
    data: bytes
    spelling: bytes
    control: bool
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class PromptTokens(NamedTuple):
    """The tokens of the prompt: the first event of a job that asks for them.

    They include neither an added BOS nor a space that the tokenizer put before a piece. The
    concatenation of their data is the prompt's text, with control tokens spelled out.

    Args:
        choice: the first choice of the job; the tokens apply to all choices.
    """

    choice: int
    tokens: Sequence[Token]


class Piece(NamedTuple):
    """Generated bytes of a choice; they may end inside a character.

    Args:
        tokens: if the job asks for tokens, those whose concatenated data is `data`. A piece that
            only spells a stop sequence has none.
        is_control: True if it is one of the job's `preserved_tokens`, and not text with the same
            spelling.
        token_count: the number of its tokens, if the engine reports it.
        starts: the positions in `data` at which its tokens begin, if there are several.
    """

    choice: int
    data: bytes
    tokens: Sequence[Token] = ()
    is_control: bool = False
    token_count: int = 0
    starts: Sequence[int] = ()


class Finish(NamedTuple):
    """The end of a choice.

    Args:
        reason: `end` for an end token, `stop` for a stop sequence, `length` for a limit.
        stop: the stop sequence that the engine reports, or None.
        prompt_tokens: the number of prompt tokens, without an added BOS.
        completion_tokens: the number of tokens that begin before the cut, without an end token. For
            a choice that the reader cut, the pieces show the number if they have token counts.
        cached_tokens: the number of prompt tokens that came from the prompt cache.
        end: the end token of the choice, if the job asks for tokens.
        inexact: the parts of the answer that are approximate, by their names in the API.
        accepted_tokens, rejected_tokens: the numbers of drafted tokens that were sampled, and of
            those that were not.
    """

    choice: int
    reason: Reason
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    end: Token | None = None
    inexact: tuple[str, ...] = ()
    accepted_tokens: int = 0
    rejected_tokens: int = 0


Event: TypeAlias = PromptTokens | Piece | Finish
# Never empty.
Batch: TypeAlias = Sequence[Event]


@dataclass(frozen=True, slots=True)
class Model:
    """The model that a backend serves.

    Args:
        name: the engine's name for the model.
        context: the context length: prompt and completion, in tokens.
        template: the model's own chat template (Jinja), or None.
        bos_token, eos_token: spellings for the template; empty if unknown.
        adds_bos: True if a text prompt gets a leading BOS token.
        fingerprint: a string that changes with the weights, the engine or the configuration.
        modified: the time when the model was made available, in seconds since 1970.
        media: the kinds of input that it accepts besides text.
        adapters: the file of each LoRA adapter and its scale, as `NAME:SCALE`.
        sizes: the sizes of the model that are known, by llama-server's names for them: `n_params`,
            `n_vocab`, `n_ctx_train` …
        places: the number of calls that the engine runs at a time.
        build: the version of the engine; empty if unknown.
    """

    name: str
    context: int
    template: str | None
    bos_token: str
    eos_token: str
    adds_bos: bool
    fingerprint: str
    modified: int
    media: frozenset[MediaKind] = frozenset()
    adapters: tuple[str, ...] = ()
    # Facts for clients only; models are keys of caches on the path of every request.
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    places: int = field(default=1, compare=False)
    build: str = field(default="", compare=False)


class Load(NamedTuple):
    """The work of an engine at one time.

    Args:
        running: the number of calls that it runs.
        waiting: the number of requests that wait for it.
        cache: the share of its KV cache that running calls take; None if unknown.
        preemptions: the number of calls that it has interrupted for others so far.
    """

    running: int
    waiting: int
    cache: float | None = None
    preemptions: int = 0


# How the vectors of an input's tokens become one; `rank` makes a score of them.
Pooling: TypeAlias = Literal["mean", "cls", "last", "rank"]


class EmbeddingModel(NamedTuple):
    """Facts about the embeddings of a backend; None where the engine does not report them.

    Args:
        dimensions: the length of a vector; 0 for a model that only ranks.
        context: the largest number of tokens in an input, with special tokens.
        generates: True if the backend also generates text.
        inexact: as in `Finish`.
    """

    dimensions: int | None
    pooling: Pooling | None
    context: int | None
    generates: bool = True
    inexact: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Tables of an engine's features and limits.

    Args:
        engine: the engine's name in messages.
        extras: the sampling extras that it supports, by their names in `EngineExtras`.
        refused: the fields of requests that it does not support, each with the hint for the error.
            The adapter rejects a request that sets one to a value with an effect. The names are
            those of `schemas/openai`: of chat completions, completions and responses.
        inexact: the fields that it only approximates, by the same names.
        native: True if `Backend.native` can return the engine's own reply.
        late_logprobs: True if log-probabilities are known only at the end of an answer.
        grammars: the grammar languages that it supports.
        plain_text: True if it can take text without parsing the control tokens spelled in it.
        media_among_ids: True if a prompt of token ids may have media.
        marks_special: True if it distinguishes a preserved token from text with its spelling.
        free_grammars: True if a grammar costs nothing in the parts where it allows any text.
        late_checks: True if a call may find that the engine has another model now (`ModelChanged`).
        own_caches: True if each owner of prompts has a prompt cache of its own.
    """

    engine: str
    extras: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    inexact: frozenset[str] = frozenset()
    native: bool = True
    late_logprobs: bool = False
    grammars: frozenset[GrammarKind] = frozenset()
    plain_text: bool = True
    media_among_ids: bool = True
    marks_special: bool = True
    free_grammars: bool = True
    late_checks: bool = False
    own_caches: bool = False


class NativeReply(NamedTuple):
    """The engine's own response: status, content type, and the body's bytes as they arrive."""

    status: int
    content_type: str
    body: AsyncIterator[bytes]


# The batches may have more than an iterator: `push_to` (`Pushing`), and `is_over`, which is True if
# no batch follows, so that a reader saves the step which only says so.
Stream: TypeAlias = AbstractAsyncContextManager[AsyncIterator[Batch]]


class Pushed(NamedTuple):
    """The reading of what `Pushing` pushes.

    Args:
        translate: returns the events of such data, which may be none yet; or None, if only the
            reader can take it. Then nothing has changed.
        is_text: True if it returns texts in place of events: each `Piece` that has one.
    """

    translate: Callable[[Any], Batch | Sequence[str] | None]
    is_text: bool = False


class Pushing(Protocol):
    """Batches of which most need no step of their reader's task, as `Stream` may yield them.

    While the reader waits, its task sleeps under a chain of coroutines. To resume them all takes
    longer than all that is done with a token.
    """

    def push_to(self, receive: Callable[[Any], bool], as_text: bool) -> Pushed | None:
        """Let `receive` have the data that arrives while the reader waits.

        `receive` is called where the data arrives, in the event loop. If it returns False, the
        reader gets the data. If it raises an error, the reader raises it.

        Args:
            as_text: True if the receiver needs only the texts of the single choice.

        Returns:
            how to read the data; None if the batches cannot be pushed.
        """
        ...


class Backend(Protocol):
    """One engine. The only errors that its coroutines raise on purpose are `LatimerError`s.

    An engine without native responses, embeddings and control tokens inherits the methods for them.
    """

    # True for a `Pool`: a model that several engines serve.
    is_pooled: bool = False
    # True if it loads its model in this process, for which `health` waits.
    loads_here: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """The engine's features and limits, known before the first connection."""
        ...

    async def model(self) -> Model:
        """Return the model; the engine's answer is cached."""
        ...

    def known_model(self) -> Model | None:
        """Return what `model` would return without a question to the engine, or None."""
        return None

    def open(self, job: Generation) -> Stream:
        """Start a job; leaving the context or cancelling the task cancels generation.

        Entering the context raises the errors that the engine reports before the first token. The
        duties of a backend, most of which `tests/support/duties.py` tests:

        - It raises `ModelChanged` if `fingerprint` is that of another model, unless its model never
          changes, `EmptyPrompt` for a prompt without tokens, and `UnknownToken` for an id that the
          vocabulary lacks, or `Unsupported` if the engine does not report its vocabulary.
        - It raises `ContextExceeded` if the prompt and `max_tokens` exceed the context. With
          `clips`, or without `max_tokens`, the context ends the choice.
        - `max_tokens` is never exceeded; 0 needs no call (`streams.end_at_once`).
        - `ticket.input` is set before the first event, for the usage at the start of a stream.
        - No batch is empty. The last event of each choice is its only `Finish`.
        - It sends `stops.for_engine` to the engine. Text from a stop sequence on may be yielded,
          since the adapter cuts it, but its tokens are not counted (`stops.TokenCut`). It ends
          choices in `stops.ends`.
        - Logprobs, those of the prompt, a suffix, media, sampling, seeds, a grammar and what
          precedes it, and `preserved_tokens` are obeyed, or else refused: in `Capabilities` if the
          field is always refused, here with `Unsupported` otherwise.
        - Calls that the engine has no place for wait, in turns of their `ticket`
          (`queue.AdmissionQueue`).
        """
        ...

    async def check(self, job: Generation) -> None:
        """Raise the errors of a prompt that `open` raises, if that takes no question to an engine.

        Other backends raise them when a job has its place.
        """
        return

    def native(self, job: Generation, stream: bool) -> AbstractAsyncContextManager[NativeReply]:
        """Run a job of one choice and return the engine's own reply, unchanged."""
        hint = self.capabilities.refused.get("oai_compat", "It has no native response. Omit it.")
        raise Unsupported("oai_compat", self.capabilities.engine, hint)

    async def embedding_model(self) -> EmbeddingModel | None:
        """Return the facts about its embeddings, or None if it has none; they are cached."""
        return None

    async def embed(self, job: Embedding) -> Embeddings:
        """Embed inputs; raise `NotServed` if the model, or the engine as it runs, cannot."""
        raise NotServed("embed", self.capabilities.engine, "Use another model.")

    async def rank(self, job: Ranking) -> Scores:
        """Score documents; raise `NotServed` if the model is not a reranker."""
        raise NotServed("rank", self.capabilities.engine, "Use another model.")

    async def speaker(self) -> Speaker | None:
        """Return what speaks, if the engine itself can; the answer is cached."""
        return None

    async def transcriber(self) -> Transcriber | None:
        """Return what transcribes, if the engine itself can; the answer is cached."""
        return None

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Return the token ids of a text; `add_special` adds a BOS if the model uses one."""
        ...

    async def detokenize(self, ids: TokenIds) -> bytes:
        """Return the text of a prompt of token ids, with control tokens spelled out."""
        ...

    async def token_bytes(self) -> Sequence[bytes] | None:
        """Return the bytes of every token by id, empty for control tokens; None if unknown."""
        ...

    async def special_tokens(self) -> Sequence[Special]:
        """Return the spellings that the tokenizer always reads as one token, as far as known.

        By it, a spelling in a message becomes text: an engine without `plain_text` needs it.
        """
        return ()

    def load(self) -> Load | None:
        """Return what the engine does now, as far as it is known without a question to it.

        Any thread may call this.
        """
        return None

    def last_byte(self) -> float:
        """Return the time of the last byte from the engine, by the event loop; 0 if unknown."""
        return 0.0

    async def health(self) -> None:
        """Check that the engine is ready; raise `EngineUnavailable` otherwise."""
        await self.model()

    async def aclose(self) -> None:
        """Release connections, threads and memory; running jobs end."""


# The hint for `min_tokens` where an engine cannot ban end tokens for a part of the answer.
ALWAYS_OR_NEVER = (
    "It cannot ban end tokens for the first tokens of a response only. Omit the field, or ban them "
    "for the whole response with 'ignore_eos': true."
)

# The extras by their names in requests.
LLAMA_CPP_EXTRAS = frozenset(
    {
        "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "repeat_penalty", "repeat_last_n", "ignore_eos",
        "adaptive_target", "adaptive_decay",
    }
)  # fmt: skip
