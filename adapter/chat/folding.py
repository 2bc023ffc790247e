"""Fold messages whose order a chat template rejects into messages that it accepts (pure).

OpenAI accepts roles in any order; many templates do not. Each step below is taken only if the
template needs it (`profile.detect_message_rules` finds out), in this order:

1. System messages at the head are joined.
2. Neighbours of one role are merged.
3. Any other system message moves into the next user message, with its role in front of it.
4. If no user message follows directly, one is added in its place. It never moves to the head.
5. An empty message is added where the template requires the other role.
6. Several calls of one message become several messages, each followed by its result.
7. The content of a message with a call becomes a message of its own, before the call. Its role is
   `model` if the template then begins a turn for the call. Otherwise step 5 can add a message.
8. Reasoning of a message with content and a call moves to the beginning of the content.
9. Arguments that are text become an object with one key.

Folding of a message depends on the messages before it and the system messages around it. The prompt
of a conversation therefore begins the prompt of its continuation, and the prompt cache is used.
Step 7 is an exception for templates that omit the content only if an answer follows: their prompt
changes at that place anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple, TypeAlias

Turn: TypeAlias = dict[str, Any]

SYSTEM = ("system", "developer")
# The name that some templates give the assistant's role.
MODEL = "model"
_REASONING = ("reasoning_content", "thinking")
_TEXTS = ("content", *_REASONING)
# The calls of a message, and their results if they are a part of it.
_CALLING = ("tool_calls", "tool_responses")
_BETWEEN = "\n\n"


class MessageRules(NamedTuple):
    """The orders of messages that a template accepts, and renders without omitting a message.

    Args:
        system: a system message at the head.
        kept: a system message at the head of a conversation that ends with another message than
            the user's.
        systems: several system messages at the head.
        later: a system message after other messages.
        users: two user messages in a row.
        assistants: two assistant messages in a row.
        calls_after_text: an assistant message with calls directly after one without.
        begins: an assistant message before any user message.
        alone: a conversation without a user message.
        uncounted: any message after a tool result; otherwise user and assistant messages must
            alternate, without counting tool results and messages with calls.
        parallel: several calls in one message.
        text_and_call: content and a call in one message.
        text_and_earlier_call: the same, if an answer follows later.
        reasoned: reasoning, content and a call in one message.
        malformed: arguments that are text instead of an object.
        model: the role `model`, for text of the assistant before a message with calls.
    """

    system: bool = True
    kept: bool = True
    systems: bool = True
    later: bool = True
    users: bool = True
    assistants: bool = True
    calls_after_text: bool = True
    begins: bool = True
    alone: bool = True
    uncounted: bool = True
    parallel: bool = True
    text_and_call: bool = True
    text_and_earlier_call: bool = True
    reasoned: bool = True
    malformed: bool = True
    model: bool = True


ANY = MessageRules()
# The fields from this one on affect messages with calls only.
_CALLS = MessageRules._fields.index("parallel")
STRICTEST = MessageRules(*[False] * len(MessageRules._fields))


def strictest(order: MessageRules) -> MessageRules:
    """Return the order for a template that rejects messages which `order` accepts."""
    return STRICTEST._replace(
        text_and_call=order.text_and_call, text_and_earlier_call=order.text_and_earlier_call
    )


def fold(turns: Sequence[Turn], order: MessageRules, null: bool = False) -> Sequence[Turn]:
    """Return the messages in an order that the template accepts; the same object if unchanged.

    Args:
        null: True if a message with calls and without text has null content.
    """
    if order == ANY or not turns:
        return turns
    if order[:_CALLS] == ANY[:_CALLS] and not any("tool_calls" in turn for turn in turns):
        return turns
    if not order.kept:
        # Such a template writes it into the last message, if that is the user's.
        order = order._replace(system=turns[-1]["role"] == "user")
    no_text = None if null else ""
    fold = _Fold(order, no_text, 0 if order.text_and_earlier_call else sum(map(_is_answer, turns)))
    for turn in turns if order.parallel else _one_by_one(turns, no_text):
        fold.add(turn)
    found = fold.end()
    if len(found) == len(turns) and all(a is b for a, b in zip(found, turns, strict=True)):
        return turns
    return found


class _Fold:
    """The messages so far, and the system messages that wait for a user message."""

    def __init__(self, order: MessageRules, no_text: str | None, answers: int) -> None:
        self._order = order
        # The content of a message with calls and without text.
        self._no_text = no_text
        # The assistant messages without calls that follow.
        self._answers = answers
        self._turns: list[Turn] = []
        self._waiting: list[str] = []
        self._in_head = True
        # The texts of messages that are merged into the last one, by key.
        self._texts: dict[str, list[str | None]] = {}
        # The role of the last message that counts in a template with alternating roles.
        self._counted: str | None = None

    def add(self, turn: Turn) -> None:
        """Add the next message."""
        role = turn["role"]
        if role in SYSTEM:
            self._system(turn)
            return
        if self._waiting:
            if role == "user":
                text = _joined(*self._waiting, turn["content"])
                turn = {**turn, "content": text}
            else:
                self._put(_user(*self._waiting))
            self._waiting = []
        if "tool_calls" in turn:
            self._call(turn)
            return
        if role == "assistant":
            self._answers -= 1
        self._put(turn)

    def end(self) -> list[Turn]:
        """Return all messages."""
        if self._waiting:
            self._put(_user(*self._waiting))
        self._close()
        if not self._order.alone and all(turn["role"] != "user" for turn in self._turns):
            head = sum(1 for _ in takewhile(lambda turn: turn["role"] in SYSTEM, self._turns))
            self._turns.insert(head, _user())
        return self._turns

    def _system(self, turn: Turn) -> None:
        order = self._order
        if self._in_head and not self._waiting and order.system:
            if self._turns and not order.systems:
                self._merge(turn)
            else:
                self._turns.append(turn)
        elif order.later and not self._in_head:
            self._close()
            self._turns.append(turn)
        elif turn["content"].strip():
            # Without its role, the prompt is the template's own for the first user message.
            is_own = self._in_head and not order.kept
            label = "" if is_own else f"{turn['role'].capitalize()}: "
            self._waiting.append(label + turn["content"])

    def _call(self, turn: Turn) -> None:
        order = self._order
        if _has_text(turn) and (
            not order.text_and_call or (not order.text_and_earlier_call and self._answers > 0)
        ):
            own = {key: value for key, value in _plain(turn).items() if key not in _CALLING}
            self._put(own)
            turn = {**turn, "content": self._no_text}
        elif not order.reasoned and turn["content"]:
            turn = _without_reasoning(turn)
        self._put(turn if order.malformed else _with_objects(turn))

    def _put(self, turn: Turn) -> None:
        """Add a message that is not a system message."""
        order, role = self._order, turn["role"]
        if self._in_head and role == "assistant" and not order.begins:
            self._append(_user())
        self._in_head = False
        if self._turns and self._is_refused_after(self._turns[-1], turn):
            if not self._is_lost_in(turn):
                self._merge(turn)
                return
            if order.model and role == "assistant":
                self._turns[-1] = {**self._turns[-1], "role": MODEL}
            else:
                self._append(_user())
        if not order.uncounted and _counts(turn) and role == self._counted:
            self._append(_user() if role == "assistant" else {"role": "assistant", "content": ""})
        self._append(turn)

    def _append(self, turn: Turn) -> None:
        self._in_head = False
        self._close()
        self._turns.append(turn)
        if _counts(turn):
            self._counted = turn["role"]

    def _is_refused_after(self, before: Turn, turn: Turn) -> bool:
        """Return True if the template rejects a message after another one of its role."""
        if before["role"] != turn["role"] or "tool_calls" in before:
            return False
        if turn["role"] == "user":
            return not self._order.users
        if "tool_calls" in turn:
            return not self._order.calls_after_text
        return turn["role"] == "assistant" and not self._order.assistants

    def _is_lost_in(self, turn: Turn) -> bool:
        """Return True if the template would omit the last message's content in a call's message."""
        shown = self._order.text_and_call and self._order.text_and_earlier_call
        if "tool_calls" not in turn or shown:
            return False
        return bool(self._texts) or _has_text(self._turns[-1])

    def _merge(self, turn: Turn) -> None:
        """Merge a message into the last one, which has the same role or is a system message."""
        last = self._turns[-1]
        merged = {**last, **turn, "role": last["role"]}
        if not self._texts:
            self._texts = {key: [last[key]] for key in _TEXTS if key in last}
        for key in _TEXTS:
            if key in turn:
                self._texts.setdefault(key, []).append(turn[key])
        if last.get("name") != turn.get("name"):
            merged.pop("name", None)
        self._turns[-1] = merged
        if not _counts(merged):
            counted = (turn["role"] for turn in reversed(self._turns) if _counts(turn))
            self._counted = next(counted, None)

    def _close(self) -> None:
        """Join the texts of the last message, once for all that were merged into it."""
        for key, texts in self._texts.items():
            self._turns[-1][key] = _joined(*texts) or texts[-1]
        self._texts = {}


def _one_by_one(turns: Sequence[Turn], no_text: str | None) -> Iterator[Turn]:
    """Yield the messages, with a message for each call, followed by its result."""
    position = 0
    while position < len(turns):
        turn = turns[position]
        position += 1
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            yield turn
            continue
        rest = islice(turns, position, None)
        results = list(takewhile(lambda one: one["role"] == "tool", rest))
        position += len(results)
        # The indices of the results of each call, the first one last.
        places: defaultdict[str | None, list[int]] = defaultdict(list)
        for place in reversed(range(len(results))):
            places[results[place].get("tool_call_id")].append(place)
        for index, call in enumerate(calls):
            one = {**turn, "tool_calls": [call]}
            yield {**_plain(one), "content": no_text} if index else one
            if own := places[call["id"]]:
                yield results[own.pop()]
        yield from (results[place] for place in sorted(chain.from_iterable(places.values())))


def _plain(turn: Turn) -> Turn:
    return {key: value for key, value in turn.items() if key not in _REASONING}


def _without_reasoning(turn: Turn) -> Turn:
    reasoning = turn.get("reasoning_content")
    return {**_plain(turn), "content": _joined(reasoning, turn["content"])} if reasoning else turn


def _with_objects(turn: Turn) -> Turn:
    """Return a message in which the arguments of every call are an object."""
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        if isinstance(function["arguments"], str):
            function = {**function, "arguments": {"arguments": function["arguments"]}}
        calls.append({**call, "function": function})
    return turn if calls == turn["tool_calls"] else {**turn, "tool_calls": calls}


def _is_answer(turn: Turn) -> bool:
    return turn["role"] == "assistant" and "tool_calls" not in turn


def _has_text(turn: Turn) -> bool:
    content = turn["content"]
    return bool(content) and not content.isspace()


def _counts(turn: Turn) -> bool:
    return turn["role"] == "user" or _is_answer(turn)


def _user(*texts: str) -> Turn:
    return {"role": "user", "content": _joined(*texts)}


def _joined(*texts: str | None) -> str:
    return _BETWEEN.join(text for text in texts if text)
