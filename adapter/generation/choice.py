"""One choice's events to what a client may see of it, and its finish reason (sans-I/O)."""

from __future__ import annotations

import codecs
import secrets
import string
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ...backends.base import Finish, Piece, PromptTokens, Token
from ...backends.errors import EngineError
from ...schemas.openai.common import FinishReason
from .logprobs import Entry, Placer
from .parts import Cutter, Kind, MessageFormat, Part
from .text import TextAssembler

_DATA, _TOKENS = attrgetter("data"), attrgetter("tokens")

_ALPHABET = string.ascii_letters + string.digits

_decoder = codecs.getincrementaldecoder("utf-8")


class Delta(NamedTuple):
    """What is added to a choice: some text of one kind, and the tokens that begin in it.

    Args:
        kind: see `parts.Part`; never `nothing`.
        call_id: the id of the call that it begins.
    """

    text: str
    entries: Sequence[Entry] = ()
    kind: Kind = "content"
    call_id: str = ""


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


NO_ECHO = Echo()


class Choice:
    """Takes a choice's events; streamed replies send each delta, plain ones put them together.

    Args:
        form: how it is taken apart, None where all of it is content.

    Attributes:
        finish: its last event, once that has come.
        reasoning: what it thought.
    """

    __slots__ = ("_assembler", "_echo", "_parts", "_placer", "_stops", "finish")

    def __init__(
        self, stops: Sequence[str], echo: Echo = NO_ECHO, form: MessageFormat | None = None
    ) -> None:
        self._stops = stops
        self._echo = echo
        self._parts = None if form is None else _Parts(form, stops)
        self._assembler = TextAssembler(stops if form is None else ())
        self._placer: Placer | None = None
        self.finish: Finish | None = None

    def start(self) -> Sequence[Delta]:
        """The echoed prompt, where it is known without the engine."""
        return self._delta(self._assembler.prefix(self._echo.data)) if self._echo.data else ()

    def prompt(self, event: PromptTokens) -> Sequence[Delta]:
        """The echoed prompt and its tokens, as the engine tells them."""
        entries = self._placed().place(event.tokens)
        text = self._assembler.prefix(b"".join(token.data for token in event.tokens))
        return self._delta(text, entries)

    def take(self, pieces: Sequence[Piece]) -> Sequence[Delta]:
        """What may be seen after some more was generated; nothing while all is held back."""
        if self._parts is not None:
            return [delta for piece in pieces for delta in self._taken(self._parts, piece)]
        if len(pieces) == 1:
            return self.feed(pieces[0].data, pieces[0].tokens)
        # Many tokens are put together here, so the loops are C's.
        tokens = list(chain.from_iterable(map(_TOKENS, pieces)))
        return self.feed(b"".join(map(_DATA, pieces)), tokens)

    def feed(self, data: bytes, tokens: Sequence[Token] = ()) -> Sequence[Delta]:
        """See `take`, where all is content."""
        text = self._assembler.feed(data)
        if tokens:
            self._placed().add(tokens)
        # A token without its text would be one for nothing: it comes with what follows.
        if not text:
            return ()
        if self._placer is None:
            return (Delta(text),)
        return (Delta(text, self._placer.take(self._assembler.released)),)

    def end(self, event: Finish) -> tuple[Sequence[Delta], FinishReason]:
        """The rest, and why it ended; a stop string wins over a limit.

        Raises:
            EngineError: the engine stopped at a string that nobody asked for.
        """
        self.finish = event
        parts = self._parts
        rest: Sequence[Delta] = () if parts is None else parts.end(self._placer)
        stop = self._assembler.stop if parts is None else parts.stop
        if stop is None and event.reason == "stop" and event.stop not in self._stops:
            raise EngineError(
                f"The engine stopped at {event.stop!r}, which the request does not name: is a "
                "reverse prompt set on the server?"
            )
        if parts is None:
            rest = self._rest(event)
        if stop is None and event.reason == "length":
            return rest, "length"
        return rest, "stop" if parts is None else parts.reason

    @property
    def reasoning(self) -> str:
        """What it thought."""
        return "" if self._parts is None else "".join(self._parts.reasoning)

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens it thought; None where the engine does not tell."""
        return 0 if self._parts is None else self._parts.reasoning_tokens()

    def _taken(self, parts: _Parts, piece: Piece) -> list[Delta]:
        if piece.tokens:
            self._placed().add(piece.tokens)
        return parts.take(piece, self._placer)

    def _rest(self, event: Finish) -> Sequence[Delta]:
        """What of content was held back."""
        placer, assembler = self._placer, self._assembler
        if assembler.stop is not None:
            return () if placer is None else self._delta("", placer.take(assembler.released))
        rest = assembler.flush()
        if self._echo.keep_end and event.end is not None:
            placer = self._placed()
            placer.add((event.end,))
        if placer is None:
            return self._delta(rest)
        # A control token that a stop spells is the stop: it adds no text, and is cut off.
        stopped = event.reason == "stop"
        return self._delta(rest, placer.take(assembler.released) if stopped else placer.take_all())

    def _delta(self, text: str, entries: Sequence[Entry] = ()) -> Sequence[Delta]:
        return (Delta(text, entries),) if text or entries else ()

    def _placed(self) -> Placer:
        if self._placer is None:
            self._placer = Placer(self._echo.base)
        return self._placer


class _Parts:
    """A choice whose text is taken apart: each part as text, with the tokens that begin in it."""

    def __init__(self, form: MessageFormat, stops: Sequence[str]) -> None:
        self._form = form
        self._cutter = Cutter(form.parser(), stops)
        self._decoders = {kind: _decoder("replace") for kind in ("content", "reasoning")}
        # Tokens of markers, which are shown with the call that they begin, if with any.
        self._marker: list[Entry] = []
        # Those of which no text is complete yet.
        self._incomplete: list[Entry] = []
        self._said = False
        self._calls = 0
        self._position = 0
        # Where pieces that may be thoughts begin, and how many tokens each is.
        self._starts: list[tuple[int, int]] = []
        self._answer_start = 0
        self.reasoning: list[str] = []

    @property
    def stop(self) -> str | None:
        return self._cutter.stop

    @property
    def reason(self) -> FinishReason:
        """Why it ended, where no limit ended it."""
        return self._form.called if self._calls else "stop"

    def take(self, piece: Piece, placer: Placer | None) -> list[Delta]:
        if not self._answers:
            at = self._position
            if piece.tokens:
                for token in piece.tokens:
                    self._starts.append((at, 1))
                    at += len(token.data)
            else:
                self._starts.append((at, piece.token_count))
        self._position += len(piece.data)
        return self._shown(self._cutter.feed(piece.data, piece.mark), placer)

    def end(self, placer: Placer | None) -> list[Delta]:
        deltas = self._shown(self._cutter.end(), placer)
        # An answer has content or calls. Of a character that the limit cut off the tokens were
        # generated all the same.
        if not self._calls and (self._incomplete or not self._said):
            deltas.append(Delta("", self._incomplete))
        return deltas

    def reasoning_tokens(self) -> int | None:
        """Tokens that begin before the answer; None where the engine does not tell how many."""
        if not self.reasoning:
            return 0
        end = self._answer_start if self._answers else self._position
        counts = [count for start, count in self._starts if start < end]
        return sum(counts) if all(counts) else None

    @property
    def _answers(self) -> bool:
        """Whether the answer has begun: what was thought is over."""
        return self._said or self._calls > 0

    def _shown(self, parts: Sequence[Part], placer: Placer | None) -> list[Delta]:
        deltas: list[Delta] = []
        released = self._cutter.released - sum(part.size for part in parts)
        for part in parts:
            start, released = released, released + part.size
            entries = placer.take(released) if placer is not None else []
            if part.kind == "nothing":
                self._marker += entries
                continue
            if part.kind in ("call", "arguments"):
                entries = self._marker + entries
            self._marker = []
            # Nobody sees the tokens of a thought.
            entries = self._incomplete + entries if part.kind != "reasoning" else []
            text = self._text(part, start)
            self._incomplete = entries if text is None else []
            if text is not None:
                call_id = new_call_id() if part.kind == "call" else ""
                deltas.append(Delta(text, entries, part.kind, call_id))
        return deltas

    def _text(self, part: Part, start: int) -> str | None:
        """The text of a part, None where nothing of it can be seen yet."""
        if part.kind != "reasoning" and not self._answers:
            self._answer_start = start
        if part.kind == "call":
            self._calls += 1
            self._decoders["arguments"] = _decoder("replace")
        if part.kind in ("call", "arguments") and self._calls > 1 and not self._form.parallel:
            return None
        if part.kind == "call":
            return part.data.decode(errors="replace")
        self._said = self._said or part.kind == "content"
        text = self._decoders[part.kind].decode(part.data)
        if part.kind == "reasoning":
            self.reasoning.append(text)
        return text or None


def new_call_id() -> str:
    """An id as OpenAI's calls have."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))
