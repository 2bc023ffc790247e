"""Render chat messages to a prompt with the model's own Jinja template, in a sandbox.

The environment is the one that chat templates are written for: `apply_chat_template` of
transformers. It has trimmed blocks, loop controls, the `generation` tag, `raise_exception`,
`strftime_now`, and a `tojson` that does not escape for HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, NotRequired, TypedDict

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...backends.base import Model
from ...backends.errors import EngineError, summed_up
from ..errors import InvalidRequest, wrong_value
from .formats import completed
from .instruct import INSTRUCT_FORMATS, InstructFormat, Opening, opening_of
from .reasoning import tags_of

# Variables that the adapter passes to a template; a request cannot set them.
OWN = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents")
# Variables that switch reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
# The variable `thinking` in a condition. Texts and keys of messages do not match.
_THINKING = re.compile(
    r"{%-?\s*(?:el)?if\s+(?:not\s+)?thinking\b|\bthinking\s+is\s+(?:not\s+)?defined\b"
)
# Methods of lists that templates may call.
_OF_LISTS = ("append", "pop")
# The bits of a product or a power, and the length of a text or a list times a number.
_MOST_PRODUCT = 65_536
_PRIVATE = range(0x10F000, 0x10FFFE)


class Conversation(TypedDict):
    """The input of a template: messages and tools from `turns_of`, and variables.

    Without an `opening`, a final assistant message is continued; after others, a turn begins.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    tools: NotRequired[Sequence[Mapping[str, Any]] | None]
    opening: NotRequired[Opening | None]


