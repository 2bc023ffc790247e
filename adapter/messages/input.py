"""Turn the messages of a Messages request into chat messages (contract of messages, section 3).

Several messages of one role in a row are one turn. The results of calls become messages of their
own, directly after the message with the calls and in their order; what else the turn has follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from ...backends.errors import shortened
from ...schemas import limits
from ...schemas.anthropic.blocks import (
    Block,
    CompactionBlock,
    MidConversationSystemBlock,
    RedactedThinkingBlock,
    ServerBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from ...schemas.anthropic.messages import CountTokensRequest, InputMessage
from ...schemas.openai.messages import (
    AssistantMessage,
    FunctionCall,
    FunctionToolCall,
    Message,
    Part,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from ..chat.tools import check_count
from ..errors import InvalidRequest
from ..responses.files import UnreadPdfs, too_long
from .errors import dotted
from .parts import Content, PartReader

# The reasoning in a signature, or None if it cannot be opened.
Unseal: TypeAlias = Callable[[str], str | None]

# Claude Code's first block of the system prompt, which differs between its conversations.
_BILLING = "x-anthropic-billing-header:"
# The text between the messages of one turn.
_BETWEEN = "\n\n"
_ERROR = "Error: "
_EMPTY = "all messages must have non-empty content except for the optional final assistant message"


@dataclass(slots=True)
class Conversation:
    """The messages that a request's system prompt and messages make.

    Args:
        ignored: the paths of blocks that no model here can read.
        inexact: the paths of blocks that are only approximated.
        names: the path in the request for each path in `messages` that differs, for errors.
    """

    messages: list[Message]
    ignored: Sequence[str] = ()
    inexact: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def plain_conversation(request: CountTokensRequest) -> list[Message] | None:
    """Return the messages of a request whose roles alternate and whose contents are texts.

    Most of them need nothing else; None for `conversation_of`.
    """
    found: list[Message] = []
    if request.system is not None:
        if not isinstance(request.system, str) or not request.system:
            return None
        found.append(SystemMessage(role="system", content=request.system))
    before = "assistant"
    for message in request.messages:
        role, text = message.role, message.content
        if role == before or not text or not isinstance(text, str):
            return None
        if role == "user":
            found.append(UserMessage(role="user", content=text))
        elif role == "assistant":
            found.append(AssistantMessage(role="assistant", content=text))
        else:
            return None
        before = role
    if before == "assistant":
        return None
    return found


def conversation_of(
    request: CountTokensRequest,
    unseal: Unseal = lambda _signature: None,
    pdf_texts: Mapping[str, str] = MappingProxyType({}),
    sees: bool = True,
) -> Conversation:
    """Return the conversation of a request.

    Args:
        unseal: opens reasoning that this server has sealed.
        pdf_texts: the text of each PDF file, by its data as the client sent it.
        sees: False if the model takes no images; a text then replaces those of results and of
            earlier messages.

    Raises:
        UnreadPdfs: the texts of PDF files are missing.
        InvalidRequest: a message or a block is malformed, or a call and its result are not both
            there.
    """
    check_count((message.content for message in request.messages), "messages")
    parts = PartReader(pdf_texts, sees)
    history = _History(parts, unseal, _system_of(request))
    last = len(request.messages) - 1
    for index, message in enumerate(request.messages):
        is_new = index == last and not _has_results(message)
        history.add(message, f"messages[{index}]", is_new)
    messages = history.end()
    if parts.unread:
        raise UnreadPdfs(parts.unread)
    if parts.pdf_size > limits.PDF_TEXT.maximum:
        raise too_long("messages")
    if all(isinstance(message, SystemMessage) for message in messages):
        if any(message.role != "system" for message in request.messages):
            raise InvalidRequest(f"messages: {_EMPTY}")
        raise InvalidRequest("messages: at least one message is required")
    ignored = [*history.ignored, *parts.ignored]
    return Conversation(messages, ignored, parts.inexact, history.names)


def _has_results(message: InputMessage) -> bool:
    return isinstance(message.content, list) and ToolResultBlock in map(type, message.content)


def _system_of(request: CountTokensRequest) -> list[str]:
    system = request.system
    if isinstance(system, list):
        texts = [block.text for block in system]
        return texts[1:] if texts and texts[0].startswith(_BILLING) else texts
    return [system] if system else []


class _History:
    """The messages so far, and the open turn.

    Args:
        system: the texts of the system prompt.

    Attributes:
        ignored: see `Conversation`, also for `names`.
    """

    def __init__(self, parts: PartReader, unseal: Unseal, system: list[str]) -> None:
        self.ignored: list[str] = []
        self.names: dict[str, str] = {}
        self._parts = parts
        self._unseal = unseal
        self._messages: list[Message] = []
        self._system: list[str] | None = system
        self._role = ""
        # True if a message of the open turn has begun that has no text yet.
        self._has_gap = False
        # The open turn of the user: the results of calls by their ids, and the rest.
        self._results: dict[str, tuple[ToolResultBlock, str]] = {}
        self._content: list[tuple[Part, str]] = []
        # The open turn of the assistant.
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[str, FunctionToolCall] = {}
        # The calls of the last turn of the assistant that have no result yet, the path of its last
        # message, and instructions that wait for the results.
        self._open: dict[str, None] = {}
        self._caller = ""
        self._waiting: list[str] = []

    def add(self, message: InputMessage, path: str, is_new: bool) -> None:
        """Add a message; a new one has images that must not be replaced (see `PartReader`)."""
        content = message.content
        blocks: Sequence[Block] = ()
        if isinstance(content, str):
            if content:
                blocks = [TextBlock(type="text", text=content)]
        else:
            blocks = content
        if message.role == "system":
            texts = [block.text for block in blocks if isinstance(block, TextBlock)]
            if len(texts) < len(blocks):
                self.ignored.append(path)
            self._instruct("".join(texts))
            return
        if not content and message.role == "user":
            raise InvalidRequest(f"{dotted(path)}: user messages must have non-empty content")
        self._begin(message.role, path)
        for index, block in enumerate(blocks):
            here = path if isinstance(content, str) else f"{path}.content[{index}]"
            if isinstance(block, ServerBlock | RedactedThinkingBlock):
                self.ignored.append(here)
            elif isinstance(block, MidConversationSystemBlock):
                self._instruct("".join(part.text for part in block.content))
                self._begin(message.role, path)
            elif message.role == "user":
                self._add_user_block(block, here, is_new)
            else:
                self._add_assistant_block(block, here)

    def end(self) -> list[Message]:
        """Return all messages.

        Raises:
            InvalidRequest: the last message cannot be continued.
        """
        last = self._role
        self._close()
        if self._open:
            raise self._unanswered()
        self._close_head()
        final = self._messages[-1] if self._messages else None
        if last == "assistant" and isinstance(final, AssistantMessage):
            text = final.content
            if isinstance(text, str) and text != text.rstrip():
                raise InvalidRequest(
                    "messages: final assistant content cannot end with trailing whitespace"
                )
        return self._messages

    def _begin(self, role: str, path: str) -> None:
        """Begin a message; one of the same role continues the turn."""
        if role == self._role:
            self._has_gap = True
        else:
            self._has_gap = False
            self._close()
            self._close_head()
            self._role = role
        if role == "assistant":
            self._caller = path

    def _instruct(self, text: str) -> None:
        """Add instructions: to the system prompt at the head, or at their place."""
        if not text:
            return
        if self._system is not None:
            self._system.append(text)
            return
        # The turn of a user stays open while results are missing.
        if self._role != "user" or self._open.keys() <= self._results.keys():
            self._close()
        if self._open:
            self._waiting.append(text)
        else:
            self._messages.append(SystemMessage(role="system", content=text))

    def _close_head(self) -> None:
        system, self._system = self._system, None
        if system and (text := "\n".join(system)):
            self._messages.append(SystemMessage(role="system", content=text))

    def _add_user_block(self, block: Block, path: str, is_new: bool) -> None:
        """Add a block of the user."""
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in self._open:
                raise InvalidRequest(
                    f"{dotted(path)}: unexpected `tool_use_id` found in `tool_result` blocks: "
                    f"{shortened(block.tool_use_id)}. Each `tool_result` block must have a "
                    "corresponding `tool_use` block in the previous message."
                )
            if block.tool_use_id in self._results:
                raise InvalidRequest(
                    f"{dotted(path)}: each tool_use must have a single result. Found multiple "
                    f"`tool_result` blocks with id: {shortened(block.tool_use_id)}"
                )
            self._results[block.tool_use_id] = block, path
        elif isinstance(block, ThinkingBlock | ToolUseBlock):
            raise InvalidRequest(
                f"{dotted(path)}: `{block.type}` blocks can only be in assistant messages"
            )
        elif isinstance(block, CompactionBlock):
            self._compact(block, path)
        else:
            if isinstance(block, TextBlock) and not block.text:
                raise InvalidRequest("messages: text content blocks must be non-empty")
            if gap := self._gap(self._content):
                self._content.append((TextPart(type="text", text=gap), path))
            self._content += self._parts.read(block, path, is_new)

    def _add_assistant_block(self, block: Block, path: str) -> None:
        """Add a block of the assistant."""
        if isinstance(block, TextBlock):
            if block.text:
                self._texts.append(self._gap(self._texts) + block.text)
        elif isinstance(block, ThinkingBlock):
            reasoning = block.thinking or self._unsealed(block.signature)
            if reasoning:
                self._reasoning.append(reasoning)
            else:
                self.ignored.append(path)
        elif isinstance(block, ToolUseBlock):
            if block.id in self._calls:
                raise InvalidRequest(f"{dotted(path)}: `tool_use` ids must be unique")
            # As templates write it, so that the prompt is that of the same call in chat.
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name, arguments=arguments)
            call = FunctionToolCall(id=block.id, type="function", function=function)
            self._calls[block.id] = call
        elif isinstance(block, CompactionBlock):
            self._compact(block, path)
        else:
            raise InvalidRequest(
                f"{dotted(path)}: `{block.type}` blocks can only be in user messages"
            )

    def _gap(self, before: Sequence[object]) -> str:
        """Return what separates the next block from those of an earlier message of the turn."""
        has_gap, self._has_gap = self._has_gap, False
        return _BETWEEN if has_gap and before else ""

    def _compact(self, block: CompactionBlock, path: str) -> None:
        """Add the text of a summary, which only Anthropic makes."""
        self.ignored.append(path)
        if isinstance(block.content, str) and block.content:
            if self._role == "user":
                self._content.append((TextPart(type="text", text=block.content), path))
            else:
                self._texts.append(block.content)

    def _unsealed(self, signature: str | None) -> str | None:
        return self._unseal(signature) if signature else None

    def _close(self) -> None:
        """End the open turn."""
        role, self._role = self._role, ""
        if role == "assistant":
            self._close_assistant()
        elif role == "user":
            self._close_user()

    def _close_assistant(self) -> None:
        texts, reasoning, calls = self._texts, self._reasoning, self._calls
        self._texts, self._reasoning, self._calls = [], [], {}
        if not texts and not reasoning and not calls:
            return
        self._check_answered()
        message = AssistantMessage(role="assistant", content="".join(texts))
        if reasoning:
            message.reasoning_content = _BETWEEN.join(reasoning)
        if calls:
            message.tool_calls = [*calls.values()]
            self._open = dict.fromkeys(calls)
        self._messages.append(message)

    def _close_user(self) -> None:
        results, content = self._results, self._content
        self._results, self._content = {}, []
        # In the order of the calls, whichever the client sends first.
        places = {call_id: place for place, call_id in enumerate(self._open)}
        for name in sorted(results, key=places.__getitem__):
            self._open.pop(name, None)
            self._append_result(*results[name])
        if not results and not content:
            return
        self._check_answered()
        if content:
            self._append(lambda text: UserMessage(role="user", content=text), content)

    def _check_answered(self) -> None:
        """Check that no call lacks its result, and add the instructions that waited for them."""
        if self._open:
            raise self._unanswered()
        for text in self._waiting:
            self._messages.append(SystemMessage(role="system", content=text))
        self._waiting.clear()

    def _unanswered(self) -> InvalidRequest:
        return InvalidRequest(
            f"{dotted(self._caller)}: `tool_use` ids were found without `tool_result` blocks "
            f"immediately after: {shortened(', '.join(self._open))}. Each `tool_use` block must "
            "have a corresponding `tool_result` block in the next message."
        )

    def _append_result(self, block: ToolResultBlock, path: str) -> None:
        given: list[tuple[Part, str]] = []
        if isinstance(block.content, str):
            given = [(TextPart(type="text", text=block.content), path)]
        for index, part in enumerate(block.content or ()):
            if isinstance(part, ServerBlock):
                self.ignored.append(f"{path}.content[{index}]")
            elif not isinstance(part, str):
                given += self._parts.read(part, f"{path}.content[{index}]")
        if block.is_error:
            first = given[0][0] if given else None
            if not isinstance(first, TextPart) or not first.text.startswith(_ERROR.rstrip()):
                given.insert(0, (TextPart(type="text", text=_ERROR), path))
        call_id = block.tool_use_id
        self._append(
            lambda text: ToolMessage(role="tool", content=text, tool_call_id=call_id), given
        )

    def _append(
        self, make: Callable[[Content], Message], given: Sequence[tuple[Part, str]]
    ) -> None:
        """Append a message with parts; its content is one text if all of them are."""
        texts = [part.text for part, _ in given if isinstance(part, TextPart)]
        if len(texts) == len(given):
            self._messages.append(make("".join(texts)))
            return
        here = f"messages[{len(self._messages)}].content"
        for index, (part, path) in enumerate(given):
            if not isinstance(part, TextPart):
                # With dots, no path of the request looks like one of chat.
                self.names[f"{here}[{index}].image_url.url"] = dotted(f"{path}.source")
                self.names[f"{here}[{index}]"] = dotted(path)
        self._messages.append(make([part for part, _ in given]))
