"""Instruct formats: the text around each message, as in koboldcpp.

A request can contain its own format in `adapter`, in either of koboldcpp's spellings. The
configuration can name one of `INSTRUCT_FORMATS` for a model without a template, or instead of a
template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

ROLES = ("system", "user", "assistant")
# The end of a prompt: the next turn begins, the last message continues, or neither.
Opening: TypeAlias = Literal["begin", "continue", "end"]


def opening_of(messages: Sequence[Mapping[str, Any]]) -> Opening:
    """Return the end of a prompt if the request does not name it."""
    return "continue" if messages[-1]["role"] == "assistant" else "begin"


class Turn(NamedTuple):
    """The text before and after the content of a message."""

    start: str = ""
    end: str = ""


class InstructFormat(NamedTuple):
    """A turn for each role; `begin` is the beginning of the assistant's next turn."""

    system: Turn
    user: Turn
    assistant: Turn
    begin: str

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt of a conversation; a final assistant message is continued."""
        parts = []
        for message in messages:
            turn = self._turn(message["role"])
            parts += [turn.start, message["content"], turn.end]
        if messages[-1]["role"] == "assistant":
            return "".join(parts[:-1])
        return "".join(parts) + self.begin

    def stops(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the markers that begin a turn, without those that a message contains."""
        text = "\n".join(message["content"] for message in messages)
        markers = [self.user.start.strip(), self.assistant.start.strip()]
        return tuple(dict.fromkeys(marker for marker in markers if marker and marker not in text))

    def _turn(self, role: str) -> Turn:
        if role in ("system", "developer"):
            return self.system
        return self.assistant if role == "assistant" else self.user


def _format(system: Turn, user: Turn, assistant: Turn, begin: str | None = None) -> InstructFormat:
    return InstructFormat(system, user, assistant, assistant.start if begin is None else begin)


def _alike(start: str, end: str, assistant: str = "assistant") -> InstructFormat:
    """Return a format whose turns differ only in the name of the role."""
    system, user, own = [Turn(start.format(role), end) for role in ("system", "user", assistant)]
    return _format(system, user, own)


INSTRUCT_FORMATS: Mapping[str, InstructFormat] = {
    "alpaca": _format(
        Turn("", "\n\n"), Turn("### Instruction:\n", "\n\n"), Turn("### Response:\n", "\n\n")
    ),
    "chatml": _alike("<|im_start|>{}\n", "<|im_end|>\n"),
    "llama-2-chat": _format(
        Turn("[INST] <<SYS>>\n", "\n<</SYS>>\n\n[/INST]"),
        Turn("[INST] ", ""),
        Turn(" [/INST] ", " </s>"),
        " [/INST]",
    ),
    "llama-3": _alike("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": _format(
        Turn("[INST] ", "\n\n[/INST]"), Turn("[INST] ", ""), Turn("[/INST] ", "</s>"), "[/INST]"
    ),
    "gemma": _format(
        Turn("<start_of_turn>user\n", "<end_of_turn>\n"),
        Turn("<start_of_turn>user\n", "<end_of_turn>\n"),
        Turn("<start_of_turn>model\n", "<end_of_turn>\n"),
    ),
    "phi-3": _alike("<|{}|>\n", "<|end|>\n"),
    "vicuna": _format(
        Turn("", "\n\n"), Turn("USER: ", "\n"), Turn("ASSISTANT: ", "</s>\n"), "ASSISTANT:"
    ),
    "command-r": _format(
        Turn("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        Turn("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        Turn("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ),
}