class _GenerationTag(Extension):
    """The `{% generation %}` tag, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the content of the tag unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Given(list[Any]):
    """A list that a template cannot change, unlike its own."""


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template may also collect values in lists, as Kimi K2's does."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power, which are calculated in one step that nothing ends.

        Raises:
            SecurityError: it is too large.
        """
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            size = bits * right if operator == "**" else bits + more
        elif isinstance(right, int) and isinstance(left, Sized):
            size = len(left) * right
        elif isinstance(left, int) and isinstance(right, Sized):
            size = left * len(right)
        if size > _MOST_PRODUCT:
            raise SecurityError(f"the result of '{operator}' is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return True if a template may use an attribute."""
        if type(obj) is list and attr in _OF_LISTS:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute; for `message.role` without the exception of a missing attribute."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


class _Raised(Exception):
    """An error that a template raises with `raise_exception`."""


class TemplateError(InvalidRequest):
    """An error for messages that the template rejects, cannot render, or omits."""


def render(model: Model, conversation: Conversation, form: InstructFormat | None = None) -> str:
    """Return the prompt for the assistant's next turn, without a BOS that the engine adds.

    A final assistant message is continued. A model without a template gets the Alpaca format, as
    in koboldcpp.

    Args:
        form: the instruct format to use instead of the template, or None.

    Raises:
        TemplateError: the template rejects the messages (roles that must alternate, for example).
        EngineError: the template is invalid.
    """
    messages = conversation["messages"]
    if form is not None:
        return form.render(messages)
    if model.template is None:
        return INSTRUCT_FORMATS["alpaca"].render(messages)
    last = messages[-1]
    opening = conversation.get("opening")
    if opening is None:
        opening = opening_of(messages)
    if opening != "continue":
        return _rendered(model, conversation, messages, opening == "begin")
    text = "".join(message["content"] or "" for message in messages)
    here = next((chr(code) for code in _PRIVATE if chr(code) not in text), None)
    if here is None:
        raise TemplateError(
            "The final assistant message cannot be continued, because the messages contain all "
            "characters that can mark its end (U+10F000 to U+10FFFD). Remove one of them.",
            "messages",
        )
    marked = [*messages[:-1], {**last, "content": (last["content"] or "") + here}]
    prompt, found, _rest = _rendered(model, conversation, marked, False).partition(here)
    if not found:
        raise TemplateError(
            "The model's chat template omits the final assistant message, so it cannot be "
            "continued. Remove it, or add a user message after it.",
            "messages",
        )
    return prompt


def _rendered(
    model: Model, conversation: Conversation, messages: Sequence[Mapping[str, Any]], begins: bool
) -> str:
    template = _compile(model.template or "")
    try:
        variables = {
            **template.globals,
            **conversation["variables"],
            "messages": _Given(messages),
            "add_generation_prompt": begins,
            "bos_token": model.bos_token,
            "eos_token": model.eos_token,
            "tools": conversation.get("tools"),
            "documents": None,
        }
        # The same as `template.render`, without two more copies of the variables.
        context = template.environment.context_class(
            template.environment, variables, template.name, template.blocks
        )
        prompt = "".join(template.root_render_func(context))
    except _Raised as error:
        raise TemplateError(
            f"The model's chat template rejects these messages: {summed_up(str(error))}", "messages"
        ) from None
    except Exception as error:
        raise TemplateError(
            f"The model's chat template cannot render these messages: {summed_up(repr(error))}",
            "messages",
        ) from error
    return without_bos(prompt, model) if model.adds_bos else prompt


class Reasoning(NamedTuple):
    """The reasoning that a request asks for.

    Args:
        effort: `reasoning_effort`.
        enabled: `enable_thinking`.
    """

    effort: str | None = None
    enabled: bool | None = None


# The reasoning of a request that does not mention it.
AS_USUAL = Reasoning()


def variables_of(
    given: Mapping[str, Any] | None, reasoning: Reasoning, model: Model
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the variables that a request passes to the model's template.

    A template that uses `reasoning_effort` gets the effort. A template that can only switch
    reasoning on or off gets `enable_thinking`, or `thinking`.

    Returns:
        The variables, and the fields for which the template has no setting.

    Raises:
        InvalidRequest: the request sets a variable of `OWN`.
    """
    source = model.template or ""
    variables = dict(given) if given else {}
    for name in OWN if given else ():
        if name in variables:
            raise wrong_value(
                f"chat_template_kwargs.{name}", f"the server sets '{name}' itself. Omit it."
            )
    dropped = [f"chat_template_kwargs.{name}" for name in variables if name not in source]
    effort, enabled = reasoning.effort, reasoning.enabled
    if effort is None and enabled is None:
        return variables, tuple(dropped)
    found: dict[str, Any] = {}
    switches = [name for name in SWITCHES if _uses(source, name)]
    reasons = tags_of(source) is not None
    if effort is not None:
        if "reasoning_effort" in source:
            found["reasoning_effort"] = effort
        elif switches:
            found.update(dict.fromkeys(switches, effort != "none"))
        elif effort != "none" or reasons:
            dropped.append("reasoning_effort")
    if enabled is not None:
        if switches:
            found.update(dict.fromkeys(switches, enabled))
        elif not enabled and "reasoning_effort" in source:
            found.setdefault("reasoning_effort", "none")
        elif enabled != reasons:
            dropped.append("enable_thinking")
    return {**found, **variables}, tuple(dropped)


@lru_cache(maxsize=64)
def can_switch(source: str) -> bool:
    """Return True if a template can switch reasoning on and off."""
    return any(_uses(source, name) for name in SWITCHES)


@lru_cache(maxsize=64)
def _uses(source: str, name: str) -> bool:
    """Return True if a template uses a variable; the word can also occur in a tag or in text."""
    return name in source and (name != "thinking" or _THINKING.search(source) is not None)


def without_bos(prompt: str, model: Model) -> str:
    """Remove the BOS at the start of a prompt if the model adds one, to avoid a second BOS."""
    if model.adds_bos and model.bos_token:
        return prompt.removeprefix(model.bos_token)
    return prompt


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    try:
        template = _environment().from_string(completed(source))
    except jinja2.TemplateError as error:
        raise EngineError(f"The model's chat template is invalid: {error}") from error
    # Jinja has a `ChainMap` here, which is slow to copy for each rendering.
    template.globals = dict(template.globals)
    return template


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["safe"] = _safe
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _safe(text: str) -> str:
    """Return a text as it is: text added to one that is safe for HTML would be escaped."""
    return text


def _raise_exception(message: str) -> None:
    raise _Raised(message)
