"""The canonical job, the canonical stream, and the protocol that every engine's translator speaks.

Engines differ only behind `Backend`: a job goes in as a `Generation`, events come out in batches.
What arrived together stays together in one batch, so that it can be sent together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from .turns import Party

Reason: TypeAlias = Literal["end", "stop", "length"]
GrammarKind: TypeAlias = Literal["gbnf", "json_schema", "regex", "lark"]


class Text(NamedTuple):
    """A stretch of prompt text; `parse_special` says whether control tokens in it count as such."""

    text: str
    parse_special: bool = True


TokenIds: TypeAlias = tuple[int, ...]
Content: TypeAlias = TokenIds | Text


# Extras that say how many of the last tokens are looked at.
WINDOWS = frozenset({"repeat_last_n", "dry_penalty_last_n"})


# The sampling extras of llama.cpp, by the names that requests use.
LLAMA_CPP_EXTRAS = frozenset(
    {
        "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "repeat_penalty", "repeat_last_n", "ignore_eos",
    }
)  # fmt: skip


@dataclass(slots=True)
class Sampling:
    """How to pick tokens: OpenAI's own knobs, and the engine extras that the request named.

    `extras` holds only what the request named; everything else is neutral on every engine,
    whatever the engine's own defaults are.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def extras_within(self, context: int) -> Mapping[str, Any]:
        """The extras, with no window longer than the context.

        Nothing is behind it, and engines allocate as much as they are told: 8 GiB for 2**31 - 1.
        """
        if WINDOWS.isdisjoint(self.extras):
            return self.extras
        return {
            name: min(value, context) if name in WINDOWS else value
            for name, value in self.extras.items()
        }


MediaKind: TypeAlias = Literal["image", "audio"]
# What stands in a prompt for each of its media, in their order: in text, and among ids.
MEDIA = "\U000fffc0"
MEDIA_ID = -1


class Media(NamedTuple):
    """A picture or a sound of a prompt.

    Args:
        data: the file as it is.
        param: the request's field that it came in, for errors.
    """

    kind: MediaKind
    data: bytes
    param: str


class Preamble(NamedTuple):
    """What a model may write before its answer: what it thinks.

    Args:
        begin, end: what stands around it.
        is_open: whether the prompt has begun it already; else it may be missing.
        special: those of the two that are one token of the model's; text that is spelled like such
            a token is none.
    """

    begin: str
    end: str
    is_open: bool
    special: frozenset[str] = frozenset()


class Grammar(NamedTuple):
    """What a completion must look like.

    Args:
        kind: the language it is written in; a JSON schema is JSON.
        param: the request's field that it came in, for errors.
        after: what may come before it.
        is_own: whether it was made here, of tools: then it may be longer than a client's.
    """

    kind: GrammarKind
    text: str
    param: str
    after: Preamble | None = None
    is_own: bool = False


class Matcher(Protocol):
    """Finds the stop that ends a choice (`stops.StopMatcher`)."""

    @property
    def stop(self) -> str | None:
        """The stop that was found."""
        ...

    def advance(self, data: bytes, mark: bool = False) -> int:
        """Take what was generated next; how many bytes more no stop can take back."""
        ...

    def settle(self) -> int:
        """How many bytes were held back, when nothing more comes."""
        ...


@dataclass(slots=True)
class Prompt:
    """What a completion follows.

    Args:
        content: text, or token ids that are used verbatim (nothing is added to them).
        suffix: what follows the gap that is to be filled; the content is what comes before it.
        media: pictures and sounds; each stands as `MEDIA` in the content, or as `MEDIA_ID`.
        bos_count: how many ids at its beginning are not the client's own: a BOS.
        logprobs: how many alternatives to tell for each of its own tokens; None tells no tokens.
    """

    content: Content
    suffix: str | None = None
    media: tuple[Media, ...] = ()
    bos_count: int = 0
    logprobs: int | None = None


@dataclass(slots=True)
class Stops:
    """Strings that end a choice; the cut is made before the first that completes.

    Args:
        matcher: makes what finds them where not all of a choice's text counts; an engine, which
            would look everywhere, is not told of them then.
    """

    texts: tuple[str, ...] = ()
    matcher: Callable[[], Matcher] | None = None

    @property
    def for_engine(self) -> tuple[str, ...]:
        """Those that an engine may end a choice at by itself."""
        return self.texts if self.matcher is None else ()


