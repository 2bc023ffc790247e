"""One choice's events to its text, its tokens and its finish reason (sans-I/O)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from ..backends.base import Finish, Piece, PromptTokens, Token
from ..backends.errors import EngineError
from ..schemas.openai.common import CompletionTokensDetails, FinishReason, Usage
from .logprobs import Entry, Placer
from .text import TextAssembler

_DATA, _TOKENS = attrgetter("data"), attrgetter("tokens")


class Delta(NamedTuple):
    """What a client may see now: text, and the tokens that begin in it.

    Args:
        deltas: instead of text, what is added to a chat's message, with the tokens of each.
    """

    text: str
    entries: Sequence[Entry] = ()
    deltas: Sequence[tuple[Mapping[str, Any], Sequence[Entry]]] = ()


class Echo(NamedTuple):
    """What of the prompt a choice shows.

    Args:
        data: the prompt's bytes where they stand in front of the text; empty where they do not,
            or where the prompt's tokens come as an event.
        base: code points of the prompt in front of the first token's offset.
        keep_end: whether an end token has an entry of its own (contract 2.6.4).
    """

    data: bytes = b""
    base: int = 0
    keep_end: bool = False


_NO_ECHO = Echo()


class Choice:
    """Folds a choice's events; streamed replies send each result, plain ones join them."""

    __slots__ = ("_assembler", "_echo", "_placer", "_stops", "finish")

    def __init__(self, stops: Sequence[str], echo: Echo = _NO_ECHO) -> None:
        self._stops = stops
        self._echo = echo
        self._assembler = TextAssembler(stops)
        self._placer: Placer | None = None
        self.finish: Finish | None = None

    def start(self) -> Delta:
        """The echoed prompt, where it is known without the engine."""
        return Delta(self._assembler.prefix(self._echo.data) if self._echo.data else "")

    def prompt(self, event: PromptTokens) -> Delta:
        """The echoed prompt and its tokens, as the engine tells them."""
        entries = self._placed().place(event.tokens)
        text = self._assembler.prefix(b"".join(token.data for token in event.tokens))
        return Delta(text, entries)

    def take(self, pieces: Sequence[Piece]) -> Delta:
        """See `feed`."""
        if len(pieces) == 1:
            return self.feed(pieces[0].data, pieces[0].tokens)
        # Many tokens are put together here, so the loops are C's.
        tokens = list(chain.from_iterable(map(_TOKENS, pieces)))
        return self.feed(b"".join(map(_DATA, pieces)), tokens)

    def feed(self, data: bytes, tokens: Sequence[Token] = ()) -> Delta:
        """What may be seen after some more was generated; nothing while all of it is held back."""
        text = self._assembler.feed(data)
        if tokens:
            self._placed().add(tokens)
        # A token without its text would be one for nothing: it comes with what follows.
        if self._placer is None or not text:
            return Delta(text)
        return Delta(text, self._placer.take(self._assembler.released))

    def end(self, event: Finish) -> tuple[Delta, FinishReason]:
        """The rest, and why it ended; a stop string wins over a limit.

        Raises:
            EngineError: the engine stopped at a string that nobody asked for.
        """
        self.finish = event
        placer = self._placer
        if self._assembler.stop is not None:
            entries = placer.take(self._assembler.released) if placer is not None else ()
            return Delta("", entries), "stop"
        if event.reason == "stop" and event.stop not in self._stops:
            raise EngineError(
                f"The engine stopped at {event.stop!r}, which the request does not name: is a "
                "reverse prompt set on the server?"
            )
        rest = self._assembler.flush()
        if self._echo.keep_end and event.end is not None:
            placer = self._placed()
            placer.add((event.end,))
        reason: FinishReason = "length" if event.reason == "length" else "stop"
        if placer is None:
            return Delta(rest), reason
        # A control token that a stop spells is the stop: it adds no text, and is cut off.
        end = self._assembler.released
        return Delta(
            rest, placer.take(end) if event.reason == "stop" else placer.take_all()
        ), reason

    def _placed(self) -> Placer:
        if self._placer is None:
            self._placer = Placer(self._echo.base)
        return self._placer


def usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """Token counts over all choices; each prompt counts once (contract 2.2)."""
    firsts = finishes[::choices_per_prompt]
    prompt = sum([finish.prompt_tokens for finish in firsts])
    completion = sum([finish.completion_tokens for finish in finishes])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def detailed_usage_of(finishes: Sequence[Finish], choices_per_prompt: int) -> Usage:
    """The same with the details that chat replies carry (contract 3.3)."""
    cached = sum([finish.cached_tokens for finish in finishes[::choices_per_prompt]])
    return {
        **usage_of(finishes, choices_per_prompt),
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": _NO_DETAILS,
    }


_NO_DETAILS: CompletionTokensDetails = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
