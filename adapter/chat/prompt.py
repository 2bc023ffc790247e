"""Render a conversation to a prompt; fold its messages if the template requires it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ...backends import offload
from ...backends.base import Model
from ...schemas.openai.messages import Function, Message
from ..errors import InvalidRequest
from ..service import Served
from .conversation import turns_of
from .folding import Turn, folded, strictest
from .instruct import InstructFormat, Opening, opening_of
from .manner import Manner
from .special_tokens import Rendered, prompt_of
from .templates import Conversation, TemplateError, render

Tools: TypeAlias = list[dict[str, Any]] | None


@dataclass(slots=True)
class Input:
    """The messages of a request, and the other input of its prompt.

    Args:
        functions: the functions that the model sees.
        format: the instruct format to use instead of the model's chat template, or None.
        variables: the template's variables.
        has_media: True if messages contain images or audio.
        size: size of the request in bytes; the work on a large one runs in a thread.
        opening: the end of the prompt, if the request names it.
    """

    messages: Sequence[Message]
    functions: Sequence[Function]
    format: InstructFormat | None
    variables: Mapping[str, Any]
    has_media: bool
    size: int
    opening: Opening | None = None


async def rendered(given: Input, served: Served, manner: Manner) -> tuple[Rendered, Sequence[str]]:
    """Return the prompt, and the stop sequences of an instruct format.

    Raises:
        InvalidRequest: the template rejects the messages, or they must be folded under `strict`.
    """
    model, size = served.model, given.size
    order = manner.order_with_tools if given.functions else manner.order
    null = manner.style.null
    arguments = model, given.messages, given.functions, manner.style, manner.tags
    if size <= offload.SMALL:
        turns, tools = turns_of(*arguments)
        messages = folded(turns, order, null)
    else:
        turns, tools = await offload.run(size, turns_of, *arguments)
        messages = await offload.run(size, folded, turns, order, null)
    markers = () if given.format is None else given.format.stops(messages)
    try:
        prompt = await _prompt(messages, tools, given, served, messages is not turns)
    except TemplateError:
        # The template rejects an order that no sample conversation covers.
        again = await offload.run(size, folded, turns, strictest(order), null)
        if model.template is None or again is turns or again == messages:
            raise
        prompt = await _prompt(again, tools, given, served, True)
    return prompt, markers


async def _prompt(
    messages: Sequence[Turn], tools: Tools, given: Input, served: Served, is_folded: bool
) -> Rendered:
    if is_folded and served.policy.strict:
        raise InvalidRequest(
            "Invalid 'messages': the model's chat template does not accept them as they are, and "
            "this server is strict and does not change them. Send at most one system message, as "
            "the first one; let user and assistant messages alternate; send one call per message, "
            "without content, and with a JSON object as its arguments.",
            "messages",
            "invalid_value",
        )
    conversation: Conversation = {
        "messages": messages,
        "variables": given.variables,
        "tools": tools,
    }
    if given.opening is not None:
        conversation["opening"] = given.opening
        if given.format is not None and given.opening != opening_of(messages):
            raise InvalidRequest(
                "Invalid 'add_generation_prompt': an instruct format always begins the next turn, "
                "or continues the assistant's last message. Omit it.",
                "add_generation_prompt",
                "invalid_value",
            )
    show = partial(_show, served.model, given.format)
    if served.policy.parse_content:
        prompt = Rendered.of(await offload.run(given.size, show, conversation))
    else:
        prompt = await prompt_of(
            served.model, conversation, served.backend, show, given.has_media, given.size
        )
    return prompt._replace(changed=True) if is_folded else prompt


def _show(model: Model, form: InstructFormat | None, conversation: Conversation) -> str:
    return render(model, conversation) if form is None else form.render(conversation["messages"])
