"""Turn the events of one choice into deltas and a finish reason (sans-I/O)."""

from __future__ import annotations

import codecs
import secrets
import string
from collections import deque
from collections.abc import Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from ...backends.base import Finish, Piece, PromptTokens, Token
from ...backends.errors import EngineError
from ...backends.stops import begun_before
from ...schemas.openai.common import FinishReason
from .logprobs import Entry, Placer
from .parts import Cutter, Kind, MessageFormat, Part
from .text import TextAssembler

_DATA, _TOKENS = attrgetter("data"), attrgetter("tokens")

_ALPHABET = string.ascii_letters + string.digits

_decoder = codecs.getincrementaldecoder("utf-8")


class Delta(NamedTuple):
    """An addition to a choice: text of one kind, and the tokens that begin in it.

    Args:
        kind: see `parts.Part`; never `nothing`.
        call_id: the id of the tool call that the delta begins; empty if it begins none.
    """

    text: str
    entries: Sequence[Entry] = ()
    kind: Kind = "content"
    call_id: str = ""


class Echo(NamedTuple):
    """The part of the prompt that a choice shows.

    Args:
        data: the bytes of the echoed prompt; empty if the prompt is not echoed, or if it comes as
            a `PromptTokens` event.
        base: the text offset of the first token, in code points.
        keep_end: True if an end token has an entry of its own (contract 2.6.4).
    """

    data: bytes = b""
    base: int = 0
    keep_end: bool = False


NO_ECHO = Echo()


