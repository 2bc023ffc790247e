"""Tokens with log-probabilities from llama-server's stream (sans-I/O).

An entry's own text is the text sent so far, so a token's bytes come from the vocabulary by its id.

Tokens that end inside a character have neither event nor entry, but `tokens_predicted` counts them.
They are derived from the bytes that are sent once the character is complete. If that is impossible
(broken UTF-8, a limit inside a character), the same request without streaming returns all ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from ..base import Finish, Generation, Piece, Reason, Token
from ..errors import EngineError
from ..stops import TokenCut
from .scoring import alternatives, logprob_of, speculative
from .translate import ENGINE, Vocabulary, ends_inside, heads, none_of


class _Step(NamedTuple):
    """An event's token, and the number of tokens without an event before it."""

    missing: int
    token: Token


class TokenStream:
    """A translator of one choice's native events to tokens.

    Tokens without an event get no log-probability here; the caller has to score them.

    Attributes:
        prompt_tokens: the number of the client's own prompt tokens.
        ids: the ids of all tokens so far.
        unsettled: the last event, if `settle` has to be called with the ids of the whole answer.
    """

    def __init__(
        self, job: Generation, choice: int, prompt_tokens: int, vocabulary: Vocabulary
    ) -> None:
        self._job = job
        self._choice = choice
        self.prompt_tokens = prompt_tokens
        self._vocabulary = vocabulary
        self._cut = TokenCut(job.stops.for_engine)
        self.preserved = vocabulary.spelled(job.preserved_tokens)
        self._predicted = 0
        self._cached = 0
        self._steps: list[_Step] = []
        self._known = b""
        self._content = b""
        self._last: list[Token] = []
        self.ids: list[int] = []
        self.finish: Finish | None = None
        self.unsettled: dict[str, Any] | None = None

    def feed(self, events: Sequence[dict[str, Any]]) -> list[Token]:
        """Translate the events of a chunk; return the tokens that are certain."""
        out: list[Token] = []
        for event in events:
            out += self._end(event) if event["stop"] else self._step(event)
        self._note(out)
        return out

    def settle(self, ids: Sequence[int]) -> list[Token]:
        """Return the remaining tokens, from the ids of the same answer without streaming.

        Raises:
            EngineError: the ids are those of another answer.
        """
        event = self.unsettled
        assert event is not None
        start = len(self.ids)
        known = {start + at: token for at, token in enumerate(self._last)}
        at = start + len(self._last)
        for step in self._steps:
            at += step.missing + 1
            known[at - 1] = step.token
        same = all(at < len(ids) and ids[at] == token.id for at, token in known.items())
        if not same or list(ids[:start]) != self.ids or len(ids) != event["tokens_predicted"]:
            raise EngineError(f"{ENGINE} did not return the tokens that it generated.")
        tokens = [known.get(at) or self._unreported(ids[at]) for at in range(start, len(ids))]
        self._steps, self._last, self.unsettled = [], [], None
        end = tokens.pop() if event["stop_type"] == "eos" else None
        self._set_finish(event, end)
        self._note(tokens)
        return tokens

    def _unreported(self, token: int) -> Token:
        spelling, control = self._vocabulary.token(token)
        return Token(token, self._data(token, spelling, control), spelling, control, None)

    def _data(self, token: int, spelling: bytes, control: bool) -> bytes:
        return b"" if control and token not in self.preserved else spelling

    def _note(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self.ids.append(token.id)
            self._cut.add(token.data)
        finish = self.finish
        stop = self._cut.stop
        if finish is not None and (finish.reason == "stop" or stop is not None):
            self._cut.settle()
            self.finish = finish._replace(completion_tokens=self._cut.tokens)

    def stopped(self) -> Finish:
        """Return the end of a choice that its reader has cut."""
        return Finish(self._choice, "stop", None, self.prompt_tokens, len(self.ids), self._cached)

    def _step(self, event: dict[str, Any]) -> list[Token]:
        predicted = event["tokens_predicted"]
        missing, self._predicted = predicted - self._predicted - 1, predicted
        if "timings" in event:
            self._cached = min(event["timings"]["cache_n"], self.prompt_tokens)
        entries, ids = event.get("completion_probabilities"), event["tokens"]
        if type(ids) is not list:
            raise none_of(event)
        if not entries or not ids:
            raise speculative()
        entry = entries[0]
        spelling, control = self._vocabulary.token(entry["id"])
        data = self._data(entry["id"], spelling, control)
        top = alternatives(entry, self._job.logprobs or 0, self._vocabulary)
        token = Token(entry["id"], data, spelling, control, logprob_of(entry), top)
        self._steps.append(_Step(missing, token))
        self._content += event["content"].encode()
        if any(step.missing for step in self._steps):
            return self._solved(self._content, False) if event["content"] else []
        self._steps.clear()
        if event["content"]:
            self._known = self._content = b""
        else:
            self._known += data
        return self._sure([token])

    def _sure(self, tokens: list[Token]) -> list[Token]:
        """Return the tokens, but hold back a final control token, which may be the end token."""
        tokens = self._last + tokens
        unsure = tokens and tokens[-1].control and tokens[-1].id not in self.preserved
        self._last = [tokens.pop()] if unsure else []
        return tokens

    def _solved(self, content: bytes, overrun: bool) -> list[Token]:
        """Return the tokens of the waiting steps, if the sent text determines them."""
        if not content.startswith(self._known):
            return []
        sent = content[len(self._known) :]
        ways = list(islice(_ways(self._steps, sent, 0, self._vocabulary, overrun), 2))
        if len(ways) != 1:
            return []
        self._steps.clear()
        self._known = self._content = b""
        return self._sure(ways[0])

    def _end(self, event: dict[str, Any]) -> list[Token]:
        kind = event["stop_type"]
        tokens: list[Token] = []
        if self._steps and kind == "word":
            tokens = self._solved(self._content + event["stopping_word"].encode(), True)
        elif self._steps:
            tokens = self._sure(self._held())
        if self._steps or event["tokens_predicted"] > self._predicted:
            self.unsettled = event
            return tokens
        last, self._last = self._last, []
        self._set_finish(event, last.pop() if kind == "eos" and last else None)
        return tokens + last

    def _set_finish(self, event: dict[str, Any], end: Token | None) -> None:
        kind = event["stop_type"]
        cached = event["timings"]["cache_n"] if "timings" in event else 0
        reason: Reason = {"eos": "end", "word": "stop"}.get(kind, "length")  # type: ignore[assignment]
        self.finish = Finish(
            self._choice,
            reason,
            event["stopping_word"] if kind == "word" else None,
            self.prompt_tokens,
            event["tokens_predicted"] - (kind == "eos"),
            max(min(cached, self.prompt_tokens), 0),
            end,
        )

    def _held(self) -> list[Token]:
        """Return the waiting steps' tokens at a limit.

        The server held their text back as a possible part of a stop sequence.
        """
        tokens: list[Token] = []
        for step in self._steps:
            data = step.token.data
            found = {b""} if not step.missing else {
                head for stop in self._job.stops.texts for head in heads(stop.encode(), data)
            }  # fmt: skip
            ways = [
                way
                for head in found
                for way in _ways([step], head + data, 0, self._vocabulary, False)
            ]
            if len(ways) != 1:
                return []
            tokens += ways[0]
        self._steps.clear()
        return tokens


def pieces_of(choice: int, tokens: Sequence[Token], preserved: Mapping[int, bytes]) -> list[Piece]:
    """Join tokens to pieces; each preserved token is a separate piece."""
    groups = groupby(enumerate(tokens), lambda one: one[0] if one[1].id in preserved else -1)
    pieces = []
    for at, group in groups:
        part = [token for _, token in group]
        data = b"".join(token.data for token in part)
        pieces.append(Piece(choice, data, part, at >= 0, len(part)))
    return pieces


def _ways(
    steps: Sequence[_Step], sent: bytes, position: int, vocabulary: Vocabulary, overrun: bool
) -> Iterator[list[Token]]:
    """Yield each list of tokens with which the steps can have produced the sent bytes.

    Args:
        overrun: True if the last step may have more bytes than were sent, cut off by a stop.
    """
    if not steps:
        if position == len(sent) or overrun:
            yield []
        return
    step, rest = steps[0], steps[1:]
    for missing in _fillings(step.missing, sent, position, vocabulary):
        at = position + sum(len(token.data) for token in missing)
        data = step.token.data
        cut = overrun and not rest and data.startswith(sent[at:])
        if sent.startswith(data, at) or cut:
            for others in _ways(rest, sent, at + len(data), vocabulary, overrun):
                yield [*missing, step.token, *others]


def _fillings(
    count: int, sent: bytes, position: int, vocabulary: Vocabulary
) -> Iterator[list[Token]]:
    """Yield each list of `count` tokens at a position that all end inside a character."""
    if not count:
        yield []
        return
    for end in range(position + 1, len(sent) + 1):
        data = sent[position:end]
        if not ends_inside(sent[:end]):
            continue
        for token in vocabulary.fragments.get(data, ()):
            for others in _fillings(count - 1, sent, end, vocabulary):
                yield [Token(token, data, data, False, None), *others]
