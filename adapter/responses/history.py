"""Build chat messages from items, one after the other (contract of responses, 2.5).

Contiguous items of the assistant make one message: one message for each item would break chat
templates. The outputs of calls follow the message with the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ...schemas.openai.messages import (
    AssistantMessage,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    FunctionToolCall,
    Message,
    Part,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from ...schemas.openai.response_items import (
    FunctionCallItem,
    InputMessage,
    OutputMessage,
)
from .calls import Answer, Call
from .parts import chat_content, is_text, own_path, text_of
from .tools import flat_name

_BETWEEN = "\n\n"


class History:
    """The messages so far, and the open message of the assistant.

    Args:
        instructions: the instructions of the request, which come first.
        pdf_texts: the text of each PDF file, by its data as the client sent it.

    Attributes:
        names: the path in the request for each path in the messages that differs.
    """

    def __init__(self, instructions: str | None, pdf_texts: Mapping[str, str]) -> None:
        self.names: dict[str, str] = {}
        self._pdf_texts = pdf_texts
        self._messages: list[Message] = []
        # System and developer texts at the head, which become one message.
        self._head: list[InputMessage] = []
        if instructions:
            self._head.append(InputMessage(role="system", content=instructions))
        self._is_head = True
        self._content: str | None = None
        self._thoughts: list[str] = []
        self._calls: list[tuple[Call, Sequence[Answer]]] = []

    def add(self, item: InputMessage, path: str) -> None:
        """Add a message of the user, or with instructions."""
        if self._is_head and item.role != "user" and is_text(item.content):
            self._head.append(item)
            return
        self.end()
        content = chat_content(item.content, f"{path}.content", self._pdf_texts)
        if item.role == "user":
            self._append(UserMessage(role="user", content=content), f"{path}.content")
        else:
            self._append(SystemMessage(role=item.role, content=content), f"{path}.content")

    def say(self, item: OutputMessage) -> None:
        """Add content of the assistant."""
        if self._content is not None:
            self.end()
        self._content = text_of(item.content)

    def think(self, thought: str) -> None:
        """Add reasoning of the assistant."""
        if self._content is not None and not self._calls:
            self.end()
        self._thoughts.append(thought)

    def call(self, item: Call, answers: Sequence[Answer]) -> None:
        """Add a call of the assistant, and its outputs."""
        self._calls.append((item, answers))

    def end(self) -> None:
        """End the assistant's message, if one is open."""
        if self._content is None and not self._thoughts and not self._calls:
            return
        said: AssistantMessage = AssistantMessage(role="assistant", content=self._content)
        if self._thoughts:
            said.reasoning_content = _BETWEEN.join(self._thoughts)
        if self._calls:
            said.tool_calls = [_tool_call(call) for call, _ in self._calls]
        calls = self._calls
        self._content, self._thoughts, self._calls = None, [], []
        self._append(said)
        for call, answers in calls:
            for item, path in answers:
                content = chat_content(item.output, f"{path}.output", self._pdf_texts)
                message = ToolMessage(role="tool", content=content, tool_call_id=call.call_id)
                self._append(message, f"{path}.output")

    def messages(self) -> list[Message]:
        """Return all messages."""
        self.end()
        self._close_head()
        return self._messages

    def _append(self, message: Message, path: str = "") -> None:
        self._close_head()
        if isinstance(message.content, list):
            self._name(message.content, path)
        self._messages.append(message)

    def _close_head(self) -> None:
        """Join the texts at the head; one text alone keeps its role."""
        self._is_head = False
        head, self._head = self._head, []
        if len(head) == 1:
            text = text_of(head[0].content)
            role: Literal["system", "developer"] = (
                "developer" if head[0].role == "developer" else "system"
            )
            self._messages.append(SystemMessage(role=role, content=text))
        elif head:
            texts = [text_of(item.content) for item in head]
            content = _BETWEEN.join(text for text in texts if text)
            self._messages.append(SystemMessage(role="system", content=content))

    def _name(self, parts: Sequence[Part], path: str) -> None:
        """Note the paths of images and audio in the request."""
        here = f"messages[{len(self._messages)}].content"
        for index, part in enumerate(parts):
            if part.type != "text":
                data, own = own_path(part, f"{path}[{index}]")
                self.names[f"{here}[{index}]{data}"] = own
                self.names[f"{here}[{index}]"] = f"{path}[{index}]"


def _tool_call(call: Call) -> FunctionToolCall | CustomToolCall:
    name = flat_name(call.name, call.namespace)
    if isinstance(call, FunctionCallItem):
        function = FunctionCall(name=name, arguments=call.arguments)
        return FunctionToolCall(id=call.call_id, type="function", function=function)
    custom = CustomCall(name=name, input=call.input)
    return CustomToolCall(id=call.call_id, type="custom", custom=custom)