class Choice:
    """A choice that takes events and returns deltas.

    A stream sends each delta. A plain response joins them.

    Args:
        form: how to split the text into parts; None if all of it is content.
        late: True if the tokens come after the text that they belong to.

    Attributes:
        finish: the last event of the choice, or None before it has come.
        reasoning: the reasoning of the choice.
    """

    __slots__ = ("_assembler", "_echo", "_parts", "_placer", "_stops", "finish")

    def __init__(
        self,
        stops: Sequence[str],
        echo: Echo = NO_ECHO,
        form: MessageFormat | None = None,
        late: bool = False,
    ) -> None:
        self._stops = stops
        self._echo = echo
        self._parts = None if form is None else _Parts(form, stops, late)
        self._assembler = TextAssembler(stops if form is None else ())
        self._placer: Placer | None = None
        self.finish: Finish | None = None

    def start(self) -> Sequence[Delta]:
        """Return the echoed prompt if it is known without the engine."""
        return self._delta(self._assembler.prefix(self._echo.data)) if self._echo.data else ()

    def prompt(self, event: PromptTokens) -> Sequence[Delta]:
        """Return the echoed prompt and its tokens, as the engine reports them."""
        entries = self._placed().place(event.tokens)
        text = self._assembler.prefix(b"".join(token.data for token in event.tokens))
        return self._delta(text, entries)

    def read(self, piece: Piece) -> int | None:
        """Parse a piece of a choice with parts before `take` shows it.

        Returns:
            The number of bytes before the cut, if a stop sequence ends the choice; else None.
        """
        assert self._parts is not None
        return self._parts.read(piece)

    def take(self, pieces: Sequence[Piece]) -> Sequence[Delta]:
        """Return the deltas of these pieces; none while all text is held back."""
        if self._parts is not None:
            return self._taken(self._parts, pieces)
        if len(pieces) == 1:
            return self.feed(pieces[0].data, pieces[0].tokens)
        # There can be many tokens here, so these loops run in C.
        tokens = list(chain.from_iterable(map(_TOKENS, pieces)))
        return self.feed(b"".join(map(_DATA, pieces)), tokens)

    def feed(self, data: bytes, tokens: Sequence[Token] = ()) -> Sequence[Delta]:
        """Return the deltas of these bytes, for a choice that has only content."""
        text = self._assembler.feed(data)
        if tokens:
            self._placed().add(tokens)
        # Tokens are not sent without text: they wait for the text that follows.
        if not text:
            return ()
        if self._placer is None:
            return (Delta(text),)
        return (Delta(text, self._placer.take(self._assembler.released)),)

    def end(self, event: Finish) -> tuple[Sequence[Delta], FinishReason]:
        """Return the last deltas and the finish reason; a stop sequence wins over a limit.

        Raises:
            EngineError: the engine stopped at a string that the request does not name.
        """
        parts = self._parts
        if parts is not None and parts.stop is not None:
            event = parts.cut(event)
        self.finish = event
        rest: Sequence[Delta] = () if parts is None else parts.end(self._placer)
        stop = self._assembler.stop if parts is None else parts.stop
        if stop is None and event.reason == "stop" and event.stop not in self._stops:
            raise EngineError(
                f"The engine stopped at {event.stop!r}, which is not a stop sequence of the "
                "request. Is a reverse prompt set on the engine?"
            )
        if parts is None:
            rest = self._rest(event)
        if stop is None and event.reason == "length":
            return rest, "length"
        return rest, "stop" if parts is None else parts.reason

    @property
    def reasoning(self) -> str:
        """The reasoning of the choice; empty if it has none."""
        return "" if self._parts is None else "".join(self._parts.reasoning)

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens; None if the engine does not report it."""
        return 0 if self._parts is None else self._parts.reasoning_tokens()

    def _taken(self, parts: _Parts, pieces: Sequence[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.tokens:
                self._placed().add(piece.tokens)
            deltas += parts.take(piece, self._placer)
        return deltas

    def _rest(self, event: Finish) -> Sequence[Delta]:
        """Return the content that was held back."""
        placer, assembler = self._placer, self._assembler
        if assembler.stop is not None:
            return () if placer is None else self._delta("", placer.take(assembler.released))
        rest = assembler.flush()
        if self._echo.keep_end and event.end is not None:
            placer = self._placed()
            placer.add((event.end,))
        if placer is None:
            return self._delta(rest)
        # A control token can be the stop sequence. It adds no text and is cut off.
        stopped = event.reason == "stop"
        return self._delta(rest, placer.take(assembler.released) if stopped else placer.take_all())

    def _delta(self, text: str, entries: Sequence[Entry] = ()) -> Sequence[Delta]:
        return (Delta(text, entries),) if text or entries else ()

    def _placed(self) -> Placer:
        if self._placer is None:
            self._placer = Placer(self._echo.base)
        return self._placer


class _Parts:
    """The parts of one choice, each decoded to text with the tokens that begin in it.

    Args:
        late: True if the tokens come after the text that they belong to.
    """

    def __init__(self, form: MessageFormat, stops: Sequence[str], late: bool) -> None:
        self._form = form
        self._cutter = Cutter(form.parser(), stops)
        self._late = late
        # The parts of pieces that were read ahead, and the number of bytes of all others.
        self._ahead: deque[Sequence[Part]] = deque()
        self._shown_bytes = 0
        # The positions at which tokens begin, up to a stop sequence; None if they are not known.
        self._begun: list[int] | None = [] if stops else None
        self._decoders = {kind: _decoder("replace") for kind in ("content", "reasoning")}
        # Tokens of markers. They are shown with a tool call that follows, or else dropped.
        self._marker: list[Entry] = []
        # Tokens whose text is still incomplete.
        self._incomplete: list[Entry] = []
        self._has_content = False
        self._calls = 0
        self._position = 0
        # The position and the token count of each piece that may be reasoning.
        self._starts: list[tuple[int, int]] = []
        self._answer_start = 0
        self.reasoning: list[str] = []

    @property
    def stop(self) -> str | None:
        return self._cutter.stop

    @property
    def reason(self) -> FinishReason:
        """The finish reason if no limit ended the choice."""
        return self._form.called if self._calls else "stop"

    def read(self, piece: Piece) -> int | None:
        """Parse a piece ahead; see `Choice.read`."""
        if self.stop is not None:
            # The engine was late to end the choice.
            self._ahead.append(())
            return None
        self._ahead.append(self._parsed(piece))
        return None if self.stop is None else self._cutter.released

    def take(self, piece: Piece, placer: Placer | None) -> list[Delta]:
        if not self._late:
            return self._shown(
                self._ahead.popleft() if self._ahead else self._parsed(piece), placer
            )
        if not piece.tokens:
            return []
        self._count(piece.tokens, 0)
        return self._shown(self._rest(), placer)

    def end(self, placer: Placer | None) -> list[Delta]:
        deltas = self._shown([*self._rest(), *self._cutter.end()], placer)
        # An answer has content or tool calls. The tokens of a character that the limit cut off
        # were generated, so they are shown.
        if not self._calls and (self._incomplete or not self._has_content):
            deltas.append(Delta("", self._incomplete))
        return deltas

    def cut(self, event: Finish) -> Finish:
        """Return the end of a choice that a stop sequence has cut, with the tokens before it."""
        count = event.completion_tokens
        if self._begun is not None:
            count = begun_before(self._cutter.released, self._begun)
        return event._replace(reason="stop", stop=self.stop, completion_tokens=count, end=None)

    def reasoning_tokens(self) -> int | None:
        """Return the number of tokens before the answer.

        None if the engine does not report token counts.
        """
        if not self.reasoning:
            return 0
        end = self._answer_start if self._answers else self._position
        counts = [count for start, count in self._starts if start < end]
        return sum(counts) if all(counts) else None

    @property
    def _answers(self) -> bool:
        """True if the answer has begun, so that the reasoning is over."""
        return self._has_content or self._calls > 0

    def _parsed(self, piece: Piece) -> list[Part]:
        at = self._position
        if self._begun is not None:
            self._note(piece, at)
        if not self._answers and not self._late and (piece.data or piece.tokens):
            if piece.tokens:
                self._count(piece.tokens, at)
            else:
                start = _visible(at, piece.data) if piece.token_count == 1 else at
                self._starts.append((start, piece.token_count))
        self._position += len(piece.data)
        parts = self._cutter.feed(piece.data, piece.mark)
        if self._begun and piece.starts and self.stop is not None:
            # The last token of the piece with the cut counts as if it began with the piece.
            self._begun[-1] = at
        return parts

    def _note(self, piece: Piece, at: int) -> None:
        """Note at which positions the tokens of a piece begin."""
        assert self._begun is not None
        if piece.tokens:
            for token in piece.tokens:
                self._begun.append(at)
                at += len(token.data)
        elif piece.token_count:
            self._begun += [at + start for start in piece.starts or (0,) * piece.token_count]
        else:
            self._begun = None

    def _count(self, tokens: Sequence[Token], at: int) -> None:
        """Note the tokens that may be reasoning."""
        for token in tokens:
            self._starts.append((_visible(at, token.data), 1))
            at += len(token.data)

    def _rest(self) -> list[Part]:
        """Return all parts that were read ahead; those of one kind that follow another are one."""
        parts: list[Part] = []
        for kind, group in groupby(chain.from_iterable(self._ahead), attrgetter("kind")):
            same = list(group)
            if kind == "call":
                parts += same
            else:
                data = b"".join(part.data for part in same)
                parts.append(Part(kind, data, sum(part.size for part in same)))
        self._ahead.clear()
        return parts

    def _shown(self, parts: Sequence[Part], placer: Placer | None) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            start = self._shown_bytes
            released = self._shown_bytes = start + part.size
            if part.kind == "nothing":
                # A token such as " I" can begin in it and belong to the text that follows.
                self._marker += placer.take_whole(released) if placer is not None else []
                continue
            entries = placer.take(released) if placer is not None else []
            if part.kind in ("call", "arguments"):
                entries = self._marker + entries
            self._marker = []
            # Tokens of reasoning are not shown.
            entries = self._incomplete + entries if part.kind != "reasoning" else []
            text = self._text(part, start)
            self._incomplete = entries if text is None else []
            if text is not None:
                call_id = new_call_id() if part.kind == "call" else ""
                deltas.append(Delta(text, entries, part.kind, call_id))
        return deltas

    def _text(self, part: Part, start: int) -> str | None:
        """Return the text of a part, or None if it has no text to show."""
        if part.kind != "reasoning" and not self._answers:
            self._answer_start = start
        if part.kind == "call":
            self._calls += 1
            self._decoders["arguments"] = _decoder("replace")
        if part.kind in ("call", "arguments") and self._calls > 1 and not self._form.parallel:
            return None
        if part.kind == "call":
            return part.data.decode(errors="replace")
        self._has_content = self._has_content or part.kind == "content"
        text = self._decoders[part.kind].decode(part.data)
        if part.kind == "reasoning":
            self.reasoning.append(text)
        return text or None


def _visible(start: int, data: bytes) -> int:
    """Return the position of a token's first byte that is not whitespace, if it has one.

    Whitespace before an answer is dropped, but a token such as " I" belongs to the answer.
    """
    bare = data.lstrip()
    return start + len(data) - len(bare) if bare else start


def new_call_id() -> str:
    """Return a random id in the format of OpenAI's tool calls."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))
