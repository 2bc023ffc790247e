"""Turn the items of a Responses request into chat messages (contract of responses, 2.3 to 2.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from ...backends.errors import shortened
from ...schemas.openai.messages import Message
from ...schemas.openai.response_items import (
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    InputMessage,
    Item,
    ItemReference,
    OutputMessage,
    ReasoningItem,
    UnservedItem,
)
from ...schemas.openai.responses import ResponseRequest
from ..chat.tools import check_count
from ..dialects import unsupported
from ..errors import InvalidRequest
from .calls import Output, Placed, answers_of, is_cut
from .files import check_pdfs
from .history import History

# The item with an id, or None if it is unknown.
Resolve: TypeAlias = Callable[[str], Item | None]
# The reasoning in an `encrypted_content`, or None if it cannot be opened.
Unseal: TypeAlias = Callable[[str], str | None]


@dataclass(slots=True)
class Conversation:
    """The messages that a request's instructions and items make.

    Args:
        messages: the messages, with the instructions first.
        ignored: the paths of items, such as `input[2]`, that no model here can read.
        inexact: names of fields that are only approximated.
        names: the path in the request for each path in `messages` that differs, for errors.
    """

    messages: list[Message]
    ignored: list[str]
    inexact: list[str]
    names: Mapping[str, str] = field(default_factory=dict)


def conversation_of(
    request: ResponseRequest,
    before: Sequence[Item] = (),
    resolve: Resolve = lambda _id: None,
    unseal: Unseal = lambda _blob: None,
    pdf_texts: Mapping[str, str] = MappingProxyType({}),
) -> Conversation:
    """Return the conversation of a request.

    Args:
        before: the items of the conversation so far, from the oldest; each input and then its
            output.
        resolve: returns stored items.
        unseal: opens reasoning that this server has encrypted.
        pdf_texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        UnreadPdfs: the texts of PDF files are missing.
        InvalidRequest: there are no items, an item is unknown or malformed, or a call and its
            output are not both there.
    """
    if not request.input and not before:
        raise _empty()
    items = [*_placed(request, before, resolve)]
    check_count((content_of(item) for item, _ in items), "input")
    answers = answers_of(items)
    inexact = check_pdfs(items, pdf_texts)
    history = History(request.instructions, pdf_texts)
    ignored: list[str] = []
    for index, (item, path) in enumerate(items):
        if isinstance(item, InputMessage):
            history.add(item, path)
        elif isinstance(item, OutputMessage):
            history.say(item)
        elif isinstance(item, ReasoningItem):
            thought = _thought(item, resolve, unseal)
            if thought is not None:
                history.think(thought)
            elif item.encrypted_content is not None or item.is_named:
                ignored.append(path)
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            if not is_cut(item):
                history.call(item, answers[index])
        elif isinstance(item, UnservedItem) and item.type == "compaction_trigger":
            raise unsupported(f"{path}.type", "This server does not compact conversations.")
        elif isinstance(item, UnservedItem | CompactionItem):
            ignored.append(path)
        elif isinstance(item, Output):
            # It ends the assistant's message, and its content is that of its call.
            history.end()
    messages = history.messages()
    if not messages:
        raise InvalidRequest(
            "Invalid 'input': it has no message, and no item that becomes one. Send a message.",
            "input",
            "invalid_value",
        )
    own = [path for path in ignored if path.startswith("input")]
    return Conversation(messages, own, inexact, history.names)


def _empty() -> InvalidRequest:
    return InvalidRequest(
        "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be "
        "provided.",
        None,
        "missing_required_parameter",
    )


def _placed(request: ResponseRequest, before: Sequence[Item], resolve: Resolve) -> Iterator[Placed]:
    """Yield the items of the conversation, with references replaced by stored items."""
    # The request does not contain these items, so errors name the field that does.
    context = "previous_response_id" if request.conversation is None else "conversation"
    for item in before:
        yield Placed(item, f"{context}[{getattr(item, 'id', None) or '?'}]")
    if isinstance(request.input, str):
        if request.input:
            yield Placed(InputMessage(role="user", content=request.input), "input")
        return
    for index, item in enumerate(request.input):
        if not isinstance(item, ItemReference):
            yield Placed(item, f"input[{index}]")
            continue
        found = resolve(item.id)
        if found is None:
            raise _unknown(item.id, request.store)
        yield Placed(found, f"input[{index}]")


def _unknown(item_id: str, store: bool | None) -> InvalidRequest:
    message = f"Item with id '{shortened(item_id)}' not found."
    if store is False:
        message += (
            " Items are not persisted when `store` is set to false. Try again with `store` set to "
            "true, or remove this item from your input."
        )
    return InvalidRequest(message, "input", None, 404)


def content_of(item: Item) -> object:
    """Return the content of a message, or the output of a call; None for other items."""
    if isinstance(item, InputMessage | OutputMessage):
        return item.content
    return item.output if isinstance(item, Output) else None


def _thought(item: ReasoningItem, resolve: Resolve, unseal: Unseal) -> str | None:
    """Return the reasoning of an item, which may be sealed, or stored under the item's id."""
    if item.text:
        return item.text
    thought = None if item.encrypted_content is None else unseal(item.encrypted_content)
    stored = resolve(item.id) if thought is None and isinstance(item.id, str) else None
    return stored.text or None if isinstance(stored, ReasoningItem) else thought
