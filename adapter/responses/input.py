"""Turn the items of a Responses request into chat messages (contract of responses, 2.3 to 2.5).

Contiguous items of the assistant make one message: one message for each item would break chat
templates. The outputs of calls follow the message with the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from ...backends.errors import shortened
from ...schemas.openai.messages import (
    AssistantMessage,
    AudioPart,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    FunctionToolCall,
    ImagePart,
    ImageUrl,
    InputAudio,
    Message,
    Part,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from ...schemas.openai.response_items import (
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    InputAudioPart,
    InputFilePart,
    InputImagePart,
    InputMessage,
    InputTextPart,
    Item,
    ItemReference,
    OutputMessage,
    OutputTextPart,
    ReasoningItem,
    UnservedItem,
    UnservedPart,
)
from ...schemas.openai.responses import ResponseRequest
from .. import data_urls
from ..chat.tools import check_count
from ..errors import InvalidRequest, missing, unsupported, wrong_value
from .files import check_pdfs, file_text, own_path
from .items import Answer, Call, Output, Placed, answers_of, is_cut, stored_path
from .tools import flat_name

# The item with an id, or None if it is unknown.
Resolve: TypeAlias = Callable[[str], Item | None]
# Between texts that are joined.
_BETWEEN = "\n\n"
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
        is_plain: True if each message is a role and a text, and every item is in a message.
    """

    messages: list[Message]
    ignored: Sequence[str] = ()
    inexact: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    is_plain: bool = False

    def own(self, paths: Iterable[str]) -> list[str]:
        """Return the paths in the request for paths in `messages`; see `files.own_path`."""
        return [own_path(self.names.get(path, path)) for path in paths]


def conversation_of(
    request: ResponseRequest,
    before: Sequence[Item] = (),
    resolve: Resolve = lambda _id: None,
    unseal: Unseal = lambda _blob: None,
    pdf_texts: Mapping[str, str] = MappingProxyType({}),
    dropped: Container[int] = (),
) -> Conversation:
    """Return the conversation of a request.

    Args:
        before: the items of the conversation so far, from the oldest; each input and then its
            output.
        resolve: returns stored items.
        unseal: opens reasoning that this server has encrypted.
        pdf_texts: the text of each PDF file, by its data as the client sent it.
        dropped: the places of items to omit; see `truncation`.

    Raises:
        UnreadPdfs: the texts of PDF files are missing.
        InvalidRequest: there are no items, an item is unknown or malformed, or a call and its
            output are not both there.
    """
    if not request.input and not before:
        raise InvalidRequest(
            "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be "
            "provided.",
            None,
            "missing_required_parameter",
        )
    if not before and not dropped:
        plain = plain_messages(request)
        if plain is not None:
            return Conversation(plain, is_plain=True)
    every = [*placed(request, before, resolve)]
    items = [one for index, one in enumerate(every) if index not in dropped]
    check_count((content_of(item) for item, _ in items), "input")
    answers = answers_of(items)
    inexact = check_pdfs(items, pdf_texts)
    history = History(request.instructions, pdf_texts)
    ignored: list[str] = []
    for index, (item, path) in enumerate(items):
        if isinstance(item, ReasoningItem):
            reasoning = _reasoning_of(item, resolve, unseal)
            if reasoning is not None:
                history.think(reasoning)
            elif item.encrypted_content is not None or item.is_named:
                ignored.append(path)
        elif isinstance(item, UnservedItem) and item.type == "compaction_trigger":
            raise unsupported(f"{path}.type", "This server does not compact conversations.")
        elif isinstance(item, UnservedItem | CompactionItem):
            ignored.append(path)
        else:
            _add(history, item, path, answers.get(index, ()))
    messages = history.messages()
    if not messages:
        raise wrong_value(
            "input", "it has no message, and no item that becomes one. Send a message."
        )
    own = [path for path in ignored if path.startswith("input")]
    return Conversation(messages, own, inexact, history.names)


def plain_messages(request: ResponseRequest) -> list[Message] | None:
    """Return the messages of a text, or of items that are texts; None for other items.

    Most requests are no more than that, and need none of the checks of other items.
    """
    found: list[Message] = []
    if request.instructions:
        found.append(SystemMessage(role="system", content=request.instructions))
    if isinstance(request.input, str):
        found.append(UserMessage(role="user", content=request.input))
        return found
    for item in request.input:
        if not isinstance(item, InputMessage | OutputMessage) or type(item.content) is not str:
            return None
        if item.role == "user":
            found.append(UserMessage(role="user", content=item.content))
        elif item.role == "assistant":
            found.append(AssistantMessage(role="assistant", content=item.content))
        else:
            # Several texts at the head become one message.
            return None
    return found


def _add(history: History, item: Item, path: str, answers: Sequence[Answer]) -> None:
    """Add a message, a call or its output to the messages."""
    if isinstance(item, InputMessage):
        history.add(item, path)
    elif isinstance(item, OutputMessage):
        history.say(item)
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        if not is_cut(item):
            history.call(item, answers)
    elif isinstance(item, Output):
        # It ends the assistant's message, and its content is that of its call.
        history.end()


def placed(request: ResponseRequest, before: Sequence[Item], resolve: Resolve) -> Iterator[Placed]:
    """Yield the items of the conversation, with references replaced by stored items."""
    for item in before:
        yield Placed(item, stored_path(request, item))
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
            message = f"Item with id '{shortened(item.id)}' not found."
            if request.store is False:
                message += (
                    " Items are not persisted when `store` is set to false. Try again with `store` "
                    "set to true, or remove this item from your input."
                )
            raise InvalidRequest(message, "input", None, 404)
        yield Placed(found, f"input[{index}]")