@dataclass(slots=True)
class Generation:
    """One prompt and the choices wanted for it.

    Args:
        max_tokens: how many tokens to generate at most; None is to the end of the context.
        seeds: one per choice; its length is the number of choices. None is a random seed.
        preserved_tokens: tokens whose spelling is to appear in the text, although they are control
            tokens.
        logprobs: how many alternatives to tell for each generated token; None tells no tokens.
        owner: whose it is; what one owner's prompts have evaluated is not gone on from for another.
        grammar: what each choice must look like, None where it is free.
        party: the request that it belongs to, None where it is the only job of one.
        fingerprint: the model that it was made for; an engine that serves another one by then
            refuses it. Empty where it does not matter.
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
    party: Party | None = None
    fingerprint: str = ""


class Special(NamedTuple):
    """A spelling that the tokeniser takes for one token, wherever it stands.

    Args:
        control: whether that can be switched off (`parse_special`); it cannot for tokens that were
            added to the vocabulary as text.
    """

    spelling: str
    control: bool


class Alternative(NamedTuple):
    """A token that could have stood at a place, and how likely it was there.

    Args:
        spelling: its bytes; a control token's name.
        control: whether it is a control token, which adds no text.
        logprob: natural logarithm of the model's own probability, -inf where that is zero.
    """

    id: int
    spelling: bytes
    control: bool
    logprob: float


class Token(NamedTuple):
    """A token of the prompt or of a choice.

    Args:
        data: the bytes that it adds to the text; none for a control token that was generated.
        spelling: what a list of log-probabilities shows for it.
        control: whether it is a control token.
        logprob: as in `Alternative`; None for the first of a prompt, which has nothing before it.
        top: the most likely tokens at its place, most likely first; it is among them only if it
            is one of the most likely.
    """

    id: int
    data: bytes
    spelling: bytes
    control: bool
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class PromptTokens(NamedTuple):
    """The prompt's own tokens, before anything else, where the job asks for them.

    A BOS that was added to the prompt is not among them, nor is a space that the tokeniser put
    before a piece: their data, put together, is the prompt's text, control tokens spelled out.

    Args:
        choice: the first of the job's choices; it holds for all of them.
    """

    choice: int
    tokens: Sequence[Token]


class Piece(NamedTuple):
    """Bytes that were generated for a choice; they may end inside a character.

    Args:
        tokens: where the job asks for tokens, those whose data, put together, is `data`; a piece
            that only spells a stop string has none.
        mark: whether it is the spelling of one of the job's `preserved_tokens`, not text like it.
        token_count: how many tokens it is, where the engine tells.
    """

    choice: int
    data: bytes
    tokens: Sequence[Token] = ()
    mark: bool = False
    token_count: int = 0


class Finish(NamedTuple):
    """A choice has ended.

    Args:
        reason: `end` by an end token, `stop` by a stop string, `length` by a limit.
        stop: the stop string that the engine says it saw, None where it does not tell.
        prompt_tokens: tokens of the prompt without a BOS that was added to it.
        completion_tokens: tokens that begin before the cut; an end token is not counted.
        cached_tokens: how many of the prompt's tokens were reused from an earlier evaluation.
        end: the end token that closed the choice, where the job asks for tokens.
        inexact: what of the answer is only nearly right, by the names that a client knows.
    """

    choice: int
    reason: Reason
    stop: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    end: Token | None = None
    inexact: tuple[str, ...] = ()


Event: TypeAlias = PromptTokens | Piece | Finish
Batch: TypeAlias = Sequence[Event]


@dataclass(frozen=True, slots=True)
class Model:
    """What a backend serves.

    Args:
        name: how the engine calls the model.
        context: the longest prompt plus completion, in tokens.
        template: the model's own chat template (Jinja), None where it has none.
        bos_token, eos_token: spellings for the template; empty where unknown.
        adds_bos: whether a text prompt gets a BOS token in front.
        fingerprint: changes when weights, engine or configuration do.
        modified: when the model was made available, in seconds since 1970.
        media: what it takes beside text.
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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Where an engine differs, as tables.

    Args:
        engine: the engine's name for messages.
        extras: sampling extras that it takes, by the name the request uses.
        refused: fields it cannot honour at all, with the hint that the error gives.
        inexact: fields it honours only nearly.
        native: whether `Backend.native` can show the engine's own reply.
        late_logprobs: whether log-probabilities are known only when an answer has ended.
        grammars: the languages of grammars that it takes.
        plain_text: whether it can be given text in which control tokens do not count as such.
        media_among_ids: whether a prompt of ids may have media.
        counts_media: whether it tells how many tokens media come to.
        tells_special: whether it tells a preserved token from text that is spelled like it.
        free_grammars: whether a grammar costs nothing where it allows anything.
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
    counts_media: bool = True
    tells_special: bool = True
    free_grammars: bool = True


@dataclass(frozen=True, slots=True)
class NativeReply:
    """An engine's own answer: status, content type, and the body's bytes as they come."""

    status: int
    content_type: str
    body: AsyncIterator[bytes]


Stream: TypeAlias = AbstractAsyncContextManager[AsyncIterator[Batch]]


class Backend(Protocol):
    """One engine. All coroutines raise `LatimerError`s and nothing else on purpose."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, known before it was ever reached."""
        ...

    async def model(self) -> Model:
        """What it serves; asks the engine once and remembers the answer."""
        ...

    def open(self, job: Generation) -> Stream:
        """Start a job; leaving the context, or cancelling the task, ends the work in the engine.

        Errors that the engine finds before the first token are raised on entering.
        """
        ...

    def native(self, job: Generation, stream: bool) -> AbstractAsyncContextManager[NativeReply]:
        """Run a job of one choice and pass the engine's own reply on, untouched."""
        ...

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        """Token ids of a text; `add_special` puts a BOS in front where the model wants one."""
        ...

    async def detokenize(self, ids: TokenIds) -> bytes:
        """The text that a prompt of token ids stands for, control tokens spelled out."""
        ...

    async def pieces(self) -> Sequence[bytes] | None:
        """The bytes of every token by its id, none for control tokens; None: it does not tell."""
        ...

    async def specials(self) -> Sequence[Special]:
        """What the tokeniser takes for one token wherever it stands, as far as can be known."""
        ...

    async def health(self) -> None:
        """Return when the engine can answer; raises `EngineUnavailable` when it cannot."""
        ...

    async def aclose(self) -> None:
        """Release connections, threads and memory; running jobs end."""
        ...