def content_of(item: Item) -> object:
    """Return the content of a message, or the output of a call; None for other items."""
    if isinstance(item, InputMessage | OutputMessage):
        return item.content
    return item.output if isinstance(item, Output) else None


def _reasoning_of(item: ReasoningItem, resolve: Resolve, unseal: Unseal) -> str | None:
    """Return the reasoning of an item, which may be sealed, or stored under the item's id.

    A summary alone is the last resort: that of this server is the reasoning itself, and some
    clients keep nothing else of a stream.
    """
    if item.text:
        return item.text
    reasoning = None if item.encrypted_content is None else unseal(item.encrypted_content)
    stored = resolve(item.id) if reasoning is None and isinstance(item.id, str) else None
    if isinstance(stored, ReasoningItem) and stored.text:
        return stored.text
    if item.encrypted_content is not None:
        return reasoning
    return _BETWEEN.join([part.text for part in item.summary or ()]) or None


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
        self._reasoning: list[str] = []
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

    def think(self, reasoning: str) -> None:
        """Add reasoning of the assistant."""
        if self._content is not None and not self._calls:
            self.end()
        self._reasoning.append(reasoning)

    def call(self, item: Call, answers: Sequence[Answer]) -> None:
        """Add a call of the assistant, and its outputs."""
        self._calls.append((item, answers))

    def end(self) -> None:
        """End the assistant's message, if one is open."""
        if self._content is None and not self._reasoning and not self._calls:
            return
        turn = AssistantMessage(role="assistant", content=self._content)
        if self._reasoning:
            turn.reasoning_content = _BETWEEN.join(self._reasoning)
        if self._calls:
            turn.tool_calls = [_tool_call(call) for call, _ in self._calls]
        calls = self._calls
        self._content, self._reasoning, self._calls = None, [], []
        self._append(turn)
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
                chats, own = (
                    ("image_url.url", "image_url")
                    if isinstance(part, ImagePart)
                    else ("input_audio.data", "input_audio.data")
                )
                self.names[f"{here}[{index}].{chats}"] = f"{path}[{index}].{own}"
                self.names[f"{here}[{index}]"] = f"{path}[{index}]"


def _tool_call(call: Call) -> FunctionToolCall | CustomToolCall:
    name = flat_name(call.name, call.namespace)
    if isinstance(call, FunctionCallItem):
        function = FunctionCall(name=name, arguments=call.arguments)
        return FunctionToolCall(id=call.call_id, type="function", function=function)
    custom = CustomCall(name=name, input=call.input)
    return CustomToolCall(id=call.call_id, type="custom", custom=custom)


ItemPart: TypeAlias = (
    InputTextPart
    | InputImagePart
    | InputFilePart
    | InputAudioPart
    | OutputTextPart
    | RefusalPart
    | UnservedPart
)

_AUDIO = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
}


def is_text(content: str | Sequence[ItemPart]) -> bool:
    """Return True for content that consists of text only."""
    return isinstance(content, str) or all(
        isinstance(part, InputTextPart | OutputTextPart | RefusalPart) for part in content
    )


def text_of(content: str | Sequence[ItemPart]) -> str:
    """Return the text of content that consists of text only."""
    if isinstance(content, str):
        return content
    return "".join(
        [part.refusal if isinstance(part, RefusalPart) else part.text for part in content]  # type: ignore[union-attr]
    )


def chat_content(
    content: str | Sequence[ItemPart], path: str, pdf_texts: Mapping[str, str]
) -> str | list[Part]:
    """Return content as chat messages have it.

    Args:
        path: the path of the content in the request, for errors.
        pdf_texts: the text of each PDF file, by its data as the client sent it.

    Raises:
        InvalidRequest: a part is malformed, or nothing here can read it.
    """
    if is_text(content):
        return text_of(content)
    return [_part(part, f"{path}[{index}]", pdf_texts) for index, part in enumerate(content)]  # type: ignore[arg-type]


def _part(part: ItemPart, path: str, pdf_texts: Mapping[str, str]) -> Part:
    if isinstance(part, InputImagePart):
        return _image(part, path)
    if isinstance(part, InputFilePart):
        return TextPart(type="text", text=file_text(part, path, pdf_texts))
    if isinstance(part, InputAudioPart):
        return AudioPart(type="input_audio", input_audio=_audio(part, path))
    if isinstance(part, UnservedPart):
        raise unsupported(f"{path}.type", f"Omit parts of type '{shortened(part.type)}'.")
    return TextPart(type="text", text=text_of([part]))


def _image(part: InputImagePart, path: str) -> ImagePart:
    if part.image_url is None:
        if part.file_id is not None:
            raise unsupported(
                f"{path}.file_id", "Send the image as a data URL, 'data:image/png;base64,…'."
            )
        raise missing(f"{path}.image_url")
    return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))


def _audio(part: InputAudioPart, path: str) -> InputAudio:
    if part.input_audio is not None:
        return part.input_audio
    if part.audio_url is None:
        raise missing(f"{path}.input_audio")
    url = data_urls.parse(part.audio_url)
    kind = None if url is None or not url.is_base64 else _AUDIO.get(url.kind)
    if url is None or kind is None:
        raise unsupported(
            f"{path}.audio_url", "Send a data URL, 'data:audio/wav;base64,…' or audio/mpeg."
        )
    return InputAudio(data=part.audio_url[url.start :], format=kind)  # type: ignore[arg-type]
